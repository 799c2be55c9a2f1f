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
        self._path, self.notices = path, list[str]()
        if (first := next(self._frames(), None)) is None:
            raise UserError(f"{path} has columns but no rows.")
        types = {name: first.dtypes[name] for name in first}
        floats = {
            name: pa.float32() if kind == "float32" else pa.float64()
            for name, kind in types.items()
        }
        is_number = pd.api.types.is_numeric_dtype
        self.schema = pa.schema(
            [(name, floats[name] if is_number(types[name]) else pa.string()) for name in first]
        )

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all columns; raise a UserError if the file is damaged."""
        for frame in self._frames():
            texts = {
                col: frame[col].astype("string")
                for col in frame
                if self.schema.field(col).type == pa.string()
            }
            yield pa.RecordBatch.from_pandas(
                frame.assign(**texts), schema=self.schema, preserve_index=False
            )

    def _frames(self) -> Iterator[pd.DataFrame]:
        try:
            if self._path.suffix.lower() == ".dta":
                with pd.read_stata(
                    self._path, chunksize=_BLOCK_ROWS, convert_categoricals=False
                ) as reader:
                    for frame in reader:
                        self._tell_labels(
                            bool(reader.value_labels())
                        )  # behind texts, which a reader of labels skips
                        yield frame
                return
            import pyreadstat

            _, settings = pyreadstat.read_sav(str(self._path), user_missing=True, metadataonly=True)
            self._tell_user_missing([*settings.missing_ranges])
            blocks = pyreadstat.read_file_in_chunks(
                pyreadstat.read_sav, str(self._path), chunksize=_BLOCK_ROWS
            )
            for frame, form in blocks:
                self._tell_labels(bool(form.variable_value_labels))
                yield frame
        except ImportError as error:
            raise UserError(
                f"{self._path}: files of SPSS need the package pyreadstat (pip install "
                "pyreadstat); or save it as CSV."
            ) from error
        except Exception as error:  # readers raise errors of all types if a file is damaged
            why = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            kind = self._path.suffix
            raise UserError(
                f"{self._path} can't be read as a {kind} file ({why}). Save it again or as CSV."
            ) from error

    def _tell_labels(self, has_labels: bool) -> None:
        notice = (
            f"{self._path}: value labels are not read, but the numbers. Save descriptions "
            "and languages as "
            "variables of text (in Stata: decode; in SPSS: VALUELABEL)."
        )
        if has_labels and notice not in self.notices:
            self.notices.append(notice)

    def _tell_user_missing(self, columns: list[str]) -> None:
        notice = (
            f"{self._path}: user-missing values are read as blank, in "
            f"{', '.join(map(shown, columns))}."
        )
        if columns and notice not in self.notices:
            self.notices.append(notice)


def write_stata(path: Path, table: pa.Table) -> bool:
    """Write a table as a .dta file, all but numbers as text; return whether names of columns had to
    be changed.
    """
    for i, one in enumerate(table.schema):
        if pa.types.is_boolean(one.type) or pa.types.is_float16(one.type):
            table = table.set_column(i, one.name, table[i].cast(pa.float32()))
        elif not (pa.types.is_integer(one.type) or pa.types.is_floating(one.type)):
            table = table.set_column(i, one.name, pc.fill_null(table[i].cast(pa.string()), ""))
    texts = [one.name for one in table.schema if pa.types.is_string(one.type)]
    long = [
        name
        for name in texts
        if (pc.max(pc.binary_length(table[name])).as_py() or 0) > _LONGEST_TEXT
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frame = (
            table.to_pandas().astype(dict.fromkeys(texts, object)).replace([inf, -inf], nan)
        )  # which Stata lacks
        frame.to_stata(path, version=118, write_index=False, convert_strl=long)
    return any(issubclass(one.category, pd.errors.InvalidColumnName) for one in caught)
