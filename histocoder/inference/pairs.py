"""Descriptions and languages of a table; imported by workers, without torch, which takes seconds."""

from collections.abc import Collection

import pyarrow as pa
import pyarrow.compute as pc

from histocoder.config import PredictConfig
from histocoder.data.languages import language_code
from histocoder.data.table import strings

TEXT, LANG = "histocoder text", "histocoder lang"  # columns of `pairs_of`


def pairs_of(table: pa.Table, config: PredictConfig) -> pa.Table:
    """Return the description and the language of each row, the columns `TEXT` and `LANG`."""
    texts, *langs = (strings(table[name], f"The column {name!r}").fill_null("") for name in config.input_cols)
    if not langs:
        return pa.table({TEXT: texts, LANG: pa.repeat(config.language, len(table))})
    return pa.table({TEXT: texts, LANG: pc.if_else(pc.equal(langs[0], ""), "unk", langs[0])})


def with_language(table: pa.Table, language: str) -> pa.Table:
    """Return a table with a column of the language after its own, if one was given for all rows."""
    for name, code in column_of_language(table.column_names, language).items():
        table = table.append_column(name, pa.repeat(code, len(table)))
    return table


def column_of_language(taken: Collection[str], language: str) -> dict[str, str]:
    """Return the name and the content of the column that `with_language` adds, if any."""
    name = "lang"
    while name in taken:
        name = f"pred_{name}"
    return {} if language == "unk" else {name: language_code(language)}
