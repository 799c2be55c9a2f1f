"""Flags of the `histocoder` commands, apart from the commands themselves, which import torch."""

from dataclasses import dataclass

from histocoder.config import PRECISIONS, ClassOptions, PredictConfig, PredictOptions, Settings
from histocoder.config.prediction import (
    COLUMNS_HELP,
    OUTPUT_HELP,
    RAW_HELP,
    TABLE_HELP,
    encoding_of,
    sheet_of,
)
from histocoder.config.run import CODE_SEP_HELP
from histocoder.config.settings import changed, free, require

PIPE = "-"  # standard input or output, in place of a file


@dataclass(frozen=True, kw_only=True)
class NamedModel(Settings):
    """The model."""

    model: str = free(
        "box",
        "folder of a run or of a saved model, or hf://OWNER/NAME (default: box, the one in the box)",
        metavar="DIR",
    )


@dataclass(frozen=True, kw_only=True)
class ComputingFlags(Settings):
    """The device and the precision."""

    device: str = free("auto", "device to compute on", choices=("auto", "cpu", "cuda", "mps"))
    precision: str = free(
        "auto", "auto: bf16 if the hardware has it, faster, slightly less exact", choices=PRECISIONS
    )


@dataclass(frozen=True, kw_only=True)
class PredictFlags(PredictConfig, ComputingFlags, NamedModel):
    """Code descriptions, or a table of them."""

    texts: tuple[str, ...] = free(
        (), "descriptions to code; after --input, more tables", metavar="TEXT", flags=("texts",)
    )
    input: str = changed(
        PredictConfig, "input", "", text=f"tables to code: {TABLE_HELP}; -: standard input"
    )
    output: str = changed(
        PredictConfig,
        "output",
        "",
        text=f"{OUTPUT_HELP}; a folder for several tables; -: standard output",
    )
    overwrite: bool = free(False, "replace an existing --output", is_recorded=False)
    engine: str | None = free(
        None,
        "code on a cluster, into a folder of Parquet files; --input may be one, too",
        choices=("ray", "spark"),
    )
    known: str | None = free(
        None, "hand-coded rows, which are kept; auto: the training data", metavar="FILE|auto"
    )
    known_exact: bool = free(
        False, "--known: compare descriptions exactly, including case, punctuation and accents"
    )
    zero_pad_codes: bool = free(False, "--known: restore lost leading zeros of codes")
    allow_codes_shorter_than_block_size: bool = free(
        False, "--known: accept codes shorter than the model's longest"
    )

    def check(self) -> None:
        """Raise a UserError unless there is something to code, and for flags that need others."""
        has_output = bool(self.output) or self.input == PIPE
        require(
            bool(self.input or self.texts) and bool(self.input) == has_output,
            (
                'Give descriptions ("wine merchant" …), or a file with --input in.csv --output '
                "out.csv."
            ),
        )
        for_known = (
            self.known_exact or self.zero_pad_codes or self.allow_codes_shorter_than_block_size
        )
        require(
            bool(self.known) or not for_known,
            "Flags for --known need that flag; add it, or omit them.",
        )
        require(
            not self.known or self.mode not in ("topk", "full"),
            f"--known gives codes, and --mode {self.mode} ranks them; choose another mode.",
        )
        if self.engine is not None:
            self._check_engine()

    def _check_engine(self) -> None:
        """Raise a UserError for what an engine's workers do not do."""
        start = f"--engine {self.engine} codes tables"
        require(bool(self.input), f"{start}; name one with --input.")
        require(
            PIPE not in (self.input, self.output),
            f"{start} in files; name them in place of {PIPE}.",
        )
        require(
            self.device != "mps",
            "--device mps is not for --engine; choose cpu or cuda, or omit it.",
        )
        for name in ("known", "excel", "raw"):
            require(
                not getattr(self, name),
                f"--{name} is not for --engine {self.engine}; omit one of them.",
            )


@dataclass(frozen=True, kw_only=True)
class KnownCodesFlags(Settings):
    """Descriptions whose codes are known."""

    batch_size: int | None = changed(PredictOptions, "batch_size", None)
    data: str = free(
        None,
        f"table of descriptions and codes: {TABLE_HELP}",
        metavar="FILE",
        is_required=True,
        flags=("--data", "--input"),
    )
    sheet: str | None = sheet_of("--data")
    file_encoding: str | None = encoding_of("--data")
    target_cols: tuple[str, ...] | None = free(
        None, "columns of codes (default: the model's)", metavar="COL"
    )
    input_col: str = free("occ1", "column of descriptions", metavar="COL")
    language: str | None = free(
        None,
        "language of all descriptions, a code or a name: see below (default: by --language-col)",
        metavar="LANG",
    )
    language_col: str = free("lang", "column of languages", metavar="COL")
    code_sep: str | None = free(None, CODE_SEP_HELP, metavar="SEP")
    zero_pad_codes: bool = free(False, "restore lost leading zeros of codes")
    allow_codes_shorter_than_block_size: bool = free(
        False, "accept codes shorter than the model's longest"
    )
    drop_bad_labels: bool = free(False, "drop rows whose labels do not fit")


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags(KnownCodesFlags, ComputingFlags, NamedModel):
    """Evaluate a model on descriptions whose codes are known."""

    input_col: str = changed(
        KnownCodesFlags, "input_col", "occ1", text="column of descriptions, also in --train-data"
    )
    train_data: str | None = free(
        None,
        "training data, to tell seen from new descriptions (default: those of the model's run)",
        metavar="FILE",
    )
    group_col: tuple[str, ...] | None = free(
        None,
        (
            "columns to tell the accuracy by, such as year, source or parish; numbers are put "
            "into ranges"
        ),
        metavar="COL",
    )
    baselines: bool = free(
        False, "compare with a linear model fitted on the training data, which may take minutes"
    )
    output: str = free("evaluation", "folder for the report", metavar="DIR")
    overwrite: bool = free(False, "replace an existing report in --output")


@dataclass(frozen=True, kw_only=True)
class CompareFlags(KnownCodesFlags, ComputingFlags):
    """Compare two models on descriptions whose codes are known."""

    models: tuple[str, ...] = free(
        None,
        "two models' folders, or hf://OWNER/NAME (required)",
        metavar="MODEL",
        flags=("models",),
    )
    output: str = free(
        "compare.csv", "file of the descriptions that they code differently", metavar="FILE"
    )
    overwrite: bool = free(False, "replace an existing --output")
    raw: bool = free(False, RAW_HELP)

    def check(self) -> None:
        require(len(self.models) == 2, f"Name two models to compare; there are {len(self.models)}.")


@dataclass(frozen=True, kw_only=True)
class CodedTableFlags(Settings):
    """The columns of a table with codes, and what is written of it."""

    input_col: str = free("occ1", "column of descriptions", metavar="COL")
    target_cols: tuple[str, ...] = free(
        None, "columns of codes, first code first", metavar="COL", is_required=True
    )
    language: str = free("unk", "language of all rows, a code or a name: see below", metavar="LANG")
    language_col: str | None = free(
        None, "column of each row's language, instead of --language", metavar="COL"
    )
    code_sep: str | None = free(None, CODE_SEP_HELP, metavar="SEP")
    zero_pad_codes: bool = free(False, "restore lost leading zeros of codes")
    allow_codes_shorter_than_block_size: bool = free(
        False, "accept codes shorter than the longest as they are"
    )
    overwrite: bool = free(False, "replace an existing --output")
    raw: bool = free(False, RAW_HELP)


@dataclass(frozen=True, kw_only=True)
class AuditFlags(CodedTableFlags):
    """Find labels of a table that are likely wrong, before a model is trained on them."""

    dataset: str = free(
        None,
        f"table of descriptions and codes: {TABLE_HELP}",
        metavar="FILE",
        is_required=True,
        flags=("--dataset", "--input"),
    )
    sheet: str | None = sheet_of("--dataset")
    file_encoding: str | None = encoding_of("--dataset")
    output: str = free("audit.csv", "file of suspect labels to correct", metavar="FILE")
    budget: int = free(200, "number of labels to check", at_least=1)
    key: str | None = free(
        None, "all codes of the classification: system_code,code; others are wrong", metavar="FILE"
    )
    group_col: str | None = free(
        None, "column to count wrong labels by, such as coder or source", metavar="COL"
    )


@dataclass(frozen=True, kw_only=True)
class AgreementFlags(CodedTableFlags):
    """Compare two coders' codes of the same descriptions, and list what they have to settle."""

    files: tuple[str, ...] = free(
        None, "a table of each coder (required)", metavar="FILE", flags=("files",)
    )
    output: str = free(
        "settle.csv", "file of the descriptions on which they differ", metavar="FILE"
    )
    id_col: str | None = free(
        None, "column that numbers the rows (default: by their descriptions)", metavar="COL"
    )

    def check(self) -> None:
        require(len(self.files) == 2, f"Name two files to compare; there are {len(self.files)}.")


@dataclass(frozen=True, kw_only=True)
class ReviewFlags(NamedModel):
    """Choose the rows of a coded file that a person should check first."""

    predictions: str = free(
        None,
        "output of histocoder predict",
        metavar="FILE",
        is_required=True,
        flags=("--predictions", "--input"),
    )
    apply: tuple[str, ...] | None = free(
        None,
        "files that are filled in: write --predictions with their codes to --output",
        metavar="FILE",
    )
    output: str = free(
        "review.csv", "file to fill in, or with --apply the checked table", metavar="FILE"
    )
    budget: int = free(200, "number of descriptions to check", at_least=1)
    input_col: str = free("occ1", "column of descriptions", metavar="COL")
    language_col: str | None = free(
        None, "column of languages (default: lang, or the run's)", metavar="COL"
    )
    overwrite: bool = free(False, "replace an existing --output")
    sheet: str | None = sheet_of("--predictions")
    raw: bool = free(False, RAW_HELP)


@dataclass(frozen=True, kw_only=True)
class ClassesFlags(ClassOptions):
    """Give the codes of a table social classes, by a table of classes that you have downloaded, and
    groups.
    """

    table: str | None = free(
        None, "table of classes: hisco, values; status, relation, product if any", metavar="FILE"
    )
    input: str = free(
        None,
        f"table of codes, such as predict's output: {TABLE_HELP}",
        metavar="FILE",
        is_required=True,
    )
    output: str = free(None, OUTPUT_HELP, metavar="FILE", is_required=True)
    sheet: str | None = sheet_of("--input")
    file_encoding: str | None = encoding_of("--input")
    code_cols: tuple[str, ...] | None = free(
        None,
        "columns of codes (default: hisco_1, hisco_2 and so on, or hisco; else occ1950's)",
        metavar="COL",
    )
    columns: str = free("", COLUMNS_HELP, metavar="PREFIX")
    overwrite: bool = free(False, "replace an existing --output", is_recorded=False)
    raw: bool = free(False, RAW_HELP)

    def check(self) -> None:
        """Raise a UserError unless there is something to add."""
        require(
            bool(self.table or self.levels),
            "Give a table of classes with --table, or groups with --levels.",
        )
        self.check_table(self.table, "--table")


@dataclass(frozen=True, kw_only=True)
class ServeFlags(ComputingFlags):
    """Train, code and check in a browser."""

    model: str | None = free(
        None,
        "folder of a model, or hf://OWNER/NAME (default: the page's own, at first the one in the box)",
        metavar="DIR",
    )
    workspace: str | None = free(
        None,
        "folder for models, decisions and files (default: histocoder-desk in the working folder)",
        metavar="DIR",
        flags=("--workspace", "--folder"),
    )
    allow_training: bool | None = free(
        None,
        "let the page train models (default: if only this machine reaches it)",
        is_negatable=True,
    )
    double_share: float = free(
        0.0, "share of descriptions that two decide on, each alone", metavar="P", between=(0, 1)
    )
    add_user: str | None = free(
        None, "ask for the password of a user, who can then sign in, and stop", metavar="NAME"
    )
    data: str | None = free(
        None,
        "output of histocoder predict to review",
        metavar="FILE",
        flags=("--data", "--input"),
    )
    input_col: str | None = free(
        None, "--data: column of descriptions (default: the run's, or occ1)", metavar="COL"
    )
    host: str = free("127.0.0.1", "address to listen on", metavar="ADDRESS")
    port: int = free(8000, "port to listen on; 0: any free one", between=(0, 65535))
    token: str | None = free(
        None, "token that the page asks for (default: a random one)", metavar="TEXT"
    )
    no_browser: bool = free(False, "do not open the browser")


@dataclass(frozen=True, kw_only=True)
class ExportFlags(NamedModel):
    """Write a model as ONNX graphs, which run without torch."""

    onnx: str = free(None, "folder to write the graphs to", metavar="DIR", is_required=True)
    data: str | None = free(
        None,
        f"table to check the graphs on: {TABLE_HELP} (default: the run's)",
        metavar="FILE",
        flags=("--data", "--input"),
    )
    input_col: str = free("occ1", "--data: column of descriptions", metavar="COL")


@dataclass(frozen=True, kw_only=True)
class ConvertFlags(Settings):
    """Convert models from and to OccCANINE's format."""

    from_occcanine: str | None = free(
        None, "OccCANINE model: last.bin, or a folder as on the hub", metavar="PATH"
    )
    to_occcanine: str | None = free(None, "model to convert to OccCANINE's format", metavar="DIR")
    output: str = free(None, "folder, or file last.bin, to write", metavar="PATH", is_required=True)
    formatter: str | None = free(
        None, "kind of the model's codes", choices=("hisco", "occ1950", "general", "gpf")
    )
    key: str | None = free(
        None, "the model's key: system_code,code, and desc if it has titles", metavar="CSV"
    )
    target_cols: tuple[str, ...] | None = free(None, "general: columns of codes", metavar="COL")
    block_size: int | None = free(
        None, "general: characters of the longest code (default: 5)", metavar="N"
    )
    encoder_config: str | None = free(
        None, "encoder's CanineConfig (default: CANINE-s's sizes)", metavar="JSON"
    )
    text_normalization: str = free(
        "lower_ascii",
        "normalisation of the training texts (default: lower_ascii, as of published models)",
        choices=("none", "lower_ascii"),
    )

    def check(self) -> None:
        """Raise a UserError unless one model is named."""
        require(
            bool(self.from_occcanine) != bool(self.to_occcanine),
            "Give either --from-occcanine or --to-occcanine.",
        )


@dataclass(frozen=True, kw_only=True)
class AboutFlags(NamedModel):
    """Print a model's card: what it has learned from, and how right it is."""


@dataclass(frozen=True, kw_only=True)
class DoctorFlags(Settings):
    """Check what this machine has for training, and what is missing."""

    folder: str = free(".", "folder in which runs will be saved", metavar="DIR")
