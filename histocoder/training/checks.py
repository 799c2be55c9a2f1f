"""Checks of a run before it trains: launcher, device, settings; and the lines that describe it."""

import hashlib
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from histocoder import distributed
from histocoder.checkpoints.training_state import Checkpoint
from histocoder.config import MixerConfig, RunConfig, StrategyConfig, TrainConfig, recorded, settings_of
from histocoder.data.example_files import ExampleFiles
from histocoder.data.key import Key
from histocoder.data.table import fingerprint
from histocoder.errors import UserError, counted
from histocoder.log import log
from histocoder.model.devices import check_compiler, computing_dtype, device_name, precision_name
from histocoder.training.trainer import Trainer


def check_launcher(config: RunConfig) -> None:
    """Raise a UserError if there is no launcher."""
    if not distributed.read_launch().launched:
        script = "train_mixer" if isinstance(config, MixerConfig) else "finetune"
        raise UserError(
            f"--distributed needs a launcher: torchrun --nproc_per_node=2 -m histocoder.cli.{script} --distributed …, "
            "with the number of GPUs in place of 2."
        )


def check_machine(config: RunConfig, device: torch.device) -> None:
    """Raise a UserError if the settings ask for what this machine does not have."""
    check_strategy(config, device, computing_dtype(config.precision, device, use_amp=config.use_amp))
    if config.world_size is not None:
        log.info(f"Notice: --world-size has no effect; the launcher started {distributed.world_size()} processes.")
    if config.compile:
        check_compiler(device)


def check_strategy(config: StrategyConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise a UserError if the device can't do what the settings ask for, or not in the precision of the run."""
    if config.fsdp is not None and device.type == "mps":
        raise UserError("--fsdp is for NVIDIA GPUs and CPUs; omit it, or add --device cpu.")
    if config.fsdp_cpu_offload and device.type != "cuda":
        raise UserError("--fsdp-cpu-offload keeps shards out of a GPU's memory, and there is no GPU; omit it.")
    if config.fsdp_cpu_offload and dtype == torch.float16:  # torch's GradScaler does not wait for copies from the GPU
        raise UserError(
            "--fsdp-cpu-offload does not work with fp16; use --precision bf16, or fp32 if the GPU has no bf16."
        )
    if config.ddp_comm_hook == "bf16" and device.type != "cuda":
        raise UserError("--ddp-comm-hook bf16 needs GPUs: torch supports it with NCCL only; omit it.")


def settings_to_compare(config: RunConfig, files: ExampleFiles, key: Key, rows: dict[str, str]) -> dict[str, Any]:
    """Return what a resumed run must agree on: its data, all settings declared by `fixed`, and the rows of a step.

    Learning rates in `config` are scaled; `files` are the training files; `rows` describe the data of each split.
    """
    form = files.formatter.to_config()
    size, by_rows = config.step_size(distributed.world_size()), config.tokens_per_batch is None
    values: dict[str, Any] = {
        **rows,
        "codes": f"{len(key.codes)} ({hashlib.sha256('&'.join(key.codes).encode()).hexdigest()[:8]})",
        "columns": ", ".join((files.input_col, files.language_col, *files.target_cols)),
        "formatter": ", ".join(f"{name} {form[name]}" for name in form if name != "labels"),  # which are the codes
        "rows a step": size if by_rows else None,
        "positions a step": None if by_rows else size,
    }
    for setting in settings_of(type(config)):
        value = getattr(config, setting.name)
        if setting.options.resume == "content" and value is not None:
            value = fingerprint(value)[:8]
        if setting.options.resume:
            values[setting.flag] = value
    return values


def check_settings(settings: dict[str, Any], config: RunConfig, checkpoint: Checkpoint | None, folder: Path) -> None:
    """Raise a UserError, on every rank, if settings differ between ranks, or from those of the checkpoint to resume.

    Settings that an earlier histocoder did not record are assumed to agree.
    """
    shared = {setting.name for setting in settings_of(TrainConfig)}
    mine = settings | {f"--{name.replace('_', '-')}": v for name, v in recorded(config).items() if name in shared}
    first, *others = distributed.gather_objects(mine)
    for rank, theirs in enumerate(others, start=1):
        if table := _differences(("setting", "rank 0", f"rank {rank}"), first, theirs):
            raise UserError(
                f"Rank {rank} was launched with settings that differ from rank 0's. Give all nodes the same flags and "
                f"files:\n{table}"
            )
    if checkpoint and (table := _differences(("setting", "then", "now"), checkpoint.settings, settings)):
        raise UserError(
            f"The run in {folder} can't be resumed with other settings. Use the earlier settings (rows a step are "
            "--batch-size × --gradient-accumulation-steps × processes), choose another folder, or add --overwrite to "
            f"delete that run:\n{table}"
        )


def _differences(header: tuple[str, str, str], first: dict[str, Any], second: dict[str, Any]) -> str:
    """Return a table of the values in which two dicts differ among those that both have; empty if they agree."""
    differ = [name for name, value in second.items() if first.get(name, value) != value]
    rows = [header, *((name, str(first[name]), str(second[name])) for name in differ)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows) if differ else ""


def banner(trainer: Trainer, *, encoder: str, num_distinct: int) -> list[str]:
    """Return the lines that describe a run at its start; a collective call."""
    config, model, data = trainer.config, trainer.model, trainer.train_data
    epochs = max(config.num_epochs, trainer.total_steps // trainer.sampler.num_batches(0))  # --min-steps repeats them
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = f", {_millions(total - trained)} frozen" if total > trained else ""
    machines = distributed.gather_objects((device_name(trainer.device), socket.gethostname()))
    devices = Counter(device for device, _ in machines)
    nodes = counted(len({host for _, host in machines}), "node", "nodes")
    processes = counted(len(machines), "process", "processes")
    names = (f"{count} × {name}" if count > 1 else name for name, count in devices.items())
    precision = precision_name(computing_dtype(config.precision, trainer.device, use_amp=config.use_amp))
    parts = config.gradient_accumulation_steps
    size, unit = config.tokens_per_batch or config.batch_size, "positions" if config.tokens_per_batch else "rows"
    lines = {
        "script": Path(sys.argv[0]).name,
        "encoder": encoder,
        "parameters": f"{_millions(total)}: {_millions(trained)} trainable{frozen}",
        "data": f"{len(data) - data.num_titles:,} training rows ({num_distinct:,} distinct descriptions), "
        f"{f'{data.num_titles:,} titles of codes, ' if data.num_titles else ''}"
        f"{len(trainer.val_data):,} validation rows, {counted(model.config.num_classes, 'code', 'codes')}",
        "machine": ", ".join([processes, nodes, *names]),
        "strategy": ", ".join(filter(None, [trainer.learner.strategy, distributed.backend(), precision])),
        "batch": f"{size:,} × {f'{parts:,} accumulated × ' if parts > 1 else ''}{processes} "
        f"= {config.step_size(len(machines)):,} {unit} a step",
        "steps": f"{trainer.total_steps:,}" + ("" if config.max_steps else f" in {counted(epochs, 'epoch', 'epochs')}"),
    }
    width = max(map(len, lines)) + 2
    return [f"{name:{width}}{text}" for name, text in lines.items()]


def notices(trainer: Trainer, config: RunConfig, checkpoint: Checkpoint | None) -> list[str]:
    """Return from which step a run resumes, and what in its settings may not be meant."""
    found = []
    if config.tokens_per_batch is None and config.step_size(distributed.world_size()) > len(trainer.train_data):
        found.append(
            f"Notice: a batch of {config.batch_size} is larger than the {len(trainer.train_data):,} training rows, so "
            "each epoch is a single step. Lower --batch-size for more steps."
        )
    if checkpoint is not None:
        found.append(f"Resuming from step {checkpoint.state.step} ({checkpoint.path}).")
    if checkpoint is not None and config.initial_checkpoint is not None:
        flags = "--initial-checkpoint and --only-encoder have" if config.only_encoder else "--initial-checkpoint has"
        found.append(f"Notice: {flags} no effect on a resumed run.")
    return found


def _millions(number: int) -> str:
    return f"{number / 1e6:,.1f} million" if number >= 100_000 else f"{number:,}"
