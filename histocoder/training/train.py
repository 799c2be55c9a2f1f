"""A run from its settings to a fitted model, as both scripts do it."""

from functools import partial
from pathlib import Path

import torch

from histocoder import distributed
from histocoder.checkpoints.run_folder import RunFolder
from histocoder.checkpoints.training_state import Checkpoint
from histocoder.config import FinetuneConfig, MixerConfig, RunConfig, recorded
from histocoder.data.dataset import OccupationDataset
from histocoder.data.example_files import ExampleFiles
from histocoder.data.examples import TITLES, TRAIN, VAL
from histocoder.data.key import Key, write_key
from histocoder.data.languages import own_languages
from histocoder.data.prepare import KEY_FILE
from histocoder.files import is_same_file
from histocoder.formatters import MISSING, build_formatter
from histocoder.log import log
from histocoder.model.devices import compute_deterministically
from histocoder.training.building import choose_tokenizer, fill_in, seeded_model
from histocoder.training.checks import (
    banner,
    check_launcher,
    check_machine,
    check_settings,
    notices,
    settings_to_compare,
)
from histocoder.training.data import augmenter_of, example_files, open_data
from histocoder.training.finish import finish
from histocoder.training.tracking import check_dashboards, open_trackers
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
        check_launcher(config)
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
    train_rows, val_rows = data.open(TRAIN, *({TITLES} & {*data.splits})), data.open(VAL)
    key = data.files.key or Key.from_codes({*train_rows.code_table, *val_rows.code_table} - {MISSING})
    languages = tuple(sorted({*train_rows.languages, "unk"}))
    # `prepare` has printed the notice on languages of the user's own
    own = own_languages(languages) if isinstance(config, MixerConfig) else None
    if own:
        log.info(own)
    scaled = config.for_rows(len(train_rows), distributed.world_size())
    rows = {
        f"data to {use}": f"{len(examples):,} rows ({data.fingerprint(split)})"
        for use, split, examples in (("train on", TRAIN, train_rows), ("validate on", VAL, val_rows))
    }
    settings = settings_to_compare(scaled, data.files, key, rows)
    check_settings(settings, scaled, checkpoint, run.path)

    model = seeded_model(config, data.files, checkpoint, tokenizer=tokenizer, key=key, languages=languages)
    train_data = OccupationDataset(
        train_rows,
        formatter=build_formatter(**model.config.formatter),
        classes=key.codes,
        max_len=config.max_len,
        tokenizer=tokenizer,
        pad_to=model.config.pad_to,
    )
    train_data.augmenter = augmenter_of(config, train_data)
    val_data = train_data.of(val_rows, augmenter=None)
    trainer = Trainer(model, train_data, val_data, scaled, device=device, run=run, settings=settings)
    start_step = 0 if checkpoint is None else checkpoint.state.step
    distributed.run_on_primary(partial(_begin, config, run, key, checkpoint), doing="opening the run's folder")
    described = banner(trainer, encoder=config.encoder, num_distinct=data.record["num_distinct"][TRAIN])
    for line in [*notices(trainer, config, checkpoint), *described]:
        log.info(line)
    tracker = open_trackers(config, run, start_step=start_step, system=model.config.system)
    try:
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
