"""Titles of codes, which say what a code is called: a model learns from them as well."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from histocoder.config import PrepareConfig
from histocoder.data.examples import CODES, is_codes
from histocoder.data.key import Key
from histocoder.data.labelled_files import LabelledFiles
from histocoder.errors import UserError, counted
from histocoder.formatters.classifications import HISCO_TITLES
from histocoder.log import log
from histocoder.tables.table import open_table
from histocoder.text.languages import Language
from histocoder.text.normalize import description_keys

WEIGHT = np.float32(0.3)
"""Weight of a title in training, where that of a row is 1; from 0.2 to 0.5 the accuracy is the
same.
"""
_CODE_COLUMNS = ("hisco", "code", "system_code")
_MAX_ROWS = 200_000  # larger tables have the words of titles themselves
_LEAST_KNOWN, _LEAST_AGREEING = 1 / 3, 1 / 2


def titles_to_learn(
    config: PrepareConfig,
    rows: pa.Table,
    files: LabelledFiles,
    *,
    key: Key | None,
    beside: Collection[str],
) -> pa.RecordBatch | None:
    """Return titles in the languages of a table as checked rows with keys; None if there are none
    to learn from.

    HISCO's are used by default if the table is coded by HISCO: a third of its codes have titles,
    and half of the descriptions that are titles have the title's code. Titles that the table has as
    descriptions, or whose keys are in `beside`, are left out, so that none of them is validated on,
    or contradicts the table; so are those of codes that `key` lacks, if given.

    Raises UserError if `config.titles` is a file that has no titles.
    """
    if config.titles == "none" or len(rows) > _MAX_ROWS:
        return None
    titles = _read(config)
    kept = rows.filter(rows["reason"].is_null())
    first = kept[next(filter(is_codes, rows.column_names))]
    given = pd.DataFrame(
        {
            "key": kept["key"].to_pylist(),
            "lang": kept["lang"].to_pylist(),
            "code": first.to_pylist(),
        }
    )
    fits = np.array([files.formatter.system.problem(code) is None for code in titles["code"]])
    titles = titles[titles["lang"].isin(given["lang"].unique()) & fits]
    if config.titles == "auto":
        coded = given.drop_duplicates("code")["code"]
        both = titles.merge(given.drop_duplicates(["key", "lang", "code"]), on=["key", "lang"])
        agrees = both["code_x"] == both["code_y"]
        if coded.isin(titles["code"]).mean() < _LEAST_KNOWN or (
            len(both) and agrees.mean() < _LEAST_AGREEING
        ):
            return None
    titles = titles[~titles["key"].isin({*given["key"], *beside})].drop_duplicates(["key", "lang"])
    titles = titles if key is None else titles[titles["code"].isin(key.codes)]
    if titles.empty:
        return None
    langs = ", ".join(sorted(titles["lang"].unique()))
    number = counted(len(titles), "title of codes", "titles of codes")
    log.info(f"The model learns from {number} as well ({langs}); --titles none leaves them out.")
    return _checked_rows(files, titles)


def _read(config: PrepareConfig) -> pd.DataFrame:
    """Read titles as a DataFrame with the columns text, lang, code and key."""
    path = HISCO_TITLES if config.titles == "auto" else Path(config.titles)
    file = open_table(path, ("title",), optional=["lang", *_CODE_COLUMNS, *config.target_cols])
    code_column = next(filter(file.has, (*config.target_cols, *_CODE_COLUMNS)), None)
    if code_column is None:
        raise UserError(
            f"--titles {path} has no column of codes; it needs title, code and, for "
            "languages, lang."
        )
    columns = ["title", code_column, *filter(file.has, ["lang"])]
    table = file.read(columns).columns
    langs = (
        table["lang"].to_pylist() if "lang" in table else [config.language] * len(table["title"])
    )
    found = pd.DataFrame(
        {"text": table["title"].to_pylist(), "code": table[code_column].to_pylist()}
    )
    found["lang"] = [Language(lang or "") for lang in langs]
    found = found.dropna(subset=["text", "code"])
    return found.assign(key=description_keys(found["text"].tolist()))


def _checked_rows(files: LabelledFiles, titles: pd.DataFrame) -> pa.RecordBatch:
    nothing = [None] * len(titles)
    columns = {
        "text": titles["text"].tolist(),
        "lang": titles["lang"].tolist(),
        "key": titles["key"].tolist(),
    }
    columns[f"{CODES}{files.target_cols[0]}"] = titles["code"].tolist()
    schema = pa.schema([*files.schema, ("key", pa.string())])
    arrays = [pa.array(columns.get(field.name, nothing), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
