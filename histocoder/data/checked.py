"""The column `checked`, in which a person marks the rows that are right; of a file that has one, these count alone."""

from collections.abc import Callable, Collection, Iterator

import numpy as np

from histocoder.data.cells import MISSING_MARKS
from histocoder.data.table import Table, TableFile
from histocoder.errors import UserError, shown

CHECKED_COL = "checked"
_YES = {*"x ✓ ✔ 1 1.0 true y yes ok j ja já jo s sí si sì sim oui ναι kyllä tak".split()}
_YES |= {*"wahr vrai vero waar sand sann sant satt verdadero verdadeiro".split()}  # TRUE in Excel's languages
_NO = {*"- – — ? 0 0.0 false n no nein nej nei nee non não nao όχι ei nie".split()}
_NO |= {*"falsch faux falso onwaar falsk falskt usann ósatt".split(), "", *map(str.casefold, MISSING_MARKS)}


def checked_tables(file: TableFile, columns: Collection[str], say: Callable[[str], None]) -> Iterator[Table]:
    """Yield columns as `TableFile.tables` does; of a file with a column `checked`, the checked rows, and say how many.

    Raises UserError if no row is checked, or a mark is neither yes nor no.
    """
    name = next((name for name in file.header if name.strip().casefold() == CHECKED_COL), None)
    if name is None:
        yield from file.tables(columns)
        return
    num_rows = num_checked = 0
    for table in file.tables([*columns, name]):
        coded = table.columns[name].fill_null("").dictionary_encode()
        marks = [mark.strip().casefold() for mark in coded.dictionary.to_pylist()]
        if unclear := [i for i, mark in enumerate(marks) if mark not in _YES | _NO]:
            row = np.flatnonzero(np.isin(coded.indices, unclear))[:1]
            raise UserError(
                f"{file.path}, line {table.lines(row)[0]}, {name}: {shown(table.columns[name][row[0]].as_py())} is "
                "neither yes nor no. Write x (or 1, yes, true, ja, oui, sí, sim) in each row that is right, and leave "
                "the others blank; or rename the column, if it says something else."
            )
        is_checked = np.array([mark in _YES for mark in marks])[coded.indices]
        num_rows += len(table)
        num_checked += int(is_checked.sum())
        yield table.filter(is_checked)
    if not num_checked:
        raise UserError(
            f"{file.path}: no row is checked. Write x in the column {name!r} of each row that is right now."
        )
    unchecked = num_rows - num_checked
    say(f"{file.path}: {num_checked:,} checked rows are used; {unchecked:,} unchecked rows are ignored.")
