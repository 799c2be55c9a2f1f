"""Files of Stata and SPSS, read in blocks: numbers without their value labels, and all else as
text.
"""

import warnings
from collections.abc import Iterator
from math import inf, nan
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.errors import UserError, shown

_BLOCK_ROWS = 20_000
_LONGEST_TEXT = 2045  # number of bytes from which Stata needs its type strL


class StataFile:
    """A .dta or .sav file, of which the first block tells the types of the columns.

    Raises UserError if the file is damaged, has no rows, or is a .sav file and pyreadstat is not
    installed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.notices: list[str] = []
        first = next(self._frames(), None)
        if first is None:
            raise UserError(f"{path} has columns but no rows.")

        # whole numbers are floats, since a later block may have missing ones
        fields: list[tuple[str, pa.DataType]] = []
        for name, dtype in first.dtypes.items():
            if not pd.api.types.is_numeric_dtype(dtype):
                fields.append((name, pa.string()))
            elif dtype == "float32":
                fields.append((name, pa.float32()))
            else:
                fields.append((name, pa.float64()))
        self.schema = pa.schema(fields)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all columns; raise a UserError if the file is damaged."""
        texts = [field.name for field in self.schema if field.type == pa.string()]
        for frame in self._frames():
            typed = frame.astype(dict.fromkeys(texts, "string"))
            yield pa.RecordBatch.from_pandas(typed, schema=self.schema, preserve_index=False)

    def _frames(self) -> Iterator[pd.DataFrame]:
        try:
            if self._path.suffix.lower() == ".dta":
                with pd.read_stata(
                    self._path, chunksize=_BLOCK_ROWS, convert_categoricals=False
                ) as reader:
                    for frame in reader:
                        # only once a block is read: a reader that has read labels skips texts
                        self._note_labels(bool(reader.value_labels()))
                        yield frame
                return
            import pyreadstat

            # only the metadata have the values that users call missing
            _, metadata = pyreadstat.read_sav(str(self._path), user_missing=True, metadataonly=True)
            if metadata.missing_ranges:
                columns = ", ".join(map(shown, metadata.missing_ranges))
                self._note(f"{self._path}: user-missing values are read as blank, in {columns}.")
            blocks = pyreadstat.read_file_in_chunks(
                pyreadstat.read_sav, str(self._path), chunksize=_BLOCK_ROWS
            )
            for frame, metadata in blocks:
                self._note_labels(bool(metadata.variable_value_labels))
                yield frame
        except ImportError as error:
            raise UserError(
                f"{self._path}: files of SPSS need the package pyreadstat (pip install "
                "pyreadstat); or save it as CSV."
            ) from error
        except Exception as error:
            # readers raise errors of all types if a file is damaged
            why = (str(error) or type(error).__name__).splitlines()[0][:120]
            kind = self._path.suffix
            raise UserError(
                f"{self._path} can't be read as a {kind} file ({why}). Save it again or as CSV."
            ) from error

    def _note_labels(self, has_labels: bool) -> None:
        if has_labels:
            self._note(
                f"{self._path}: value labels are not read, but the numbers. Save descriptions and "
                "languages as variables of text (in Stata: decode; in SPSS: VALUELABEL)."
            )

    def _note(self, notice: str) -> None:
        """Add a notice, once: the file is read at least twice."""
        if notice not in self.notices:
            self.notices.append(notice)


def write_stata(path: Path, table: pa.Table) -> bool:
    """Write a table as a .dta file, all but numbers as text; return whether names of columns had to
    be changed.
    """
    texts: list[str] = []
    long_texts: list[str] = []
    for i, column in enumerate(table.schema):
        if pa.types.is_boolean(column.type) or pa.types.is_float16(column.type):
            table = table.set_column(i, column.name, table[i].cast(pa.float32()))
        elif not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            cells = pc.fill_null(table[i].cast(pa.string()), "")
            table = table.set_column(i, column.name, cells)
            texts.append(column.name)
            if (pc.max(pc.binary_length(cells)).as_py() or 0) > _LONGEST_TEXT:
                long_texts.append(column.name)

    # Stata has missing numbers, but no infinite ones; pandas changes names with a warning alone
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frame = table.to_pandas().astype(dict.fromkeys(texts, object)).replace([inf, -inf], nan)
        frame.to_stata(path, version=118, write_index=False, convert_strl=long_texts)
    return any(issubclass(warning.category, pd.errors.InvalidColumnName) for warning in caught)
