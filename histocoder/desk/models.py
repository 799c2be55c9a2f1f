"""The models of a desk: train them in the background, compare them, and choose the one that codes."""

import csv
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from fastapi.responses import FileResponse
from pydantic import BaseModel

from histocoder.checkpoints.model_files import CONFIG_FILE, WEIGHTS_FILE, read_model_config
from histocoder.checkpoints.run_folder import LOG_FILE, METRICS_FILE, REPORT_FILE, run_of, run_settings
from histocoder.checkpoints.training_state import BEST_FOLDER
from histocoder.desk.checks import TrainOptions
from histocoder.desk.coding import Coding
from histocoder.errors import UserError
from histocoder.evaluation.review_file import words_to_correct
from histocoder.evaluation.summary import TARGET_ACCURACY, gain_in_words, summary
from histocoder.files import make_folder, sha256, write_text
from histocoder.inference.coder import Coder

GIVEN = "given"  # the model of `serve --model`
_CURRENT = "current"  # file with the id of the model in use
_BUSY = "is in use by another run"  # what is said where the training of a server that was killed goes on
_FAILED = "Training failed; the log says why."
_STAGES = {
    "Training finished.": "Choosing how to predict",
    "Writing the report": "Writing the report",
    "Evaluation finished.": "Learning from the validation rows, too",
}  # what a run says -> what it does then
_OF_REPORT = {  # so that its own styles and scripts work, and reach nothing of the desk
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; sandbox allow-scripts; frame-ancestors 'self'",
    "X-Frame-Options": "SAMEORIGIN",
}


class Progress(BaseModel):
    """How far training is."""

    stage: str
    step: int = 0
    steps: int = 0
    seconds_left: float | None = None  # of the steps
    curve: list[tuple[int, float]] = []  # step, share of validation rows that are exactly right


class Figures(BaseModel):
    """What the report of a model says."""

    accuracy: float
    descriptions: int  # validation rows
    automatic: float  # share of the descriptions of which 95 % are right, the surest
    summary: list[str]
    before: float | None = None  # accuracy of the model that it was trained further from, on the same rows
    after: float | None = None
    gain: list[str] = []


class Model(BaseModel):
    """A model, and how it was made."""

    id: str
    made: float
    file: str | None = None  # id of the table that it was trained on
    table: str = ""  # its name
    base: str | None = None  # model that was trained further
    corrections: int = 0
    words: list[str] = []  # flags of `histocoder finetune`
    state: Literal["queued", "running", "stopped", "failed", "done"] = "queued"
    message: str = ""
    seconds: float = 0  # that training took


class Shown(Model):
    """A model, with what is read from its folder."""

    in_use: bool
    codes: int | None = None
    has_report: bool = False
    figures: Figures | None = None
    progress: Progress | None = None


class Models:
    """The models in a folder, each a run of `histocoder finetune`, of which one is in use."""

    def __init__(self, folder: Path, *, device: str, precision: str) -> None:
        make_folder(folder)
        self._folder, self._device, self._precision = folder, device, precision
        self._lock = threading.RLock()
        self._worker = ThreadPoolExecutor(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = False
        self._begun: dict[str, tuple[float, int]] = {}  # model -> when its training was at which step first
        self._coding: Coding | None = None
        self._given: Path | None = None  # folder of the given model
        self.in_use: str | None = None
        records = [Model.model_validate_json(path.read_bytes()) for path in folder.glob("*.json")]
        self._models = {model.id: model for model in sorted(records, key=lambda model: model.made)}

    def start(self) -> None:
        """Resume what an earlier server has not finished."""
        for model in self._models.values():
            if model.state in ("queued", "running"):
                self._queue(model)

    def stop(self) -> None:
        """Interrupt training; the next server resumes it."""
        self._is_stopping = True
        self._interrupt()
        self._worker.shutdown(cancel_futures=True)

    @property
    def coding(self) -> Coding:
        """The model in use; a UserError is raised while there is none."""
        if self._coding is None:
            raise UserError("There is no model yet. Train one under Models.")
        return self._coding

    @property
    def name(self) -> str:
        """Name of the model in use, as the page shows it."""
        return self._models[self.in_use].table if self.in_use == GIVEN else str(self.in_use)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run of the model in use."""
        return self._coding.settings if self._coding else {}

    def give(self, coder: Coder, folder: Path, *, name: str) -> None:
        """Use a model from elsewhere."""
        self._given = folder
        model = Model(id=GIVEN, made=(folder / WEIGHTS_FILE).stat().st_mtime, table=name, state="done")
        self._models = {GIVEN: model, **self._models}
        self._use(GIVEN, coder)

    def use_again(self) -> None:
        """Use the model that was used last."""
        path = self._folder / _CURRENT
        if path.is_file() and (name := path.read_text(encoding="utf-8")) in self._models:
            self.use(name)

    def use(self, model: str) -> list[Shown]:
        """Use a model for all that is coded and reviewed from now on."""
        if self._models[model].state != "done":
            raise UserError(f"{model} is not trained yet.")
        folder = self.best(model)
        self._use(model, Coder.from_pretrained(folder, self._device, precision=self._precision))
        write_text(self._folder / _CURRENT, model)
        return self.all()

    def _use(self, model: str, coder: Coder) -> None:
        folder = self.best(model)
        model_id = f"{sha256(folder / WEIGHTS_FILE)} {sha256(folder / CONFIG_FILE)} {coder.precision}"
        self._coding, self.in_use = Coding(coder, run=self.run(model), model_id=model_id), model

    def run(self, model: str) -> Path:
        """Return the folder of a model's run."""
        return run_of(self.best(model))

    def best(self, model: str) -> Path:
        """Return the folder of a model's files."""
        given = self._given if model == GIVEN else None
        return given or self._folder / self._models[model].id / BEST_FOLDER

    def all(self) -> list[Shown]:
        """List the models, the last one first."""
        return [self._shown(model) for model in list(self._models.values())[::-1]]

    def users_of(self, file: str) -> list[str]:
        """Return the models that are trained on a file."""
        return [model.id for model in self._models.values() if model.file == file]

    def train(self, dataset: Path, options: TrainOptions, *, file: str, sheet: str | None) -> Shown:
        """Train a new model on a table."""
        flags: dict[str, Any] = options.model_dump(exclude_defaults=True) | {"dataset": dataset, "sheet": sheet}
        words = ["--encoder", "ngram"]
        for name, value in flags.items():
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)] if value not in (None, False) else []
        return self._add(self._free(dataset.stem), words, file=file, table=dataset.name)

    def correct(self, model: str, write: Callable[[Path], int]) -> Shown:
        """Train a model further on corrections, which `write` writes to a file and counts."""
        base, run = self._models[model], self.run(model)
        settings = run_settings(run)
        if base.state != "done" or not settings.get("dataset"):
            raise UserError(f"{model} has no training data here; train it further where it was trained.")
        name = self._free(re.sub(r"-\d+$", "", run.name))
        path = self._folder / f"{name}.corrections.csv"
        if not (number := write(path)):
            raise UserError("Nothing is checked yet. Check codes under Review first.")
        # the decisions of this desk are all in the new file
        others = [one for one in settings.get("corrections") or [] if Path(one).parent != self._folder]
        words = words_to_correct(self.best(model), [*others, path], run)
        return self._add(name, words, file=base.file, table=base.table, base=model, corrections=number)

    def _free(self, stem: str) -> str:
        name = re.sub(r"[^\w-]+", "-", stem, flags=re.ASCII).strip("-")[:40] or "model"
        return next(f"{name}-{n}" for n in range(1, 10_000) if f"{name}-{n}" not in self._models)

    def _add(self, name: str, words: Sequence[str], **more: Any) -> Shown:
        with self._lock:
            model = Model(id=name, made=time.time(), words=list(words), **more)
            self._models[model.id] = model
            self._queue(model)
        return self._shown(model)

    def halt(self, model: str) -> Shown:
        """Stop training; it can be resumed."""
        with self._lock:
            found = self._models[model]
            if found.state in ("queued", "running"):
                was_running = found.state == "running"
                found.state = "stopped"
                self._save(found)
                if was_running:
                    self._interrupt()
        return self._shown(found)

    def resume(self, model: str) -> Shown:
        """Resume training that was stopped, or has failed."""
        with self._lock:
            found = self._models[model]
            if found.state in ("stopped", "failed"):
                self._queue(found)
        return self._shown(found)

    def remove(self, model: str) -> list[Shown]:
        """Delete a model that is not in use."""
        with self._lock:
            if model in (self.in_use, GIVEN):
                raise UserError(f"{model} is in use. Switch to another model first.")
            if self._models[model].state == "running":
                raise UserError(f"{model} is being trained. Stop it first.")
            del self._models[model]
            for path in (self._folder / f"{model}{suffix}" for suffix in (".json", ".log", ".corrections.csv")):
                path.unlink(missing_ok=True)
            shutil.rmtree(self._folder / model, ignore_errors=True)
        return self.all()

    def report(self, model: str) -> FileResponse:
        """Return the report of a model, which may be framed by the desk's own page."""
        path = self.run(model) / REPORT_FILE
        if not path.is_file():
            raise KeyError(model)
        return FileResponse(path, headers=_OF_REPORT)

    def log(self, model: str) -> FileResponse:
        """Return what training has said."""
        path = self._log(self._models[model])
        if not path.is_file():
            raise KeyError(model)
        return FileResponse(path, media_type="text/plain; charset=utf-8")

    def _log(self, model: Model) -> Path:
        return self._folder / f"{model.id}.log"

    def _save(self, model: Model) -> None:
        write_text(self._folder / f"{model.id}.json", model.model_dump_json())

    def _queue(self, model: Model) -> None:
        model.state, model.message = "queued", ""
        self._save(model)
        self._worker.submit(self._work, model)

    def _interrupt(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.terminate()

    def _work(self, model: Model) -> None:
        """Train a model, unless it was stopped in the queue."""
        with self._lock:
            if self._is_stopping or model.id not in self._models or model.state != "queued":
                return
            model.state = "running"
            self._save(model)
        begun = time.monotonic()
        while (code := self._trained(model)) != 0 and _BUSY in self._said(model):
            time.sleep(2)
        model.seconds += time.monotonic() - begun
        self._begun.pop(model.id, None)
        with self._lock:
            if model.state == "running" and code == 0:
                model.state = "done"
            elif model.state == "running" and not self._is_stopping:
                error = self._said(model).rpartition("error: ")[2]
                model.state, model.message = "failed", error.strip() if code == 2 else _FAILED
            self._save(model)
        if model.state == "done" and self._coding is None:
            self.use(model.id)

    def _trained(self, model: Model) -> int:
        """Run `histocoder finetune` to its end; return its exit code."""
        flags = ("--save-path", str(self._folder / model.id), "--log-interval", "20", "--save-each-epoch")
        command = [sys.executable, "-m", "histocoder.cli.finetune", *model.words, *flags]
        with self._log(model).open("wb") as log:
            with self._lock:
                if self._is_stopping or model.state != "running":
                    return 1
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            code = self._process.wait()
        with self._lock:
            self._process = None
        return code

    def _said(self, model: Model) -> str:
        path = self._log(model)
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def _shown(self, model: Model) -> Shown:
        run = self.run(model.id)
        metrics = run / METRICS_FILE
        is_done = model.state == "done"
        return Shown(
            **model.model_dump(),
            in_use=model.id == self.in_use,
            codes=read_model_config(self.best(model.id)).num_classes if is_done else None,
            has_report=is_done and (run / REPORT_FILE).is_file(),
            figures=figures_of(json.loads(metrics.read_bytes())) if is_done and metrics.is_file() else None,
            progress=None if is_done or model.state == "failed" else self._progress(model, run),
        )

    def _progress(self, model: Model, run: Path) -> Progress:
        said, path = self._said(model), run / LOG_FILE
        if model.state == "queued":
            return Progress(stage="Waiting in the queue")
        found = re.search(r"^steps +([\d,]+) in ", said, re.MULTILINE)
        if found is None or not path.is_file():
            return Progress(stage="Reading the table")
        steps = int(found[1].replace(",", ""))
        rows = [row for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()) if row["step"]]
        step = int(rows[-1]["step"]) if rows else 0
        begun, first = self._begun.setdefault(model.id, (time.monotonic(), step))
        left = (steps - step) * (time.monotonic() - begun) / (step - first) if step > first else None
        stages = [stage for words, stage in _STAGES.items() if words in said]
        curve = [(int(row["step"]), float(row["flat_acc"])) for row in rows if row["flat_acc"]]
        stage = stages[-1] if stages else "Learning"
        return Progress(stage=stage, step=step, steps=steps, seconds_left=None if stages else left, curve=curve)


def figures_of(metrics: dict[str, Any]) -> Figures:
    """Return the figures of a report."""
    overall, production = metrics["answer"]["overall"], metrics["answer"]["production"]
    pairs = zip(production["accuracy"], production["share"], strict=True)
    gain = metrics.get("corrections", {}).get("validation", {})
    return Figures(
        accuracy=overall["accuracy"],
        descriptions=metrics["num_rows"],
        automatic=max((share for right, share in pairs if (right or 0) >= TARGET_ACCURACY), default=0.0),
        summary=summary(metrics)[:2],
        before=gain["before"]["rows"] if gain else None,
        after=gain["after"]["rows"] if gain else None,
        gain=gain_in_words(metrics),
    )
