"""Columns of a table by code, such as a social class, for the codes of a file."""

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.data.cells import read_code
from histocoder.data.table import open_table
from histocoder.errors import UserError, counted, shown

_CODE_COLUMNS = ("system_code", "code")
_NUM_EXAMPLES = 5


class Join:
    """A table with a row for each code.

    Its codes are in the column called like the classification (`hisco`, `hisco_1`), `system_code` or `code`; else in
    the first column. By the model's `codes`, zeros that the table has lost are restored.
    """

    def __init__(self, path: Path, *, system: str, codes: Collection[str], sheet: str | None = None) -> None:
        names = (system, f"{system}_1", *_CODE_COLUMNS)
        file = open_table(path, (), optional=names, codes=names, sheet=sheet)
        code_col = next((file.column(name) for name in names if file.has(name)), file.header[0])
        self._path, self._names = path, [name for name in file.header if name != code_col]
        if not self._names:
            raise UserError(f"--join {path} has no column other than that of the codes, {code_col!r}.")
        table = file.read([code_col, *self._names])
        known, width = set(codes), max(map(len, codes), default=0)
        self._rows: dict[str, tuple[str | None, ...]] = {}
        values = zip(*(table.columns[name].to_pylist() for name in self._names), strict=True)
        for row, (cell, cells) in enumerate(zip(table.columns[code_col].to_pylist(), values, strict=True)):
            code = _read(cell or "", known, width)
            if code and self._rows.setdefault(code, cells) != cells:
                line = table.lines(np.array([row]))[0]
                raise UserError(
                    f"--join {path}, line {line}: the code {shown(code)} has another row with other values."
                )
        self._lacking: Counter[str] = Counter()

    def columns(self, code_columns: Mapping[str, str]) -> dict[str, tuple[str, int]]:
        """Return the name of each new column -> its column of codes, and its index among the table's columns.

        `code_columns` has the name of each column of codes -> that of its probabilities, `prob_1`, whose prefixes and
        number the new ones have.
        """
        return {
            f"{name}_".join(prob.rsplit("prob_", 1)): (column, i)
            for column, prob in code_columns.items()
            for i, name in enumerate(self._names)
        }

    def add(self, table: pa.Table, code_columns: Mapping[str, str]) -> pa.Table:
        """Return a coded table with the columns behind its own."""
        found = {column: self._find(table[column]) for column in code_columns}
        for name, (column, i) in self.columns(code_columns).items():
            indices, rows = found[column]
            table = table.append_column(name, pa.array([row[i] for row in rows], pa.string()).take(indices))
        return table

    def _find(self, cells: pa.ChunkedArray) -> tuple[pa.Array, list[tuple[str | None, ...]]]:
        """Return each cell's index among the distinct codes, and the row of each distinct code."""
        coded = pa.concat_arrays(cells.chunks).dictionary_encode()
        codes, times = coded.dictionary.to_pylist(), pc.value_counts(coded.indices.drop_null())
        for count in times.to_pylist():
            if (code := codes[count["values"]]) not in self._rows:
                self._lacking[code] += count["counts"]
        nothing = (None,) * len(self._names)
        return coded.indices, [self._rows.get(code, nothing) for code in codes]

    def notices(self) -> list[str]:
        """Return a notice on codes that the table lacks, if there are any."""
        codes = ", ".join(code for code, _ in self._lacking.most_common(_NUM_EXAMPLES))
        more = ", …" if len(self._lacking) > _NUM_EXAMPLES else ""
        notice = (
            f"--join {self._path} has no row for {counted(len(self._lacking), 'code', 'codes')} ({codes}{more}), in "
            f"{counted(self._lacking.total(), 'cell', 'cells')}; its columns are blank there."
        )
        return [notice] if self._lacking else []


def _read(cell: str, known: Collection[str], width: int) -> str:
    """Return the code in a cell, as the model has it; "" where there is none."""
    code = read_code(cell, known)
    padded = code.zfill(width)
    return padded if code.isdigit() and padded in known else code
