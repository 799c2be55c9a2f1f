"""Settings of prediction, for descriptions and whole files."""

from dataclasses import dataclass
from typing import Any

from histocoder.config.settings import Settings, free, require

MODES = ("combined", "greedy", "flat", "topk", "full")
LEVELS = ("major", "minor", "unit")
# what a class may depend on besides the code, the weightiest first
QUALIFIERS = ("status", "relation", "product")
SOURCE_COL = "source"  # column of the source of a row's codes; see `known`
# what the HSN's tables write for no class, no status, no relation and no product
NONE_CELLS = ("-1", "-9", "999")
TABLE_HELP = ".csv, .csv.gz, .tsv, .parquet, .xlsx, .dta or .sav"
SHEET_HELP = "sheet of an Excel workbook (default: the only one with content)"
ENCODING_HELP = (
    "encoding of a text file, such as cp850 (default: UTF-8, UTF-16, or the one that makes words)"
)
OUTPUT_HELP = "output, by its suffix: .csv, .csv.gz, .tsv, .parquet, .xlsx or .dta"
COLUMNS_HELP = "prefix of the names of the new columns (default: none)"
RAW_HELP = "do not put an apostrophe before texts that a spreadsheet would run as formulas"


def sheet_of(flag: str) -> Any:
    """Declare the sheet of a workbook that a flag names."""
    return free(None, f"{flag}: {SHEET_HELP}", metavar="NAME")


def encoding_of(flag: str) -> Any:
    """Declare the encoding of a text file that a flag names."""
    return free(None, f"{flag}: {ENCODING_HELP}", metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class PredictOptions(Settings):
    """Settings of `Coder.predict`."""

    batch_size: int | None = free(
        None,
        "descriptions per batch; fewer take less memory (default: 256, on a GPU up to 4,096)",
        at_least=1,
    )
    mode: str | None = free(
        None, "how codes are chosen (default: the best way on validation data)", choices=MODES
    )
    k: int = free(5, "topk: number of codes", at_least=1)
    threshold: float | None = free(
        None,
        "flat: probability that further codes need (default: the model's own)",
        metavar="P",
        between=(0, 1),
    )
    constrain: bool | None = free(None, "greedy: write only codes of the model's key")
    min_confidence: float = free(
        0.0, "confidence below which rows get no codes", metavar="P", between=(0, 1)
    )

    def check(self) -> None:
        """Raise a UserError if an option does not fit the mode."""
        for name, mode in (("threshold", "flat"), ("k", "topk"), ("constrain", "greedy")):
            is_default = getattr(self, name) == getattr(PredictOptions, name)
            require(
                is_default or self.mode in (None, mode),
                (
                    f"--{name} is for the mode {mode}, and the mode is {self.mode}; omit it, "
                    f"or add --mode {mode}."
                ),
            )
        require(
            self.min_confidence == 0 or self.mode != "full",
            "--min-confidence leaves out codes, and --mode full writes none; omit one of them.",
        )


@dataclass(frozen=True, kw_only=True)
class FileOptions(Settings):
    """The file to code, and the form of its output."""

    input: str = free("", f"table of descriptions: {TABLE_HELP}", metavar="FILE")
    output: str = free("", OUTPUT_HELP, metavar="FILE")
    sheet: str | None = sheet_of("--input")
    file_encoding: str | None = encoding_of("--input")
    input_col: str = free("occ1", "column of descriptions", metavar="COL")
    language: str = free(
        "unk",
        "language of all descriptions, code or name: see below (default: unk)",
        metavar="LANG",
    )
    language_col: str | None = free(
        None, "column of each row's language, instead of --language", metavar="COL"
    )
    columns: str = free("", COLUMNS_HELP, metavar="PREFIX")
    excel: bool = free(
        False, "write CSV that Excel opens: with a byte order mark, and the input's decimal mark"
    )
    raw: bool = free(False, RAW_HELP)

    def check(self) -> None:
        require(
            self.language == "unk" or self.language_col is None,
            "Give --language or --language-col, not both.",
        )

    @property
    def settings_of_columns(self) -> dict[str, str]:
        """Columns of the input -> the settings that name them."""
        named = {self.input_col: "input_col", self.language_col: "language_col"}
        return {column: setting for column, setting in named.items() if column is not None}


@dataclass(frozen=True, kw_only=True)
class ClassOptions(Settings):
    """Values that are added to codes: those of a table of classes, and groups."""

    value_cols: tuple[str, ...] | None = free(
        None,
        "columns of the table of classes to add (default: all that are not matched)",
        metavar="COL",
    )
    scale_cols: tuple[str, ...] | None = free(
        None,
        "those of them that are scales (default: hiscam… and numbers with decimals)",
        metavar="COL",
    )
    none: tuple[str, ...] = free(
        NONE_CELLS,
        f"cells that mean none, besides blank ones (default: {' '.join(NONE_CELLS)})",
        metavar="CELL",
    )
    status_col: str | None = free(
        None, "column of status (default: status, if there is one)", metavar="COL"
    )
    relation_col: str | None = free(
        None, "column of relation (default: relation, if there is one)", metavar="COL"
    )
    product_col: str | None = free(
        None, "column of product (default: product, if there is one)", metavar="COL"
    )
    levels: tuple[str, ...] | None = free(
        None, "groups (HISCO, OCC1950) to add: major, minor, unit", metavar="LEVEL"
    )

    def check(self) -> None:
        unknown = [level for level in self.levels or () if level not in LEVELS]
        require(
            not unknown,
            (
                f"--levels {' '.join(unknown)}: there is no such level; choose among "
                f"{', '.join(LEVELS)}."
            ),
        )

    def check_table(self, table: str | None, flag: str) -> None:
        """Raise a UserError for a setting that does nothing without a table of classes, which the
        flag names.
        """
        if table:
            return
        for name in (
            "value_cols",
            "scale_cols",
            "none",
            "status_col",
            "relation_col",
            "product_col",
        ):
            is_default = getattr(self, name) == getattr(ClassOptions, name)
            require(
                is_default,
                f"--{name.replace('_', '-')} needs {flag}; add it, or omit this one.",
            )

    @property
    def settings_of_qualifiers(self) -> dict[str, str]:
        """Columns of the input that are named for status, relation and product -> the settings that
        name them.
        """
        settings = {}
        for setting in ("status_col", "relation_col", "product_col"):
            if column := getattr(self, setting):
                settings[column] = setting
        return settings


@dataclass(frozen=True, kw_only=True)
class PredictConfig(PredictOptions, FileOptions, ClassOptions):
    """Settings of `histocoder predict`."""

    classes: str | None = free(None, "table of classes to add, with a column hisco", metavar="FILE")

    def check(self) -> None:
        require(
            not (self.classes or self.levels) or self.mode != "full",
            (
                "--classes and --levels are of codes, and --mode full writes none; choose "
                "another mode."
            ),
        )
        self.check_table(self.classes, "--classes")
