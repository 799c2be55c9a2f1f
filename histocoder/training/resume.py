"""Settings that the ranks of a run, and the run that it resumes, must agree on."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from histocoder import distributed
from histocoder.checkpoints.run_files import was_interrupted
from histocoder.checkpoints.run_folder import RunFolder, run_settings
from histocoder.checkpoints.training_state import Checkpoint
from histocoder.config import RunConfig, TrainConfig, recorded, settings_of
from histocoder.errors import UserError
from histocoder.tables.table import fingerprint
from histocoder.training.building import Task

_Config = TypeVar("_Config", bound=RunConfig)


def with_earlier_defaults(config: _Config, checkpoint: Checkpoint | None) -> _Config:
    """Return settings with what a checkpoint of an earlier version was trained with, where defaults
    have changed.
    """
    if checkpoint is None:
        return config
    # which settings a checkpoint records tells the version that wrote it
    if "--repeats" not in checkpoint.settings:
        config = replace(config, repeats="all", label_smoothing=0.0, flat_head="linear")
    if "text_normalization" in (config.by_recipe or ()):
        config = replace(config, text_normalization=checkpoint.model_config.text_normalization)
    return config


def settings_to_compare(config: RunConfig, task: Task) -> dict[str, Any]:
    """Return what a resumed run must agree on beside its rows: form of the data, `fixed` settings,
    rows of a step.

    Learning rates in `config` are scaled.
    """
    # the form of the data; codes are many, so a hash stands for them
    files = task.files
    codes_hash = hashlib.sha256("&".join(task.key.codes).encode()).hexdigest()[:8]
    form = files.formatter.to_config()
    form.pop("labels", None)  # which are the codes
    settings: dict[str, Any] = {
        "codes": f"{len(task.key.codes)} ({codes_hash})",
        "columns": ", ".join([files.input_col, files.language_col, *files.target_cols]),
        "attributes": ", ".join(files.attribute_cols),
        "formatter": ", ".join(f"{name} {value}" for name, value in form.items()),
        "rows a step": config.step_size(distributed.world_size()),
    }

    # settings, by their flags; of a file that one names, what counts is its content
    for setting in settings_of(type(config)):
        if setting.resume:
            value = getattr(config, setting.name)
            if setting.resume == "content" and value is not None:
                value = fingerprint(value)[:8]
            settings[setting.flag] = value
    return settings


def check_repeats(config: RunConfig, run: RunFolder) -> None:
    """Raise a UserError if a run of other `fixed` settings was killed before its first checkpoint,
    and has left its best model.
    """
    if not (was_interrupted(run.path) and run.best.is_dir()):
        return
    before = run_settings(run.path)
    now = yaml.safe_load(yaml.safe_dump(recorded(config)))
    fixed = [setting for setting in settings_of(type(config)) if setting.resume]
    changed = [one.flag for one in fixed if before.get(one.name) != now.get(one.name)]
    if changed:
        raise UserError(
            f"{run.path} holds the best model of a run with other settings "
            f"({', '.join(changed)}), which a new run would delete. Choose another folder, or add "
            "--overwrite."
        )


def check_settings(
    settings: dict[str, Any], config: RunConfig, checkpoint: Checkpoint | None, folder: Path
) -> None:
    """Raise a UserError, on every rank, if settings differ between ranks, or from those of the
    checkpoint to resume.

    Settings that an earlier histocoder did not record are assumed to agree.
    """
    # ranks must agree on all that the trainer reads, not only on what a resumed run must
    values = recorded(config)
    own_settings = dict(settings)
    for setting in settings_of(TrainConfig):
        if setting.name in values:
            own_settings[setting.flag] = values[setting.name]
    of_ranks = distributed.gather_objects(own_settings)
    for rank in range(1, len(of_ranks)):
        table = _differences(("setting", "rank 0", f"rank {rank}"), of_ranks[0], of_ranks[rank])
        if table:
            raise UserError(
                f"Rank {rank} was launched with settings that differ from rank 0's. Give "
                "all nodes the same flags and "
                f"files:\n{table}"
            )

    # and all of them with the run to resume
    if checkpoint is None:
        return
    table = _differences(("setting", "then", "now"), checkpoint.settings, settings)
    if table:
        raise UserError(
            f"The run in {folder} can't be resumed with other settings. Use the earlier settings"
            f"{_batch_size_for(checkpoint.settings, config)}, choose another folder, or "
            "add --overwrite to delete that "
            f"run:\n{table}"
        )


def _batch_size_for(earlier: dict[str, Any], config: RunConfig) -> str:
    """Return, for a message, how to have the rows a step of an earlier run, if they differ."""
    num_rows = int(earlier.get("rows a step", 0))
    num_processes = distributed.world_size()
    # 0: an earlier version, which did not record it
    if num_rows in (0, config.step_size(num_processes)):
        return ""
    if num_rows % num_processes:
        return (
            f" ({num_rows:,} rows a step can't be divided among {num_processes:,} processes: start "
            "another number of them)"
        )

    # accumulation stays as it is where the rows can be divided so
    rows_per_process = num_rows // num_processes
    if rows_per_process % config.gradient_accumulation_steps:
        return f" (here, --batch-size {rows_per_process} --gradient-accumulation-steps 1)"
    return f" (here, --batch-size {rows_per_process // config.gradient_accumulation_steps})"


def _differences(
    header: tuple[str, str, str], first: dict[str, Any], second: dict[str, Any]
) -> str:
    """Return a table of the values in which two dicts differ among those that both have; empty if
    they agree.
    """
    rows = [header]
    for name, value in second.items():
        if first.get(name, value) != value:
            rows.append((name, str(first[name]), str(value)))
    if len(rows) == 1:
        return ""

    # columns as wide as their longest cell
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(f"  {line}" for line in lines)


def check_steps(num_taken: int, num_total: int, folder: Path) -> None:
    """Raise a UserError if the run to resume has taken more steps than it is to have."""
    if num_taken > num_total:
        raise UserError(
            f"The run in {folder} has taken {num_taken:,} steps, and these settings ask for "
            f"{num_total:,}. Choose another "
            "folder, or add --overwrite to delete that run."
        )
