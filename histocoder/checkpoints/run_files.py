"""Distinguish the files of a run from others in its folder: a run replaces and deletes only its own."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from histocoder import launcher
from histocoder.checkpoints.manifest import MANIFEST_FILE
from histocoder.checkpoints.model_files import (
    CARD_FILE,
    CONFIG_FILE,
    TOKENIZER_FOLDER,
    WEIGHTS_FILE,
    model_names,
)
from histocoder.checkpoints.training_state import (
    BEST_FOLDER,
    CHECKPOINTS_FOLDER,
    LAST_BIN_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    checkpoint_names,
    list_checkpoints,
)
from histocoder.config.model import MODEL_TYPE
from histocoder.data.example_writer import EXAMPLES_FILE
from histocoder.data.prepare import KEY_FILE, PREPARED_TABLES
from histocoder.data.prepared_folder import PREPARED_FILE
from histocoder.errors import UserError
from histocoder.files import existing, write_text

ARGS_FILE = "args.yaml"
LOG_FILE = "logs.csv"
WANDB_ID_FILE = "wandb_run_id"
REPORT_FILE = "report.html"
METRICS_FILE = "metrics.json"
FIGURES_FOLDER = "report"
FIGURES = ("training", "production", "calibration", "languages", "digits", "code_seen", "text_seen")
"""Names of the report's figures."""
TENSORBOARD_FOLDER = "tensorboard"
RECORD_FILE = "run.json"
"""Names the folder of a run, and what in it is the run's: names that were free when it began; says
whether the run has ended.
"""
_RESULT_FILES = (REPORT_FILE, METRICS_FILE, LAST_BIN_FILE)
RESULTS = _RESULT_FILES + tuple(f"{FIGURES_FOLDER}/{name}.png" for name in FIGURES)
"""Files that the end of a run writes about its model."""
_MODEL_AND_LOGS = (
    CONFIG_FILE,
    WEIGHTS_FILE,
    CARD_FILE,
    MANIFEST_FILE,
    ARGS_FILE,
    LOG_FILE,
    WANDB_ID_FILE,
)
_FILES = _MODEL_AND_LOGS + _RESULT_FILES
_FOLDERS = (CHECKPOINTS_FOLDER, BEST_FOLDER, TOKENIZER_FOLDER, FIGURES_FOLDER, TENSORBOARD_FOLDER)
_NAMES = (RECORD_FILE, *PREPARED_TABLES, PREPARED_FILE, *_FILES, *_FOLDERS)
_HEAD_BYTES = 1 << 20
_MARKS = {
    # each run has every setting
    ARGS_FILE: (b"encoder:", b"seed:", b"batch_size:", b"save_interval:"),
    CARD_FILE: (b"library_name: histocoder",),
    CONFIG_FILE: (MODEL_TYPE.encode(),),
    WEIGHTS_FILE: (b'"linear_decoder.weight"',),  # in its header
    EXAMPLES_FILE: (b"ARROW1",),
    PREPARED_FILE: (b'"format_version"',),
    RECORD_FILE: (b'"folder"', b'"names"'),
    KEY_FILE: (b"system_code", b"code"),
    LOG_FILE: (b"step,epoch,train_loss",),
    METRICS_FILE: (b'"answer"',),
    REPORT_FILE: (b"histocoder",),
}
"""Texts that the files of histocoder contain, for names that other programs use as well."""


def trained_files(run: Path) -> Iterator[Path]:
    """Yield the existing files that bear the names of what training writes into a run's folder."""
    yield from existing(run, _FILES + RESULTS + model_names(run))
    yield from existing(run / BEST_FOLDER, model_names(run / BEST_FOLDER))
    for checkpoint in list_checkpoints(run):
        yield from existing(checkpoint, checkpoint_names(checkpoint))
    yield from (run / TENSORBOARD_FOLDER).glob("events.out.tfevents.*")


def claim(folder: Path) -> None:
    """Record that a folder belongs to a run.

    It is a run's if `run.json` says so, which names the folder. Where that file is missing, or was
    copied or moved with the folder, each file must look like what histocoder writes under its name.

    Raises a UserError that names what a run would replace and histocoder did not write.
    """
    # The record of a folder that was copied or moved names another one.
    record = _read_json(folder / RECORD_FILE)
    recorded_names: set[str] = set()
    if record.get("folder") == str(folder.resolve()):
        recorded_names.update(record.get("names", ()))

    # Common names, such as README.md, are the run's only beside a file that is certainly a run's.
    has_run = any(map(_is_certain, (folder, folder / BEST_FOLDER, *list_checkpoints(folder))))
    foreign = []
    for name in _NAMES:
        is_unknown = name not in recorded_names and os.path.lexists(folder / name)
        if is_unknown and not (has_run and _is_of_run(folder, name)):
            foreign.append(name)
    if foreign:
        raise UserError(
            f"{folder} contains {', '.join(foreign)}, which a run would replace and "
            "histocoder did not write there. Choose a new folder."
        )

    if recorded_names != set(_NAMES):
        _write_record(folder, {"folder": str(folder.resolve()), "names": _NAMES})


def record_begin(folder: Path) -> None:
    """Record that a run has begun, and the launch that it is of."""
    _write_record(folder, {"has_ended": False, "launch": launcher.launch_id()})


def record_end(folder: Path) -> None:
    """Record that a run has ended."""
    _write_record(folder, {"has_ended": True})


def was_restarted(folder: Path) -> bool:
    """Return whether the processes are those of a launch that has begun the folder's run before."""
    is_again = launcher.restarts() > 0 or launcher.requeues() > 0
    return is_again and _read_json(folder / RECORD_FILE).get("launch") == launcher.launch_id()


def was_interrupted(folder: Path) -> bool:
    """Return whether the last run of a folder has begun and not ended."""
    return _read_json(folder / RECORD_FILE).get("has_ended") is False


def _write_record(folder: Path, changes: dict[str, Any]) -> None:
    record = _read_json(folder / RECORD_FILE) | changes
    write_text(folder / RECORD_FILE, json.dumps(record, indent=2) + "\n")


def foreign_results(folder: Path) -> list[str]:
    """Return the names of files in a folder that a report would replace and that do not look like a
    report's.
    """
    names = [path.relative_to(folder).as_posix() for path in existing(folder, RESULTS)]
    pages = [name for name in names if name in (REPORT_FILE, METRICS_FILE)]
    foreign = [name for name in pages if not _has_marks(folder / name, name)]

    # Figures have no mark of their own: they are a report's if they lie beside its pages.
    if not pages or foreign:
        foreign += [name for name in names if name.startswith(f"{FIGURES_FOLDER}/")]
    return foreign


def has_files(folder: Path) -> bool:
    """Return whether a run has written anything into its folder but the record."""
    return any(os.path.lexists(folder / name) for name in _NAMES if name != RECORD_FILE)


def _read_json(path: Path) -> dict[str, Any]:
    """Return an object in a JSON file; an empty one if there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_certain(folder: Path) -> bool:
    """Return whether a folder holds a file that nobody but histocoder writes: of data, a model or a
    checkpoint.
    """
    prepared = _read_json(folder / PREPARED_FILE)
    if "format_version" in prepared and ("settings" in prepared or "examples" in prepared):
        return True
    if _read_json(folder / CONFIG_FILE).get("model_type") == MODEL_TYPE:
        return True
    is_in_place = folder.parent.name == CHECKPOINTS_FOLDER
    return is_in_place and any(existing(folder, (STATE_FILE, OPTIMIZER_FILE)))


def _is_of_run(run: Path, name: str) -> bool:
    """Return whether a file or all files of a folder look like what histocoder writes under their
    names.

    The run's folder is known to hold a file of histocoder's.
    """
    path = run / name
    if not path.is_dir():
        return _has_marks(path, name)
    files_of_run = set(trained_files(run))
    for folder in (path, run):
        files_of_run.update(existing(folder, model_names(run)))
    return all(file in files_of_run for file in path.rglob("*") if not file.is_dir())


def _has_marks(path: Path, name: str) -> bool:
    """Return whether the head of a file contains the texts of `_MARKS` for its name."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return all(mark in head for mark in _MARKS.get(name, ()))
