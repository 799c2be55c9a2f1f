"""The options of coding a whole file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from histocoder.data.sources import EXCEL, LABELLED, PARQUET
from histocoder.data.table import check_output
from histocoder.errors import UserError
from histocoder.inference.options import SOURCE_COL, PredictOptions


@dataclass(frozen=True)
class PredictConfig(PredictOptions):
    """How a file is coded."""

    input: str
    output: str = ""
    """Empty where no file is written."""
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
        if self.output:
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
