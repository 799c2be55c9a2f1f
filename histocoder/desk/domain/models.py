"""The models of a desk: trained in the background, one after the other; one of them codes."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import Field

from histocoder.checkpoints.model_files import WEIGHTS_FILE, read_model_config
from histocoder.checkpoints.run_files import LOG_FILE, METRICS_FILE, REPORT_FILE
from histocoder.checkpoints.run_folder import LOCK_FILE, holding, run_of, run_settings
from histocoder.checkpoints.starter import STARTER
from histocoder.checkpoints.training_state import BEST_FOLDER
from histocoder.desk.domain.checks import TrainOptions
from histocoder.desk.domain.coding import Coding
from histocoder.desk.domain.jobs import Job, Jobs, read_records
from histocoder.desk.domain.sample import TITLES
from histocoder.errors import Cancelled, UserError
from histocoder.evaluation.checked_file import words_to_correct
from histocoder.files import make_folder, sha256
from histocoder.inference.coder import Coder

GIVEN = "given"  # id of the model of `serve --model`
_NO_MODEL = "There is no model yet. Train one under Models."
_BUSY_MESSAGE = "is in use by another run"  # while the run of a server that was killed is saved
_BUSY_SECONDS = 2.0  # between two tries to start it again
_POLL_SECONDS = 0.1  # between two looks at a process that trains
_RUN_FILES = {"report.html": REPORT_FILE, "metrics.json": METRICS_FILE, "logs.csv": LOG_FILE}
RunFile: TypeAlias = Literal["report.html", "metrics.json", "logs.csv", "training.log"]


class Model(Job):
    """A model, and how it was made."""

    made: float
    file: str | None = None  # id of the table that it was trained on
    table: str  # its name
    base: str | None = None  # model that was trained further
    # whether it is measured on titles of codes, which are easier than descriptions
    of_titles: bool = False
    corrections: int = 0
    words: list[str] = Field(default_factory=list)  # flags of `histocoder finetune`
    state: Literal["queued", "running", "stopped", "failed", "done"] = "queued"
    seconds: float = 0  # that training took
    in_use: bool = False
    has_metrics: bool = True  # whether its run, once done, has been measured


class Models:
    """The models in a folder, each a run of `histocoder finetune`, of which one is in use."""

    def __init__(self, folder: Path, *, device: str, precision: str) -> None:
        make_folder(folder)
        self._folder = folder
        self._device = device
        self._precision = precision
        self._coding: Coding | None = None
        self._given_folder: Path | None = None

        # the models that earlier servers have trained, or were training
        records = read_records(Model, folder.glob("*.json"))
        records.sort(key=lambda model: model.made)
        self.jobs: Jobs[Model] = Jobs(
            records, path=self._record_file, work=self._train, delete=self._delete
        )

    def _record_file(self, model: Model) -> Path | None:
        if model.id == GIVEN:  # its folder is somebody else's
            return None
        return self._folder / f"{model.id}.json"

    @property
    def coding(self) -> Coding:
        """The model in use; a UserError is raised while there is none."""
        if self._coding is None:
            raise UserError(_NO_MODEL)
        return self._coding

    @property
    def has_model(self) -> bool:
        """Whether a model is in use."""
        return self._coding is not None

    @property
    def in_use(self) -> Model:
        """The record of the model in use; a UserError is raised while there is none."""
        for model in self.jobs.all():
            if self.has_model and model.in_use:
                return model
        raise UserError(_NO_MODEL)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run of the model in use."""
        if self._coding is None:
            return {}
        return self._coding.settings

    def offer(self, folder: Path, *, name: str) -> None:
        """List a model from elsewhere, which can be used."""
        self._given_folder = folder
        made = (folder / WEIGHTS_FILE).stat().st_mtime
        has_metrics = (run_of(folder) / METRICS_FILE).is_file()
        self.jobs.add_oldest(
            Model(id=GIVEN, made=made, table=name, state="done", has_metrics=has_metrics)
        )

    def give(self, coder: Coder, folder: Path, *, name: str) -> None:
        """Use a model from elsewhere."""
        self.offer(folder, name=name)
        self._use(GIVEN, coder)

    def use_again(self) -> None:
        """Use the model that was used last, or else the one that is offered."""
        used = [model.id for model in self.jobs.all() if model.in_use]
        if not used and self._given_folder is not None:
            used = [GIVEN]
        for model_id in used:
            self.use(model_id)

    @property
    def box_is_in_use(self) -> bool:
        """Whether the model in use is the one in the box."""
        return self._coding is not None and self._coding.folder == STARTER.resolve()

    def use(self, model_id: str) -> None:
        """Use a model for all that is coded and reviewed from now on."""
        if self.jobs[model_id].state != "done":
            raise UserError(f"{model_id} is not trained yet.")
        folder = self.best(model_id)
        self._use(model_id, Coder.from_pretrained(folder, self._device, precision=self._precision))

    def _use(self, model_id: str, coder: Coder) -> None:
        name = model_id
        if model_id == GIVEN:
            name = self.jobs[model_id].table
        self._coding = Coding(coder, self.best(model_id), name=name)

        # the next server uses it again
        for model in self.jobs.all():
            self.jobs.save(model, in_use=model.id == model_id)

    def run(self, model_id: str) -> Path:
        """Return the folder of a model's run."""
        return run_of(self.best(model_id))

    def best(self, model_id: str) -> Path:
        """Return the folder of a model's files."""
        if model_id == GIVEN and self._given_folder is not None:
            return self._given_folder
        return self._folder / self.jobs[model_id].id / BEST_FOLDER

    def train(
        self,
        dataset: Path,
        options: TrainOptions,
        *,
        file: str,
        sheet: str | None,
        encoding: str | None,
    ) -> Model:
        """Train a new model on a table."""
        words = ["--dataset", str(dataset)]
        if sheet is not None:
            words += ["--sheet", sheet]
        if encoding is not None:
            words += ["--file-encoding", encoding]
        if options.quick:
            words += ["--num-epochs", "3", "--min-steps", "0"]

        # the other options are flags of finetune.py by name
        for name, value in options.model_dump(exclude_defaults=True, exclude={"quick"}).items():
            words.append(f"--{name.replace('_', '-')}")
            if isinstance(value, list):
                words += value
            elif value is not True:
                words.append(value)

        # the id is free until the model has it
        with self.jobs.lock:
            model = Model(
                id=self._free_id(dataset.stem),
                made=time.time(),
                file=file,
                table=dataset.name,
                of_titles=dataset.name == TITLES,
                words=words,
            )
            return self._add(model)

    def correct(self, base_id: str, write: Callable[[Path], int]) -> Model:
        """Train a model further on corrections, which `write` writes to a file and counts."""
        base = self.jobs[base_id]
        run = self.run(base_id)
        settings = run_settings(run)
        is_box = self.best(base_id) == STARTER
        if base.state != "done" or not (is_box or settings.get("dataset")):
            raise UserError(
                f"{base_id} has no training data here; train it further where it was trained."
            )
        with self.jobs.lock:
            stem = "own" if is_box else re.sub(r"-\d+$", "", run.name)
            model_id = self._free_id(stem)
            corrections = self._corrections(model_id)
            num_corrections = write(corrections)

            # an empty file would train the same model once more
            if not num_corrections:
                raise UserError("Nothing is checked yet. Check codes under Review first.")

            # of earlier corrections only those from elsewhere: this desk's are all in the new file
            paths = settings.get("corrections") or []
            foreign = [path for path in paths if Path(path).parent != self._folder]
            best = self.best(base_id)
            words = words_to_correct(
                best,
                [*foreign, corrections],
                run,
                written_cols=read_model_config(best).written_cols,
            )
            if is_box:
                words = ["--corrections", str(corrections)]
            model = Model(
                id=model_id,
                made=time.time(),
                file=base.file,
                table=base.table,
                base=base_id,
                of_titles=base.of_titles,
                corrections=num_corrections,
                words=words,
            )
            return self._add(model)

    def has_learned(self, corrections: Path) -> bool:
        """Return whether the model in use, or one trained further from it, was trained on just
        these corrections.
        """
        digest = sha256(corrections)
        in_use = [model.id for model in self.jobs.all() if model.in_use]
        for model in self.jobs.all():
            path = self._corrections(model.id)
            is_related = model.in_use or model.base in in_use
            if is_related and path.is_file() and sha256(path) == digest:
                return True
        return False

    def _corrections(self, model_id: str) -> Path:
        return self._folder / f"{model_id}.corrections.csv"

    def _free_id(self, stem: str) -> str:
        """Return an id, from the name of a table or run, that no model has."""
        name = re.sub(r"[^\w-]+", "-", stem, flags=re.ASCII).strip("-")[:40] or "model"
        number = 1
        while f"{name}-{number}" in self.jobs:
            number += 1
        return f"{name}-{number}"

    def _add(self, model: Model) -> Model:
        self.jobs.add(model)
        self.jobs.queue(model)
        return model

    def halt(self, model_id: str) -> Model:
        """Stop training; it can be resumed."""
        with self.jobs.lock:
            model = self.jobs[model_id]
            if model.is_unfinished:
                self.jobs.save(model, state="stopped")
        return model

    def resume(self, model_id: str) -> Model:
        """Resume training that was stopped, or has failed."""
        model = self.jobs[model_id]
        if model.state in ("stopped", "failed"):
            self.jobs.queue(model)
        return model

    def remove(self, model_id: str) -> None:
        """Delete a model that is neither in use nor being trained."""
        with self.jobs.lock:
            model = self.jobs[model_id]
            if model.in_use or model_id == GIVEN or model.state == "running":
                raise UserError(
                    f"{model_id} is in use. Stop it, or switch to another model, first."
                )
            for further in self.jobs.all():
                if further.base == model_id and further.state != "done":
                    raise UserError(
                        f"The training of {further.id} continues from {model_id}. Finish or delete "
                        "it first."
                    )
            self._check_ended(model_id)
            self.jobs.remove(model_id)

    def _delete(self, model: Model) -> None:
        for suffix in (".json", ".log", ".corrections.csv"):
            (self._folder / f"{model.id}{suffix}").unlink(missing_ok=True)
        shutil.rmtree(self._folder / model.id, ignore_errors=True)

    def _check_ended(self, model_id: str) -> None:
        """Raise a UserError while the training of a model that was stopped is still being saved."""
        run = self._folder / model_id
        if not run.is_dir():
            return
        try:
            with holding(run / LOCK_FILE, path=run, instead="another folder"):
                pass
        except UserError as error:
            raise UserError(f"{model_id} is still being saved. Try again in a moment.") from error

    def run_file(self, model_id: str, name: RunFile) -> bytes:
        """Return a file of a model's run: its report, the numbers of both, or what training has
        said.
        """
        path = self._log(model_id)
        if name in _RUN_FILES:
            path = self.run(model_id) / _RUN_FILES[name]
        if not path.is_file():
            raise KeyError(name)
        return path.read_bytes()

    def _log(self, model_id: str) -> Path:
        return self._folder / f"{self.jobs[model_id].id}.log"

    def _train(self, model: Model) -> None:
        """Run the training of a model, and use the model if there is none yet."""
        begun = time.monotonic()
        try:
            # the run of a server that was killed may still be saving itself
            status, output = self._run(model)
            while status != 0 and _BUSY_MESSAGE in output and not self.jobs.is_interrupted(model):
                time.sleep(_BUSY_SECONDS)
                status, output = self._run(model)
        except OSError as error:  # as of a full disk, on which there may be room for the next
            raise UserError(str(error)) from error
        self.jobs.save(model, seconds=model.seconds + time.monotonic() - begun)

        # a process that was told to stop has saved its state, and ends with another status
        if status == 0:
            self.jobs.end(model, state="done")
            # a model of one's own takes the place of the one in the box
            if self._coding is None or self.box_is_in_use:
                self.use(model.id)
        elif self.jobs.is_interrupted(model):
            raise Cancelled
        else:
            raise UserError(output.rpartition("error: ")[2].strip()[-2000:])

    def _run(self, model: Model) -> tuple[int, str]:
        """Train in a process that ends with this one; return its status, and what it has said."""
        log = self._log(model.id)
        command = [sys.executable, "-m", "histocoder.cli.desk_run", *model.words]
        command += ["--save-path", str(self._folder / model.id)]
        command += ["--log-interval", "20", "--save-each-epoch"]
        command += ["--device", self._device.partition(":")[0]]  # without the number of a GPU

        # the process ends when the pipe to its standard input is closed, as by the end of this one
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
        while process.poll() is None and not self.jobs.is_interrupted(model):
            time.sleep(_POLL_SECONDS)
        process.terminate()  # does nothing to one that has ended
        status = process.wait()
        return status, log.read_text(encoding="utf-8", errors="replace")
