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
from fastapi import Response
from pydantic import BaseModel

from histocoder.checkpoints.run_folder import METRICS_FILE, run_settings
from histocoder.checkpoints.training_state import BEST_FOLDER
from histocoder.data.example_files import CHECKED_COL
from histocoder.data.languages import Language
from histocoder.data.normalize import description_keys
from histocoder.data.output import Form, write_table
from histocoder.desk.cards import Cards
from histocoder.errors import UserError
from histocoder.evaluation.review_file import next_step
from histocoder.evaluation.summary import gain_in_words
from histocoder.files import replacing

State = Literal["idle", "running", "done", "failed"]
_LOG_LINES = 12


class Improvement(BaseModel):
    """Corrections to train on, and the state of the training."""

    corrections: int
    command: str
    is_complete: bool  # whether the command can be run without changes
    serve: str | None  # command that serves the trained model
    may_train: bool
    state: State
    log: str
    gains: list[str]  # accuracy before and after, once training is done


class Improve:
    """Corrections and training of a desk.

    `folder` is the desk's, `run` that of the model's run, and `model` the model's name as the user gave it. `may_train`
    says whether the server may start the training itself.
    """

    def __init__(
        self, cards: Cards, folder: Path, *, model: str, run: Path, target_cols: tuple[str, ...], may_train: bool
    ) -> None:
        self._cards, self._model, self._run, self.may_train = cards, model, run, may_train
        self._file, self._log = folder / "corrections.csv", folder / "training.log"
        self._target_cols = target_cols
        self.settings = run_settings(run)
        self._process: subprocess.Popen[bytes] | None = None
        self._words: list[str] = []  # of the command that runs
        self._lock = threading.Lock()  # so that one training is started at a time

    def _settled(self) -> pa.Table:
        """Return the settled descriptions as `--corrections` takes them; of several decisions on one, the last."""
        settings, targets = self.settings, self._target_cols
        language_col = settings.get("language_col") or (None if settings else "lang")
        lang_cols = [language_col] if language_col else []
        names = [settings.get("input_col") or "occ1", *lang_cols, CHECKED_COL, *targets, "conf", "times", "who"]
        rows = {}
        for card in self._cards.settled():
            langs, codes = [card.lang] * len(lang_cols), card.codes or []
            blanks = [None] * (len(targets) - len(codes))
            cells = [card.text, *langs, "x", *codes, *blanks, round(card.confidence, 6), card.times, card.who]
            key = description_keys([card.text])[0], *map(Language, langs)
            rows[key] = dict(zip(names, cells, strict=True))
        kinds = {"conf": pa.float64(), "times": pa.int64()}
        return pa.Table.from_pylist(
            list(rows.values()), pa.schema([(name, kinds.get(name, pa.string())) for name in names])
        )

    def corrections(self, raw: bool = False) -> Response:
        """Return settled descriptions, as CSV for `finetune.py --corrections`; `raw` leaves formulas as they are."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / self._file.name
            write_table(path, [self._settled()], Form(raw=raw))
            content = path.read_bytes()
        headers = {"Content-Disposition": f'attachment; filename="{self._file.name}"'}
        return Response(content, media_type="text/csv; charset=utf-8", headers=headers)

    def state(self) -> Improvement:
        """Return the command that trains on the corrections, and the state of the training."""
        sentence, _, command = next_step(self._model, self._file, self._run).partition("\n")
        ended = self._process.poll() if self._process else None
        state: State = "idle"
        lines: list[str] = []
        if self._process is not None:
            state = "running" if ended is None else "failed" if ended else "done"
            lines = self._log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
        words = self._words if state in ("running", "done") else shlex.split(command)
        new = Path(words[words.index("--save-path") + 1]) if words else None
        return Improvement(
            corrections=len(self._settled()),
            command=shlex.join(words) if state == "running" else command or sentence,
            is_complete=bool(command),
            serve=shlex.join(["histocoder", "serve", "--model", str(new / BEST_FOLDER)]) if new else None,
            may_train=self.may_train,
            state=state,
            log="\n".join(lines[-_LOG_LINES:]),
            gains=_gains(new / METRICS_FILE) if new and state == "done" else [],
        )

    def keep(self) -> Improvement:
        """Write the corrections to the file that the command names."""
        with replacing(self._file) as temporary:
            temporary.write_bytes(self.corrections(raw=True).body)
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


def _gains(metrics: Path) -> list[str]:
    """Return what training on corrections has brought, if the run's report says so."""
    return gain_in_words(json.loads(metrics.read_text(encoding="utf-8"))) if metrics.is_file() else []
