"""Tables of training data, prepared to try: all their problems, before training."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, TypeAlias

import pandas as pd
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from histocoder.config import PrepareConfig
from histocoder.data.prepare import CONFLICTS_FILE, REJECTED_FILE, prepare
from histocoder.errors import UserError
from histocoder.log import sending_lines

_NUM_ROWS_SHOWN = 20


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


def check(
    dataset: Path, options: TrainOptions, *, sheet: str | None = None, encoding: str | None = None
) -> Check:
    """Prepare a table as `histocoder finetune` does, in a temporary folder, and return what was
    found.
    """
    lines: list[str] = []
    with TemporaryDirectory() as name, sending_lines(lines.append):
        folder = Path(name) / "prepared"
        settings = options.model_dump(exclude={"quick"})
        config = PrepareConfig(
            dataset=str(dataset), sheet=sheet, file_encoding=encoding, save_path=name, **settings
        )

        # all problems are in one message, a line each
        try:
            record = prepare(config, folder)
        except UserError as error:
            first, *problems = str(error).split("\n- ")
            return Check(problems=problems or [first], fixes=error.settings)

        # the tables that preparing writes for people
        conflicts = _rows(folder / CONFLICTS_FILE)
        num_rows = record["rows"]
        return Check(
            train=num_rows["train"],
            val=num_rows["val"],
            rejected=num_rows["rejected"],
            codes=record["codes"],
            conflicts=len(conflicts[conflicts.columns[:2]].drop_duplicates()),
            rejected_rows=_rows(folder / REJECTED_FILE)[:_NUM_ROWS_SHOWN].to_dict("records"),
            conflict_rows=conflicts[:_NUM_ROWS_SHOWN].to_dict("records"),
            notices=[line for line in lines if name not in line],  # none that names the folder
        )


def _rows(path: Path) -> pd.DataFrame:
    if not path.is_file():
        return pd.DataFrame()
    return pd.read_csv(path, dtype=str, keep_default_na=False)
