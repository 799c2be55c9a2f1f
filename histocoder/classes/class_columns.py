"""Columns of classes and other values of codes, for a table of coded descriptions."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.classes.crosswalk import CODE_COL, EXACT, NO_CODE, WITHOUT_VALUE, Crosswalk, Match
from histocoder.classes.groups import Groups, system_of
from histocoder.config.prediction import QUALIFIERS, ClassOptions
from histocoder.errors import UserError
from histocoder.tables.header import named
from histocoder.tables.table import strings

_DECIMALS = 4
_CLASS_SUFFIXES = ("prob",)
_SCALE_SUFFIXES = ("mean", "sd", "share")
NUMBER_SUFFIXES = _CLASS_SUFFIXES + _SCALE_SUFFIXES
"""Suffixes of the columns of numbers behind a column of values."""


@dataclass(frozen=True)
class LikelyCodes:
    """Codes that the n rows of a table may have, m in all."""

    num_rows: int
    rows: np.ndarray
    """Row of each candidate, of shape (m,)."""
    probs: np.ndarray
    """Probability of each, of shape (m,)."""
    is_first: np.ndarray
    """Whether a candidate has the likeliest code of its row, of shape (m,)."""

    def _sums(self, weights: np.ndarray) -> np.ndarray:
        """Return the sum of each row's weights, of shape (n,)."""
        sums = np.bincount(self.rows, weights, minlength=self.num_rows)
        return sums.astype(float)  # of no candidates, bincount makes integers

    def class_probability(self, classes: np.ndarray, written: np.ndarray) -> np.ndarray:
        """Return the probability of the class that is `written` in each row, of shape (n,), given
        that of each candidate.
        """
        is_written = classes == written[self.rows]
        listed = self._sums(self.probs * is_written)

        # codes that are not listed have the class as often as those listed after the first
        probs_after_first = np.where(self.is_first, 0, self.probs)
        sum_after_first = np.maximum(self._sums(probs_after_first), np.finfo(float).tiny)
        sum_with_class = self._sums(probs_after_first * is_written)
        unlisted = 1 - self._sums(self.probs)
        probs = listed + unlisted * sum_with_class / sum_after_first
        return np.where(pd.notna(written), probs, np.nan)

    def scale_moments(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Return mean, standard deviation and share of a scale, each of shape (n,), given the value
        of each candidate.
        """
        texts = pd.Series(values).str.replace(",", ".")
        numbers = pd.to_numeric(texts, errors="coerce").to_numpy(dtype=float)

        # a code without a value has no weight; a row without any value gets NaN
        weights = np.where(np.isnan(numbers), 0, self.probs)
        numbers = np.nan_to_num(numbers)
        share = self._sums(weights)
        total = np.where(share > 0, share, np.nan)
        mean = self._sums(weights * numbers) / total
        variance = self._sums(weights * (numbers - mean[self.rows]) ** 2) / total
        return {"mean": mean, "sd": variance**0.5, "share": share}


class Classes:
    """The columns that a crosswalk or groups add to a table of codes, and how many rows have which.

    With the likely first codes of each row, these columns follow those of values, where p is the
    probability of a code, times that of status, relation and product where these are predicted as
    well:

    - `…_prob` of a class: the sum of p over the codes that have the class that is written, where
      codes that are not listed are taken to have it as often as those listed after the first one;
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
        self.values = values
        self._code_cols = list(code_cols)
        self._options = options
        self._prefix = prefix
        self._expect = expect  # whether there are likely codes
        # status, relation or product -> its column, where the table has one
        self._qualifier_cols: dict[str, str] = {}
        # for each column of codes: column of values -> the new column
        self._names = []
        for i in range(len(self._code_cols)):
            number = f"_{i + 1}" if len(self._code_cols) > 1 else ""
            self._names.append({value: f"{prefix}{value}{number}" for value in values.value_cols})
        self._counts: dict[str, Counter[str]] = {}
        # column of numbers -> number of rows that have one, and their sum
        self._sums: dict[str, np.ndarray] = {}

    @property
    def fields(self) -> list[pa.Field]:
        """The new columns, in their order."""
        fields = []
        for number, names in enumerate(self._names):
            for value, name in names.items():
                fields.append(pa.field(name, pa.string()))
                if self._expect and number == 0:
                    for suffix in self._number_suffixes(value):
                        fields.append(pa.field(f"{name}_{suffix}", pa.float64()))
        return fields

    def _number_suffixes(self, value: str) -> tuple[str, ...]:
        """Return the suffixes of the columns of numbers that a column of values has; none of a
        title.
        """
        if value in self.values.classes:
            return _CLASS_SUFFIXES
        return _SCALE_SUFFIXES if value in self.values.scales else ()

    def check_header(self, path: object, header: Sequence[str]) -> None:
        """Raise a UserError if a table has several columns of what classes depend on."""
        for name in self.values.qualifiers:
            columns = named(getattr(self._options, f"{name}_col") or name, header)
            if len(columns) > 1:
                raise UserError(
                    f"{path} has several columns {columns[0]!r}, on which classes depend. Rename "
                    f"those that are not meant, or name another one with --{name}-col."
                )

    def append(self, table: pa.Table, likely: Mapping[str, pa.Array] | None = None) -> pa.Table:
        """Return a table with the new columns behind its own.

        `likely` lists, for each row, the codes that it may have (`CODE_COL`), and likewise its
        statuses and so on where these are predicted: structs of a `value` and its probability `p`.
        """
        # qualifiers are in the input's column, else in that of what is predicted
        for name in self.values.qualifiers:
            input_col = getattr(self._options, f"{name}_col") or name
            columns = named(input_col, table.column_names)
            columns += named(f"{self._prefix}{name}", table.column_names)
            if columns:
                self._qualifier_cols[name] = columns[0]

        # the cells by which values are found
        cells = {
            name: strings(table[name], f"The column {name!r}").to_pylist() for name in self._matched
        }
        nothing = [None] * len(table)
        qualifiers = {
            name: cells.get(self._qualifier_cols.get(name, ""), nothing) for name in QUALIFIERS
        }

        # values of the written codes, and how often they were found in which way
        new: dict[str, np.ndarray] = {}
        for code_col, names in zip(self._code_cols, self._names, strict=True):
            keys = list(zip(cells[code_col], *qualifiers.values(), strict=True))
            matches = self._find_all(keys)
            for value, name in names.items():
                new[name] = np.array([match.value for match in matches[value]], dtype=object)

                # a title is found whenever its group is
                if value in self.values.classes or value in self.values.scales:
                    ways = (match.way for match in matches[value])
                    self._counts.setdefault(name, Counter()).update(ways)

        # numbers from the likely codes
        if likely is not None:
            new |= self._expected_values(likely, qualifiers, new)
        for field in self.fields:
            column = pa.array(new[field.name], field.type, from_pandas=True)
            table = table.append_column(field, column)
        return table

    def _find_all(self, keys: Sequence[tuple[str | None, ...]]) -> dict[str, list[Match]]:
        """Return the values of codes with their qualifiers, by column of values."""
        matches = {key: self.values.find(*key) for key in set(keys)}
        rows = [matches[key] for key in keys]
        return {name: [row[i] for row in rows] for i, name in enumerate(self.values.value_cols)}

    def _expected_values(
        self,
        likely: Mapping[str, pa.Array],
        qualifiers: Mapping[str, Sequence[str | None]],
        written: Mapping[str, np.ndarray],
    ) -> dict[str, np.ndarray]:
        """Return the columns of numbers, each of shape (n,), for n rows with their likely codes; NaN
        where there is none.
        """
        num_rows = len(likely[CODE_COL])

        # a predicted qualifier is likely with a probability of its own, one of the input is certain
        frame = _candidates(likely[CODE_COL], CODE_COL)
        for name, cells in qualifiers.items():
            is_predicted = self._qualifier_cols.get(name) == f"{self._prefix}{name}"
            if is_predicted and name in likely:
                candidates = _candidates(likely[name], name)
                candidates = candidates.rename(columns={"p": "p_of_qualifier"})
                frame = frame.merge(candidates, on="row", how="left")
                # of a known description, no qualifier is predicted
                frame["p"] *= frame.pop("p_of_qualifier").fillna(1.0)
            else:
                frame[name] = np.array(cells, dtype=object)[frame["row"]]

        # with predicted qualifiers, several candidates of a row have its first code
        first_code = frame.groupby("row")[CODE_COL].transform("first")
        likely_codes = LikelyCodes(
            num_rows=num_rows,
            rows=frame["row"].to_numpy(),
            probs=frame["p"].to_numpy(),
            is_first=(frame[CODE_COL] == first_code).to_numpy(),
        )

        # what follows from each candidate's values
        keys = frame[[CODE_COL, *QUALIFIERS]].astype(object)
        keys = keys.where(keys.notna(), None)
        matches = self._find_all(list(keys.itertuples(index=False, name=None)))
        columns: dict[str, np.ndarray] = {}
        for value, name in self._names[0].items():
            values = np.array([match.value for match in matches[value]], dtype=object)
            if value in self.values.classes:
                columns[f"{name}_prob"] = likely_codes.class_probability(values, written[name])
            if value in self.values.scales:
                moments = likely_codes.scale_moments(values)
                columns |= {f"{name}_{suffix}": column for suffix, column in moments.items()}

        # a row without codes has no numbers
        is_coded = np.isin(np.arange(num_rows), likely_codes.rows)
        for name, column in columns.items():
            columns[name] = np.where(is_coded, column.round(_DECIMALS), np.nan)
            sums = np.array([np.isfinite(columns[name]).sum(), np.nansum(columns[name])])
            self._sums[name] = self._sums.get(name, 0) + sums
        return columns

    @property
    def _matched(self) -> list[str]:
        return [*self._code_cols, *self._qualifier_cols.values()]

    @property
    def record(self) -> dict[str, Any]:
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
        identity = self.values.identity
        lines = [
            f"Classes of {identity['table']} (SHA-256 {identity['sha256'][:12]}) by "
            f"{', '.join(self._matched)}:"
        ]
        for name, counts in self._counts.items():
            num_coded, num_with_value = covered(counts)
            exact = f"{100 * counts[EXACT] / max(num_coded, 1):.1f} %"
            all_ways = f"{100 * num_with_value / max(num_coded, 1):.1f} %"
            order = sorted(
                counts, key=lambda way: (way != EXACT, way in WITHOUT_VALUE, -counts[way], way)
            )
            each = ", ".join(f"{way} {counts[way]:,}" for way in order)
            lines.append(
                f"  {name}: {exact} of {num_coded:,} rows with a code by exact matches, "
                f"{all_ways} with fallbacks ({each})"
            )
        return "\n".join(lines)


def _candidates(lists: pa.Array, name: str) -> pd.DataFrame:
    """Return the values in lists, the index of the list of each, its row, and its probability p."""
    values = lists.flatten()
    columns = {
        "row": pc.list_parent_indices(lists),
        name: values.field("value"),
        "p": values.field("p"),
    }
    return pa.table(columns).to_pandas()


def classes_of(
    code_cols: Sequence[str],
    options: ClassOptions,
    table: str | None,
    *,
    codes: Collection[str] | None,
    **kwargs: Any,
) -> list[Classes]:
    """Return what is added to columns of codes: values of a table, if there is one, and groups.

    `codes` are all that may occur, if they are known; see `Classes` for `kwargs`.
    """
    values: list[Crosswalk | Groups] = []
    if table:
        values.append(Crosswalk(table, options))
    if options.levels:
        system = system_of(code_cols[0].removeprefix(kwargs["prefix"]), codes)
        if system is None:
            raise UserError(
                "--levels are of HISCO and OCC1950, and the model's codes are neither; omit it."
            )
        values.append(Groups(system, options.levels))
    return [Classes(source, code_cols, options, **kwargs) for source in values]


def covered(counts: Mapping[str, int]) -> tuple[int, int]:
    """Return the number of rows with a code, and of those with a value, of the counts of a
    column.
    """
    num_coded = sum(counts.values()) - counts.get(NO_CODE, 0)
    num_without = sum(counts.get(way, 0) for way in WITHOUT_VALUE)
    return num_coded, sum(counts.values()) - num_without
