"""From checked codes to a better model: corrections as a file, and the training run that takes them."""

from __future__ import annotations

import csv
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel

from histocoder.checkpoints.run_folder import ARGS_FILE, METRICS_FILE
from histocoder.checkpoints.training_state import BEST_FOLDER
from histocoder.data.corrections import CHECKED_COL
from histocoder.data.languages import language_code
from histocoder.data.normalize import fold
from histocoder.data.sheets import harmless
from histocoder.desk.store import Card, Store
from histocoder.errors import UserError
from histocoder.evaluation.review import next_step
from histocoder.files import write_text

_LOG_LINES = 12


class Gain(BaseModel):
    """How right the models before and after training on corrections are on the same descriptions, as shares."""

    what: str
    rows: int
    before: float
    after: float
    low: float
    high: float
    """Of the difference, the ends of a 95 % interval."""


class Improvement(BaseModel):
    """What there is to train on, and how far training is."""

    corrections: int
    command: str
    is_complete: bool
    """Whether the command can be run as it stands."""
    serve: str | None
    """The command that serves the model that training gives."""
    may_train: bool
    state: Literal["idle", "running", "done", "failed"]
    log: str
    gains: list[Gain]
    """What training has brought."""


class Improve:
    """Exports corrections and runs the training.

    Parameters
    ----------
    store : Store
    folder : Path
        The desk's, for the corrections and the log.
    model : str
        As the user named it.
    run : Path
        The folder of the model's run.
    target_cols : tuple of str
    may_train : bool
        Whether the server may start the training itself.
    """

    def __init__(
        self, store: Store, folder: Path, *, model: str, run: Path, target_cols: tuple[str, ...], may_train: bool
    ) -> None:
        self._store, self._model, self._run, self.may_train = store, model, run, may_train
        self._file, self._log = folder / "corrections.csv", folder / "training.log"
        self._target_cols = target_cols
        args = run / ARGS_FILE
        self.settings: dict[str, Any] = yaml.safe_load(args.read_text(encoding="utf-8")) if args.is_file() else {}
        self._process: subprocess.Popen[bytes] | None = None
        self._words: list[str] = []  # of the command that runs

    def corrections(self, *, raw: bool) -> str:
        """Return the settled descriptions as CSV that `finetune.py --corrections` takes.

        Parameters
        ----------
        raw : bool
            Whether descriptions that spreadsheets take as formulas stay as they are, instead of with an apostrophe
            before them.
        """
        text_col, lang_col = self.settings.get("input_col") or "occ1", self._lang_col
        codes = [*self._target_cols]
        written = io.StringIO()
        writer = csv.writer(written, lineterminator="\n")
        writer.writerow([text_col, *([lang_col] if lang_col else []), CHECKED_COL, *codes, "conf", "times", "who"])
        for card in self._settled():
            given = card.codes or []
            text, who = (value if raw else harmless(value) for value in (card.text, card.who or ""))
            lang = [card.lang] if lang_col else []
            row = [
                text,
                *lang,
                "x",
                *given,
                *[""] * (len(codes) - len(given)),
                f"{card.confidence:.6f}",
                card.times,
                who,
            ]
            writer.writerow(row)
        return written.getvalue()

    @property
    def _lang_col(self) -> str | None:
        """The run's column of languages."""
        return self.settings.get("language_col") or (None if self.settings else "lang")

    def _settled(self) -> list[Card]:
        """Return the settled cards; of several decisions on what is one description to `--corrections`, the last."""
        last: dict[tuple[str, str | None], Card] = {}
        for card in self._store.settled():
            last.setdefault((fold(card.text), language_code(card.lang) if self._lang_col else None), card)
        return list(last.values())

    def state(self) -> Improvement:
        """Return what there is to train on, and how far training is."""
        number = len(self._settled())
        sentence, _, command = next_step(self._model, self._file, self._run, self.settings).partition("\n")
        ended = None if self._process is None else self._process.poll()
        state: Literal["idle", "running", "done", "failed"] = "idle"
        if self._process is not None:
            state = "running" if ended is None else "failed" if ended else "done"
        if state == "running":
            command = shlex.join(self._words)
        lines = self._log.read_text(encoding="utf-8", errors="replace") if self._process is not None else ""
        trained = _new_run(self._words) if state == "done" else None
        new = trained or (_new_run(shlex.split(command)) if command else None)
        return Improvement(
            corrections=number,
            command=command or sentence,
            is_complete=bool(command),
            serve=shlex.join(["histocoder", "serve", "--model", str(new / BEST_FOLDER)]) if new else None,
            may_train=self.may_train,
            state=state,
            log="\n".join(lines.replace("\r", "\n").splitlines()[-_LOG_LINES:]),
            gains=_gains(trained) if trained else [],
        )

    def keep(self) -> None:
        """Write the corrections where the command has them."""
        write_text(self._file, self.corrections(raw=True))

    def train(self) -> None:
        """Start the training.

        Raises
        ------
        UserError
            Where the server may not, nothing is corrected, or training runs already.
        """
        now = self.state()
        if not self.may_train:
            raise UserError("This server does not train; start it with --allow-training, or run the command yourself.")
        if now.state == "running":
            raise UserError("Training is running already.")
        if not now.corrections:
            raise UserError("There are no corrections yet. Check some descriptions under Review first.")
        if not now.is_complete:
            raise UserError(now.command)
        self.keep()
        self._words = shlex.split(now.command)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._words[1:]], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def stop(self) -> None:
        """Ask a training that runs to save its state and end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._process.kill()


def _new_run(command: list[str]) -> Path:
    """Return the folder that a training command names."""
    return Path(command[command.index("--save-path") + 1])


def _gains(run: Path) -> list[Gain]:
    """Return what a run's report says of the model before; nothing where there is no report."""
    try:
        found = json.loads((run / METRICS_FILE).read_text(encoding="utf-8"))["corrections"]
    except (OSError, ValueError, KeyError):
        return []
    gains = []
    for part, what in {"validation": "rows of validation data", "held_out": "corrections that were held out"}.items():
        if part in found:
            rights = {when: found[part][when]["rows"] for when in ("before", "after")}
            interval = found[part]["difference"]["rows"]
            ends = {end: interval[end] for end in ("low", "high")}
            gains.append(Gain(what=what, rows=found[part]["num_rows"], **rights, **ends))
    return gains
