"""Trackers of a run's numbers: `logs.csv`, and the base of those that feed dashboards."""

import csv
import math
from pathlib import Path

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
"""Name of each number in W&B and TensorBoard."""
COLUMNS = ("step", *DASHBOARD_NAMES)  # columns of `logs.csv`


def dashboard_values(values: dict[str, float]) -> dict[str, float]:
    """Return numbers under their names in dashboards, without those that were not measured."""
    return {DASHBOARD_NAMES[name]: value for name, value in values.items() if not math.isnan(value)}


class Tracker:
    """Takes a run's numbers, and the final model, for other trackers, of which ranks but 0 have none."""

    _others: "tuple[Tracker, ...]" = ()

    def __init__(self, *others: "Tracker") -> None:
        self._others = others

    def log(self, step: int, values: dict[str, float]) -> None:
        """Take the numbers of a step; NaN stands for one that was not measured."""
        for other in self._others:
            other.log(step, values)

    def keep_model(self, folder: Path) -> None:
        """Take the final model, which stays as it is until `close`."""
        for other in self._others:
            other.keep_model(folder)

    def close(self) -> None:
        """Finish what was begun."""
        for other in self._others:
            other.close()


class CsvLog(Tracker):
    """Writes `logs.csv`, a line per log call; lines beyond `start_step`, behind the last checkpoint, are removed."""

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
        """Append a line; a cell is empty if the number was not measured."""
        cells = {name: f"{value:.6g}" for name, value in values.items() if not math.isnan(value)}
        try:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, COLUMNS, restval="").writerow({**cells, "step": step})
        except OSError as error:
            raise UserError(f"Could not write {self._path}: {error.strerror or error}.") from error
