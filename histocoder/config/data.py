"""Settings of the data of a run: the table or the files, and their form."""

import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from histocoder.config.model import check_target_len
from histocoder.config.settings import Settings, free, require

NUM_CODES = {"hisco": 5, "occ1950": 2}  # columns of codes, by formatter that fixes their number
_TAKEN = re.compile("occ1|lang|checked|conf|times|source|(prob|desc|alt)_.*")
_FITTING = "auto: as many as the codes need; codes without digits are numbered (default: auto)"


def _block_size(text: str) -> int | None:
    if text != "auto" and not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is neither a whole number nor auto")
    return None if text == "auto" else int(text)


def check_names(target_cols: Sequence[str]) -> None:
    for name in target_cols:
        taken = f"A target column can't be called {name}, since prepared or coded tables use this name; rename it."
        require(not _TAKEN.fullmatch(name), taken)


@dataclass(frozen=True)
class TableConfig(Settings):
    """The user's table."""

    GROUP = "table"

    dataset: str = free(
        None,
        "table of descriptions and codes: .csv, .xlsx, .dta, .parquet, … (required)",
        metavar="FILE",
        is_short=True,
    )
    target_cols: tuple[str, ...] = free(
        None, "columns of codes, from the first code to the last (required)", metavar="COL", is_short=True
    )
    save_path: str = free("./Finetuned/", "the run's folder", metavar="DIR", is_short=True)
    language: str = free(
        "unk",
        "language of all rows, a code or a name: see below (default: unk, unknown)",
        metavar="LANG",
        is_short=True,
    )
    language_col: str | None = free(
        None, "column of each row's language, instead of --language", metavar="COL", is_short=True
    )
    block_size: int | None = free(
        None, f"characters of the longest code; {_FITTING}", metavar="N|auto", parse=_block_size, at_least=1
    )
    use_within_block_sep: bool = free(False, "',' separates the tokens within a code, as in PSTI's 1,10,2")
    share_val: float = free(0.1, "share of the data for validation", metavar="P")
    split_by: str = free("text", "split by descriptions, whose rows stay together, or by rows", choices=("text", "row"))
    key: str | None = free(
        None, "allowed codes: system_code,code (default: those in the data)", metavar="CSV", is_short=True
    )
    corrections: tuple[str, ...] | None = free(
        None,
        "checked rows of histocoder review, which override the data's codes of their descriptions; of 20 or more, a "
        "fifth is held out to compare the new model with --initial-checkpoint, the model that they correct",
        metavar="FILE",
        is_short=True,
    )
    sheet: str | None = free(None, "sheet of an Excel workbook (default: the only one with content)", metavar="NAME")
    prepare_only: bool = free(False, "check and split the table, and stop")

    def check(self) -> None:
        """Raise a UserError if the table can't be used as the settings say."""
        columns = self.target_cols
        require(
            self.dataset is not None and columns is not None,
            "Name your table and its columns of codes: --dataset my.csv --target-cols hisco_1.",
        )
        require(bool(columns), "No target columns are given; name them with --target-cols COL [COL ...].")
        require(len(set(columns)) == len(columns), "A column is specified twice in --target-cols.")
        check_names(columns)
        require(
            self.language == "unk" or self.language_col is None,
            "Give --language (one for all rows) or --language-col (one for each row), not both.",
        )
        check_target_len(len(columns), self.block_size or 1)
        require(0 < self.share_val < 1, f"--share-val is {self.share_val:g}; it must lie between 0 and 1, as 0.1 does.")

    @property
    def folder(self) -> Path:
        return Path(self.save_path)


@dataclass(frozen=True)
class FilesConfig(Settings):
    """Prepared files."""

    GROUP = "files"

    train_data: tuple[str, ...] = free(
        None, "CSV or Parquet files to train on (required)", metavar="FILE", is_short=True
    )
    val_data: tuple[str, ...] = free(
        None, "CSV or Parquet files to validate on (required)", metavar="FILE", is_short=True
    )
    save_dir: str = free(None, "the run's folder (required)", metavar="DIR", is_short=True)
    language_col: str = free("lang", "column of languages", metavar="COL", is_short=True)
    formatter: str = free("hisco", "kind of code", choices=("hisco", "occ1950", "general", "gpf"), is_short=True)
    target_col_naming: str | None = free(
        None, "columns of codes are NAME_1, NAME_2, … (default: the formatter's)", choices=tuple(NUM_CODES)
    )
    target_cols: tuple[str, ...] | None = free(
        None, "columns of codes, instead of --target-col-naming", metavar="COL", is_short=True
    )
    block_size: int | None = free(
        None,
        f"with general: characters of the longest code; {_FITTING}",
        metavar="N|auto",
        parse=_block_size,
        at_least=1,
    )
    use_within_block_sep: bool = free(False, "with general: ',' separates a code's tokens")
    key: str | None = free(
        None, "allowed codes: system_code,code (default: those in the data)", metavar="CSV", is_short=True
    )

    def check(self) -> None:
        """Raise a UserError if files or columns are missing."""
        require(
            None not in (self.train_data, self.val_data, self.save_dir),
            "Name your files and a folder: --train-data a.csv --val-data v.csv --save-dir out.",
        )
        check_names(self.target_cols or ())
        require(
            self.formatter in NUM_CODES or bool(self.target_cols or self.target_col_naming),
            f"--formatter {self.formatter} needs the columns of codes: --target-cols COL [COL ...].",
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of codes that a file may have."""
        naming = self.target_col_naming or self.formatter
        return self.target_cols or tuple(f"{naming}_{i + 1}" for i in range(NUM_CODES[naming]))

    @property
    def folder(self) -> Path:
        return Path(self.save_dir)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Settings):
    """The form of the data."""

    GROUP = "data"

    input_col: str = free("occ1", "column of descriptions", metavar="COL")
    drop_bad_labels: bool = free(False, "drop rows whose labels do not fit")
    blank_means_no_occupation: bool = free(
        False, "train on rows without any code as descriptions of no occupation (default: drop them)"
    )
    zero_pad_codes: bool = free(False, "restore lost leading zeros of codes")
    allow_codes_shorter_than_block_size: bool = free(False, "accept codes shorter than --block-size")
    cache_dir: str | None = free(
        None,
        "folder for a frozen encoder's outputs and train_mixer.py's examples; runs may share it (default: the run's)",
        metavar="DIR",
    )
