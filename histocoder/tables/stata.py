"""Files of Stata and SPSS, read in blocks: numbers without their value labels, and all else as
text.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from math import inf, nan
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.errors import UserError, shown
from histocoder.tables.text_encodings import ENCODINGS, guess, readings
from histocoder.tables.text_file import NUM_GUESS_WORDS, checked_encoding

_BLOCK_ROWS = 20_000
_UTF8_VERSION = re.compile(rb"<stata_dta><header><release>11[89]<")
_LATIN_1 = "latin-1"  # as pandas reads texts of earlier versions, which keeps their bytes
_LONGEST_TEXT = 2045  # number of bytes from which Stata needs its type strL


class StataFile:
    """A .dta or .sav file, of which the first block tells the types of the columns.

    Texts of versions of Stata before 14, whose files do not name their encoding, are read in the
    `encoding` that the user names; otherwise, with a notice, in the one that makes words.

    Raises UserError if the file is damaged, has no rows, names its encoding although the user does,
    or is a .sav file and pyreadstat is not installed.
    """

    def __init__(self, path: Path, encoding: str | None = None) -> None:
        self._path = path
        self.notices: list[str] = []
        self._encoding = _LATIN_1
        self._years = self._find_years()
        if _names_encoding(path):
            if encoding is not None:
                raise UserError(
                    f"--file-encoding is for files that do not name their encoding, and {path} "
                    "does. Omit it."
                )
        elif encoding is not None:
            self._encoding = checked_encoding(encoding)
        else:
            self._encoding = self._guess()
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

    def _find_years(self) -> list[str]:
        """Return the columns of years, which pandas reads as the first of January."""
        if self._path.suffix.lower() != ".dta":
            return []
        years: list[str] = []
        with suppress(Exception):  # which reading the file will raise again
            options: dict[str, Any] = {"chunksize": _BLOCK_ROWS, "convert_categoricals": False}
            with (
                pd.read_stata(self._path, **options) as reader,
                pd.read_stata(self._path, convert_dates=False, **options) as reader_of_numbers,
            ):
                dates = next(reader).select_dtypes("datetime")
                numbers = next(reader_of_numbers)
            for name, column in dates.items():
                years_of_rows = column.dt.year.dropna()
                if len(years_of_rows) and (numbers[name].dropna() == years_of_rows).all():
                    years.append(str(name))
        return years

    def _guess(self) -> str:
        """Return the encoding that makes words of a file's texts."""
        words: set[bytes] = set()
        for frame in self._frames():
            texts = {text for name in _texts(frame) for text in frame[name].unique()}
            for text in filter(None, [*frame.columns, *texts]):
                if not text.isascii():
                    in_bytes = text.encode(_LATIN_1).split()
                    words.update(word for word in in_bytes if not word.isascii())
            if len(words) >= NUM_GUESS_WORDS:
                break
        if not words:
            return _LATIN_1

        # other programs than Stata have written UTF-8 into such files
        try:
            b" ".join(words).decode("utf-8")
            return "utf-8"
        except UnicodeDecodeError:
            encoding = guess(words)
        if encoding is None:
            raise UserError(
                f"{self._path} is not text in a usual encoding. Name it with --file-encoding."
            )
        examples = ", ".join(map(shown, readings(words, encoding)[0].examples))
        self._note(
            f"{self._path} is of a version of Stata before 14, and is read as "
            f"{ENCODINGS[encoding]} ({encoding}), for example {examples}. If these are wrong, name "
            "its encoding with --file-encoding."
        )
        return encoding

    def _decoded(self, text: Any) -> Any:
        """Return a text of an early version in its encoding, and anything else as it is."""
        return text.encode(_LATIN_1).decode(self._encoding) if isinstance(text, str) else text

    def _blocks(self) -> Iterator[pd.DataFrame]:
        """Yield the blocks of a .dta file."""
        with pd.read_stata(self._path, chunksize=_BLOCK_ROWS, convert_categoricals=False) as reader:
            while True:
                # pandas reads a text that is not in the file's encoding as Latin-1, and warns
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always", UnicodeWarning)
                    frame = next(reader, None)
                if frame is None:
                    return
                if any(issubclass(warning.category, UnicodeWarning) for warning in caught):
                    self._note(
                        f"{self._path}: some texts are not UTF-8, unlike the others, and are read "
                        "as Latin-1. Check them, or save the file again from Stata (unicode "
                        "translate)."
                    )

                # only once a block is read: a reader that has read labels skips texts
                self._note_labels(bool(reader.value_labels()))
                for name in self._years:
                    frame[name] = frame[name].dt.year
                if self._encoding != _LATIN_1:
                    for name in _texts(frame):
                        frame[name] = frame[name].map(self._decoded)
                    frame = frame.rename(columns=self._decoded)
                yield frame

    def _frames(self) -> Iterator[pd.DataFrame]:
        try:
            if self._path.suffix.lower() == ".dta":
                yield from self._blocks()
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
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self._path} is not text in the encoding {self._encoding}: {error.reason}. Name "
                "another one with --file-encoding."
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


def _names_encoding(path: Path) -> bool:
    """Return whether a file names the encoding of its texts: files of SPSS do, and those of Stata
    from version 14 on, which are UTF-8.
    """
    if path.suffix.lower() != ".dta":
        return True
    with path.open("rb") as file:
        return _UTF8_VERSION.match(file.read(64)) is not None


def _texts(frame: pd.DataFrame) -> list[str]:
    """Return the columns that hold texts."""
    return [name for name, dtype in frame.dtypes.items() if pd.api.types.is_string_dtype(dtype)]


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
