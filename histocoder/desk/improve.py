"""Export corrections, and run the training on them."""

import json
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pyarrow as pa
from pydantic import BaseModel

from histocoder.checkpoints.run_folder import METRICS_FILE, run_settings
from histocoder.checkpoints.training_state import BEST_FOLDER
from histocoder.data.example_files import CHECKED_COL
from histocoder.data.languages import Language
from histocoder.data.normalize import description_keys
from histocoder.data.output import Form, write_table
from histocoder.desk.store import Card, Store
from histocoder.errors import UserError
from histocoder.evaluation.review import next_step
from histocoder.files import replacing

State = Literal["idle", "running", "done", "failed"]
_LOG_LINES = 12


class Gain(BaseModel):
    """Shares of the same descriptions that the models before and after training on corrections get right."""

    what: str
    rows: int
    before: float
    after: float
    low: float  # ends of the 95 % interval of the difference: low and high
    high: float


class Improvement(BaseModel):
    """Corrections to train on, and the state of the training."""

    corrections: int
    command: str
    is_complete: bool  # whether the command can be run without changes
    serve: str | None  # command that serves the trained model
    may_train: bool
    state: State
    log: str
    gains: list[Gain]  # accuracy before and after, once training is done


class Improve:
    """Corrections and training of a desk.

    `folder` is the desk's, `run` that of the model's run, and `model` the model's name as the user gave it. `may_train`
    says whether the server may start the training itself.
    """

    def __init__(
        self, store: Store, folder: Path, *, model: str, run: Path, target_cols: tuple[str, ...], may_train: bool
    ) -> None:
        self._store, self._model, self._run, self.may_train = store, model, run, may_train
        self._file, self._log = folder / "corrections.csv", folder / "training.log"
        self._target_cols = target_cols
        self.settings = run_settings(run)
        self._process: subprocess.Popen[bytes] | None = None
        self._words: list[str] = []  # of the command that runs
        self._lock = threading.Lock()  # so that one training is started at a time

    def corrections(self, *, raw: bool) -> bytes:
        """Return the settled descriptions as CSV that `finetune.py --corrections` takes.

        Unless `raw`, texts that a spreadsheet would run as formulas get an apostrophe before them.
        """
        lang_cols, targets = [self._lang_col] if self._lang_col else [], self._target_cols
        names = [self.settings.get("input_col") or "occ1", *lang_cols, CHECKED_COL, *targets, "conf", "times", "who"]
        rows = []
        for card in self._settled():
            langs, codes = [card.lang] * len(lang_cols), card.codes or []
            blanks = [None] * (len(targets) - len(codes))
            cells = [card.text, *langs, "x", *codes, *blanks, round(card.confidence, 6), card.times, card.who]
            rows.append(dict(zip(names, cells, strict=True)))
        kinds = {"conf": pa.float64(), "times": pa.int64()}
        table = pa.Table.from_pylist(rows, pa.schema([(name, kinds.get(name, pa.string())) for name in names]))
        with TemporaryDirectory() as folder:
            path = Path(folder) / self._file.name
            write_table(path, [table], Form(raw=raw))
            return path.read_bytes()

    @property
    def _lang_col(self) -> str | None:
        """Name of the run's column of languages."""
        return self.settings.get("language_col") or (None if self.settings else "lang")

    def _settled(self) -> list[Card]:
        """Return the settled cards; of those that are one description to `--corrections`, the last."""
        last: dict[tuple[str, str | None], Card] = {}
        for card in self._store.settled():
            last.setdefault((description_keys([card.text])[0], Language(card.lang) if self._lang_col else None), card)
        return list(last.values())

    def state(self) -> Improvement:
        """Return the command that trains on the corrections, and the state of the training."""
        sentence, _, command = next_step(self._model, self._file, self._run).partition("\n")
        state: State = "idle"
        lines = ""
        if self._process is not None:
            ended = self._process.poll()
            lines = self._log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
            state = "running" if ended is None else "failed" if ended else "done"
        if state == "running":
            command = shlex.join(self._words)
        trained = _new_run(self._words) if state == "done" else None
        new = trained or (_new_run(shlex.split(command)) if command else None)
        return Improvement(
            corrections=len(self._settled()),
            command=command or sentence,
            is_complete=bool(command),
            serve=shlex.join(["histocoder", "serve", "--model", str(new / BEST_FOLDER)]) if new else None,
            may_train=self.may_train,
            state=state,
            log="\n".join(lines.splitlines()[-_LOG_LINES:]),
            gains=_gains(trained) if trained else [],
        )

    def keep(self) -> Improvement:
        """Write the corrections to the file that the command names."""
        with replacing(self._file) as temporary:
            temporary.write_bytes(self.corrections(raw=True))
        return self.state()

    def train(self) -> Improvement:
        """Start the training, where the server was started with --allow-training."""
        if not self.may_train:
            raise UserError("This server does not train; start it with --allow-training, or run the command yourself.")
        with self._lock:
            now = self.state()
            if now.state == "running":
                raise UserError("Training is already running.")
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
            return self.state()

    def stop(self) -> Improvement:
        """Ask a running training to save its state and end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self.state()


def _new_run(command: list[str]) -> Path:
    """Return the folder that a training command names."""
    return Path(command[command.index("--save-path") + 1])


def _gains(run: Path) -> list[Gain]:
    """Return the accuracy before and after training on corrections, as the run's report, if any, has it."""
    try:
        found = json.loads((run / METRICS_FILE).read_text(encoding="utf-8")).get("corrections", {})
    except (OSError, ValueError):
        return []
    gains = []
    for part, what in {"validation": "rows of validation data", "held_out": "corrections that were held out"}.items():
        if part in found:
            before, after, interval = (found[part][name]["rows"] for name in ("before", "after", "difference"))
            ends = {end: interval[end] for end in ("low", "high")}
            gains.append(Gain(what=what, rows=found[part]["num_rows"], before=before, after=after, **ends))
    return gains
