"""From the settings of a run to a fitted model: what both scripts do."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from histocoder import distributed
from histocoder.checkpoints.model_files import CONFIG_FILE, initial_weights, read_model_config
from histocoder.checkpoints.resume import (
    BATCH_SETTINGS,
    mark_begun,
    marking_interruptions,
    open_checkpoint,
    refuse_other_settings,
    stay_interrupted,
)
from histocoder.checkpoints.run_folder import (
    ARGS_FILE,
    CACHE_FOLDER,
    LOG_FILE,
    clear_run,
    refuse_others_files,
    run_folder,
)
from histocoder.checkpoints.training_state import (
    BEST_FOLDER,
    CHECKPOINTS_FOLDER,
    Checkpoint,
    checkpoint_bytes,
    drop_checkpoints_after,
)
from histocoder.config import NUM_GREEDY, FinetuneConfig, MixerConfig, RunConfig, TrainConfig, recorded, settings_of
from histocoder.data.cache import ExampleArrays
from histocoder.data.dataset import OccupationDataset
from histocoder.data.examples import ExampleFiles
from histocoder.data.key import Key, write_key
from histocoder.data.languages import is_language
from histocoder.distributed.launch import node_name
from histocoder.distributed.nodes import refuse_differences
from histocoder.files import is_same_file, remove_leftovers, replacing
from histocoder.formatters import MISSING, formatter_from_config
from histocoder.inference.descriptions import not_in_table
from histocoder.model import MixerModel
from histocoder.model.devices import compute_deterministically, device_name
from histocoder.model.precision import computing_dtype, precision_name
from histocoder.training.batch_size import find_batch_size
from histocoder.training.building import choose_tokenizer, seeded_model
from histocoder.training.console import RunFacts, banner, say
from histocoder.training.dashboards import check_dashboards, open_tensorboard, open_wandb, run_name
from histocoder.training.data import augmenter_of, example_files, open_data
from histocoder.training.out_of_memory import explaining_out_of_memory
from histocoder.training.recipes import fill_in
from histocoder.training.settings import check_machine, what_to_agree_on
from histocoder.training.tracking import CsvLog, NullRun, Tee, Tracker
from histocoder.training.trainer import Trainer, check_batch_size

REFIT_ROWS = 100_000
"""Rows up to which a model is fitted to its validation data as well, in the end."""
REPORT_ROWS = 5_000
"""Validation rows that the report at the end of a run is about, at most."""


def train(config: FinetuneConfig | MixerConfig) -> Path:
    """Train a model; resumes from the newest checkpoint in the run's folder if there is one.

    Parameters
    ----------
    config : FinetuneConfig or MixerConfig
        The same settings as the flags of `finetune.py` and `train_mixer.py`; see docs/configuration.md.

    Returns
    -------
    Path
        The run's folder, which holds the model; `best/` in it holds the one that was best in validation.

    Raises
    ------
    UserError
        For a user's mistake, with what to do about it.
    Interrupted
        Where the run was asked to stop; its state is saved.

    Examples
    --------
    >>> from histocoder import Coder, FinetuneConfig, train
    >>> config = FinetuneConfig(dataset="my.csv", target_cols=("hisco_1",), encoder="ngram", save_path="out")
    >>> folder = train(config)  # doctest: +SKIP
    >>> Coder.from_pretrained(folder / "best").predict(["farmer"], "en")  # doctest: +SKIP
    """
    config = fill_in(config)
    device, folder = start(config), config.folder
    with run_folder(folder), marking_interruptions(folder):
        refuse_others_files(folder)
        train_files, val_files = example_files(config)
        if not (isinstance(config, FinetuneConfig) and config.prepare_only):
            fit(config, train_files, val_files, device=device)
    return folder


def start(config: RunConfig) -> torch.device:
    """Join the other processes, if any, and choose a device; mistakes in settings are named before any work."""
    if config.deterministic:
        compute_deterministically()
    device = distributed.start(
        device=config.device,
        required=config.distributed,
        grouped=config.fsdp is not None,
        local_rank=config.local_rank,
        rank_timeout=config.rank_timeout,
    )
    check_machine(config, device)
    check_dashboards(wandb=config.log_wandb, tensorboard=config.log_tensorboard)
    return device


def open_folder(config: FinetuneConfig | MixerConfig, *, key: Key, start_step: int) -> None:
    """Prepare the run's folder, on rank 0 and after all checks.

    Writes `args.yaml` and `key.csv`, and deletes an earlier run that is not resumed, or what it left beyond the
    checkpoint that is.
    """
    folder = config.folder
    if start_step == 0 and (folder / ARGS_FILE).is_file():
        clear_run(folder)
    drop_checkpoints_after(folder, start_step)
    for part in (folder, folder / CHECKPOINTS_FOLDER, folder / BEST_FOLDER, folder / CACHE_FOLDER):
        remove_leftovers(part)
    mark_begun(folder)
    with replacing(folder / ARGS_FILE) as temporary:
        temporary.write_text(yaml.safe_dump(recorded(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
    if config.key is None or not is_same_file(config.key, folder / "key.csv"):
        write_key(folder / "key.csv", key)


def fit(
    config: FinetuneConfig | MixerConfig, train_files: ExampleFiles, val_files: ExampleFiles, *, device: torch.device
) -> None:
    """Build the model and the data that the settings describe, and fit; resumes from a checkpoint if there is one."""
    folder = config.folder
    stay_interrupted(folder)
    _check_together(config, folder)
    starts_over = config.overwrite and config.resume == "auto"
    checkpoint = open_checkpoint(folder, "never" if starts_over else config.resume)
    tokenizer = choose_tokenizer(config, checkpoint)
    train_arrays, val_arrays = open_data(config, [train_files, val_files], folder, tokenizer)
    for notice in train_arrays.notices + val_arrays.notices:
        say(notice)
    key = train_files.key or Key.from_codes({*train_arrays.code_table, *val_arrays.code_table} - {MISSING})
    languages, model_config = _languages_of(train_arrays), None if checkpoint is None else checkpoint.model_config
    build = partial(seeded_model, config, train_files, model_config, tokenizer=tokenizer, key=key, languages=languages)
    if config.auto_batch_size:
        size = _fitting_batch_size(config, checkpoint, build, device, num_rows=len(train_arrays))
        config = replace(config, batch_size=size, auto_batch_size=False)  # in args.yaml stands what was found
    if config.tokens_per_batch is None:
        check_batch_size(config, len(train_arrays))
    scaled = config.for_rows(len(train_arrays), distributed.world_size())
    settings = what_to_agree_on(scaled, train_files, train_arrays, val_arrays, key)
    _check_settings(settings, scaled, checkpoint, folder)

    model = build()
    common: dict[str, Any] = {
        "formatter": formatter_from_config(model.config.formatter),
        "classes": key.codes,
        "max_len": config.max_len,
        "pad_to": model.config.pad_to,
    }
    noise = augmenter_of(config, train_arrays)
    train_data = OccupationDataset(train_arrays, augmenter=noise, **common)
    val_data = OccupationDataset(val_arrays, **common)
    explaining = partial(explaining_out_of_memory, scaled, device, max_len=config.max_len)
    with explaining():
        trainer = Trainer(
            model,
            train_data,
            val_data,
            scaled,
            loader=scaled,
            device=device,
            folder=folder,
            settings=settings,
        )

    start_step = checkpoint.state.step if checkpoint is not None else 0
    distributed.run_on_primary(
        lambda: open_folder(config, key=key, start_step=start_step), doing="opening the run's folder"
    )
    warn_of_a_small_disk(folder, model)
    if checkpoint is not None:
        _say_resumed(config, checkpoint)
    for line in banner(_facts(scaled, trainer)):
        say(line)
    tracker = _tracker(config, folder, start_step, model.config.system)
    try:
        with explaining():
            if checkpoint is not None:
                trainer.restore(checkpoint)
            del checkpoint  # or all that was read would stay in memory while the run trains
            trainer.fit(tracker)
        if config.wandb_artifact:
            tracker.keep_model(folder)
    finally:
        tracker.close()
    _finish(config, trainer, train_files, val_files, folder=folder, device=device)


def _finish(
    config: FinetuneConfig | MixerConfig,
    trainer: Trainer,
    train_files: ExampleFiles,
    val_files: ExampleFiles,
    *,
    folder: Path,
    device: torch.device,
) -> None:
    """Fit the experts of a trained model, and report on it."""
    if not config.no_experts:
        distributed.run_on_primary(
            lambda: experts(folder, trainer, val_files, device, config.precision), doing="fitting the experts"
        )
    if not config.no_report:
        distributed.run_on_primary(
            lambda: report(folder, train_files, val_files, len(trainer.val_data), device, config.precision),
            doing="writing the report",
        )
    if isinstance(config, FinetuneConfig) and _refits(config, trainer, folder):
        refit(config, trainer, train_files, val_files, folder=folder)
    say(f"Saved in {folder}: {CONFIG_FILE} and model.safetensors (the last), best/ (most often right in validation).")


def _languages_of(arrays: ExampleArrays) -> tuple[str, ...]:
    """Return the languages of the data and "unk", with a notice on those that histocoder does not know."""
    languages = tuple(sorted({*arrays.languages, "unk"}))
    if strange := [lang for lang in languages if not is_language(lang)]:
        say(not_in_table(strange))
    return languages


def _check_together(config: RunConfig, folder: Path) -> None:
    """Raise a UserError where processes can't do together what they do before all settings are known, and after."""
    refuse_differences({"--auto-batch-size": config.auto_batch_size, "--fsdp-state-dict": config.fsdp_state_dict})
    if config.fsdp_state_dict == "sharded" and distributed.world_size() > 1:
        from histocoder.checkpoints.sharded import check_folder  # here, since it takes a while to import

        check_folder(folder)


def _check_settings(settings: dict[str, Any], config: RunConfig, checkpoint: Checkpoint | None, folder: Path) -> None:
    """Raise a UserError if settings differ between ranks, or from those of the checkpoint to resume from."""
    shared = (setting for setting in settings_of(TrainConfig) if setting.options.is_recorded)
    refuse_differences(settings | {setting.flag: getattr(config, setting.name) for setting in shared})
    if checkpoint is not None:
        refuse_other_settings(
            checkpoint, settings, folder, gradient_accumulation_steps=config.gradient_accumulation_steps
        )


def _say_resumed(config: RunConfig, checkpoint: Checkpoint) -> None:
    say(f"Resuming from step {checkpoint.state.step} ({checkpoint.path}).")
    if config.initial_checkpoint is not None:
        flags = "--initial-checkpoint and --only-encoder have" if config.only_encoder else "--initial-checkpoint has"
        say(f"Notice: {flags} no effect on a run that resumes; --resume never starts a new run from those weights.")


def _fitting_batch_size(
    config: RunConfig,
    checkpoint: Checkpoint | None,
    build: Callable[[], MixerModel],
    device: torch.device,
    *,
    num_rows: int,
) -> int:
    """Return the batch size of the resumed run, else the largest that fits."""
    if checkpoint is not None and (rows := checkpoint.settings.get(BATCH_SETTINGS["--batch-size"])) is not None:
        return max(rows // config.num_parts(distributed.world_size()), 1)
    with explaining_out_of_memory(config, device, max_len=config.max_len):
        size, used = find_batch_size(build, config, device, num_rows=num_rows)
    say(f"Batches of {size} rows fit: a step takes at most {used:.0%} of the memory available.")
    return size


def experts(folder: Path, trainer: Trainer, val_files: ExampleFiles, device: torch.device, precision: str) -> None:
    """Fit what is fitted once a model is trained, for the last one and the best; rank 0's part."""
    from histocoder.training.experts import (  # here, since scikit-learn takes a second to import
        fit_experts,
        fit_linear_expert,
    )

    expert = fit_linear_expert(trainer.train_data, num_classes=trainer.model.config.num_classes)
    examples = val_files.sample(NUM_GREEDY, of=len(trainer.val_data), seed=0)
    settings: dict[str, Any] = {"num_train": len(trainer.train_data), "device": device, "precision": precision}
    fit_experts(folder, expert, examples, **settings)
    if not read_model_config(folder / BEST_FOLDER).fitted_to_validation:  # else a run before has done all
        say(f"{BEST_FOLDER}/: {fit_experts(folder / BEST_FOLDER, expert, examples, **settings)}")


def _refits(config: FinetuneConfig, trainer: Trainer, folder: Path) -> bool:
    """Return whether the best model is to learn from the validation data as well: where rows are few, each tells."""
    num_rows = len(trainer.train_data) + len(trainer.val_data)
    if config.no_refit or num_rows > REFIT_ROWS or len(set(distributed.gather_texts(node_name()))) > 1:
        return False
    return not read_model_config(folder / BEST_FOLDER).fitted_to_validation


def refit(
    config: RunConfig, trainer: Trainer, train_files: ExampleFiles, val_files: ExampleFiles, *, folder: Path
) -> None:
    """Fit the best model to the validation data as well, now that these have served; all processes call this."""
    best = folder / BEST_FOLDER
    files = replace(train_files, paths=train_files.paths + val_files.paths)
    say(f"All is measured: {BEST_FOLDER}/ learns from the validation data too (--no-refit leaves that out).")
    arrays = open_data(config, [train_files, val_files, files], folder, trainer.model.tokenizer)[-1]
    data = trainer.train_data.of(arrays, augmenter=augmenter_of(config, arrays))
    weights, _ = initial_weights(best)
    trainer.refit(data, {name: value for name, value in weights.items() if not name.startswith("linear_expert.")})
    weights = trainer.learner.weights()

    def save() -> None:
        from histocoder.training.experts import fit_linear_expert, save_refitted

        num_classes = trainer.model.config.num_classes
        expert = None if config.no_experts else fit_linear_expert(data, num_classes=num_classes)
        save_refitted(best, weights, expert)

    distributed.run_on_primary(save, doing="saving the model")
    say(
        f"{BEST_FOLDER}/ is now trained on all {len(data):,} rows, including the {len(trainer.val_data):,} of "
        f"validation; the model in {folder} itself has not seen those."
    )


def report(
    folder: Path,
    train_files: ExampleFiles,
    val_files: ExampleFiles,
    num_val: int,
    device: torch.device,
    precision: str,
) -> None:
    """Write `report.html` on the model as it was saved last, on the validation data or a sample; rank 0's part."""
    from histocoder.evaluation.baselines import AFTER_TRAINING, RIGHT_COL, Baselines
    from histocoder.evaluation.evaluate import evaluate, times_seen  # here, since drawing takes a second to import
    from histocoder.evaluation.report import write_report
    from histocoder.evaluation.summary import comparison, summary
    from histocoder.inference.coder import Coder
    from histocoder.inference.known import Known

    coder = Coder.from_pretrained(folder, str(device), precision=precision)
    examples = val_files.sample(REPORT_ROWS, of=num_val, seed=0)
    baselines = Baselines(examples, Known(languages=coder.model.config.languages), max_size=AFTER_TRAINING)
    texts_seen, codes_seen = times_seen(baselines.watch(train_files.chunks()), examples.texts)
    found = evaluate(coder, examples, texts_seen=texts_seen, codes_seen=codes_seen)
    found.metrics["baselines"] = baselines.compare(found.rows[RIGHT_COL].to_numpy())
    path = write_report(folder, found, coder, title=folder.resolve().name, logs=folder / LOG_FILE)
    for line in [*summary(found.metrics)[:2], *comparison(found.metrics)]:
        say(line)
    say(f"The report is {path}.")


def _tracker(config: RunConfig, folder: Path, start_step: int, system: str) -> Tracker:
    if not distributed.is_primary():
        return NullRun()
    trackers: list[Tracker] = [CsvLog(folder, start_step=start_step)]
    if config.log_wandb:
        name = config.run_name or run_name(config.encoder, system, world_size=distributed.world_size())
        trackers.append(
            open_wandb(
                folder,
                project=config.wandb_project_name,
                name=name,
                config=recorded(config),
                uploads_model=config.wandb_artifact,
            )
        )
    if config.log_tensorboard:
        trackers.append(open_tensorboard(folder, start_step=start_step))
    return Tee(*trackers)


def warn_of_a_small_disk(folder: Path, model: MixerModel) -> None:
    """Two checkpoints must fit: the last one, and the one that is being written."""
    needed, free = 2 * checkpoint_bytes(model), shutil.disk_usage(folder).free
    if free < needed:
        say(
            f"Warning: two checkpoints take {needed / 1e9:,.1f} GB, and {folder} has room for {free / 1e9:,.1f} GB. "
            "Saving may fail."
        )


def _facts(config: RunConfig, trainer: Trainer) -> RunFacts:
    """Return what the banner tells; all ranks ask for it together."""
    model, device = trainer.model, trainer.device
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return RunFacts(
        script=Path(sys.argv[0]).name,
        encoder=config.encoder,
        num_trained=trained,
        num_frozen=sum(p.numel() for p in model.parameters()) - trained,
        num_train=len(trainer.train_data),
        num_distinct=trainer.train_data.arrays.num_distinct,
        num_val=len(trainer.val_data),
        num_codes=model.config.num_classes,
        devices=tuple(distributed.gather_texts(device_name(device))),
        num_nodes=len(set(distributed.gather_texts(node_name()))),
        backend=distributed.backend(),
        strategy=trainer.learner.strategy.name,
        precision=precision_name(computing_dtype(config.precision, device, use_amp=config.use_amp)),
        batch_size=config.tokens_per_batch or config.batch_size,
        batch_unit="rows" if config.tokens_per_batch is None else "positions",
        accumulation=config.gradient_accumulation_steps,
        step_size=config.step_size(distributed.world_size()),
        num_steps=trainer.total_steps,
        num_epochs=config.num_epochs if config.max_steps is None else None,
    )
