"""A run from its settings to a fitted model, as both scripts do it."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from histocoder import distributed
from histocoder.checkpoints.run_folder import RunFolder
from histocoder.checkpoints.training_state import Checkpoint
from histocoder.config import FinetuneConfig, MixerConfig, RunConfig, TrainConfig, recorded, settings_of
from histocoder.data.dataset import OccupationDataset
from histocoder.data.example_files import ExampleFiles
from histocoder.data.examples import TRAIN, VAL
from histocoder.data.key import Key, write_key
from histocoder.data.languages import own_languages
from histocoder.data.prepare import KEY_FILE
from histocoder.files import is_same_file
from histocoder.formatters import MISSING, build_formatter
from histocoder.log import log
from histocoder.model.devices import compute_deterministically
from histocoder.training.banner import banner, say_resumed
from histocoder.training.building import choose_tokenizer, seeded_model
from histocoder.training.checks import (
    check_batch_size,
    check_launcher,
    check_machine,
    refuse_differences,
    refuse_other_settings,
    settings_to_compare,
)
from histocoder.training.dashboards import check_dashboards, open_trackers
from histocoder.training.data import augmenter_of, example_files, open_data
from histocoder.training.finish import finish
from histocoder.training.out_of_memory import explaining_out_of_memory
from histocoder.training.recipes import fill_in
from histocoder.training.trainer import Trainer


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
    device = start(config)
    with RunFolder.open(config.folder) as run:
        files = example_files(config)
        if not (isinstance(config, FinetuneConfig) and config.prepare_only):
            fit(config, files, run=run, device=device)
    return run.path


def start(config: RunConfig) -> torch.device:
    """Join the process group, check the settings, and return the device."""
    if config.deterministic:
        compute_deterministically()
    if config.distributed:
        check_launcher()
    device = distributed.start(
        device=config.device,
        grouped=config.fsdp is not None,
        local_rank=config.local_rank,
        rank_timeout=config.rank_timeout,
    )
    check_machine(config, device)
    check_dashboards(config)
    return device


def fit(
    config: FinetuneConfig | MixerConfig, files: dict[str, ExampleFiles], *, run: RunFolder, device: torch.device
) -> None:
    """Build the model and the data, and fit; resumes from a checkpoint if there is one."""
    checkpoint = run.checkpoint(config.resume, overwrite=config.overwrite)
    tokenizer = choose_tokenizer(config, checkpoint)
    data = open_data(config, files, run)
    train_rows, val_rows = data.open(TRAIN), data.open(VAL)
    for notice in data.record["notices"]:
        log.info(notice)
    key = data.files.key or Key.from_codes({*train_rows.code_table, *val_rows.code_table} - {MISSING})
    languages = tuple(sorted({*train_rows.languages, "unk"}))
    if isinstance(config, MixerConfig) and (notice := own_languages(languages)):  # `prepare` prints it otherwise
        log.info(notice)
    model_config = None if checkpoint is None else checkpoint.model_config
    build = partial(seeded_model, config, data.files, model_config, tokenizer=tokenizer, key=key, languages=languages)
    check_batch_size(config, len(train_rows))
    scaled = config.for_rows(len(train_rows), distributed.world_size())
    numbers = {"train": (len(train_rows), data.fingerprint(TRAIN)), "val": (len(val_rows), data.fingerprint(VAL))}
    settings = settings_to_compare(scaled, data.files, key, **numbers)
    _check_settings(settings, scaled, checkpoint, run.path)

    model = build()
    train_data = OccupationDataset(
        train_rows,
        formatter=build_formatter(**model.config.formatter),
        classes=key.codes,
        max_len=config.max_len,
        cache_dir=Path(config.cache_dir) if config.cache_dir else run.cache,
        tokenizer=tokenizer,
        pad_to=model.config.pad_to,
    )
    train_data.augmenter = augmenter_of(config, train_data)
    explaining = partial(explaining_out_of_memory, scaled, device, max_len=config.max_len)
    with explaining():
        val_data = train_data.of(val_rows, augmenter=None)
        trainer = Trainer(model, train_data, val_data, scaled, loader=scaled, device=device, run=run, settings=settings)
    start_step = 0 if checkpoint is None else checkpoint.state.step
    distributed.run_on_primary(partial(_begin, config, run, key, checkpoint), doing="opening the run's folder")
    if checkpoint is not None:
        say_resumed(config, checkpoint)
    for line in banner(trainer, encoder=config.encoder, num_distinct=data.record["num_distinct"][TRAIN]):
        log.info(line)
    tracker = open_trackers(config, run, start_step=start_step, system=model.config.system)
    try:
        with explaining():
            if checkpoint is not None:
                trainer.restore(checkpoint)
            del checkpoint  # or its tensors would stay in memory while the run trains
            trainer.fit(tracker)
        if config.wandb_artifact:
            tracker.keep_model(run.path)
    finally:
        tracker.close()
    finish(config, trainer, data)


def _begin(config: FinetuneConfig | MixerConfig, run: RunFolder, key: Key, checkpoint: Checkpoint | None) -> None:
    """Prepare the run's folder, on rank 0 and after all checks."""
    run.begin(recorded(config), checkpoint)
    if config.key is None or not is_same_file(config.key, run.path / KEY_FILE):
        write_key(run.path / KEY_FILE, key)


def _check_settings(settings: dict[str, Any], config: RunConfig, checkpoint: Checkpoint | None, folder: Path) -> None:
    """Raise a UserError if settings differ between ranks, or from those of the checkpoint to resume from."""
    shared = (setting for setting in settings_of(TrainConfig) if setting.options.is_recorded)
    refuse_differences(settings | {setting.flag: getattr(config, setting.name) for setting in shared})
    if checkpoint is not None:
        refuse_other_settings(
            checkpoint, settings, folder, gradient_accumulation_steps=config.gradient_accumulation_steps
        )
