"""Titles of codes, which say what a code is called: a model learns from them as well."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from histocoder.config import PrepareConfig
from histocoder.data.cells import Cell
from histocoder.data.examples import CODES_PREFIX, is_codes
from histocoder.data.labelled_files import LabelledFiles
from histocoder.errors import UserError, counted, shown
from histocoder.files import is_same_file
from histocoder.formatters.classifications import HISCO_TITLES, LEXICON
from histocoder.log import log
from histocoder.tables.table import open_table
from histocoder.text.languages import Language
from histocoder.text.normalize import description_keys

TITLE_WEIGHT = np.float32(0.3)
"""Weight of a title in training, where that of a row is 1; from 0.2 to 0.5 the accuracy is the
same.
"""
_CODE_COLUMNS = ("hisco", "code", "system_code")
_MAX_ROWS = 200_000  # tables with more rows have the words of titles themselves
MIN_SHARE_WITH_TITLES = 1 / 3
"""Share of a table's codes that have titles of HISCO, from which on it is coded by HISCO."""
MIN_SHARE_AGREEING = 1 / 2
"""Share of descriptions that are titles and have the title's code, likewise."""


def titles_to_learn(
    config: PrepareConfig, rows: pa.Table, files: LabelledFiles, *, beside: Collection[str]
) -> pa.RecordBatch | None:
    """Return titles in the languages of a table as checked rows with keys; None if there are none
    to learn from.

    The project's own are used if the table is coded by HISCO: a third of its codes have titles, and
    half of the descriptions that are titles have the title's code. Titles that the table has as
    descriptions, or whose keys are in `beside`, are left out, so that none of them is validated on,
    or contradicts the table; so are those of codes that the files' key lacks, if there is one.
    Codes are read as those of the files, and those that do not fit are left out; a notice says how
    many the user's own file has.

    Raises UserError if `config.titles` is a file that has no titles, or no languages although the
    table has several.
    """
    is_own = config.titles == "auto" or is_same_file(LEXICON, config.titles)
    if config.titles == "none" or (is_own and len(rows) > _MAX_ROWS):
        return None
    kept_rows = rows.filter(rows["reason"].is_null())
    first_codes = kept_rows[next(filter(is_codes, rows.column_names))]
    coded_rows = pd.DataFrame(
        {
            "key": kept_rows["key"].to_pylist(),
            "lang": kept_rows["lang"].to_pylist(),
            "code": first_codes.to_pylist(),
        }
    )

    # languages that the table lacks are not what the model is to learn
    langs_of_table = coded_rows["lang"].unique().tolist()
    titles = _read(config, files, langs_of_table, says_unfit=not is_own)
    titles = titles[titles["lang"].isin(langs_of_table)]

    # titles of the user's own are taken as they are
    if is_own and not _is_coded_by(titles, coded_rows):
        return None

    # none is validated on, or contradicts the table
    titles = titles[~titles["key"].isin(set(coded_rows["key"]).union(beside))]
    titles = titles.drop_duplicates(["key", "lang"])
    if files.key is not None:
        titles = titles[titles["code"].isin(files.key.codes)]
    if titles.empty:
        return None

    # whoever trains is told, since these rows are not the user's
    langs = ", ".join(sorted(titles["lang"].unique()))
    number = counted(len(titles), "title of codes", "titles of codes")
    log.info(f"The model learns from {number} as well ({langs}); --titles none leaves them out.")
    return _checked_rows(files, titles)


def _is_coded_by(titles: pd.DataFrame, coded_rows: pd.DataFrame) -> bool:
    """Return whether a table's descriptions have the codes that titles have."""
    has_title = coded_rows["code"].drop_duplicates().isin(titles["code"])
    if has_title.mean() < MIN_SHARE_WITH_TITLES:
        return False
    pairs = titles.merge(
        coded_rows.drop_duplicates(["key", "lang", "code"]),
        on=["key", "lang"],
        suffixes=("_of_title", "_of_row"),
    )
    agrees = pairs["code_of_title"] == pairs["code_of_row"]
    return pairs.empty or agrees.mean() >= MIN_SHARE_AGREEING


def _read(
    config: PrepareConfig, files: LabelledFiles, langs_of_table: list[str], *, says_unfit: bool
) -> pd.DataFrame:
    """Read titles as a DataFrame with the columns text, lang, code and key, of codes that fit; say
    how many do not.
    """
    path = HISCO_TITLES if config.titles == "auto" else Path(config.titles)
    file = open_table(path, ("title",), optional=["lang", *_CODE_COLUMNS, *config.target_cols])
    code_column = file.first_of((*config.target_cols, *_CODE_COLUMNS))
    if code_column is None:
        raise UserError(
            f"--titles {path} has no column of codes; it needs title, code and, for "
            "languages, lang."
        )

    # without a column of languages, titles are in that of the table
    if not file.has("lang") and len(langs_of_table) > 1:
        raise UserError(
            f"--titles {path} has no column lang, and the table has rows in several languages "
            f"({', '.join(sorted(langs_of_table))}). Add the language of each title."
        )
    table = file.read(["title", code_column, *filter(file.has, ["lang"])]).columns
    texts = table["title"].to_pylist()
    langs = table["lang"].to_pylist() if "lang" in table else langs_of_table * len(texts)
    titles = pd.DataFrame({"text": texts, "cell": table[code_column].to_pylist()})
    titles["lang"] = [Language(lang or "") for lang in langs]
    titles = titles.dropna(subset=["text", "cell"])

    # the key alone may lack codes that fit
    counts = titles["cell"].value_counts().to_dict()
    column = replace(files.column_for(counts), has_key=False)
    cells = {text: column.read(text) for text in counts}
    fitting = {text: cell.codes[0] for text, cell in cells.items() if _is_one_code(cell)}
    titles["code"] = titles["cell"].map(fitting)
    is_left_out = titles["code"].isna()
    if says_unfit and is_left_out.any():
        first = titles["cell"][is_left_out].iat[0]
        number = counted(int(is_left_out.sum()), "title has", "titles have")
        reason = cells[first].problem or "is not one code"
        log.info(
            f"{path}: {number} no code that fits, and are left out; the first: {shown(first)} "
            f"{reason}."
        )
    titles = titles[~is_left_out]
    return titles.assign(key=description_keys(titles["text"].tolist()))


def _is_one_code(cell: Cell) -> bool:
    return len(cell.codes) == 1 and not cell.problem


def _checked_rows(files: LabelledFiles, titles: pd.DataFrame) -> pa.RecordBatch:
    """Return titles with the columns of checked rows, and their keys."""
    columns = {name: titles[name].tolist() for name in ("text", "lang", "key")}
    columns[f"{CODES_PREFIX}{files.target_cols[0]}"] = titles["code"].tolist()
    schema = pa.schema([*files.schema, ("key", pa.string())])
    for name in schema.names:
        columns.setdefault(name, [None] * len(titles))
    return pa.RecordBatch.from_pydict(columns, schema=schema)
