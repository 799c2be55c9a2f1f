"""How descriptions are coded: the options of a call, and those of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from histocoder.data.sources import EXCEL, LABELLED, PARQUET
from histocoder.data.table import check_output
from histocoder.errors import UserError

SOURCE_COL = "source"
"""The column that says who gave a row its codes; see `known`."""
MODES = ("combined", "greedy", "flat", "topk", "full")


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """How descriptions are coded; see `Coder.predict`."""

    mode: str | None = None
    k: int = 5
    threshold: float | None = None
    constrain: bool | None = None
    min_confidence: float = 0.0
    batch_size: int = 256

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in MODES:
            raise UserError(f"Unknown mode {self.mode!r}; choose one of {', '.join(MODES)}.")
        if self.constrain is False and self.mode in ("combined", "topk", "full"):
            raise UserError(f"The mode {self.mode!r} gives codes of the key only; omit constrain.")
        if self.k < 1:
            raise UserError(f"k is {self.k}; it must be 1 or more.")
        if self.batch_size < 1:
            raise UserError(f"batch_size is {self.batch_size}; it must be 1 or more.")
        if self.threshold is not None and not 0 <= self.threshold < 1:
            raise UserError(f"The threshold is {self.threshold:g}; it must be 0 or more and less than 1.")


@dataclass(frozen=True)
class PredictConfig(PredictOptions):
    """How a file is coded."""

    input: str
    output: str
    input_col: str = "occ1"
    language: str = "unk"
    language_col: str | None = None
    columns: str = ""
    """What the names of the columns that are added begin with."""
    excel: bool = False
    """Whether CSV is written as Excel opens it: UTF-8 with a byte order mark, separated as the input is."""
    sheet: str | None = None
    """Of an Excel workbook; None: the only one that holds anything."""
    raw: bool = False
    """Whether texts that a spreadsheet would run as formulas are written as they are."""

    def __post_init__(self) -> None:
        if self.language != "unk" and self.language_col is not None:
            raise UserError("Give --language (one for all rows) or --language-col (one for each row), not both.")
        super().__post_init__()
        check_output(Path(self.output))
        if self.excel and Path(self.output).suffix.lower() in (*PARQUET, *EXCEL, *LABELLED):
            raise UserError("--excel is for CSV; choose an --output that ends in .csv.")

    @property
    def input_cols(self) -> list[str]:
        """The columns that are read."""
        return [c for c in (self.input_col, self.language_col) if c is not None]

    def output_names(self, names: Sequence[str], system: str, *, taken: Sequence[str] = ()) -> dict[str, str]:
        """Name of each column that is added -> the column of `Coder.predict`, one of `names`.

        Of codes that are ranked, all but the first are alternatives, and say so: `alt_hisco_2`.

        Raises
        ------
        UserError
            Where one of them is in the input, whose columns are `taken`.
        """
        first = (f"{system}_1", "prob_1", "desc_1", "conf", SOURCE_COL)
        other = "alt_" if self.mode == "topk" else ""
        found = {f"{self.columns}{'' if name in first else other}{name}": name for name in names}
        if clash := [name for name in found if name in taken]:
            raise UserError(
                f"{self.input} has a column {clash[0]!r} already. Choose with --columns what the names of the new "
                f"columns begin with, such as --columns pred_{self.columns}."
            )
        return found
