"""A file that is sent in, and how far it is."""

import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from histocoder.desk.domain.jobs import Job
from histocoder.tables.table import READ_ONLY
from histocoder.tables.text_encodings import Reading

_MAX_NAME_BYTES = 160  # of the 255 that a name may have on disk, with what is added to it
Use: TypeAlias = Literal["code", "train", "classes"]


class Options(BaseModel):
    """Options of coding a file."""

    model_config = ConfigDict(str_max_length=2000)

    input_col: str
    language: str = "unk"
    language_col: str | None = None
    known: bool = False  # whether descriptions of the training data get their own codes
    classes: str | None = None  # id of a table of classes, which are added


class File(Job):
    """A file, and how far it is."""

    name: str
    sent: float
    use: Use = "code"
    is_sample: bool = False  # whether it was made to try the desk with
    sheet: str | None = None  # sheet of a workbook that is used
    sheets: list[str] = Field(default_factory=list)  # those that it may be, if there are several
    encoding: str | None = None  # encoding of a text file that is not UTF-8
    encodings: list[Reading] = Field(default_factory=list)  # encodings that it may be
    # "cancelled": only in records of earlier versions
    state: Literal["new", "queued", "running", "done", "failed", "cancelled"] = "new"
    options: Options | None = None
    # columns of codes of the model that coded it
    target_cols: list[str] = Field(default_factory=list)
    num_rows: int | None = None
    rows_done: float = 0
    # numbers of `rows`, of `blank` ones, and `to_check`, those less sure than `sure`; the share
    # `expected_right` of the others
    summary: dict[str, float] = Field(default_factory=dict)
    notices: list[str] = Field(default_factory=list)


@dataclass(frozen=True)
class Download:
    """A file to download, and the name that it gets."""

    path: Path
    name: str
    is_temporary: bool = False  # whether to delete it afterwards


def new_file(name: str, *, use: Use, sheet: str | None = None, is_sample: bool = False) -> File:
    """Return a file that is just being sent, under a name that any system can have on disk."""
    name = re.split(r"[/\\]", name)[-1]
    name = "".join(char for char in name if char.isprintable() and char not in ':*?"<>|')
    name = name.encode()[-_MAX_NAME_BYTES:].decode(errors="ignore")
    file_id = secrets.token_hex(8)
    return File(id=file_id, name=name, sent=time.time(), use=use, sheet=sheet, is_sample=is_sample)


def coded_name(name: str) -> str:
    """Return the name of the coded file: census_coded.csv.gz of census.csv.gz."""
    path = Path(name)
    suffix = path.suffix
    if suffix.lower() == ".gz":
        suffix = "".join(path.suffixes[-2:])
    stem = name.removesuffix(suffix)
    return f"{stem}_coded{READ_ONLY.get(suffix.lower(), suffix)}"


def options_of(file: File) -> Options:
    """Return the options with which a file is or was coded."""
    assert file.options is not None, "a file that was queued has options"
    return file.options
