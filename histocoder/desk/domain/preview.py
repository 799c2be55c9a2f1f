"""The first rows of a table that was sent in, and what its columns probably hold."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic import BaseModel
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import Pipeline, make_pipeline

from histocoder.formatters.classifications import HISCO_TITLES
from histocoder.tables.header import descriptions_in, plain
from histocoder.tables.table import open_table, strings
from histocoder.text.normalize import description_keys

_CODE_COLUMN = re.compile(
    r"(.*[ _])?(hisco|occ1950|isco(58|68|88|08)?|psti|codes?|kode[nr]?|koder?)[ _]?[0-9]*"
)
_NUM_ROWS_READ = 300
_NUM_ROWS_SHOWN = 8
_MAX_CHARACTERS_SHOWN = 120
_MIN_CATEGORIES = 2  # distinct cells of an attribute, blank ones among them
_MAX_CATEGORIES = 20


class Preview(BaseModel):
    """The first rows of a file."""

    columns: list[str]
    rows: list[list[str]]
    input_col: str | None  # column that probably holds descriptions
    language_col: str | None  # column that probably holds languages
    language: str  # language in which the descriptions probably are
    target_cols: list[str]  # columns that probably hold codes
    attribute_cols: list[str]  # columns of few categories, which may be attributes
    notices: list[str]


def read_preview(
    path: Path,
    *,
    sheet: str | None,
    encoding: str | None,
    input_col: str | None,
    language_col: str | None,
) -> Preview:
    """Read the first rows of a table; raise a UserError if it can't be read.

    `input_col` and `language_col` are the columns in which the model's training data had
    descriptions and languages; they are taken where the table has them.
    """
    # a first block of rows, which is enough to guess from
    optional = list(filter(None, (input_col, language_col, "occ1", "lang")))
    table = open_table(path, {}, optional=optional, sheet=sheet, encoding=encoding)
    chunk = next(table.chunks(chunk_rows=_NUM_ROWS_READ))
    texts = {}
    for name, column in zip(table.header, chunk.columns, strict=True):
        texts[name] = strings(column).fill_null("").to_pylist()  # of several with a name, the last
    cells = pd.DataFrame(texts, dtype=object)

    # the columns, by their names and by what is in them
    text_col = descriptions_in(table.header)
    if input_col and table.has(input_col):
        text_col = table.column(input_col)
    lang_col = None
    for lang_name in (language_col, "lang", "language"):
        if lang_col is None and lang_name and table.has(lang_name):
            lang_col = table.column(lang_name)

    # few distinct cells may be categories, one alone says nothing
    attribute_cols = []
    for name in cells:
        num_categories = cells[name].str.strip().nunique()
        if _MIN_CATEGORIES <= num_categories <= _MAX_CATEGORIES:
            attribute_cols.append(name)

    # as much as fits a page
    shown = cells[:_NUM_ROWS_SHOWN].map(lambda cell: cell[:_MAX_CHARACTERS_SHOWN])
    language = "unk"
    if text_col:
        language = guess_language(cells[text_col])
    return Preview(
        columns=list(cells),
        rows=shown.to_numpy().tolist(),
        input_col=text_col,
        language_col=lang_col,
        language=language,
        target_cols=code_columns(cells),
        attribute_cols=attribute_cols,
        notices=table.notices,
    )


def code_columns(cells: pd.DataFrame) -> list[str]:
    """Return the columns that probably hold codes, by their names; of several, those that are not
    blank.
    """
    named = [name for name in cells if _CODE_COLUMN.fullmatch(plain(name))]
    return [name for name in named if name == named[0] or cells[name].str.strip().any()]


def guess_language(texts: Sequence[str]) -> str:
    """Return the language in which descriptions probably are, among those of histocoder's
    titles.
    """
    keys = list(filter(None, description_keys(texts)))
    if not keys:
        return "unk"
    model = _language_model()
    log_probs = model.predict_log_proba(keys).sum(axis=0)
    return str(model.classes_[np.argmax(log_probs)])


@cache
def _language_model() -> Pipeline:
    titles = pd.read_csv(HISCO_TITLES, dtype=str, keep_default_na=False)
    model = make_pipeline(
        CountVectorizer(analyzer="char_wb", ngram_range=(1, 4)), MultinomialNB(fit_prior=False)
    )
    return model.fit(description_keys(titles["title"]), titles["lang"])
