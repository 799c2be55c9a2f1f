"""All settings of a run: one class for each group of flags, here and in `data` and `training`.

A function takes the smallest class that has what it reads; `FinetuneConfig` and `MixerConfig` have all groups. Bases
are listed last group first, since dataclasses collect fields from the last base to the first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from histocoder.config.data import DataConfig, FilesConfig, TableConfig
from histocoder.config.settings import Settings, changed, free, require
from histocoder.config.training import AugmentConfig, FitConfig, SeedConfig, StartConfig, StrategyConfig

NUM_GREEDY = 1024
"""Number of validation rows that are decoded freely during training; all are scored with teacher forcing."""
RANK_TIMEOUT = 600.0
"""Seconds after which a collective fails, as by default in PyTorch."""
_WORKERS_EACH = 8
"""Loader processes per processor at most; more than one is of no use, and each takes memory."""


@dataclass(frozen=True, kw_only=True)
class SavingConfig(Settings):
    """Saving and logging."""

    GROUP = "saving and logging"

    save_interval: int | None = free(1000, "steps between checkpoints", at_least=1)
    save_each_epoch: bool = free(False, "save at the end of each epoch as well")
    keep_checkpoints: int = free(2, "number of newest checkpoints to keep", at_least=1)
    resume: str = free(
        "auto",
        "checkpoint to resume from; never: start a new run (default: auto, the newest)",
        metavar="auto|never|PATH",
        is_recorded=False,
    )
    overwrite: bool = free(False, "let a new run delete an earlier one in the folder", is_recorded=False)
    save_format: str = free(
        "histocoder",
        "occcanine: also write last.bin in OccCANINE's format at the end",
        choices=("histocoder", "occcanine"),
    )
    log_interval: int = free(100, "steps between lines of the log", at_least=1)
    eval_interval: int | None = free(
        None, "steps between validations (default: the steps of an epoch, at least 100 and at most 1000)", at_least=1
    )
    no_report: bool = free(False, "do not write report.html at the end")
    no_experts: bool = free(
        False,
        "do not fit the linear expert and the combination of experts at the end; the model predicts in mode greedy",
    )
    log_tensorboard: bool = free(False, "also log to TensorBoard, in tensorboard/")
    log_wandb: bool = free(False, "also log to Weights & Biases")
    wandb_project_name: str = free("histco-v2-mixer", "W&B project", metavar="NAME")
    run_name: str | None = free(
        None,
        "name of the run in W&B (default: encoder, columns of codes and processes, as canine-s_hisco_gpu4)",
        metavar="NAME",
    )
    wandb_artifact: bool = free(False, "with --log-wandb: also upload the final model, for ten minutes at most")

    def check(self) -> None:
        require(
            self.log_wandb or not self.wandb_artifact,
            "--wandb-artifact needs --log-wandb; add that, or omit it.",
        )


@dataclass(frozen=True, kw_only=True)
class DebugConfig(Settings):
    """Profiling and debugging."""

    GROUP = "profiling and debugging"

    profile: int | None = free(
        None, "profile N steps after the first five; a trace and a table are written to profile/", at_least=1
    )
    deterministic: bool = free(False, "use only deterministic algorithms; slower on a GPU")


@dataclass(frozen=True, kw_only=True)
class MachineConfig(Settings):
    """The device and the processes of a run."""

    GROUP = "machine"

    device: str = free(
        "auto", "device to compute on (default: auto, a GPU if there is one)", choices=("auto", "cpu", "cuda", "mps")
    )
    distributed: bool = free(False, "require a launcher, such as torchrun")
    rank_timeout: float = free(
        RANK_TIMEOUT,
        "seconds that processes wait for one another in a collective before the run ends",
        metavar="S",
        at_least=5,
    )
    local_rank: int | None = free(None, None, flags=("--local_rank", "--local-rank"), is_recorded=False)
    world_size: int | None = free(None, None, is_recorded=False)
    """Ignored; OccCANINE's command lines have it."""


@dataclass(frozen=True, kw_only=True)
class LoaderConfig(Settings):
    """Loading of batches."""

    GROUP = "machine"

    num_workers: int = free(0, "number of processes that load data", at_least=0)
    prefetch_factor: int = free(2, "batches that each worker loads in advance", at_least=1)
    pin_memory: bool | None = free(None, "load batches into pinned memory (default: with a GPU)", is_negatable=True)
    persistent_workers: bool = free(False, "keep workers alive between epochs")
    worker_timeout: float = free(
        300.0, "seconds without a batch after which a worker counts as hung", metavar="S", above=0
    )

    def check(self) -> None:
        processors = os.cpu_count() or 1
        require(
            self.num_workers <= _WORKERS_EACH * processors,
            f"--num-workers is {self.num_workers}, far more than the {processors} processors of this machine; choose "
            "as many as there are for each process, or fewer.",
        )


@dataclass(frozen=True)
class PrepareConfig(SeedConfig, DataConfig, TableConfig):
    """Preparation of training and validation data from a user's table."""

    def check(self) -> None:
        require(self.input_col not in self.target_cols, f"{self.input_col!r} is both input and target column.")
        require(
            not (self.zero_pad_codes and self.use_within_block_sep),
            "--zero-pad-codes is for codes of digits; it can't be used with --use-within-block-sep.",
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(DebugConfig, SavingConfig, StrategyConfig, AugmentConfig, SeedConfig, FitConfig):
    """Settings that the `Trainer` reads."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(LoaderConfig, MachineConfig, TrainConfig, StartConfig, DataConfig):
    """Settings of both scripts."""

    def check(self) -> None:
        """Raise a UserError if settings of batches contradict each other."""
        require(
            self.tokens_per_batch is None or self.tokens_per_batch >= self.max_len,
            f"--tokens-per-batch is {self.tokens_per_batch}; set it to --max-len ({self.max_len}) or more, which a "
            "single row can take.",
        )
        require(
            not self.max_epoch_steps or not (self.tokens_per_batch or self.scale_lr),
            "--max-epoch-steps sets the rows of a step; it can't be used with --tokens-per-batch or --scale-lr.",
        )

    def for_rows(self, num_rows: int, num_processes: int) -> RunConfig:
        """Return the settings with `max_epoch_steps` and `scale_lr` applied to batch size and learning rates."""
        growth = 1
        while self.max_epoch_steps and growth < 4:
            if num_rows <= self.max_epoch_steps * growth * self.step_size(num_processes):
                break
            growth *= 2
        scale = self.step_size(num_processes) / self.base_batch_size if self.scale_lr else growth**0.5
        names = ("learning_rate", "encoder_learning_rate", "table_learning_rate")
        rates = {name: getattr(self, name) and getattr(self, name) * scale for name in names}
        size, stride = self.batch_size * growth, self.decoder_stride * growth
        return replace(self, **rates, batch_size=size, decoder_stride=stride, max_epoch_steps=0, scale_lr=False)


@dataclass(frozen=True)
class FinetuneConfig(RunConfig, PrepareConfig):
    """Fine-tune a model that codes occupational descriptions, on your own table."""

    GROUP = SavingConfig.GROUP

    input_col: str = changed(DataConfig, "input_col", "occ1", is_short=True)
    no_refit: bool = free(False, "do not train best/ on the validation data after the report")


@dataclass(frozen=True)
class MixerConfig(RunConfig, FilesConfig):
    """Train a model that codes occupational descriptions, on prepared files."""

    # Prepared files are large: they have batches and passes of their own, whatever the recipe.
    num_epochs: int = changed(FitConfig, "num_epochs", 50)
    min_steps: int = changed(FitConfig, "min_steps", 0, text="repeat epochs until there are N steps")
    batch_size: int = changed(FitConfig, "batch_size", 512)
    max_epoch_steps: int = changed(FitConfig, "max_epoch_steps", 0)
    base_batch_size: int = changed(FitConfig, "base_batch_size", 512)
    seq2seq_weight: float = changed(FitConfig, "seq2seq_weight", 0.5)
    save_interval: int | None = changed(SavingConfig, "save_interval", 5000)
