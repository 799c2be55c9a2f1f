"""Lines with which a run describes itself before it trains."""

import socket
import sys
from collections import Counter
from pathlib import Path

from histocoder import distributed
from histocoder.checkpoints.training_state import Checkpoint
from histocoder.config import RunConfig
from histocoder.errors import counted
from histocoder.log import log
from histocoder.model.devices import computing_dtype, device_name, precision_name
from histocoder.training.trainer import Trainer


def banner(trainer: Trainer, *, encoder: str, num_distinct: int) -> list[str]:
    """Return the lines that describe a run at its start; a collective call."""
    config, model, data = trainer.config, trainer.model, trainer.train_data
    epochs = max(config.num_epochs, trainer.total_steps // trainer.sampler.num_batches(0))  # --min-steps repeats them
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = f", {_millions(total - trained)} frozen" if total > trained else ""
    devices = distributed.gather_objects(device_name(trainer.device))
    nodes = counted(len(set(distributed.gather_objects(socket.gethostname()))), "node", "nodes")
    processes = counted(len(devices), "process", "processes")
    names = (f"{count} × {name}" if count > 1 else name for name, count in Counter(devices).items())
    precision = precision_name(computing_dtype(config.precision, trainer.device, use_amp=config.use_amp))
    parts = config.gradient_accumulation_steps
    size, unit = (
        (config.batch_size, "rows") if config.tokens_per_batch is None else (config.tokens_per_batch, "positions")
    )
    lines = {
        "script": Path(sys.argv[0]).name,
        "encoder": encoder,
        "parameters": f"{_millions(total)}: {_millions(trained)} trainable{frozen}",
        "data": f"{len(data):,} training rows ({num_distinct:,} distinct descriptions), "
        f"{len(trainer.val_data):,} validation rows, {counted(model.config.num_classes, 'code', 'codes')}",
        "machine": ", ".join([processes, nodes, *names]),
        "strategy": ", ".join(filter(None, [trainer.learner.strategy.name, distributed.backend(), precision])),
        "batch": f"{size:,} × {f'{parts:,} accumulated × ' if parts > 1 else ''}{processes} "
        f"= {config.step_size(len(devices)):,} {unit} a step",
        "steps": f"{trainer.total_steps:,}" + ("" if config.max_steps else f" in {counted(epochs, 'epoch', 'epochs')}"),
    }
    width = max(map(len, lines)) + 2
    return [f"{name:{width}}{text}" for name, text in lines.items()]


def say_resumed(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Say from which step a run resumes, and which settings have no effect on it."""
    log.info(f"Resuming from step {checkpoint.state.step} ({checkpoint.path}).")
    if config.initial_checkpoint is not None:
        flags = "--initial-checkpoint and --only-encoder have" if config.only_encoder else "--initial-checkpoint has"
        log.info(
            f"Notice: {flags} no effect on a resumed run. To start a new run from those weights, choose another folder."
        )


def _millions(number: int) -> str:
    return f"{number / 1e6:,.1f} million" if number >= 100_000 else f"{number:,}"
