"""The models of a desk: trained in the background, one after the other; one of them codes."""

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

from fastapi import Response
from pydantic import BaseModel

from histocoder.checkpoints.model_files import WEIGHTS_FILE
from histocoder.checkpoints.run_files import LOG_FILE, METRICS_FILE, REPORT_FILE
from histocoder.checkpoints.run_folder import LOCK_FILE, holding, run_of, run_settings
from histocoder.checkpoints.training_state import BEST_FOLDER
from histocoder.desk.domain.checks import TrainOptions
from histocoder.desk.domain.coding import Coding
from histocoder.desk.domain.sample import TITLES
from histocoder.errors import UserError
from histocoder.evaluation.review_file import words_to_correct
from histocoder.files import make_folder, sha256, write_text
from histocoder.inference.coder import Coder
from histocoder.log import log

GIVEN = "given"  # the model of `serve --model`
# What is said while the training of a server that was killed is being saved
_BUSY = "is in use by another run"
_PAUSE_SECONDS = 2.0  # between two tries to start it again
_OF_REPORT = {  # so that its own styles and scripts work, and reach nothing of the desk
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src "
    "'unsafe-inline'; "
    "img-src data:; sandbox allow-scripts; frame-ancestors 'self'",
    "X-Frame-Options": "SAMEORIGIN",
}


class Model(BaseModel):
    """A model, and how it was made."""

    id: str
    made: float
    file: str | None = None  # id of the table that it was trained on
    table: str  # its name
    base: str | None = None  # model that was trained further
    of_titles: bool = (
        False  # whether it is measured on titles of codes, which are easier than descriptions
    )
    corrections: int = 0
    words: list[str] = []  # flags of `histocoder finetune`
    state: Literal["queued", "running", "stopped", "failed", "done"] = "queued"
    message: str = ""
    seconds: float = 0  # that training took
    in_use: bool = False


class Models:
    """The models in a folder, each a run of `histocoder finetune`, of which one is in use."""

    def __init__(self, folder: Path, *, device: str, precision: str) -> None:
        make_folder(folder)
        self._folder, self._device, self._precision = folder, device, precision
        self._lock, self._worker = threading.RLock(), ThreadPoolExecutor(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = False
        self._coding: Coding | None = None
        self._given = Path()  # folder of the given model
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
    def in_use(self) -> Model | None:
        """The record of the model in use."""
        return (
            next((model for model in self._models.values() if model.in_use), None)
            if self._coding
            else None
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run of the model in use."""
        return self._coding.settings if self._coding else {}

    def give(self, coder: Coder, folder: Path, *, name: str) -> None:
        """Use a model from elsewhere."""
        self._given = folder
        made = (folder / WEIGHTS_FILE).stat().st_mtime
        self._models = {GIVEN: Model(id=GIVEN, made=made, table=name, state="done"), **self._models}
        self._use(GIVEN, coder)

    def use_again(self) -> None:
        """Use the model that was used last."""
        for model in [model.id for model in self._models.values() if model.in_use]:
            self.use(model)

    def use(self, model: str) -> list[Model]:
        """Use a model for all that is coded and reviewed from now on."""
        if self._models[model].state != "done":
            raise UserError(f"{model} is not trained yet.")
        self._use(
            model, Coder.from_pretrained(self.best(model), self._device, precision=self._precision)
        )
        return self.all()

    def _use(self, model: str, coder: Coder) -> None:
        name = self._models[model].table if model == GIVEN else model
        self._coding = Coding(coder, self.best(model), name=name)
        for record in self._models.values():
            self._set(record, in_use=record.id == model)

    def run(self, model: str) -> Path:
        """Return the folder of a model's run."""
        return run_of(self.best(model))

    def best(self, model: str) -> Path:
        """Return the folder of a model's files."""
        return (
            self._given if model == GIVEN else self._folder / self._models[model].id / BEST_FOLDER
        )

    def all(self) -> list[Model]:
        """List the models, the last one first."""
        return list(self._models.values())[::-1]

    def train(self, dataset: Path, options: TrainOptions, *, file: str, sheet: str | None) -> Model:
        """Train a new model on a table."""
        own = options.model_dump(exclude_defaults=True, exclude={"quick"})
        flags: dict[str, Any] = own | {"dataset": dataset, "sheet": sheet}
        words = ["--num-epochs", "3", "--min-steps", "0"] if options.quick else []
        for name, value in flags.items():
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += (
                [f"--{name.replace('_', '-')}", *map(str, values)]
                if value not in (None, False)
                else []
            )
        of_titles = dataset.name == TITLES
        with self._lock:
            return self._add(
                self._free(dataset.stem), words, file=file, table=dataset.name, of_titles=of_titles
            )

    def correct(self, model: str, write: Callable[[Path], int]) -> Model:
        """Train a model further on corrections, which `write` writes to a file and counts."""
        base, run = self._models[model], self.run(model)
        settings = run_settings(run)
        if base.state != "done" or not settings.get("dataset"):
            raise UserError(
                f"{model} has no training data here; train it further where it was trained."
            )
        with self._lock:
            name = self._free(re.sub(r"-\d+$", "", run.name))
            path = self._corrections(name)
            if not (number := write(path)):
                raise UserError("Nothing is checked yet. Check codes under Review first.")
            # the decisions of this desk are all in the new file
            others = [
                one for one in settings.get("corrections") or [] if Path(one).parent != self._folder
            ]
            words = words_to_correct(self.best(model), [*others, path], run)
            more = {"file": base.file, "table": base.table, "of_titles": base.of_titles}
            return self._add(name, words, **more, base=model, corrections=number)

    def has_learned(self, corrections: Path) -> bool:
        """Return whether the model in use, or one trained further from it, was trained on just
        these corrections.
        """
        now = [one.id for one in self._models.values() if one.in_use]
        files = (
            self._corrections(one.id)
            for one in self._models.values()
            if one.in_use or one.base in now
        )
        return any(path.is_file() and sha256(path) == sha256(corrections) for path in files)

    def _corrections(self, model: str) -> Path:
        return self._folder / f"{model}.corrections.csv"

    def _free(self, stem: str) -> str:
        name = re.sub(r"[^\w-]+", "-", stem, flags=re.ASCII).strip("-")[:40] or "model"
        return next(f"{name}-{n}" for n in range(1, 10_000) if f"{name}-{n}" not in self._models)

    def _add(self, name: str, words: Sequence[str], **more: Any) -> Model:
        model = self._models[name] = Model(id=name, made=time.time(), words=list(words), **more)
        self._queue(model)
        return model

    def halt(self, model: str) -> Model:
        """Stop training; it can be resumed."""
        with self._lock:
            found = self._models[model]
            if (was := found.state) in ("queued", "running"):
                self._set(found, state="stopped")
            if was == "running":
                self._interrupt()
        return found

    def resume(self, model: str) -> Model:
        """Resume training that was stopped, or has failed."""
        if self._models[model].state in ("stopped", "failed"):
            self._queue(self._models[model])
        return self._models[model]

    def remove(self, model: str) -> list[Model]:
        """Delete a model that is neither in use nor being trained."""
        with self._lock:
            if (
                self._models[model].in_use
                or model == GIVEN
                or self._models[model].state == "running"
            ):
                raise UserError(f"{model} is in use. Stop it, or switch to another model, first.")
            if others := [
                one.id for one in self._models.values() if one.base == model and one.state != "done"
            ]:
                raise UserError(
                    f"The training of {others[0]} continues from {model}. Finish or delete "
                    "it first."
                )
            self._check_ended(model)
            del self._models[model]
            for suffix in (".json", ".log", ".corrections.csv"):
                (self._folder / f"{model}{suffix}").unlink(missing_ok=True)
            shutil.rmtree(self._folder / model, ignore_errors=True)
        return self.all()

    def _check_ended(self, model: str) -> None:
        """Raise a UserError while the training of a model that was stopped is still being saved."""
        run = self._folder / model
        if not run.is_dir():
            return
        try:
            with holding(run / LOCK_FILE, path=run, instead="another folder"):
                pass
        except UserError as error:
            raise UserError(f"{model} is still being saved. Try again in a moment.") from error

    def read(
        self, model: str, name: Literal["report.html", "metrics.json", "logs.csv", "training.log"]
    ) -> Response:
        """Return a file of a model's run: its report, the numbers of both, and what training has
        said.
        """
        kinds = {
            "report.html": (REPORT_FILE, "text/html"),
            "metrics.json": (METRICS_FILE, "application/json"),
        }
        file, kind = kinds.get(name, (LOG_FILE, "text/plain"))
        path = self._log(model) if name == "training.log" else self.run(model) / file
        if not path.is_file():
            raise KeyError(name)
        # at once, since logs grow
        return Response(
            path.read_bytes(),
            media_type=kind,
            headers=_OF_REPORT if name == "report.html" else None,
        )

    def _log(self, model: str) -> Path:
        return self._folder / f"{self._models[model].id}.log"

    def _set(self, model: Model, **changes: Any) -> None:
        """Change a record once that is saved: what the page shows is what the next server finds."""
        with self._lock:  # while another thread may write the same file
            if model.id != GIVEN:
                changed = model.model_copy(update=changes)
                write_text(self._folder / f"{model.id}.json", changed.model_dump_json())
            for name, value in changes.items():
                setattr(model, name, value)

    def _queue(self, model: Model) -> None:
        self._set(model, state="queued", message="")
        self._worker.submit(self._work, model)

    def _interrupt(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.terminate()

    def _work(self, model: Model) -> None:
        """Train a model, unless it was stopped in the queue."""
        try:
            with self._lock:
                if self._is_stopping or model.id not in self._models or model.state != "queued":
                    return
                self._set(model, state="running")
            self._train(model)
            if model.state == "done" and self._coding is None:
                self.use(model.id)
        except (
            UserError,
            OSError,
        ) as error:  # as of a full disk, after which there may be room for the next
            log.error(str(error))
            model.state = "failed"
            model.message = str(error)

    def _train(self, model: Model) -> None:
        """Run the training of a model, and record how it ended."""
        begun = time.monotonic()
        is_busy, status, output = True, 1, ""
        while is_busy and model.state == "running" and not self._is_stopping:
            status, output = self._run(model)
            is_busy = status != 0 and _BUSY in output
            if is_busy:
                time.sleep(_PAUSE_SECONDS)

        with self._lock:
            changes: dict[str, Any] = {"seconds": model.seconds + time.monotonic() - begun}
            if model.state == "running" and status == 0:
                changes["state"] = "done"
            elif model.state == "running" and not self._is_stopping:
                changes["state"] = "failed"
                changes["message"] = output.rpartition("error: ")[2].strip()[-2000:]
            self._set(model, **changes)

    def _run(self, model: Model) -> tuple[int, str]:
        """Train in a process that ends with this one; return its status, and what it has said."""
        flags = (
            "--save-path",
            str(self._folder / model.id),
            "--log-interval",
            "20",
            "--save-each-epoch",
        )
        device = ("--device", self._device.partition(":")[0])  # without the number of a GPU
        command = [sys.executable, "-m", "histocoder.cli.desk_run", *model.words, *flags, *device]
        with self._log(model.id).open("wb") as output, self._lock:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output
            )
        status = self._process.wait()
        self._process = None
        return status, self._log(model.id).read_text(encoding="utf-8", errors="replace")
