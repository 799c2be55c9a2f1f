"""A run from its settings to a fitted model, as both scripts do it."""

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from histocoder import distributed, launcher
from histocoder.checkpoints.run_folder import RunFolder
from histocoder.checkpoints.training_state import (
    BEST_FOLDER,
    CHECKPOINTS_FOLDER,
    Checkpoint,
)
from histocoder.config import FinetuneConfig, MixerConfig, RunConfig, recorded
from histocoder.data.dataset import OccupationDataset
from histocoder.data.key import Key, write_key
from histocoder.data.labelled_files import LabelledFiles
from histocoder.data.prepare import KEY_FILE, with_language_column
from histocoder.data.prepared_folder import read_prepared
from histocoder.errors import UserError
from histocoder.files import is_same_file
from histocoder.log import log
from histocoder.model import MixerModel
from histocoder.model.devices import compute_deterministically, computing_dtype
from histocoder.text.languages import own_languages
from histocoder.training.adapting import is_adapted
from histocoder.training.banner import codes_not_learned, log_banner, rows_without_codes
from histocoder.training.building import seeded_model
from histocoder.training.data import (
    RunData,
    example_files,
    log_cut_descriptions,
    open_data,
    task_of,
    training_data,
)
from histocoder.training.encoded_rows import set_directions
from histocoder.training.finish import finish
from histocoder.training.resume import (
    check_repeats,
    check_settings,
    check_steps,
    settings_to_compare,
    with_earlier_defaults,
)
from histocoder.training.start import EncoderChoice, Start, choose_encoder, fill_in
from histocoder.training.tracking import open_tracker
from histocoder.training.trainer import Trainer


def train(config: FinetuneConfig | MixerConfig) -> Path:
    """Train a model; resumes from the newest checkpoint in the run's folder if there is one.

    Parameters
    ----------
    config : FinetuneConfig or MixerConfig
        The same settings as the flags of `finetune.py` and `train_mixer.py`; see
        docs/configuration.md.

    Returns
    -------
    Path
        The run's folder, which holds the model; `best/` in it holds the one that was best in
        validation.

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
    device = join(config)
    _refuse_own_start(config)
    encoder = choose_encoder(config, device)
    config = replace(config, encoder=encoder.name)
    start = Start.of(config)
    config = fill_in(config, start)
    only_prepares = False
    if isinstance(config, FinetuneConfig):
        only_prepares = config.prepare_only
        # rank 0 looks into the table; the other settings stay each rank's own, and are compared
        # later
        primary = distributed.broadcast_from_primary(
            partial(with_language_column, config), doing="reading the table"
        )
        config = replace(config, language_col=config.language_col or primary.language_col)

    with RunFolder.open(config.folder) as run:
        if only_prepares and config.overwrite:
            distributed.run_on_primary(run.refuse_model, doing="looking at the run's folder")
        files = example_files(config, start)
        if only_prepares:
            log_cut_descriptions(config)
        else:
            fit(config, files, start, run=run, device=device, encoder=encoder)
    return run.path


def _refuse_own_start(config: FinetuneConfig | MixerConfig) -> None:
    """Raise a UserError if a run would replace the model that it starts from."""
    if config.initial_checkpoint is None or not Path(config.initial_checkpoint).exists():
        return
    run = config.folder.resolve()
    initial = Path(config.initial_checkpoint).resolve()
    is_of_run = initial in (run, run / BEST_FOLDER) or initial.parent == run / CHECKPOINTS_FOLDER
    if is_of_run:
        raise UserError(
            f"--initial-checkpoint {config.initial_checkpoint} is in the run's own folder, whose "
            "model a new run replaces. Choose another --save-path."
        )


def join(config: RunConfig) -> torch.device:
    """Join the process group, check the settings that depend on it, and return the device."""
    if config.deterministic:
        compute_deterministically()
    if config.distributed and not launcher.read_launch().launched:
        script = "train_mixer" if isinstance(config, MixerConfig) else "finetune"
        raise UserError(
            "--distributed needs a launcher: torchrun --nproc_per_node=2 -m "
            f"histocoder.cli.{script} --distributed …, "
            "with the number of GPUs in place of 2."
        )
    device = distributed.start(
        device=config.device,
        grouped=config.fsdp is not None,
        local_rank=config.local_rank,
        rank_timeout=config.rank_timeout,
    )
    if config.fsdp is not None and device.type == "mps":
        raise UserError("--fsdp is for NVIDIA GPUs and CPUs; omit it, or add --device cpu.")
    # raises an error for fp16 on a CPU
    computing_dtype(config.precision, device, use_amp=config.use_amp)
    return device


def fit(
    config: FinetuneConfig | MixerConfig,
    files: dict[str, LabelledFiles],
    start: Start,
    *,
    run: RunFolder,
    device: torch.device,
    encoder: EncoderChoice,
) -> None:
    """Build the model and the data, and fit; resumes from a checkpoint if there is one."""
    checkpoint = run.load_checkpoint(config.resume, overwrite=config.overwrite)
    config = with_earlier_defaults(config, checkpoint)

    # the data, and what a model learns from them
    data = open_data(config, files, run, start)
    task = task_of(data)
    log_notices_on_data(config, data, start)

    # settings are compared before a model is built
    scaled = config.for_rows(data.num_examples(config.repeats), distributed.world_size())
    settings = data.description() | settings_to_compare(scaled, task)
    check_settings(settings, scaled, checkpoint, run.path)

    # the model, and the rows as it reads them
    model = seeded_model(config, task, start, checkpoint)
    train_data = training_data(config, model, data.to_train_on())
    if notice := rows_without_codes(train_data.examples, model.config):
        log.info(notice)
    start_step = checkpoint.state.step if checkpoint is not None else 0
    keeps_weights = False
    if checkpoint is None:
        begin_model(model, train_data, start, device)
        num_rows = len(train_data) - train_data.num_titles
        keeps_weights = is_adapted(config, start, model.config, num_rows=num_rows)
    trainer = Trainer(
        model,
        train_data,
        train_data.of(data.to_validate_on()),
        scaled,
        device=device,
        run=run,
        settings=settings,
        keeps_weights=keeps_weights,
    )
    check_steps(start_step, trainer.total_steps, run.path)

    # nothing in the run's folder is replaced before all checks are passed
    begin = partial(begin_run, run, config, checkpoint, task.key)
    distributed.run_on_primary(begin, doing="opening the run's folder")
    log_banner(config, data, start, trainer, encoder)

    # training itself
    tracker = open_tracker(config, run, start_step=start_step, system=model.config.system)
    with closing(tracker):
        if checkpoint is not None:
            log.info(f"Resuming from step {start_step} ({checkpoint.path}).")
            trainer.restore(checkpoint)
        # or its tensors would stay in memory while the run trains
        del begin, checkpoint
        trainer.fit(tracker)
    finish(config, trainer, data, initial=start if keeps_weights else None)


def log_notices_on_data(config: FinetuneConfig | MixerConfig, data: RunData, start: Start) -> None:
    """Log what a person should know of the codes and languages of the data."""
    train_rows = data.to_train_on()
    sentences = []
    if not start.keeps_heads:
        sentences.append(codes_not_learned(train_rows, data.to_validate_on()))
    # `prepare` has printed the notice on languages of a user's own table
    if isinstance(config, MixerConfig):
        sentences.append(own_languages(sorted(train_rows.languages)))
    for sentence in sentences:
        if sentence:
            log.info(sentence)


def begin_model(
    model: MixerModel, data: OccupationDataset, start: Start, device: torch.device
) -> None:
    """Let a new model keep hashes of the descriptions that it is trained on, beside those of before,
    and set the directions of a new head.
    """
    model.has_learned(torch.from_numpy(start.hashes_with(data.examples)))
    if not start.keeps_heads:
        set_directions(model, data, device)


def begin_run(
    run: RunFolder, config: FinetuneConfig | MixerConfig, checkpoint: Checkpoint | None, key: Key
) -> None:
    """Write a run's settings and its key into its folder."""
    settings = recorded(config)
    if isinstance(config, FinetuneConfig) and config.share_val is None:
        # data that were prepared before may have another share than the default
        settings["share_val"] = read_prepared(run.path).get("settings", {}).get("share_val")
    if checkpoint is None and not config.overwrite:
        check_repeats(config, run)
    run.begin(settings, checkpoint)
    if config.key is None or not is_same_file(config.key, run.path / KEY_FILE):
        write_key(run.path / KEY_FILE, key)
