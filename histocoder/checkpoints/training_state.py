"""Training states on disk: each checkpoint is written aside and renamed, so that it is complete or
missing.
"""

import json
import math
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from histocoder.checkpoints import model_files
from histocoder.checkpoints.manifest import verify_manifest
from histocoder.checkpoints.occcanine import save_published, with_all_positions
from histocoder.config import NUM_GREEDY, ModelConfig
from histocoder.errors import DamagedError, UserError
from histocoder.files import existing, file_names, remove_files, replacing_folder
from histocoder.log import log
from histocoder.model import Tokenizer

OPTIMIZER_FILE = "optimizer.pt"
RANKS_FILE = "ranks.safetensors"
STATE_FILE = "state.json"
LAST_BIN_FILE = "last.bin"
CHECKPOINTS_FOLDER = "checkpoints"
BEST_FOLDER = "best"
CHECKPOINT_VERSION = 2  # version of the format of a checkpoint's files


@dataclass
class TrainState:
    """Position of a run, and its results up to there."""

    step: int = 0  # number of optimizer steps taken
    epoch: int = 0  # the current one, from 0
    samples: int = 0  # number of rows of the epoch trained on so far, over all ranks
    # best mean of `greedy_seq_acc` and `flat_acc`, and the loss of the same model
    best_accuracy: float = -math.inf
    best_val_loss: float = math.inf
    # validation results at this step, if there was a validation
    results: dict[str, float] | None = None

    def improves(self, results: dict[str, float], *, num_rows: int) -> bool:
        """Record a validation; return whether to keep its model as the best so far.

        A model is kept unless an earlier one is better by more than a standard error: of models
        that validation can't tell apart, the last was trained at the lowest learning rate.
        """
        accuracy = (results["greedy_seq_acc"] + results["flat_acc"]) / 2
        loss = results["val_loss"]
        if (accuracy, -loss) > (self.best_accuracy, -self.best_val_loss):
            self.best_accuracy = accuracy
            self.best_val_loss = loss

        # The variance of the mean of two accuracies, of which the decoder's is measured on at most
        # NUM_GREEDY rows.
        share = self.best_accuracy / 100
        variance = share * (1 - share) * (3 / num_rows + 1 / min(num_rows, NUM_GREEDY)) / 4
        return accuracy >= self.best_accuracy - 100 * math.sqrt(variance)


@dataclass
class LearnerState:
    """State dicts of model, optimizer, scheduler and scaler, as a run on one process has them.

    Of a table of n-grams and its moments they may have only the trained rows, with a bit for each
    row (see `checkpoints.compact`); earlier versions had all rows.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    scaler: dict[str, Any] = field(default_factory=dict)  # loss scale in fp16; otherwise empty


@dataclass
class Checkpoint:
    """The state that a run resumes from."""

    path: Path  # its folder; see `checkpoint_path`
    state: TrainState
    learner: LearnerState
    # state of each rank, such as that of its random number generator, one row per rank
    ranks: dict[str, Tensor]
    settings: dict[str, Any]  # those that a resumed run must share
    model_config: ModelConfig
    tokenizer: Tokenizer


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / CHECKPOINTS_FOLDER / f"step-{step:07d}"


def save_checkpoint(checkpoint: Checkpoint, *, keep: int) -> None:
    """Write a checkpoint to its path, and delete all but the newest `keep` checkpoints of its
    run.
    """
    path = checkpoint.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_folder(path) as folder:
            _write_checkpoint(checkpoint, folder)
            # files that histocoder did not create stay
            for name in _foreign_names(path):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path / name, folder / name)
    except (OSError, UserError) as error:
        # The message of `replacing_folder` names a temporary folder, which tells a user nothing:
        # only the system's reason is reported.
        cause: BaseException = error
        if isinstance(error.__cause__, OSError):
            cause = error.__cause__
        reason = getattr(cause, "strerror", None) or cause
        raise UserError(
            f"Could not save the checkpoint {path} ({reason}). Older checkpoints are intact. "
            "Make room, or fix the folder, and run the same command again."
        ) from error

    for old in list_checkpoints(path.parents[1])[:-keep]:
        delete_checkpoint(old)


def _write_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the files of a checkpoint into a new folder."""
    learner = checkpoint.learner
    learner_state = {
        "optimizer": learner.optimizer,
        "scheduler": learner.scheduler,
        "scaler": learner.scaler,
    }
    model_files.save_tensors(learner_state, folder / OPTIMIZER_FILE)
    model_files.write_tensors(checkpoint.ranks, folder / RANKS_FILE)
    record = {"format_version": CHECKPOINT_VERSION} | asdict(checkpoint.state)
    record["settings"] = checkpoint.settings
    (folder / STATE_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    # The model is the last, since its manifest lists all files of the folder.
    model_files.write_model(
        folder, checkpoint.model_config, learner.weights, tokenizer=checkpoint.tokenizer
    )


def save_last_bin(
    folder: Path, config: ModelConfig, learner: LearnerState, *, step: int, trained: Sequence[str]
) -> None:
    """Write `last.bin`, the dict that OccCANINE's own scripts save and load.

    `trained` are the names of the weights that the optimizer updates, in its order.
    """
    moments = {}
    for i, state in learner.optimizer["state"].items():
        moments[i] = {
            name: with_all_positions(trained[i], value, config) for name, value in state.items()
        }
    groups = [group | {"fused": None} for group in learner.optimizer["param_groups"]]
    save_published(
        folder / LAST_BIN_FILE,
        config,
        learner.weights,
        step=step,
        optimizer={"state": moments, "param_groups": groups},
        scheduler=learner.scheduler,
    )


def list_checkpoints(folder: Path) -> list[Path]:
    """Return a run's checkpoints, intact or not, the newest last; a folder without any of their
    files is none.
    """
    checkpoints = []
    for path in (folder / CHECKPOINTS_FOLDER).glob("step-*"):
        is_numbered = path.name.removeprefix("step-").isdecimal()
        if is_numbered and any(existing(path, checkpoint_names(path))):
            checkpoints.append(path)
    return sorted(checkpoints, key=step_of)


def checkpoint_names(checkpoint: Path) -> tuple[str, ...]:
    """Return the paths that the files of a checkpoint have in its folder, first the one without
    which it is damaged.
    """
    names = [STATE_FILE, OPTIMIZER_FILE, RANKS_FILE, *model_files.model_names(checkpoint)]
    names.remove(model_files.CARD_FILE)
    return tuple(names)


def _foreign_names(checkpoint: Path) -> set[str]:
    """Return the paths in a checkpoint's folder of files that are not the checkpoint's."""
    return file_names(checkpoint) - set(checkpoint_names(checkpoint))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def delete_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint; rename it first, so that a partly deleted one is not resumed. Files
    that histocoder did not create stay.
    """
    if _foreign_names(checkpoint):
        remove_files(existing(checkpoint, checkpoint_names(checkpoint)))
        return
    doomed = checkpoint.with_name(f".{checkpoint.name}.old.tmp")
    with suppress(OSError):
        checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def find_checkpoint(folder: Path, resume: str) -> Checkpoint | None:
    """Return the checkpoint that a run resumes from; warn of each that can't be read and is
    skipped.

    `resume` is "auto" (the newest checkpoint in the run's folder that can be read, if any),
    "never", or the path of a checkpoint or of a run. A UserError is raised if there are checkpoints
    but none can be read, or the given path holds none.
    """
    if resume == "never":
        return None
    path = folder if resume == "auto" else Path(resume)
    checkpoints = list_checkpoints(path)
    if (path / STATE_FILE).is_file():
        checkpoints = [path]

    # The damage of the newest is the one to report, if no older checkpoint can be read either.
    damage = ""
    for checkpoint in reversed(checkpoints):
        try:
            return load_checkpoint(checkpoint)
        except DamagedError as error:
            damage = damage or str(error)
            log.info(f"Warning: {error} Looking for an older checkpoint.")
    if damage:
        raise UserError(
            f"{damage} No older checkpoint in {path} is intact; start a new run in another folder."
        )
    if resume != "auto":
        raise UserError(
            f"--resume {resume}: no checkpoint. Name a run's folder, or a folder "
            "checkpoints/step-… in it."
        )
    return None


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; raise a DamagedError for a file that is missing or damaged, a UserError
    for other versions.
    """
    verify_manifest(path)
    record = model_files.read_json(path / STATE_FILE)
    version = record.pop("format_version", None)
    if version != CHECKPOINT_VERSION:
        raise UserError(
            f"The checkpoint {path} has format version {version}; this histocoder reads "
            f"{CHECKPOINT_VERSION}. Resume it with the version that wrote it, or start a new run, "
            f"with --initial-checkpoint {path}."
        )

    record.pop("num_worse", None)  # of earlier versions
    settings = record.pop("settings")
    learner_state = model_files.load_tensors(path / OPTIMIZER_FILE)
    weights = model_files.read_tensors(path / model_files.WEIGHTS_FILE)
    return Checkpoint(
        path=path,
        state=TrainState(**record),
        learner=LearnerState(weights, **learner_state),
        ranks=model_files.read_tensors(path / RANKS_FILE),
        settings=settings,
        model_config=model_files.read_model_config(path),
        tokenizer=model_files.read_tokenizer(path),
    )
