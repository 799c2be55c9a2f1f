"""All settings of a run: one class for each group of flags, here and in `training`.

A function takes the smallest class that has what it reads; `FinetuneConfig` and `MixerConfig` have
all groups. Bases are listed last group first, since dataclasses collect fields from the last base
to the first.
"""

import os
import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from histocoder.config.model import check_target_len
from histocoder.config.prediction import ENCODING_HELP
from histocoder.config.settings import Need, Settings, changed, free, require
from histocoder.config.training import AugmentConfig, FitConfig, SeedConfig, StartConfig

NUM_GREEDY = 1024
"""Number of validation rows that are decoded freely during training; all are scored with teacher
forcing.
"""
RANK_TIMEOUT = 600.0  # seconds after which a collective fails, as by default in PyTorch
MAX_WORKERS = 8 * (os.cpu_count() or 1)
"""Loader processes at most; more than one per processor is of no use, and each takes memory."""
STEP_ROWS = 64
"""Rows of a step for which recipes have learning rates."""
MAX_GROWTH = 4
"""Factor by which `max_epoch_steps` multiplies them at most."""
NO_COLUMN = "none"  # as --language-col
NUM_CODES = {"hisco": 5, "occ1950": 2}  # columns of codes, by formatter that fixes their number
_WANDB = Need("--log-wandb", lambda run, model: run.log_wandb)
_WORKERS = Need("--num-workers above 0", lambda run, model: bool(run.num_workers))
_NO_COLUMNS = Need(
    "the default columns; omit --target-cols", lambda run, model: not run.target_cols
)
_TAKEN = re.compile("occ1|lang|checked|conf|times|source|(prob|desc|alt)_.*")
CODE_SEP_HELP = (
    "separator of several codes in one cell (default: the one mark that fits all such cells)"
)
_FITTING = "auto: as many as the codes need; codes without digits are numbered (default: auto)"


def _block_size(text: str) -> int | None:
    if text != "auto" and not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is neither a whole number nor auto")
    return None if text == "auto" else int(text)


def check_names(target_cols: Sequence[str]) -> None:
    for name in target_cols:
        require(
            not _TAKEN.fullmatch(name),
            f"A column of codes or attributes can't be called {name}, since prepared or coded "
            "tables use this name; rename it.",
        )


@dataclass(frozen=True)
class TableConfig(Settings):
    """The user's table."""

    GROUP = "table"

    dataset: str = free(
        None,
        "table of descriptions and codes: .csv, .xlsx, .parquet, … (required)",
        metavar="FILE",
        flags=("--dataset", "--input"),
    )
    target_cols: tuple[str, ...] = free(
        None, "columns of codes, first code first (required)", metavar="COL"
    )
    save_path: str = free("./Finetuned/", "the run's folder", metavar="DIR")
    language: str = free(
        "unk",
        "language of all rows, code or name: see below (default: unk, unknown)",
        metavar="LANG",
    )
    language_col: str | None = free(
        None,
        (
            "column of each row's language, instead of --language (default: lang or language, "
            "if it has languages)"
        ),
        metavar="COL|none",
    )
    block_size: int | None = free(
        None,
        f"characters of the longest code; {_FITTING}",
        metavar="N|auto",
        parse=_block_size,
        at_least=1,
    )
    use_within_block_sep: bool = free(
        False, "',' separates the tokens within a code, as in PSTI's 1,10,2"
    )
    share_val: float | None = free(
        None,
        (
            "share of the data for validation (default: 1,000 descriptions, between a tenth "
            "and a fifth)"
        ),
        metavar="P",
    )
    split_by: str = free(
        "text",
        "split by descriptions, whose rows stay together, or by rows",
        choices=("text", "row"),
    )
    key: str | None = free(
        None, "allowed codes: system_code,code (default: those in the data)", metavar="CSV"
    )
    titles: str = free(
        "auto",
        (
            "titles of codes to learn from as well: title, code, lang; auto: histocoder's own, "
            "if the codes are HISCO's"
        ),
        metavar="auto|none|CSV",
    )
    corrections: tuple[str, ...] | None = free(
        None,
        (
            "checked rows of histocoder review, which override the codes; of 20 or more a "
            "fifth is held out"
        ),
        metavar="FILE",
    )
    sheet: str | None = free(
        None, "sheet of an Excel workbook (default: the only one with content)", metavar="NAME"
    )
    file_encoding: str | None = free(None, ENCODING_HELP, metavar="NAME")
    prepare_only: bool = free(False, "check and split the table, and stop")

    def check(self) -> None:
        """Raise a UserError if the table can't be used as the settings say."""
        columns = self.target_cols
        require(
            bool(self.dataset and columns),
            "Name a table and its codes: --dataset my.csv --target-cols hisco_1.",
        )
        require(len(set(columns)) == len(columns), "A column is specified twice in --target-cols.")
        check_names(columns)
        require(
            self.language == "unk" or self.column_of_languages is None,
            "Give --language or --language-col, not both.",
        )
        check_target_len(len(columns), self.block_size or 1)
        if self.share_val is not None:
            require(
                0 < self.share_val < 1,
                f"--share-val is {self.share_val:g}; it must lie between 0 and 1, as 0.1 does.",
            )

    @property
    def column_of_languages(self) -> str | None:
        """The column of each row's language; None if there is none, or it is not to be read."""
        return None if self.language_col == NO_COLUMN else self.language_col

    @property
    def folder(self) -> Path:
        return Path(self.save_path)


@dataclass(frozen=True)
class FilesConfig(Settings):
    """Prepared files."""

    GROUP = "files"

    train_data: tuple[str, ...] = free(
        None, "CSV or Parquet files to train on (required)", metavar="FILE"
    )
    val_data: tuple[str, ...] = free(
        None, "CSV or Parquet files to validate on (required)", metavar="FILE"
    )
    save_dir: str = free(None, "the run's folder (required)", metavar="DIR")
    language_col: str = free("lang", "column of languages", metavar="COL")
    formatter: str = free("hisco", "kind of code", choices=("hisco", "occ1950", "general", "gpf"))
    target_col_naming: str | None = free(
        None,
        "columns of codes are NAME_1, NAME_2, … (default: the formatter's)",
        choices=tuple(NUM_CODES),
        needs=_NO_COLUMNS,
    )
    target_cols: tuple[str, ...] | None = free(
        None, "columns of codes, instead of --target-col-naming", metavar="COL"
    )
    block_size: int | None = free(
        None,
        f"with general: longest code's characters; {_FITTING}",
        metavar="N|auto",
        parse=_block_size,
        at_least=1,
    )
    use_within_block_sep: bool = free(False, "with general: ',' separates a code's tokens")
    key: str | None = free(
        None, "allowed codes: system_code,code (default: those in the data)", metavar="CSV"
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
            (
                f"--formatter {self.formatter} needs the columns of codes: --target-cols COL "
                "[COL ...]."
            ),
        )

        # what a formatter with a form of its own does not need
        flag = ""
        if self.block_size is not None:
            flag = "--block-size"
        elif self.use_within_block_sep:
            flag = "--use-within-block-sep"
        require(
            not flag or self.formatter not in NUM_CODES,
            f"{flag} is for --formatter general; codes of {self.formatter} have a form of their "
            "own. Omit it.",
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
    attribute_cols: tuple[str, ...] | None = free(
        None,
        "further columns of categories to learn beside the codes, such as status; blank is none",
        metavar="COL",
    )
    drop_bad_labels: bool = free(False, "drop rows whose labels do not fit")
    blank_means_no_occupation: bool = free(
        False,
        "train on rows without any code as descriptions of no occupation (default: drop them)",
    )
    code_sep: str | None = free(None, CODE_SEP_HELP, metavar="SEP")
    zero_pad_codes: bool = free(False, "restore lost leading zeros of codes")
    allow_codes_shorter_than_block_size: bool = free(
        False, "accept codes shorter than the longest as they are"
    )

    def check(self) -> None:
        """Raise a UserError if a column of attributes can't be one."""
        columns = self.attribute_cols or ()
        require(
            len({*columns, self.input_col}) == len(columns) + 1,
            "A column is specified twice in --attribute-cols.",
        )
        check_names(columns)


@dataclass(frozen=True, kw_only=True)
class SavingConfig(Settings):
    """Saving and logging."""

    GROUP = "saving and logging"

    save_interval: int | None = free(1000, "steps between saved states of the run", at_least=1)
    save_each_epoch: bool = free(False, "save at the end of each epoch as well")
    keep_checkpoints: int | None = free(
        None,
        "number of newest saved states to keep (default: 2, and with --encoder ngram 1 of a run "
        "that has ended); 0: none of a run that has ended",
        at_least=0,
    )
    resume: str = free(
        "auto",
        "saved state to resume from (default: auto, the newest)",
        metavar="auto|never|PATH",
        is_recorded=False,
    )
    overwrite: bool = free(
        False, "let a new run delete an earlier one in the folder", is_recorded=False
    )
    save_format: str = free(
        "histocoder", "occcanine: also write its last.bin", choices=("histocoder", "occcanine")
    )
    log_interval: int = free(100, "steps between lines of the log", at_least=1)
    eval_interval: int | None = free(
        None,
        "steps between validations (default: the steps of an epoch, at least 100 and at most 1000)",
        at_least=1,
    )
    no_report: bool = free(False, "do not write report.html at the end")
    no_experts: bool = free(
        False, "leave out word parts, nearest rows and vote: the decoder alone predicts (greedy)"
    )
    log_tensorboard: bool = free(False, "also log to TensorBoard, in tensorboard/")
    log_wandb: bool = free(False, "also log to Weights & Biases")
    wandb_project_name: str = free("histco-v2-mixer", "W&B project", metavar="NAME", needs=_WANDB)
    run_name: str | None = free(
        None,
        "name of the run in W&B (default: as canine-s_hisco_gpu4)",
        metavar="NAME",
        needs=_WANDB,
    )

    def num_checkpoints(self, *, is_small: bool) -> int:
        """Return how many saved states to keep, with a new one that may be the small one of the
        end.
        """
        if self.keep_checkpoints is None:
            return 1 if is_small else 2
        return max(self.keep_checkpoints, 1)  # training needs one; the run's end deletes it


@dataclass(frozen=True, kw_only=True)
class MachineConfig(Settings):
    """The device, memory and processes of a run, and the processes that load its data."""

    GROUP = "machine"

    device: str = free(
        "auto",
        "device to compute on (default: auto, a GPU if there is one)",
        choices=("auto", "cpu", "cuda", "mps"),
    )
    distributed: bool = free(False, "require a launcher, such as torchrun")
    rank_timeout: float = free(
        RANK_TIMEOUT,
        "seconds that processes wait for one another before the run ends",
        metavar="S",
        at_least=5,
    )
    local_rank: int | None = free(
        None, None, flags=("--local_rank", "--local-rank"), is_recorded=False
    )
    # ignored; OccCANINE's command lines have it
    world_size: int | None = free(None, None, is_recorded=False)
    num_workers: int | None = free(
        None,
        "number of processes that load data (default: 2 with a GPU, else 0)",
        between=(0, MAX_WORKERS),
    )
    prefetch_factor: int = free(
        2, "batches that each worker loads in advance", at_least=1, needs=_WORKERS
    )
    pin_memory: bool | None = free(
        None, "load batches into pinned memory (default: with a GPU)", is_negatable=True
    )
    persistent_workers: bool = free(False, "keep workers alive between epochs", needs=_WORKERS)
    worker_timeout: float = free(
        300.0,
        "seconds without a batch until a worker counts as hung",
        metavar="S",
        above=0,
        needs=_WORKERS,
    )
    deterministic: bool = free(False, "use only deterministic algorithms; slower on a GPU")
    gradient_checkpointing: bool = free(
        False, "recompute each layer in the backward pass: less memory, same results"
    )
    fsdp: str | None = free(
        None, "shard weights and optimizer (default: DDP)", choices=("full_shard", "shard_grad_op")
    )
    bf16_gradients: bool = free(
        False, "exchange gradients between processes in bf16: half the bytes, less exact"
    )
    compile: bool = free(
        False, "compile the model by torch.compile: the first steps take minutes, others less"
    )

    def check(self) -> None:
        """Raise a UserError if settings exclude each other."""
        excluded = {
            "--fsdp": self.fsdp,
            "--gradient-checkpointing": self.gradient_checkpointing,
        }
        for flag, is_set in excluded.items():
            require(
                not (self.compile and is_set),
                f"--compile can't be used with {flag}; omit one of them.",
            )


@dataclass(frozen=True)
class PrepareConfig(SeedConfig, DataConfig, TableConfig):
    """Preparation of training and validation data from a user's table."""

    def check(self) -> None:
        for name in (self.input_col, *(self.attribute_cols or ())):
            require(
                name not in self.target_cols,
                f"{name!r} is a target column and another one as well.",
            )
        require(
            not (self.zero_pad_codes and self.use_within_block_sep),
            (
                "--zero-pad-codes is for codes of digits; it can't be used with "
                "--use-within-block-sep."
            ),
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(MachineConfig, SavingConfig, AugmentConfig, SeedConfig, FitConfig):
    """Settings that the `Trainer` reads."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(TrainConfig, StartConfig, DataConfig):
    """Settings of both scripts."""

    def for_rows(self, num_rows: int, num_processes: int) -> "RunConfig":
        """Return the settings with `max_epoch_steps` applied to batch size, stride and learning
        rates.

        Rates and stride follow from the rows of the data and of a step alone: how many processes
        and accumulated batches share a step does not matter, nor who has chosen the batch.
        """
        # the more rows, the larger are steps, so that an epoch has not too many
        growth = 1
        while growth < MAX_GROWTH and 0 < self.max_epoch_steps * growth < num_rows / STEP_ROWS:
            growth *= 2

        # the batch grows unless the user has chosen it
        batch_size = self.batch_size
        by_recipe = self.by_recipe or ()
        if growth > 1 and ("batch_size" in by_recipe or "max_epoch_steps" not in by_recipe):
            while batch_size < MAX_GROWTH * self.batch_size and (
                replace(self, batch_size=batch_size).step_size(num_processes) < STEP_ROWS * growth
            ):
                batch_size *= 2

        # a step of fewer rows than the data ask for has the rates of its size
        step_rows = replace(self, batch_size=batch_size).step_size(num_processes)
        while growth > 1 and step_rows < STEP_ROWS * growth:
            growth //= 2
        rates = {}
        for name in ("learning_rate", "encoder_learning_rate", "table_learning_rate"):
            if rate := getattr(self, name):
                rates[name] = rate * growth**0.5
        stride = self.decoder_stride * growth
        return replace(
            self, **rates, batch_size=batch_size, decoder_stride=stride, max_epoch_steps=0
        )


@dataclass(frozen=True)
class FinetuneConfig(RunConfig, PrepareConfig):
    """Fine-tune a model that codes occupational descriptions, on your own table."""

    GROUP = SavingConfig.GROUP
    MAIN = (
        "dataset",
        "target_cols",
        "attribute_cols",
        "input_col",
        "save_path",
        "language",
        "language_col",
        "key",
        "corrections",
        "encoder",
        "initial_checkpoint",
        "num_epochs",
        "batch_size",
    )

    no_refit: bool = free(False, "do not train best/ on the validation data after the report")


@dataclass(frozen=True)
class MixerConfig(RunConfig, FilesConfig):
    """Train a model that codes occupational descriptions, on prepared files."""

    MAIN = (
        "train_data",
        "val_data",
        "save_dir",
        "language_col",
        "formatter",
        "target_cols",
        "key",
        "encoder",
        "initial_checkpoint",
        "num_epochs",
        "batch_size",
    )

    # Prepared files are large: they have batches and passes of their own, whatever the recipe.
    num_epochs: int = changed(FitConfig, "num_epochs", 50)
    min_steps: int = changed(FitConfig, "min_steps", 0, text="train for N steps at least")
    batch_size: int = changed(FitConfig, "batch_size", 512)
    max_epoch_steps: int = changed(FitConfig, "max_epoch_steps", 0)
    seq2seq_weight: float = changed(FitConfig, "seq2seq_weight", 0.5)
    save_interval: int | None = changed(SavingConfig, "save_interval", 5000)
