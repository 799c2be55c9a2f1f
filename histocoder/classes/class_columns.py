"""Columns of classes and other values of codes, for a table of coded descriptions."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.classes.crosswalk import CODE_COL, EXACT, NO_CODE, WITHOUT_VALUE, Crosswalk
from histocoder.classes.groups import Groups, system_of
from histocoder.config.prediction import QUALIFIERS, ClassOptions
from histocoder.errors import UserError
from histocoder.tables.header import named
from histocoder.tables.table import strings

LIKELY, SHARE = "histocoder:likely:", "histocoder:share:"
"""Names of columns begin so that list a row's likely codes, or statuses and so on, and the
probability of each.
"""

_DECIMALS, _OF_SCALES = 4, ("mean", "sd", "share")


class Classes:
    """The columns that a crosswalk or groups add to a table of codes, and how many rows have which.

    With columns that list a row's likely first codes (see `LIKELY`), these columns follow those of
    values, where p is the probability of a code, times that of status, relation and product where
    these are predicted as well:

    - `…_prob` of a class: the sum of p over the codes that have the class that is written, where
      codes that are not
      listed are taken to have it as often as those listed behind the first one;
    - `…_mean`, `…_sd` of a scale: mean and standard deviation of its values, weighted by p, over
      codes with one;
    - `…_share` of a scale: the sum of p over the codes that have a value, on which the former rest.
    """

    def __init__(
        self,
        values: Crosswalk | Groups,
        code_cols: Sequence[str],
        options: ClassOptions,
        *,
        prefix: str,
        expect: bool,
    ) -> None:
        self.values, self._code_cols, self._options, self._prefix = (
            values,
            [*code_cols],
            options,
            prefix,
        )
        self._expect = expect  # whether there are such columns
        self._qualifier_cols: dict[
            str, str
        ] = {}  # status, relation or product -> its column, where the table has one
        numbers = [f"_{i}" if len(code_cols) > 1 else "" for i in range(1, len(code_cols) + 1)]
        self._names = [
            [f"{prefix}{value}{number}" for value in values.value_cols] for number in numbers
        ]
        self._counts: dict[str, Counter[str]] = {}
        self._sums: dict[
            str, np.ndarray
        ] = {}  # column of numbers -> number of rows that have one, and their sum

    @property
    def fields(self) -> list[pa.Field]:
        """The new columns, in their order."""
        found, values = [], self.values
        for number, names in enumerate(self._names):
            for value, name in zip(values.value_cols, names, strict=True):
                ends = (
                    ("prob",)
                    if value in values.classes
                    else _OF_SCALES
                    if value in values.scales
                    else ()
                )
                found.append(pa.field(name, pa.string()))
                if self._expect and number == 0:
                    found += [pa.field(f"{name}_{end}", pa.float64()) for end in ends]
        return found

    def append(self, table: pa.Table) -> pa.Table:
        """Return a table with the new columns behind its own."""
        for name in self.values.qualifiers:  # the input's column, else that of what is predicted
            usual = (getattr(self._options, f"{name}_col") or name, f"{self._prefix}{name}")
            if columns := [column for own in usual for column in named(own, table.column_names)]:
                self._qualifier_cols[name] = columns[0]
        cells = {
            name: strings(table[name], f"The column {name!r}").to_pylist() for name in self._matched
        }
        given = [
            cells.get(self._qualifier_cols.get(name, ""), [None] * len(table))
            for name in QUALIFIERS
        ]
        found: dict[str, Any] = {}
        for code_col, names in zip(self._code_cols, self._names, strict=True):
            keys = list(zip(cells[code_col], *given, strict=True))
            values = {key: self.values.find(*key) for key in set(keys)}
            for i, (value, name) in enumerate(zip(self.values.value_cols, names, strict=True)):
                found[name] = np.array([values[key][i].value for key in keys], dtype=object)
                if value in (*self.values.classes, *self.values.scales):
                    self._counts.setdefault(name, Counter()).update(
                        values[key][i].how for key in keys
                    )
        if self._expect:
            found |= self._expected_values(table, given, found)
        for one in self.fields:
            table = table.append_column(one, pa.array(found[one.name], one.type, from_pandas=True))
        return table

    def _expected_values(
        self, table: pa.Table, given: list[list[str | None]], found: dict[str, Any]
    ) -> dict[str, np.ndarray]:
        """Return the columns of numbers, each of shape (n,), for the n rows of a table; NaN where
        there is none.
        """
        pairs = _likely(table, CODE_COL)
        for name, cells in zip(QUALIFIERS, given, strict=True):
            own = f"{self._prefix}{name}"
            if self._qualifier_cols.get(name) == own and f"{LIKELY}{name}" in table.column_names:
                pairs = pairs.merge(
                    _likely(table, name), on="row", how="left", suffixes=("", "_of_it")
                )
                pairs["p"] *= pairs.pop("p_of_it").fillna(
                    1.0
                )  # of a known description, nothing is predicted
            else:
                pairs[name] = np.array(cells, dtype=object)[pairs["row"]]
        rows, p = pairs["row"].to_numpy(), pairs["p"].to_numpy()
        cells_of = (
            pairs[name].astype(object).where(pairs[name].notna(), None)
            for name in (CODE_COL, *QUALIFIERS)
        )
        keys = pd.Index(list(zip(*cells_of, strict=True)), tupleize_cols=False)
        index, distinct = pd.factorize(keys)
        values = [self.values.find(*key) for key in distinct]

        def total(weights: np.ndarray) -> np.ndarray:
            return np.bincount(rows, weights, minlength=len(table))

        is_coded, columns = total(np.ones(len(rows))) > 0, dict[str, np.ndarray]()
        is_first = (pairs[CODE_COL] == pairs.groupby("row")[CODE_COL].transform("first")).to_numpy()
        rest, unlisted = np.where(is_first, 0, p), 1 - total(p)
        for i, (value, name) in enumerate(zip(self.values.value_cols, self._names[0], strict=True)):
            own = np.array([one[i].value for one in values], dtype=object)[index]
            if value in self.values.classes:
                same = own == found[name][rows]
                prob = total(p * same) + unlisted * total(rest * same) / np.maximum(
                    total(rest), np.finfo(float).tiny
                )
                columns[f"{name}_prob"] = np.where(pd.notna(found[name]), prob, np.nan)
            if value in self.values.scales:
                numbers = pd.to_numeric(
                    pd.Series(own).str.replace(",", "."), errors="coerce"
                ).to_numpy(dtype=float)
                weights, numbers = np.where(np.isnan(numbers), 0, p), np.nan_to_num(numbers)
                share = total(weights)
                known = np.where(share > 0, share, np.nan)
                mean = total(weights * numbers) / known
                variance = total(weights * (numbers - mean[rows]) ** 2) / known
                columns |= {
                    f"{name}_mean": mean,
                    f"{name}_sd": variance**0.5,
                    f"{name}_share": share,
                }
        for name, column in columns.items():
            columns[name] = np.where(is_coded, column.round(_DECIMALS), np.nan)
            sums = np.array([np.isfinite(columns[name]).sum(), np.nansum(columns[name])])
            self._sums[name] = self._sums.get(name, 0) + sums
        return columns

    @property
    def _matched(self) -> list[str]:
        return [*self._code_cols, *self._qualifier_cols.values()]

    @property
    def told(self) -> dict[str, Any]:
        """The table, the columns that are matched, rows by how a value was found, and means of
        numbers; for JSON.
        """
        means = {
            name: {"rows": int(rows), "mean": round(total / max(rows, 1), _DECIMALS)}
            for name, (rows, total) in self._sums.items()
        }
        columns = {"codes": self._code_cols, **self._qualifier_cols}
        return {**self.values.identity, "columns": columns, "counts": self._counts, "means": means}

    def coverage(self) -> str:
        """Say how many rows with a code have each value by an exact match, and with fallbacks; then
        all counts.
        """
        told = self.told
        lines = [
            (
                f"Classes of {told['table']} (SHA-256 {told['sha256'][:12]}) by "
                f"{', '.join(self._matched)}:"
            )
        ]
        for name, counts in told["counts"].items():
            coded, found = covered(counts)
            exact, all_ways = (
                f"{100 * part / max(coded, 1):.1f} %" for part in (counts[EXACT], found)
            )
            order = sorted(
                counts, key=lambda how: (how != EXACT, how in WITHOUT_VALUE, -counts[how], how)
            )
            each = ", ".join(f"{how} {counts[how]:,}" for how in order if counts[how])
            lines.append(
                f"  {name}: {exact} of {coded:,} rows with a code by exact matches, "
                f"{all_ways} with fallbacks ({each})"
            )
        return "\n".join(lines)


def _likely(table: pa.Table, name: str) -> pd.DataFrame:
    """Return the rows of a table with what it lists as likely for each, and its probability p."""
    lists, shares = (table[f"{start}{name}"].combine_chunks() for start in (LIKELY, SHARE))
    columns = {"row": pc.list_parent_indices(lists), name: lists.flatten(), "p": shares.flatten()}
    return pd.DataFrame(
        {key: column.to_numpy(zero_copy_only=False) for key, column in columns.items()}
    )


def classes_of(
    code_cols: Sequence[str],
    options: ClassOptions,
    table: str | None,
    *,
    codes: Collection[str] | None,
    **how: Any,
) -> list[Classes]:
    """Return what is added to columns of codes: values of a table, if there is one, and groups.

    `codes` are all that may occur, if they are known; see `Classes` for `how`.
    """
    values: list[Crosswalk | Groups] = [Crosswalk(table, options)] if table else []
    if options.levels:
        if (system := system_of(code_cols[0].removeprefix(how["prefix"]), codes)) is None:
            raise UserError(
                "--levels are of HISCO and OCC1950, and the model's codes are neither; omit it."
            )
        values.append(Groups(system, options.levels))
    return [Classes(one, code_cols, options, **how) for one in values]


def covered(counts: Mapping[str, int]) -> tuple[int, int]:
    """Return the number of rows with a code, and of those with a value, of the counts of a
    column.
    """
    coded = sum(counts.values()) - counts.get(NO_CODE, 0)
    return coded, sum(number for how, number in counts.items() if how not in WITHOUT_VALUE)
