"""Checks of a run's settings, and the values that a resumed run must agree on."""

import hashlib
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from histocoder import distributed
from histocoder.checkpoints.training_state import Checkpoint
from histocoder.config import RunConfig, TrainConfig, settings_of
from histocoder.data.example_files import ExampleFiles
from histocoder.data.key import Key
from histocoder.data.table import fingerprint
from histocoder.errors import UserError
from histocoder.log import log
from histocoder.model.devices import check_compiler, computing_dtype
from histocoder.training.strategies import check_strategy

_BATCH_SETTINGS = {"--batch-size": "rows a step", "--tokens-per-batch": "positions a step"}  # over all ranks, by flag


def check_launcher() -> None:
    """Raise a UserError if there is no launcher."""
    if distributed.read_launch().launched:
        return
    folder, name = os.path.split(sys.argv[0])
    stem, suffix = os.path.splitext(name)
    is_command = os.path.basename(folder) == "cli"
    if suffix != ".py" or is_command or stem == "__main__":
        name = f"-m histocoder.cli.{stem if is_command else sys.argv[1].replace('-', '_')}"
    raise UserError(
        f"--distributed needs a launcher: torchrun --nproc_per_node=2 {name} --distributed …, with the number of GPUs "
        "in place of 2."
    )


def check_machine(config: RunConfig, device: torch.device) -> None:
    """Raise a UserError if the settings ask for what this machine does not have; print what has no effect on it."""
    check_strategy(config, device, computing_dtype(config.precision, device, use_amp=config.use_amp))
    if not distributed.read_launch().launched and {"ACCELERATE_USE_CPU", "MASTER_PORT"} <= set(os.environ):
        raise UserError(
            "accelerate launch has started one process instead of several; without GPUs it starts several through "
            "mpirun only. Use torchrun --nproc_per_node=2, with the number of processes in place of 2."
        )
    if config.world_size is not None:
        log.info(
            "Notice: --world-size has no effect. The launcher sets the number of processes; this run has "
            f"{distributed.world_size()}."
        )
    if config.compile:
        check_compiler(device)
    if distributed.world_size() == 1 and config.ddp_comm_hook != "none":
        log.info(f"Notice: --ddp-comm-hook {config.ddp_comm_hook} has no effect with one process.")


def check_batch_size(config: TrainConfig, num_rows: int) -> None:
    """Print a notice if a step over all ranks takes more rows than there are to train on."""
    num_parts = config.num_parts(distributed.world_size())
    if config.tokens_per_batch is None and config.step_size(distributed.world_size()) > num_rows:
        times = "" if num_parts == 1 else f" × {num_parts} (processes × accumulated batches)"
        log.info(
            f"Notice: a batch of {config.batch_size}{times} is larger than the {num_rows:,} training rows, so each "
            "epoch is a single step. Lower --batch-size for more steps."
        )


def refuse_differences(settings: dict[str, Any]) -> None:
    """Raise a UserError, on every rank, if one has settings that differ from rank 0's."""
    mine = torch.tensor([zlib.crc32(repr(value).encode()) for value in settings.values()])
    first, *others = distributed.gather(mine)
    for rank, theirs in enumerate(others, start=1):
        if names := [name for name, same in zip(settings, theirs == first, strict=True) if not same]:
            raise UserError(
                f"Rank {rank} was launched with settings that differ from rank 0's: {', '.join(names)}. Give all nodes "
                "the same flags and files."
            )


def settings_to_compare(
    config: RunConfig, files: ExampleFiles, key: Key, *, train: tuple[int, str], val: tuple[int, str]
) -> dict[str, Any]:
    """Return what a resumed run must agree on: its data, all settings declared by `fixed`, and the rows of a step.

    Learning rates in `config` are scaled; `files` are the training files; `train` and `val` are the number of rows to
    train on and to validate on, and a hash of the files that they come from.
    """
    form = files.formatter.to_config()
    size, by_rows = config.step_size(distributed.world_size()), config.tokens_per_batch is None
    values: dict[str, Any] = {
        "data to train on": "{:,} rows ({})".format(*train),
        "data to validate on": "{:,} rows ({})".format(*val),
        "codes": f"{len(key.codes)} ({hashlib.sha256('&'.join(key.codes).encode()).hexdigest()[:8]})",
        "columns": ", ".join((files.input_col, files.language_col, *files.target_cols)),
        "formatter": ", ".join(f"{name} {form[name]}" for name in form if name != "labels"),  # which are the codes
        _BATCH_SETTINGS["--batch-size"]: size if by_rows else None,
        _BATCH_SETTINGS["--tokens-per-batch"]: None if by_rows else size,
    }
    for setting in settings_of(type(config)):
        value = getattr(config, setting.name)
        if setting.options.resume == "content" and value is not None:
            value = fingerprint(value)[:8]
        if setting.options.resume:
            values[setting.flag] = value
    return values


def refuse_other_settings(
    checkpoint: Checkpoint, settings: dict[str, Any], folder: Path, *, gradient_accumulation_steps: int
) -> None:
    """Raise a UserError with a table of the settings that differ between a checkpoint and the current run.

    Settings that an earlier histocoder did not record are assumed to agree.
    """
    then = checkpoint.settings
    names = [name for name, value in settings.items() if then.get(name, value) != value]
    if not names:
        return
    rows = [("setting", "then", "now"), *((name, str(then[name]), str(settings[name])) for name in names)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    raise UserError(
        f"The run in {folder} can't be resumed with other settings. Use the earlier settings, choose another folder, "
        "or add --overwrite to delete that run:\n"
        + "\n".join([*table, *_advice_on_batches(then, settings, gradient_accumulation_steps)])
    )


def _advice_on_batches(then: dict[str, Any], now: dict[str, Any], num_accumulated: int) -> Iterator[str]:
    """Yield what to set for the same rows per step with this number of processes and accumulated batches."""
    processes = distributed.world_size()
    what = f"{processes} process{'es' * (processes > 1)}"
    if num_accumulated > 1:
        what += f" and --gradient-accumulation-steps {num_accumulated}"
    num_parts = processes * num_accumulated
    for flag, name in _BATCH_SETTINGS.items():
        if (wanted := then.get(name)) is not None and now[name] is not None and wanted != now[name]:
            if wanted % num_parts == 0:
                yield f"With {what}, set {flag} {wanted // num_parts}."
            else:
                yield f"{wanted} can't be divided equally among {what}; choose numbers that divide it."
