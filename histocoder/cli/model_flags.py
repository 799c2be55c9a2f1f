"""The flags of commands that read a model, and what belongs to one: its run, and what it was trained on."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from histocoder.config import PRECISIONS

if TYPE_CHECKING:
    from histocoder.data.examples import ExampleFiles
    from histocoder.data.labels import LabelRules
    from histocoder.inference.coder import Coder

TABLE_HELP = ".csv, .csv.gz, .tsv, .parquet, .xlsx, .dta or .sav"
SHEET_HELP = "sheet of an Excel workbook (default: the only one with content)"
RAW_HELP = "write texts that a spreadsheet would run as formulas as they are, without an apostrophe before them"
BATCH_HELP = "descriptions at once, fewer where memory runs out (default: 256)"


def add_command(
    commands: argparse._SubParsersAction, name: str, text: str, *, epilog: str | None = None
) -> argparse.ArgumentParser:
    """Add a command to the parser."""
    description = f"{text[0].upper()}{text[1:]}."
    return commands.add_parser(name, help=text, description=description, epilog=epilog, config=False)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a model and where it computes."""
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of a run or a checkpoint, or a hub repo")
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="where to compute (default: auto)"
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not compare a large model's files with its manifest.json first"
    )


def add_precision_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--precision`."""
    parser.add_argument(
        "--precision",
        default="auto",
        choices=PRECISIONS,
        help="auto: bf16 where the hardware has it, several times as fast and a little less exact (default: auto)",
    )


def add_label_flags(parser: argparse.ArgumentParser, *, of: str = "") -> None:
    """Add the flags that say how codes of files are read."""
    parser.add_argument(
        "--zero-pad-codes", action="store_true", help=f"{of}give codes of digits their leading zeros back"
    )
    parser.add_argument(
        "--allow-codes-shorter-than-block-size",
        action="store_true",
        help=f"{of}take codes shorter than the model's block size as meant",
    )


def training_files(path: Path, coder: Coder, args: argparse.Namespace, rules: LabelRules) -> tuple[ExampleFiles, bool]:
    """Return a file of training data, and whether it has a column of languages.

    Columns that are not there by the names that were given are sought by those of prepared data.
    """
    from histocoder.data.examples import LANG_COL, TEXT_COL, ExampleFiles
    from histocoder.data.table import open_table

    languages = (args.language_col or LANG_COL, LANG_COL)
    header = open_table(path, (), optional=(args.input_col, TEXT_COL, *languages)).header
    text_col = TEXT_COL if TEXT_COL in header and args.input_col not in header else args.input_col
    lang_col = next((name for name in languages if name in header), None)
    files = ExampleFiles(
        (path,),
        coder.model.config.target_cols,
        coder.formatter,
        input_col=text_col,
        language_col=lang_col or LANG_COL,
        language=None if lang_col else "unk",
        rules=rules,
    )
    return files, lang_col is not None


def run_of(folder: Path) -> Path:
    """Return the folder of the run that a model belongs to: the model's own, or above best/ and checkpoints/step-…/."""
    from histocoder.checkpoints.training_state import BEST_FOLDER, CHECKPOINTS_FOLDER

    folder = folder.resolve()
    if folder.parent.name == CHECKPOINTS_FOLDER:
        return folder.parents[1]
    return folder.parent if folder.name == BEST_FOLDER else folder
