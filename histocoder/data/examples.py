"""Reads prepared files: descriptions, languages and codes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from histocoder.data.key import Key
from histocoder.data.labels import LabelRules, check_labels
from histocoder.data.table import Table, read_header, read_table
from histocoder.errors import UserError
from histocoder.formatters import MISSING, Formatter

TEXT_COL, LANG_COL = "occ1", "lang"
MAX_CODES = 5
"""Code columns of a prepared file at most."""


@dataclass
class Examples:
    """Descriptions with languages and codes, each of n rows."""

    texts: list[str]
    langs: list[str]
    codes: pd.DataFrame
    """Of shape (n, k): strings, None where there is none."""
    notices: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.texts)

    def sample(self, num_rows: int, *, seed: int) -> Examples:
        """So many of the rows at random, in their order; all of them where there are no more."""
        if num_rows >= len(self):
            return self
        rows = np.sort(np.random.default_rng(seed).permutation(len(self))[:num_rows])
        texts, langs = ([values[row] for row in rows] for values in (self.texts, self.langs))
        return Examples(texts, langs, self.codes.iloc[rows].reset_index(drop=True), self.notices)

    def distinct_codes(self) -> set[str]:
        """All codes that occur; a missing one is none."""
        return {code for code in pd.unique(self.codes.to_numpy().ravel()) if code is not None and code != MISSING}


def read_examples(
    paths: Sequence[str | Path],
    target_cols: Sequence[str],
    formatter: Formatter,
    *,
    input_col: str = TEXT_COL,
    language_col: str = LANG_COL,
    key: Key | None = None,
    rules: LabelRules | None = None,
) -> Examples:
    """Read files with a description, a language and codes in each row; one behind the other.

    Parameters
    ----------
    paths : sequence of path
    target_cols : sequence of str
        Columns of codes, first code first. A file may have the first few of them only. Where it has none, but has
        `code1`, `code2`, … instead, these are indices into `key`.
    formatter : Formatter
    input_col, language_col : str
        Without the language's column all rows are "unk".
    key : Key, optional
        The only codes there may be.
    rules : LabelRules, optional
        What is done about codes that do not fit.

    Raises
    ------
    UserError
        For what a user can mend, with the file and the line.
    """
    parts = [
        _read_file(Path(path), target_cols, formatter, input_col, language_col, key, rules or LabelRules())
        for path in paths
    ]
    if not any(len(part) for part in parts):
        raise UserError(f"{', '.join(map(str, paths))}: no row has a description and codes that fit.")
    return Examples(
        texts=[text for part in parts for text in part.texts],
        langs=[lang for part in parts for lang in part.langs],
        codes=pd.concat([part.codes for part in parts], ignore_index=True),
        notices=[notice for part in parts for notice in part.notices],
    )


def _read_file(
    path: Path,
    target_cols: Sequence[str],
    formatter: Formatter,
    input_col: str,
    language_col: str,
    key: Key | None,
    rules: LabelRules,
) -> Examples:
    header = read_header(path)
    present = [column for column in target_cols if column in header]
    indexed = [f"code{i}" for i in range(1, MAX_CODES + 1) if f"code{i}" in header]
    use_index = target_cols[0] not in header and "code1" in indexed
    if use_index and key is None:
        raise UserError(
            f"{path} has code1 … (indices into a key) instead of {target_cols[0]}; name the key file with --key."
        )
    columns = indexed if use_index else [target_cols[0], *[c for c in present if c != target_cols[0]]]
    has_lang = language_col in header
    table = read_table(path, [input_col, *([language_col] if has_lang else []), *columns])
    if use_index:
        assert key is not None
        for column, target in zip(columns, target_cols, strict=False):
            table.columns[target] = _codes_of(table, column, key)
        columns = list(target_cols[: len(columns)])

    labels = check_labels(table, columns, formatter, rules, key=key)
    notices = [*table.notices, *labels.notices]
    keep = np.asarray(table.columns[input_col].is_valid())
    if num_blank := int((~keep).sum()):
        notices.append(f"{path}: {num_blank:,} rows without a description are left out.")
    keep = keep.copy()
    keep[list(labels.bad)] = False
    if labels.bad:
        notices.append(f"{path}: {len(labels.bad):,} rows with labels that do not fit are left out.")
    if not has_lang:
        notices.append(f"{path} has no column {language_col!r}; its language is taken as unknown (unk).")
    mask = pa.array(keep)
    langs = table.columns[language_col].fill_null("unk").filter(mask).to_pylist() if has_lang else ["unk"] * keep.sum()
    codes = labels.codes[keep].reindex(columns=list(target_cols))
    codes = codes.astype(object).where(codes.notna(), None)
    return Examples(table.columns[input_col].filter(mask).to_pylist(), langs, codes, notices)


def _codes_of(table: Table, column: str, key: Key) -> pa.Array:
    """The codes that a column of class indices stands for."""
    coded = table.columns[column].dictionary_encode()
    codes: list[str] = []
    for text in coded.dictionary.to_pylist():
        match = re.fullmatch(r"\s*(\d+)(\.0)?\s*", text)  # columns with gaps are often saved as floats
        if match is None or int(match[1]) >= len(key.codes):
            row = np.flatnonzero(np.asarray(coded.indices.fill_null(-1)) == len(codes))
            raise UserError(
                f"{table.path}, line {table.lines(row[:1])[0]}, {column}: {text!r} is no index into the key, which has "
                f"{len(key.codes):,} codes."
            )
        codes.append(key.codes[int(match[1])])
    return pa.array(codes, pa.string()).take(coded.indices)
