"""Where a run's numbers go, and what they are called there: `logs.csv`, and dashboards beside it."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Protocol

from histocoder.errors import UserError
from histocoder.files import replacing

DASHBOARD_NAMES = {
    "epoch": "train/epoch",
    "train_loss": "train/loss",
    "val_loss": "val/loss",
    "val_loss_linear": "val/loss_linear",
    "val_loss_seq2seq": "val/loss_seq2seq",
    "seq_acc": "val/seq_acc",
    "token_acc": "val/token_acc",
    "flat_acc": "val/flat_acc",
    "greedy_seq_acc": "val/greedy_seq_acc",
    **{f"{name}_{k}": f"val/{name}_{k}_codes" for name in ("flat_acc", "greedy_seq_acc") for k in (1, 2, 3)},
    "lr": "hyperparams/lr",
    "grad_norm": "train/grad_norm",
    "samples_per_sec": "perf/rows_per_sec",
    "skipped_steps": "train/skipped_steps",
    "gpu_memory_gb": "perf/gpu_memory_gb",
}
"""What each number is called in W&B and TensorBoard."""
COLUMNS = ("step", *DASHBOARD_NAMES)
"""Of `logs.csv`."""


def dashboard_values(values: dict[str, float]) -> dict[str, float]:
    """Numbers under their dashboards' names, those left out that were not measured."""
    return {DASHBOARD_NAMES[name]: value for name, value in values.items() if not math.isnan(value)}


class Tracker(Protocol):
    """Takes a run's numbers."""

    def log(self, step: int, values: dict[str, float]) -> None: ...
    def keep_model(self, folder: Path) -> None: ...
    def close(self) -> None: ...


class NullRun:
    """Takes numbers, and the final model, and keeps none: on all processes but rank 0."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Nothing."""

    def keep_model(self, folder: Path) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class CsvLog(NullRun):
    """Writes `logs.csv`: one line per log call; a cell is empty if the number was not measured.

    Parameters
    ----------
    path : Path
    start_step : int
        Lines beyond this step, which a run logged after its last checkpoint, are removed.
    """

    def __init__(self, path: Path, *, start_step: int = 0) -> None:
        self._path = path
        kept = []
        if self._path.exists() and start_step:
            whole, _, _ = self._path.read_text(encoding="utf-8").rpartition("\n")  # a full disk may cut the last line
            kept = [row for row in csv.DictReader(whole.splitlines()) if int(row["step"]) <= start_step]
        with replacing(self._path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", restval="")
            writer.writeheader()
            writer.writerows(kept)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Add a line."""
        cells = {name: f"{value:.6g}" for name, value in values.items() if not math.isnan(value)}
        try:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, COLUMNS, restval="").writerow({**cells, "step": step})
        except OSError as error:
            raise UserError(f"Could not write {self._path}: {error.strerror or error}.") from error


class Tee:
    """Several trackers as one."""

    def __init__(self, *trackers: Tracker) -> None:
        self._trackers = trackers

    def log(self, step: int, values: dict[str, float]) -> None:
        """Tell each."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def keep_model(self, folder: Path) -> None:
        """Give each the final model."""
        for tracker in self._trackers:
            tracker.keep_model(folder)

    def close(self) -> None:
        """Close each."""
        for tracker in self._trackers:
            tracker.close()
