"""What a run says of itself at its start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class RunFacts:
    """What the banner tells."""

    script: str
    encoder: str
    num_trained: int
    """Parameters that are trained."""
    num_frozen: int
    """Those that are not."""
    num_train: int
    """Rows to train on."""
    num_distinct: int
    """Distinct descriptions among them."""
    num_val: int
    num_codes: int
    devices: tuple[str, ...]
    """Of each process, by rank."""
    num_nodes: int
    backend: str | None
    """None for one process."""
    strategy: str
    precision: str
    batch_size: int
    """Of one process."""
    batch_unit: str
    """What it counts."""
    accumulation: int
    """Batches whose gradients are added up to one step."""
    num_steps: int
    num_epochs: int | None
    """None where the number of steps was asked for."""


def effective_batch(batch_size: int, *, accumulation: int, processes: int) -> int:
    """Rows, or positions, of an optimizer step."""
    return batch_size * accumulation * processes


def banner(facts: RunFacts) -> list[str]:
    """The lines that say it.

    Examples
    --------
    >>> _counted(1, "process", "processes"), _counted(8, "process", "processes")
    ('1 process', '8 processes')
    """
    total = facts.num_trained + facts.num_frozen
    frozen = f", {_millions(facts.num_frozen)} frozen" if facts.num_frozen else ""
    processes = len(facts.devices)
    names = (f"{count} × {name}" if count > 1 else name for name, count in Counter(facts.devices).items())
    machine = [_counted(processes, "process", "processes"), _counted(facts.num_nodes, "node", "nodes"), *names]
    size = effective_batch(facts.batch_size, accumulation=facts.accumulation, processes=processes)
    accumulated = f"{facts.accumulation:,} accumulated × " if facts.accumulation > 1 else ""
    epochs = "" if facts.num_epochs is None else f" in {_counted(facts.num_epochs, 'epoch', 'epochs')}"
    lines = {
        "script": facts.script,
        "encoder": facts.encoder,
        "parameters": f"{_millions(total)}: {_millions(facts.num_trained)} trained{frozen}",
        "data": f"{facts.num_train:,} rows to train on ({facts.num_distinct:,} distinct descriptions), "
        f"{facts.num_val:,} to validate on, {_counted(facts.num_codes, 'code', 'codes')}",
        "machine": ", ".join(machine),
        "strategy": ", ".join(filter(None, [facts.strategy, facts.backend, facts.precision])),
        "batch": f"{facts.batch_size:,} × {accumulated}{_counted(processes, 'process', 'processes')} "
        f"= {size:,} {facts.batch_unit} a step",
        "steps": f"{facts.num_steps:,}{epochs}",
    }
    width = max(map(len, lines)) + 2
    return [f"{name:{width}}{text}" for name, text in lines.items()]


def _counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _millions(number: int) -> str:
    return f"{number / 1e6:,.1f} million" if number >= 100_000 else f"{number:,}"
