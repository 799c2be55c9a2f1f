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
from histocoder.files import existing, remove_files, replacing_folder
from histocoder.log import log
from histocoder.model import Tokenizer

OPTIMIZER_FILE, RANKS_FILE, STATE_FILE = "optimizer.pt", "ranks.safetensors", "state.json"
LAST_BIN_FILE = "last.bin"
CHECKPOINTS_FOLDER, BEST_FOLDER = "checkpoints", "best"
CHECKPOINT_VERSION = 2  # version of the format of a checkpoint's files


@dataclass
class TrainState:
    """Position of a run, and its results up to there."""

    step: int = 0  # number of optimizer steps taken
    epoch: int = 0  # the current one, from 0
    samples: int = 0  # number of rows of the epoch trained on so far, over all ranks
    best_accuracy: float = float(
        "-inf"
    )  # best mean of `greedy_seq_acc` and `flat_acc`; the next is the same model's
    best_val_loss: float = float("inf")
    results: dict[str, float] | None = (
        None  # validation results at this step, if there was a validation
    )

    def improves(self, results: dict[str, float], *, num_rows: int) -> bool:
        """Record a validation; return whether to keep its model as the best so far.

        A model is kept unless an earlier one is better by more than a standard error: of models
        that validation can't tell apart, the last was trained at the lowest learning rate.
        """
        accuracy, loss = (results["greedy_seq_acc"] + results["flat_acc"]) / 2, results["val_loss"]
        if (accuracy, -loss) > (self.best_accuracy, -self.best_val_loss):
            self.best_accuracy, self.best_val_loss = accuracy, loss
        share = self.best_accuracy / 100
        # of the mean of two accuracies of the same answers, that of the decoder on some of the rows
        variance = share * (1 - share) * (3 / num_rows + 1 / min(num_rows, NUM_GREEDY)) / 4
        return accuracy >= self.best_accuracy - 100 * math.sqrt(variance)


@dataclass
class LearnerState:
    """State dicts of model, optimizer, scheduler and scaler, as a run on one process has them.

    Of a table of n-grams and its moments they may have the trained rows alone, with a bit for each
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
    ranks: dict[
        str, Tensor
    ]  # state of each rank, such as that of its random number generator, one row per rank
    settings: dict[str, Any]  # those that a resumed run must share
    model_config: ModelConfig
    tokenizer: Tokenizer


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / CHECKPOINTS_FOLDER / f"step-{step:07d}"


def save_checkpoint(checkpoint: Checkpoint, *, keep: int) -> None:
    """Write a checkpoint to its path, and delete all but the newest `keep` checkpoints of its
    run.
    """
    final = checkpoint.path
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with replacing_folder(final) as folder:
            learner = checkpoint.learner
            rest = {
                "optimizer": learner.optimizer,
                "scheduler": learner.scheduler,
                "scaler": learner.scaler,
            }
            model_files.save_tensors(rest, folder / OPTIMIZER_FILE)
            model_files.write_tensors(checkpoint.ranks, folder / RANKS_FILE)
            record = {
                "format_version": CHECKPOINT_VERSION,
                **asdict(checkpoint.state),
                "settings": checkpoint.settings,
            }
            (folder / STATE_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            model_files.write_model(
                folder, checkpoint.model_config, learner.weights, tokenizer=checkpoint.tokenizer
            )
            for path in _others_files(final):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(final / path, folder / path)
    except (OSError, UserError) as error:
        # `replacing_folder` names its temporary folder and the system's reason, of which the latter
        # is told
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        reason = cause.strerror or cause if isinstance(cause, OSError) else cause
        raise UserError(
            f"Could not save the checkpoint {final} ({reason}). Older checkpoints are "
            "intact. Make room, or fix "
            "the folder, and run the same command again."
        ) from error
    for old in list_checkpoints(final.parents[1])[:-keep]:
        delete_checkpoint(old)


def save_last_bin(
    folder: Path, config: ModelConfig, learner: LearnerState, *, step: int, trained: Sequence[str]
) -> None:
    """Write `last.bin`, the dict that OccCANINE's own scripts save and load.

    `trained` are the names of the weights that the optimizer updates, in its order.
    """
    moments = {
        i: {name: with_all_positions(trained[i], value, config) for name, value in values.items()}
        for i, values in learner.optimizer["state"].items()
    }
    groups = [{**group, "fused": None} for group in learner.optimizer["param_groups"]]
    state = {
        "optimizer": {"state": moments, "param_groups": groups},
        "scheduler": learner.scheduler,
    }
    save_published(folder / LAST_BIN_FILE, config, learner.weights, step=step, **state)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return a run's checkpoints, intact or not, the newest last; a folder without any of their
    files is none.
    """
    folders = (folder / CHECKPOINTS_FOLDER).glob("step-*")
    numbered = (path for path in folders if path.name.removeprefix("step-").isdecimal())
    return sorted(
        (path for path in numbered if any(existing(path, checkpoint_names(path)))), key=step_of
    )


def checkpoint_names(checkpoint: Path) -> tuple[str, ...]:
    """Return the paths that the files of a checkpoint have in its folder, first the one without
    which it is damaged.
    """
    model = (name for name in model_files.model_names(checkpoint) if name != model_files.CARD_FILE)
    return (STATE_FILE, OPTIMIZER_FILE, RANKS_FILE, *model)


def _others_files(checkpoint: Path) -> list[Path]:
    """Return the paths in a checkpoint's folder of files that are not the checkpoint's."""
    paths = (path.relative_to(checkpoint) for path in checkpoint.rglob("*") if not path.is_dir())
    names = checkpoint_names(checkpoint)
    return [path for path in paths if path.as_posix() not in names]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def delete_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint; rename it first, so that a partly deleted one is not resumed. Others'
    files in it stay.
    """
    if _others_files(checkpoint):
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
    path, damage = folder if resume == "auto" else Path(resume), ""
    for checkpoint in [path] if (path / STATE_FILE).is_file() else reversed(list_checkpoints(path)):
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
    if (version := record.pop("format_version", None)) != CHECKPOINT_VERSION:
        raise UserError(
            f"The checkpoint {path} has format version {version}; this histocoder reads "
            f"{CHECKPOINT_VERSION}. Resume "
            "it with the version that wrote it, or start a new run, with "
            f"--initial-checkpoint {path}."
        )
    record.pop("num_worse", None)  # of earlier versions
    settings, saved = record.pop("settings"), model_files.load_tensors(path / OPTIMIZER_FILE)
    return Checkpoint(
        path=path,
        state=TrainState(**record),
        learner=LearnerState(model_files.read_tensors(path / model_files.WEIGHTS_FILE), **saved),
        ranks=model_files.read_tensors(path / RANKS_FILE),
        settings=settings,
        model_config=model_files.read_model_config(path),
        tokenizer=model_files.read_tokenizer(path),
    )
