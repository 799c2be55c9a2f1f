"""Flags of commands that open a model, and files of training data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from histocoder.config import PRECISIONS, Settings
from histocoder.config.settings import free
from histocoder.data.examples import LANG_COL, TEXT_COL, ExampleFiles
from histocoder.data.labels import LabelRules
from histocoder.data.table import open_table
from histocoder.inference.coder import Coder


@dataclass(frozen=True, kw_only=True)
class ModelFlags(Settings):
    """The model, and how it computes."""

    model: str = free(None, "folder of a run or a checkpoint, or a hub repo", metavar="DIR", is_required=True)
    device: str = free("auto", "device to compute on", choices=("auto", "cpu", "cuda", "mps"))
    no_verify: bool = free(False, "do not verify a large model's files with its manifest.json")
    precision: str = free(
        "auto",
        "auto: bf16 if the hardware supports it, several times as fast and slightly less exact",
        choices=PRECISIONS,
    )


def training_files(
    path: Path, coder: Coder, rules: LabelRules, *, input_col: str, language_col: str | None, sheet: str | None = None
) -> tuple[ExampleFiles, bool]:
    """Return a file of training data, and whether it has a column of languages.

    A column that is missing under the given name is read under its name in prepared data.
    """
    languages = (language_col or LANG_COL, LANG_COL)
    header = open_table(path, (), optional=(input_col, TEXT_COL, *languages), sheet=sheet).header
    text_col = TEXT_COL if TEXT_COL in header and input_col not in header else input_col
    lang_col = next((name for name in languages if name in header), None)
    files = ExampleFiles(
        (path,),
        coder.model.config.target_cols,
        coder.formatter,
        input_col=text_col,
        language_col=lang_col or LANG_COL,
        language=None if lang_col else "unk",
        rules=rules,
        sheet=sheet,
    )
    return files, lang_col is not None
