"""Every setting of a run: one class for each group of flags, in the order in which `--help-all` has them.

A function takes the smallest class that has what it reads; a `FinetuneConfig` or a `MixerConfig` is all of them.
Bases are listed last group first, since dataclasses collect fields from the last base to the first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from histocoder.config.model import FLAT_LOSSES, check_decoder, check_max_len, check_target_len
from histocoder.config.settings import Settings, changed, fixed, free, require, whole_number

MAX_SEED = 2**32 - 1
"""What all generators of random numbers take."""
NUM_GREEDY = 1024
"""Validation rows that are decoded freely during training; all are scored with teacher forcing."""
RANK_TIMEOUT = 300.0
"""Seconds without a sign of life after which a process is taken for hung."""
NORMALIZATIONS = ("none", "nfc", "lower", "lower_ascii")
"""See `data.normalize`."""
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
"""See `model.precision`."""
NUM_CODES = {"hisco": 5, "occ1950": 2}
"""Columns of codes of the formatters that fix their number."""
_WORKERS_EACH = 8
"""Loader processes for each processor at most: more than one are of no use, and each takes memory."""


@dataclass(frozen=True)
class TableConfig(Settings):
    """The user's table."""

    GROUP = "table"

    dataset: str = free(None, "CSV or Parquet with descriptions and codes (required)", metavar="FILE", is_short=True)
    target_cols: tuple[str, ...] = free(
        None, "columns of codes, the first code's first (required)", metavar="COL", is_short=True
    )
    save_path: str = free("./Finetuned/", "the run's folder", metavar="DIR", is_short=True)
    language: str = free(
        "unk", "of all rows, a code or a name: see below (default: unk, unknown)", metavar="LANG", is_short=True
    )
    language_col: str | None = free(
        None, "column of each row's language, instead of --language", metavar="COL", is_short=True
    )
    block_size: int = free(5, "characters of the longest code", metavar="N", at_least=1)
    use_within_block_sep: bool = free(False, "',' separates the tokens within a code, as in PSTI's 1,10,2")
    share_val: float = free(0.1, "share to validate on", metavar="P")
    split_by: str = free("text", "set aside descriptions or rows", choices=("text", "row"))
    key: str | None = free(
        None, "the codes there may be: system_code,code (default: those in the data)", metavar="CSV", is_short=True
    )
    corrections: tuple[str, ...] | None = free(
        None,
        "checked rows of histocoder review, the last word on their descriptions; they are trained on, with "
        "--initial-checkpoint from the model that they correct",
        metavar="FILE",
        is_short=True,
    )
    prepare_only: bool = free(False, "check and split the table, and stop")

    def check(self) -> None:
        """Raise a UserError where the table can't be used as the settings say."""
        columns = self.target_cols
        require(
            self.dataset is not None and columns is not None,
            "Name your table and its columns of codes: --dataset my.csv --target-cols hisco_1.",
        )
        require(bool(columns), "No target columns are given; name them with --target-cols COL [COL ...].")
        require(len(set(columns)) == len(columns), "A column is specified twice in --target-cols.")
        require(
            not {"occ1", "lang"} & set(columns),
            "A target column can't be called occ1 or lang, as the prepared data's own columns are; rename it.",
        )
        require(
            self.language == "unk" or self.language_col is None,
            "Give --language (one for all rows) or --language-col (one for each row), not both.",
        )
        check_target_len(len(columns), self.block_size)
        require(0 < self.share_val < 1, f"--share-val is {self.share_val:g}; it must lie between 0 and 1, as 0.1 does.")

    @property
    def folder(self) -> Path:
        """The run's folder."""
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
        None, "codes are in NAME_1, NAME_2, … (default: the formatter's)", choices=tuple(NUM_CODES)
    )
    target_cols: tuple[str, ...] | None = free(None, "columns of codes, instead", metavar="COL", is_short=True)
    block_size: int = free(5, "with general: characters of the longest code", metavar="N")
    use_within_block_sep: bool = free(False, "with general: ',' separates a code's tokens")
    key: str | None = free(
        None, "the codes there may be: system_code,code (default: those in the data)", metavar="CSV", is_short=True
    )

    def check(self) -> None:
        """Raise a UserError where no files are named, or no columns."""
        require(
            None not in (self.train_data, self.val_data, self.save_dir),
            "Name your files and a folder: --train-data a.csv --val-data v.csv --save-dir out.",
        )
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
        """The run's folder."""
        return Path(self.save_dir)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Settings):
    """What the data look like."""

    GROUP = "data"

    input_col: str = free("occ1", "column of descriptions", metavar="COL")
    drop_bad_labels: bool = free(False, "leave out rows whose labels do not fit")
    blank_means_no_occupation: bool = free(
        False, "train on rows without any code as descriptions of no occupation (default: they are left out)"
    )
    zero_pad_codes: bool = free(False, "give codes of digits their leading zeros back")
    allow_codes_shorter_than_block_size: bool = free(False, "take codes shorter than --block-size as meant")
    cache_dir: str | None = free(
        None, "where tokenised data are kept, for several runs (default: the run's cache/)", metavar="DIR"
    )


@dataclass(frozen=True, kw_only=True)
class StartConfig(Settings):
    """What a model is made of, and starts from."""

    GROUP = "model"

    encoder: str = fixed(
        "google/canine-s",
        "from the hub or a folder: any CANINE, or another with its tokenizer, such as XLM-R, BERT or ByT5; or a preset "
        "trained from scratch: ngram, tiny, small",
        metavar="NAME|PATH",
        is_short=True,
    )
    initial_checkpoint: str | None = free(
        None,
        "weights to start from: a run's folder, a hub repo, or the reference's .bin file",
        metavar="PATH",
        is_short=True,
    )
    only_encoder: bool = free(False, "take only the encoder of --initial-checkpoint", is_negatable=True)
    freeze_encoder: bool = fixed(
        False, "train the decoder and the flat head only; without augmentation texts are encoded once, to --cache-dir"
    )
    max_len: int = fixed(128, "characters of an input, or tokens where the encoder reads such", metavar="N")
    text_normalization: str = fixed(
        None,
        "nfc: one Unicode form for each letter; lower: in lower case and with single blanks as well; lower_ascii: "
        "væver is read as vaever, as by published models",
        choices=NORMALIZATIONS,
    )
    ngram_dropout: float = fixed(0.3, "n-grams left out, with ngram", metavar="P")
    pooling: str = fixed(
        None,
        "what the flat head reads of an encoder of Hugging Face's: the mean over all tokens, or auto, the first token "
        "where it stands for the whole text",
        choices=("auto", "mean"),
    )
    dropout: float = fixed(0.0, "of decoder and heads", metavar="P")
    decoder_dim_feedforward: int | None = fixed(
        None, "decoder's inner width (default: the encoder's width)", metavar="N"
    )

    def check(self) -> None:
        """Raise a UserError where there can be no such model."""
        check_max_len(self.max_len)
        check_decoder(dropout=self.dropout, dim_feedforward=self.decoder_dim_feedforward)
        require(
            not self.only_encoder or self.initial_checkpoint is not None,
            "--only-encoder says what to take of --initial-checkpoint; give that as well.",
        )


@dataclass(frozen=True, kw_only=True)
class FitConfig(Settings):
    """How a model is fitted."""

    GROUP = "training"

    recipe: str = free(
        "auto",
        "where flags that are left out get their values: by what the run starts from, see docs/configuration.md, or "
        "OccCANINE's own",
        choices=("auto", "reference"),
    )
    num_epochs: int = free(None, "passes over the data", metavar="N", at_least=1, is_short=True)
    min_steps: int = fixed(
        None,
        "passes are repeated until there have been N steps (default: by the recipe; 0 with --num-epochs)",
        metavar="N",
        at_least=0,
    )
    early_stopping: int | None = free(
        None, "end after N validations in a row without a better model (default: off)", metavar="N", at_least=1
    )
    max_steps: int | None = free(None, "end after N steps (default: by --num-epochs)", metavar="N", at_least=1)
    batch_size: int = free(None, "rows of a batch, on each process", metavar="N", at_least=1, is_short=True)
    gradient_accumulation_steps: int = free(
        1, "batches of a step, on each process: as one batch N times as large, in less memory", metavar="N", at_least=1
    )
    tokens_per_batch: int | None = free(
        None,
        "positions of a batch, padding included, in training: as many rows as fit (default: --batch-size)",
        metavar="N",
        at_least=1,
    )
    learning_rate: float = fixed(
        None,
        "peak of the learning rate, of all weights (default: by the recipe, of encoder and heads apart)",
        metavar="LR",
        above=0,
    )
    encoder_learning_rate: float | None = fixed(
        None, "the encoder's own peak (default: by the recipe)", metavar="LR", above=0
    )
    table_learning_rate: float | None = fixed(
        None, "peak for an n-gram encoder's embeddings (default: by the recipe)", metavar="LR", above=0
    )
    scale_lr: bool = free(False, "times the rows of a step, by all processes, over --base-batch-size")
    base_batch_size: int = free(128, "rows of a step that --learning-rate is meant for", metavar="N", at_least=1)
    seq2seq_weight: float = fixed(
        0.1, "weight of the decoder's loss; the flat head's has 1 - W", metavar="W", between=(0, 1)
    )
    flat_loss: str = fixed(
        None,
        "loss of the flat head: cross-entropy over the codes, or binary cross-entropy, summed or averaged over them",
        choices=FLAT_LOSSES,
    )
    warmup_pct: float = free(None, "share of warm-up steps, to the nearest step", metavar="P", between=(0, 1))
    weight_decay: float = fixed(0.01, "of AdamW", metavar="D", at_least=0)
    max_grad_norm: float = free(1.0, "gradients are clipped to", metavar="N", above=0)
    precision: str = fixed("auto", "auto: bf16 where the hardware has it", choices=PRECISIONS)
    use_amp: bool = free(False, "let auto be fp16 on GPUs without bf16")
    compile: bool = free(False, "let torch compile the model's layers, in the first steps")
    max_skipped_steps: int = free(
        10,
        "end after N consecutive steps with gradients that are not finite; checked when logging",
        metavar="N",
        at_least=1,
    )

    def check(self) -> None:
        """Raise a UserError where the learning rate is to go by rows that are not fixed."""
        require(
            not self.scale_lr or self.tokens_per_batch is None,
            "--scale-lr goes by rows, which --tokens-per-batch does not fix; choose one of the two.",
        )

    def num_parts(self, num_processes: int) -> int:
        """Return the batches of a step: accumulated batches × processes."""
        return self.gradient_accumulation_steps * num_processes

    def step_size(self, num_processes: int) -> int:
        """Return the rows of a step, or its positions if `tokens_per_batch` is given."""
        return (self.tokens_per_batch or self.batch_size) * self.num_parts(num_processes)


@dataclass(frozen=True, kw_only=True)
class SeedConfig(Settings):
    """The seed of all that is random."""

    GROUP = "training"

    seed: int = fixed(42, "of split, batches, noise, weights", metavar="N", between=(0, MAX_SEED))


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(Settings):
    """How training descriptions are altered on the fly; see `data.augment`."""

    GROUP = "augmentation, of training descriptions on the fly"

    augmentation_prob: float = fixed(None, "share altered", metavar="P", between=(0, 1))
    num_transformations: int = fixed(
        3, "edits of an altered description: 1 to N, where OccCANINE makes N", metavar="N", at_least=0
    )
    unk_lang_prob: float = fixed(None, "share with language withheld", metavar="P", between=(0, 1))
    fn_word_freq: str | None = fixed(
        None, "words to insert: word,freq (default: the data's own)", metavar="CSV", resume="content"
    )


@dataclass(frozen=True, kw_only=True)
class StrategyConfig(Settings):
    """How a model is spread over processes; for one process alone all of it is as if it were not."""

    GROUP = "strategy, for models and batches that are large"

    gradient_checkpointing: bool = free(
        False, "compute each layer twice instead of keeping what is in it: less memory, the same bits"
    )
    auto_batch_size: bool = free(
        False,
        "in place of --batch-size: the largest power of two, up to 1024, whose longest step fits; found before "
        "training by trying on a GPU, and by measuring small batches on a CPU",
    )
    fsdp: str | None = free(
        None,
        "each process holds a share of weights, gradients and optimizer state; shard_grad_op: weights are whole from "
        "the forward to the end of the backward pass (default: DDP, all of them on each process)",
        choices=("full_shard", "shard_grad_op"),
    )
    fsdp_min_num_params: int | None = free(
        None,
        "a layer with at least N parameters is its own FSDP unit, the rest is one unit (default: every layer)",
        metavar="N",
        parse=whole_number,
        at_least=1,
    )
    fsdp_cpu_offload: bool = free(False, "keep shards and optimizer steps in the CPUs' memory; needs GPUs")
    fsdp_state_dict: str = free(
        "full",
        "checkpoints: one state dict as with DDP, or each rank writes its shard into a folder that all see",
        choices=("full", "sharded"),
    )
    fsdp_reduce_dtype: str = free(
        "fp32", "precision in which gradients are summed over processes", choices=("fp32", "bf16")
    )
    zero_optimizer: bool = free(
        False, "DDP: each process holds a share of the optimizer's state (ZeRO-1), in place of all of it"
    )
    ddp_comm_hook: str = free(
        "none",
        "DDP: exchange gradients in half the bytes; bf16 needs GPUs (default: none, in their own precision)",
        choices=("none", "bf16", "fp16"),
    )

    def check(self) -> None:
        """Raise a UserError where strategies contradict each other."""
        for name in ("fsdp_min_num_params", "fsdp_cpu_offload", "fsdp_state_dict", "fsdp_reduce_dtype"):
            require(
                self.fsdp is not None or getattr(self, name) == getattr(StrategyConfig, name),
                f"--{name.replace('_', '-')} is for --fsdp full_shard or shard_grad_op; add that, or omit it.",
            )
        require(
            self.fsdp is None or not self.zero_optimizer,
            "--fsdp shards the optimizer's state as well; omit --zero-optimizer.",
        )
        require(
            self.fsdp is None or self.ddp_comm_hook == "none",
            "--ddp-comm-hook is for DDP; with --fsdp use --fsdp-reduce-dtype.",
        )

    def flags(self) -> list[str]:
        """Return those that need several processes, as they are given."""
        hook = [f"--ddp-comm-hook {self.ddp_comm_hook}"] if self.ddp_comm_hook != "none" else []
        zero = ["--zero-optimizer"] if self.zero_optimizer else []
        return zero + hook


@dataclass(frozen=True, kw_only=True)
class SavingConfig(Settings):
    """What is saved and logged."""

    GROUP = "saving and logging"

    save_interval: int | None = free(1000, "steps between checkpoints", metavar="N", at_least=1)
    save_each_epoch: bool = free(False, "save at the end of each epoch as well")
    keep_checkpoints: int = free(2, "the newest N are kept", metavar="N", at_least=1)
    resume: str = free(
        "auto", "checkpoint to resume from (default: auto, the newest)", metavar="auto|never|PATH", is_recorded=False
    )
    overwrite: bool = free(False, "delete what an earlier run left in the folder", is_recorded=False)
    save_format: str = free(
        "histocoder",
        "occcanine: write last.bin in the reference's form as well, at the end",
        choices=("histocoder", "occcanine"),
    )
    log_interval: int = free(100, "steps between lines of the log", metavar="N", at_least=1)
    eval_interval: int | None = free(
        None,
        "steps between validations (default: those of an epoch, but 1000 at most and 100 at least)",
        metavar="N",
        at_least=1,
    )
    no_report: bool = free(False, "leave out report.html on the validation data, at the end")
    no_experts: bool = free(
        False, "fit no linear expert and no combination of experts, at the end; the mode to predict in stays greedy"
    )
    no_refit: bool = free(
        False, "do not let best/ learn from the validation data too, at the end, once it is measured on them"
    )
    log_tensorboard: bool = free(False, "log to TensorBoard as well, in tensorboard/")
    log_wandb: bool = free(False, "log to Weights & Biases as well")
    wandb_project_name: str = free("histco-v2-mixer", "W&B project", metavar="NAME")
    run_name: str | None = free(
        None,
        "the run's name in W&B (default: as canine-s_hisco_gpu4, by encoder, columns of codes, and processes)",
        metavar="NAME",
    )
    wandb_artifact: bool = free(
        False, "with --log-wandb: send the final model as well, which may take ten minutes at most"
    )

    def check(self) -> None:
        """Raise a UserError where a model is to be sent to nowhere."""
        require(
            self.log_wandb or not self.wandb_artifact,
            "--wandb-artifact sends the model to Weights & Biases; add --log-wandb.",
        )


@dataclass(frozen=True, kw_only=True)
class DebugConfig(Settings):
    """What helps to find out where time goes, and why results differ."""

    GROUP = "profiling and debugging"

    profile: int | None = free(
        None,
        "write where the time of N steps goes, behind the first five, to profile/: a trace and a table",
        metavar="N",
        at_least=1,
    )
    deterministic: bool = free(
        False, "let torch use only algorithms that give the same bits each time; slower on a GPU"
    )


@dataclass(frozen=True, kw_only=True)
class MachineConfig(Settings):
    """Where a run computes, and with whom."""

    GROUP = "machine"

    device: str = free(
        "auto", "where to compute (default: auto, a GPU if there is one)", choices=("auto", "cpu", "cuda", "mps")
    )
    distributed: bool = free(False, "insist on a launcher, such as torchrun")
    rank_timeout: float = free(
        RANK_TIMEOUT, "seconds without a sign of life after which a process is taken for hung, and all end", metavar="S"
    )
    local_rank: int | None = free(None, None, flags=("--local_rank", "--local-rank"), is_recorded=False)
    world_size: int | None = free(None, None, is_recorded=False)
    """As in OccCANINE's command lines."""


@dataclass(frozen=True, kw_only=True)
class LoaderConfig(Settings):
    """How batches reach the device."""

    GROUP = "machine"

    num_workers: int = free(0, "processes that load data", metavar="N", at_least=0)
    prefetch_factor: int = free(2, "batches that a worker holds ready", metavar="N", at_least=1)
    pin_memory: bool | None = free(None, "page-locked batches (default: where there is a GPU)", is_negatable=True)
    persistent_workers: bool = free(False, "keep workers from epoch to epoch")
    worker_timeout: float = free(
        300.0, "seconds without a batch after which a worker is taken to hang", metavar="S", above=0
    )

    def check(self) -> None:
        """Raise a UserError where there would be far too many processes."""
        processors = os.cpu_count() or 1
        require(
            self.num_workers <= _WORKERS_EACH * processors,
            f"--num-workers is {self.num_workers}, far more than the {processors} processors of this machine; choose "
            "as many as there are for each process, or fewer.",
        )


@dataclass(frozen=True)
class PrepareConfig(SeedConfig, DataConfig, TableConfig):
    """How a user's table becomes training and validation data."""

    def check(self) -> None:
        """Raise a UserError where the columns and the codes can't be as the settings say."""
        require(self.input_col not in self.target_cols, f"{self.input_col!r} is both input and target column.")
        require(
            not (self.zero_pad_codes and self.use_within_block_sep),
            "--zero-pad-codes is for codes of digits; it can't go with --use-within-block-sep.",
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(DebugConfig, SavingConfig, StrategyConfig, AugmentConfig, SeedConfig, FitConfig):
    """What the `Trainer` reads."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(LoaderConfig, MachineConfig, TrainConfig, StartConfig, DataConfig):
    """What both scripts have."""

    def check(self) -> None:
        """Raise a UserError where batches can't be as the settings say."""
        require(
            self.tokens_per_batch is None or self.tokens_per_batch >= self.max_len,
            f"--tokens-per-batch is {self.tokens_per_batch}; a single row takes up to {self.max_len} positions "
            "(--max-len).",
        )
        require(
            not self.auto_batch_size or self.tokens_per_batch is None,
            "--auto-batch-size finds a number of rows, which --tokens-per-batch replaces; choose one.",
        )

    def with_scaled_rates(self, num_processes: int) -> RunConfig:
        """Apply `scale_lr` to the learning rates."""
        scale = self.step_size(num_processes) / self.base_batch_size if self.scale_lr else 1
        names = ("learning_rate", "encoder_learning_rate", "table_learning_rate")
        rates = {name: getattr(self, name) and getattr(self, name) * scale for name in names}
        return replace(self, **rates, scale_lr=False)


@dataclass(frozen=True)
class FinetuneConfig(RunConfig, PrepareConfig):
    """Fine-tune a model that codes occupational descriptions, on your own table."""

    input_col: str = changed(DataConfig, "input_col", "occ1", is_short=True)


@dataclass(frozen=True)
class MixerConfig(RunConfig, FilesConfig):
    """Train a model that codes occupational descriptions, on prepared files."""

    # Prepared files are large: they have batches and passes of their own, whatever the recipe.
    num_epochs: int = changed(FitConfig, "num_epochs", 50)
    min_steps: int = changed(FitConfig, "min_steps", 0, text="passes are repeated until there have been N steps")
    batch_size: int = changed(FitConfig, "batch_size", 512)
    base_batch_size: int = changed(FitConfig, "base_batch_size", 512)
    seq2seq_weight: float = changed(FitConfig, "seq2seq_weight", 0.5)
    save_interval: int | None = changed(SavingConfig, "save_interval", 5000)
