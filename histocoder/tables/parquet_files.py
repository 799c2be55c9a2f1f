"""Tables in several Parquet files, as Ray and Spark read them."""

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet

from histocoder.errors import UserError
from histocoder.tables.table import PARQUET, TableFile, kind_of

PART_ROWS = 10_000
"""Number of rows of each file that a table of another format is split into."""


@dataclass(frozen=True)
class ParquetFiles:
    """Absolute paths of files that are one table; the names of folders below `base`, such as
    year=1900, are columns.
    """

    files: list[str]
    base: str

    def open(self) -> pa.dataset.Dataset:
        """Read the schema; raise a UserError if a file is damaged, or has other columns."""
        file = self.files[0]
        names: set[str] = set()
        try:
            dataset = pa.dataset.dataset(
                self.files, format="parquet", partitioning="hive", partition_base_dir=self.base
            )
            for fragment in dataset.get_fragments():
                file = fragment.path
                names_of_file = set(fragment.physical_schema.names)
                names = names or names_of_file
                if names_of_file != names:
                    different = ", ".join(sorted(names_of_file ^ names))
                    raise UserError(
                        f"{file} does not have the same columns as {self.files[0]}; they differ "
                        f"in {different}. All files of a table need the same columns."
                    )
        except (pa.ArrowInvalid, OSError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{file} is not a Parquet file: {reason}") from error
        return dataset


def paths_of(names: Iterable[str]) -> list[Path]:
    """Return the files and folders that names, or patterns such as `census/*.parquet`, mean."""
    paths: list[Path] = []
    for name in names:
        if os.path.exists(name) or not glob.has_magic(name):
            paths.append(Path(name))
            continue
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise UserError(f"No file matches {name}.")
        paths += map(Path, matches)
    return paths


def parquet_files(paths: Sequence[Path]) -> ParquetFiles | None:
    """Return the Parquet files among paths and in their folders, as one table; None for one file of
    another format.
    """
    files: list[str] = []
    folders: list[str] = []
    for path in paths:
        absolute = Path(os.path.abspath(path))
        if absolute.is_dir():
            files_of_folder = _files_in(absolute)
            if not files_of_folder:
                raise UserError(f"{path} has no Parquet files.")
            files += files_of_folder
            folders.append(str(absolute))
        elif kind_of(path) in PARQUET:
            files.append(str(absolute))
            folders.append(str(absolute.parent))
        elif len(paths) == 1:
            return None
        else:
            raise UserError(
                f"{path} is not a Parquet file; several files are coded as one table only if all "
                "are Parquet."
            )
    return ParquetFiles(files, os.path.commonpath(folders))


def _files_in(folder: Path) -> list[str]:
    """Return the Parquet files in a folder, except unfinished ones of engines, whose names or
    folders begin with _ or a dot.
    """
    files: list[str] = []
    for path in sorted(folder.rglob("*")):
        is_finished = not any(part[0] in "._" for part in path.relative_to(folder).parts)
        if is_finished and path.suffix.lower() in PARQUET:
            files.append(str(path))
    return files


def split(table: TableFile, folder: Path) -> ParquetFiles:
    """Write a table as Parquet files into a new folder."""
    folder.mkdir()
    files: list[str] = []
    for number, part in enumerate(table.chunks(chunk_rows=PART_ROWS)):
        files.append(str(folder / f"part-{number:06d}.parquet"))
        pa.parquet.write_table(part, files[-1])
    return ParquetFiles(files, str(folder))
