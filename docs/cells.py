"""Write the table of docs/data.md on how cells of codes are read: make docs, or python -m
docs.cells.

A test reads each of these cells at each entrance, and compares what it finds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).with_name("data.md")
_MADE = re.compile(r"(?<=<!-- made by docs.cells -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
ENTRANCES = (
    "train",
    "mixer",
    "evaluate",
    "known",
    "agreement",
    "corrections",
    "apply",
    "desk",
    "predict",
)
NONE, REFUSED, LEFT_OUT = "no code", "refused", "left out"
CODED, NOTICED = "a description", "a description, with a notice"
"""What `predict` takes a cell as that stands in the column of descriptions."""


class Kind(NamedTuple):
    """Cells in a column of five digits that are read in one way."""

    name: str
    cells: tuple[str, ...]
    result: str  # the codes, with blanks between them; NONE or REFUSED
    reason: str = ""  # what the message says where it is refused
    desk: str = ""  # the result where a person gives it as one code on the desk, if it differs
    predict: str = CODED

    def at(self, entrance: str) -> str:
        """Return the result at an entrance."""
        if entrance == "predict":
            return self.predict
        if entrance == "desk" and self.desk:
            return self.desk
        # zeros may be lost in all rows, which are not compared without them
        leaves_out = (
            entrance in ("known", "agreement")
            and self.result == REFUSED
            and self.name != "lost zeros"
        )
        return LEFT_OUT if leaves_out else self.result


KINDS = (
    Kind("a code", ("61110", " 61110 "), "61110"),
    Kind(
        "marks of programs",
        ("NA", "NaN", "NULL", "\\N", "<NA>", "#N/A", "n/a"),
        NONE,
        predict=NOTICED,
    ),
    Kind("marks of people", ("-", "--", "–", "—", "−", "?", ".", "..", "…"), NONE, predict=NOTICED),
    Kind("words for none", ("none", "NONE", "na", "n.a.", "x", "X"), NONE),
    Kind("a lone zero", ("0", "0.0", "0,0"), NONE),
    Kind("decimals", ("61110.0", "61110,0", "61110,00"), "61110"),
    Kind(
        "formulas and quotation marks",
        ('="61110"', "'61110", '"61110"', "“61110”", "’61110", "«61110»"),
        "61110",
    ),
    Kind(
        "blanks and marks nobody sees", ("61110\u00a0", "\u200b61110", "\ufeff61110\u200e"), "61110"
    ),
    Kind("signs around a code", ("61110.", "61110,", "*61110", "61110?", "(61110)"), "61110"),
    Kind("digits of full width", ("６１１１０",), "61110"),
    Kind("minus signs", ("-1", "−1", "–1", "- 1", "-1.0"), "-1"),
    Kind("HISCO as printed", ("6-11.10", "611-10", "6.11.10", "611.10", "6-11-10"), "61110"),
    Kind("several codes", ("61110/77610", "61110 / 77610"), "61110 77610"),
    Kind(
        "marks of thousands",
        ("61.110", "61'110", "61’110", "61 110", "61\u00a0110", "61,110"),
        REFUSED,
        "thousands",
    ),
    Kind("lost zeros", ("1110", "1110.0"), REFUSED, "fewer than 5"),
    Kind(
        "made by a spreadsheet",
        ("6.111E+04", "1-Nov", "2024-11-01"),
        REFUSED,
        "spreadsheet has turned",
    ),
    Kind("errors", ("#REF!", "#VALUE!"), REFUSED, "turned into an error", predict=NOTICED),
    Kind("words", ("farmer", "not known"), REFUSED, "five digits|contains|fewer|longer"),
)


def with_table(page: str) -> str:
    """Return a page with a new table."""
    return _MADE.sub(lambda _: "\n".join(_lines()), page)


def _lines() -> Iterator[str]:
    columns = [entrance for entrance in ENTRANCES if entrance != "predict"]
    yield "| cell | as in | " + " | ".join(columns) + " | as a description in predict |"
    yield "| --- |" + " --- |" * (len(columns) + 2)
    for kind in KINDS:
        cells = " ".join(f"`{_shown(cell)}`" for cell in kind.cells)
        results = [kind.at(entrance) for entrance in [*columns, "predict"]]
        yield f"| {kind.name} | {cells} | " + " | ".join(results) + " |"


def _shown(cell: str) -> str:
    """Return a cell with what nobody sees as its code point."""
    cell = cell.strip(" ")
    return "".join(
        char if char == " " or char.isprintable() else f"U+{ord(char):04X} " for char in cell
    )


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
