"""Tables of training data, before training: which columns and language they have, and all their
problems.
"""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import pandas as pd
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import Pipeline, make_pipeline

from histocoder.config import PrepareConfig
from histocoder.data.prepare import CONFLICTS_FILE, REJECTED_FILE, prepare
from histocoder.errors import UserError
from histocoder.formatters.classifications import HISCO_TITLES
from histocoder.log import sending_lines
from histocoder.tables.header import plain
from histocoder.text.normalize import description_keys

_CODE_COLUMN = re.compile(
    r"(.*[ _])?(hisco|occ1950|isco(58|68|88|08)?|psti|codes?|kode[nr]?|koder?)[ _]?[0-9]*"
)
_ROWS_SHOWN = 20
CATEGORIES = (
    2,
    20,
)  # least and largest number of distinct cells, blank ones among them, of an attribute


def _value_of_flag(name: str) -> str:
    if name.startswith("-"):
        raise ValueError("names must not begin with a dash, as flags do; rename the column")
    return name


_Column: TypeAlias = Annotated[str, AfterValidator(_value_of_flag)]


class TrainOptions(BaseModel):
    """A table of training data: its columns, and what to do with codes that do not fit."""

    model_config = ConfigDict(str_max_length=2000)

    input_col: _Column
    target_cols: list[_Column] = Field(min_length=1, max_length=20)
    language: _Column = "unk"
    language_col: _Column | None = None
    attribute_cols: list[_Column] = Field([], max_length=20)
    zero_pad_codes: bool = False
    allow_codes_shorter_than_block_size: bool = False
    drop_bad_labels: bool = False
    blank_means_no_occupation: bool = False
    titles: Literal["auto", "none"] = "auto"
    quick: bool = False  # whether to train for three epochs alone


class Check(BaseModel):
    """Findings of preparing a table; without problems, it can be trained on."""

    problems: list[str] = []
    fixes: dict[str, Any] = {}  # options with which it can be prepared, where there are any
    notices: list[str] = []
    train: int = 0  # number of rows to train on, to validate on, and left out
    val: int = 0
    rejected: int = 0
    codes: int = 0
    conflicts: int = 0  # number of descriptions with different codes
    rejected_rows: list[dict[str, str]] = []  # the first ones
    conflict_rows: list[dict[str, str]] = []


def check(dataset: Path, options: TrainOptions, *, sheet: str | None = None) -> Check:
    """Prepare a table as `histocoder finetune` does, in a temporary folder, and return what was
    found.
    """
    lines: list[str] = []
    with TemporaryDirectory() as name, sending_lines(lines.append):
        folder = Path(name) / "prepared"
        try:
            how = options.model_dump(exclude={"quick"})
            record = prepare(
                PrepareConfig(dataset=str(dataset), sheet=sheet, save_path=name, **how), folder
            )
        except UserError as error:
            first, *others = str(error).split("\n- ")
            return Check(problems=others or [first], fixes=error.settings)
        contradicting = _rows(folder / CONFLICTS_FILE)
        return Check(
            **{part: record["rows"][part] for part in ("train", "val", "rejected")},
            codes=record["codes"],
            conflicts=contradicting[contradicting.columns[:2]].drop_duplicates().shape[0],
            rejected_rows=_rows(folder / REJECTED_FILE)[:_ROWS_SHOWN].to_dict("records"),
            conflict_rows=contradicting[:_ROWS_SHOWN].to_dict("records"),
            notices=[line for line in lines if name not in line],
        )


def _rows(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype=str, keep_default_na=False) if path.is_file() else pd.DataFrame()


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
    model, languages = _language_model()
    keys = [key for key in description_keys(texts) if key]
    return languages[int(np.argmax(model.predict_log_proba(keys).sum(0)))] if keys else "unk"


@cache
def _language_model() -> tuple[Pipeline, list[str]]:
    titles = pd.read_csv(HISCO_TITLES, dtype=str, keep_default_na=False)
    model = make_pipeline(
        CountVectorizer(analyzer="char_wb", ngram_range=(1, 4)), MultinomialNB(fit_prior=False)
    )
    model.fit(description_keys(titles["title"]), titles["lang"])
    return model, model.classes_.tolist()
