"""A run from its settings to a fitted model, as both scripts do it."""

import hashlib
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from histocoder import distributed
from histocoder.checkpoints.run_folder import RunFolder
from histocoder.checkpoints.training_state import Checkpoint
from histocoder.config import (
    FinetuneConfig,
    MixerConfig,
    RunConfig,
    TrainConfig,
    recorded,
    settings_of,
    without_effect,
)
from histocoder.data.dataset import OccupationDataset
from histocoder.data.examples import SEEN, TITLES, TRAIN, VAL, Examples
from histocoder.data.hashes import hashes_of
from histocoder.data.key import Key, write_key
from histocoder.data.labelled_files import LabelledFiles
from histocoder.data.prepare import KEY_FILE, identifiers_notice, with_language_column
from histocoder.errors import UserError, counted
from histocoder.evaluation.summary import FEW_TEXTS, too_few
from histocoder.files import is_same_file
from histocoder.formatters import MISSING, build_formatter
from histocoder.log import log
from histocoder.model import MixerModel
from histocoder.model.devices import (
    compute_deterministically,
    computing_dtype,
    device_name,
    precision_name,
)
from histocoder.tables.table import fingerprint
from histocoder.text.languages import own_languages
from histocoder.training.building import choose_encoder, fill_in, seeded_model, trained_before
from histocoder.training.data import (
    RunData,
    augmenter_of,
    cut_notice,
    example_files,
    log_cut_descriptions,
    open_data,
)
from histocoder.training.encoded_rows import set_directions
from histocoder.training.finish import finish
from histocoder.training.tracking import open_tracker
from histocoder.training.trainer import Trainer

_AnyConfig: TypeAlias = FinetuneConfig | MixerConfig
MOST_CATEGORIES, FEW_ROWS = (
    1_000,
    5,
)  # of a column of attributes; rows of a category that is hardly learned


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
    device = start(config)
    encoder = choose_encoder(config, device)
    config = fill_in(replace(config, encoder=encoder.name))
    if isinstance(config, FinetuneConfig):
        # rank 0 looks into the table; the other settings stay each rank's own, and are compared
        # later
        chosen = distributed.run_on_primary(
            partial(with_language_column, config), doing="reading the table"
        )
        language_col = distributed.broadcast(None if chosen is None else chosen.language_col)
        config = replace(config, language_col=config.language_col or language_col)
    with RunFolder.open(config.folder) as run:
        only_prepares = isinstance(config, FinetuneConfig) and config.prepare_only
        if only_prepares and config.overwrite:
            distributed.run_on_primary(run.refuse_model, doing="looking at the run's folder")
        files = example_files(config)
        if only_prepares:
            log_cut_descriptions(config)
        else:
            fit(config, files, run=run, device=device, why_encoder=encoder.reason)
    return run.path


def start(config: RunConfig) -> torch.device:
    """Join the process group, check the settings, and return the device."""
    if config.deterministic:
        compute_deterministically()
    if config.distributed and not distributed.read_launch().launched:
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
    computing_dtype(
        config.precision, device, use_amp=config.use_amp
    )  # raises an error for fp16 on a CPU
    return device


def fit(
    config: FinetuneConfig | MixerConfig,
    files: dict[str, LabelledFiles],
    *,
    run: RunFolder,
    device: torch.device,
    why_encoder: str = "",
) -> None:
    """Build the model and the data, and fit; resumes from a checkpoint if there is one."""
    checkpoint = run.checkpoint(config.resume, overwrite=config.overwrite)
    config = _as_begun(config, checkpoint)

    # the data, and what follows from them
    data = open_data(config, files, run)
    splits = (TRAIN, TITLES) if TITLES in data.splits else (TRAIN,)
    train_rows = data.open(*splits)
    val_rows = data.to_validate_on()
    all_val_rows = data.open(VAL, SEEN)
    key = data.files.key or Key.from_codes(
        {*train_rows.code_table, *all_val_rows.code_table} - {MISSING}
    )
    attributes = attribute_categories((train_rows, all_val_rows))
    languages = tuple(sorted({*train_rows.languages, "unk"}))
    # `prepare` has printed the notice on languages of the user's own
    own = own_languages(languages) if isinstance(config, MixerConfig) else ""
    for notice in filter(None, (codes_not_learned(train_rows, val_rows), own)):
        log.info(notice)

    # settings are compared before a model is built
    num_examples = (
        data.record["num_distinct"][TRAIN] if config.repeats == "once" else len(train_rows)
    )
    scaled = config.for_rows(num_examples, distributed.world_size())
    rows = {
        f"data to {use}": f"{len(examples):,} rows ({data.fingerprint(split)})"
        for use, split, examples in (
            ("train on", TRAIN, train_rows),
            ("validate on", VAL, val_rows),
        )
    }
    settings = rows | settings_to_compare(scaled, data.files, key)
    check_settings(settings, scaled, checkpoint, run.path)

    model = seeded_model(
        config, data.files, checkpoint, key=key, languages=languages, attributes=attributes
    )
    if checkpoint is None:
        record_descriptions(model, train_rows, before=trained_before(config))
    train_data = _dataset(config, model, train_rows, key)
    val_data = train_data.of(val_rows, augmenter=None)
    if checkpoint is None and (config.initial_checkpoint is None or config.only_encoder):
        set_directions(model, train_data, device)
    trainer = Trainer(
        model, train_data, val_data, scaled, device=device, run=run, settings=settings
    )
    start_step = 0 if checkpoint is None else checkpoint.state.step
    check_steps(start_step, trainer.total_steps, run.path)

    # nothing in the run's folder is replaced before all checks are passed
    def begin() -> None:
        """Prepare the run's folder, after all checks."""
        run.begin(recorded(config), checkpoint)
        if config.key is None or not is_same_file(config.key, run.path / KEY_FILE):
            write_key(run.path / KEY_FILE, key)

    distributed.run_on_primary(begin, doing="opening the run's folder")
    encoder = f"{config.encoder}: {why_encoder}" if why_encoder else config.encoder
    sentences = notices(config, data, trainer)
    log_banner(
        trainer, encoder=encoder, num_distinct=data.record["num_distinct"], notices=sentences
    )

    # training itself
    tracker = open_tracker(config, run, start_step=start_step, system=model.config.system)
    try:
        if checkpoint is not None:
            log.info(f"Resuming from step {start_step} ({checkpoint.path}).")
            trainer.restore(checkpoint)
        checkpoint = None  # or its tensors would stay in memory while the run trains
        trainer.fit(tracker)
    finally:
        tracker.close()
    finish(config, trainer, data)


def _as_begun(config: _AnyConfig, checkpoint: Checkpoint | None) -> _AnyConfig:
    """Return settings with what a checkpoint of an earlier version was trained with, where defaults
    have changed.
    """
    if checkpoint is None:
        return config
    if "--repeats" not in checkpoint.settings:
        config = replace(config, repeats="all", label_smoothing=0.0, flat_head="linear")
    if "text_normalization" in (config.by_recipe or ()):
        config = replace(config, text_normalization=checkpoint.model_config.text_normalization)
    return config


def _dataset(
    config: FinetuneConfig | MixerConfig, model: MixerModel, train_rows: Examples, key: Key
) -> OccupationDataset:
    """Return the training rows as a model reads them, altered as the settings say."""
    dataset = OccupationDataset(
        train_rows,
        formatter=build_formatter(**model.config.formatter),
        classes=key.codes,
        max_len=config.max_len,
        attributes=model.config.attributes,
        tokenizer=model.tokenizer,
        pad_to=model.config.pad_to,
        once=config.repeats == "once",
    )
    dataset.augmenter = augmenter_of(config, dataset)
    return dataset


def record_descriptions(
    model: MixerModel, train_rows: Examples, *, before: np.ndarray | None
) -> None:
    """Let a model keep hashes of the descriptions that it is trained on, and of those that it was
    trained on before.
    """
    hashes = hashes_of(train_rows)
    if before is not None:
        hashes = np.concatenate([hashes, before])
    model.has_learned(torch.from_numpy(hashes))


def notices(config: FinetuneConfig | MixerConfig, data: RunData, trainer: Trainer) -> list[str]:
    """Return what a person should know before a run trains, each in a sentence or two."""
    train_data, val_data, model_config = trainer.train_data, trainer.val_data, trainer.model.config
    unit = "characters" if train_data.tokenizer.reads_characters else "tokens"
    found = [
        seen_notice(config, data),
        cut_notice(train_data.num_cut + val_data.num_cut, config.max_len, unit),
    ]
    if isinstance(config, MixerConfig):  # `prepare` has looked at a user's table
        found.append(
            identifiers_notice(model_config.num_classes, len(train_data), config.columns[0])
        )
    with_workers = replace(config, num_workers=trainer.train_loader.num_workers)
    found += [f"Notice: {sentence}" for sentence in without_effect(with_workers, model_config)]
    return [notice for notice in found if notice is not None]


def seen_notice(config: RunConfig, data: RunData) -> str | None:
    """Return a notice if the model has, or may have, learned from descriptions that it is validated
    on.
    """
    if num_rows := len(data.open(SEEN)):
        consequence = "There are too few others to choose a model by, so accuracy is too high."
        if data.has_new:
            consequence = (
                "The others alone choose and judge the model; the report has both accuracies."
            )
        descriptions = counted(data.record["num_distinct"][SEEN], "description", "descriptions")
        return (
            f"Notice: {num_rows:,} of {len(data.open(VAL, SEEN)):,} validation rows "
            f"({descriptions}) are of "
            f"descriptions in the training data, or in those of the initial model. {consequence}"
        )
    if config.initial_checkpoint is not None and trained_before(config) is None:
        return (
            f"Notice: {config.initial_checkpoint} does not record what it was trained on. "
            "If that is in these "
            "validation data, accuracy is too high."
        )
    return None


def codes_not_learned(train_rows: Examples, val_rows: Examples) -> str:
    """Return a notice if validation rows have a code that no training row has; an empty text
    otherwise.
    """
    learned = {*train_rows.code_table, MISSING}
    codes = [code for code in val_rows.code_table if code not in learned]
    if not codes:
        return ""
    is_new = np.array(
        [False, *(code not in learned for code in val_rows.code_table)]
    )  # index 0: no code
    num_rows = int(is_new[val_rows.code_index].any(axis=1).sum())
    consequence = "so these rows count as wrong."
    if 2 * num_rows > len(val_rows):
        consequence = "so its accuracy is low. Add rows with them."
    more = ", …" if codes[5:] else ""
    return (
        f"Notice: {counted(num_rows, 'validation row has', 'validation rows have')} a code "
        "that no training row has, "
        f"of {len(val_rows):,}: {', '.join(codes[:5])}{more}. The model can't learn these "
        f"codes, {consequence}"
    )


def attribute_categories(parts: Sequence[Examples]) -> dict[str, tuple[str, ...]]:
    """Return the categories of each column of attributes, however rare, and say which hardly any
    row has.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name in parts[0].attributes:
        counts = Counter(label for part in parts for label in part.attributes[name].to_pylist())
        found[name] = tuple(sorted(filter(None, counts)))
        if not 0 < len(found[name]) <= MOST_CATEGORIES:
            raise UserError(
                f"The column {name!r} has "
                f"{counted(len(found[name]), 'category', 'categories')}; a column of "
                f"--attribute-cols has 1 to {MOST_CATEGORIES:,}."
            )
        rare = [label for label in found[name] if counts[label] < FEW_ROWS]
        log.info(
            (
                f"{name}: {counted(len(found[name]), 'category', 'categories')}, and none in "
                f"{counts['']:,} rows"
            )
            + f"; rarely predicted, with fewer than {FEW_ROWS} rows: {', '.join(rare[:10])}"
            * bool(rare)
        )
    return found


def settings_to_compare(config: RunConfig, files: LabelledFiles, key: Key) -> dict[str, Any]:
    """Return what a resumed run must agree on beside its rows: form of the data, `fixed` settings,
    rows of a step.

    Learning rates in `config` are scaled; `files` are the training files.
    """
    form = files.formatter.to_config()
    values: dict[str, Any] = {
        "codes": (
            f"{len(key.codes)} ({hashlib.sha256('&'.join(key.codes).encode()).hexdigest()[:8]})"
        ),
        "columns": ", ".join((files.input_col, files.language_col, *files.target_cols)),
        "attributes": ", ".join(files.attribute_cols),
        "formatter": ", ".join(
            f"{name} {form[name]}" for name in form if name != "labels"
        ),  # which are the codes
        "rows a step": config.step_size(distributed.world_size()),
    }
    for setting in settings_of(type(config)):
        if setting.resume:
            value = getattr(config, setting.name)
            is_file = setting.resume == "content" and value is not None
            values[setting.flag] = fingerprint(value)[:8] if is_file else value
    return values


def check_settings(
    settings: dict[str, Any], config: RunConfig, checkpoint: Checkpoint | None, folder: Path
) -> None:
    """Raise a UserError, on every rank, if settings differ between ranks, or from those of the
    checkpoint to resume.

    Settings that an earlier histocoder did not record are assumed to agree.
    """
    shared = {setting.name for setting in settings_of(TrainConfig)}
    mine = settings | {
        f"--{name.replace('_', '-')}": v for name, v in recorded(config).items() if name in shared
    }
    first, *others = distributed.gather_objects(mine)
    for rank, theirs in enumerate(others, start=1):
        if table := _differences(("setting", "rank 0", f"rank {rank}"), first, theirs):
            raise UserError(
                f"Rank {rank} was launched with settings that differ from rank 0's. Give "
                "all nodes the same flags and "
                f"files:\n{table}"
            )
    if checkpoint and (
        table := _differences(("setting", "then", "now"), checkpoint.settings, settings)
    ):
        raise UserError(
            f"The run in {folder} can't be resumed with other settings. Use the earlier settings"
            f"{_batch_size_for(checkpoint.settings, config)}, choose another folder, or "
            "add --overwrite to delete that "
            f"run:\n{table}"
        )


def _batch_size_for(earlier: dict[str, Any], config: RunConfig) -> str:
    """Return, for a message, how to have the rows a step of an earlier run, if they differ."""
    rows, processes = int(earlier.get("rows a step", 0)), distributed.world_size()
    if rows in (0, config.step_size(processes)):
        return ""
    if rows % (processes * config.gradient_accumulation_steps) == 0:
        return f" (here, --batch-size {rows // (processes * config.gradient_accumulation_steps)})"
    if rows % processes == 0:
        return f" (here, --batch-size {rows // processes} --gradient-accumulation-steps 1)"
    return (
        f" ({rows:,} rows a step can't be divided among {processes:,} processes: start "
        "another number of them)"
    )


def check_steps(taken: int, total: int, folder: Path) -> None:
    """Raise a UserError if the run to resume has taken more steps than it is to have."""
    if taken > total:
        raise UserError(
            f"The run in {folder} has taken {taken:,} steps, and these settings ask for "
            f"{total:,}. Choose another "
            "folder, or add --overwrite to delete that run."
        )


def _differences(
    header: tuple[str, str, str], first: dict[str, Any], second: dict[str, Any]
) -> str:
    """Return a table of the values in which two dicts differ among those that both have; empty if
    they agree.
    """
    differ = [name for name, value in second.items() if first.get(name, value) != value]
    rows = [header, *((name, str(first[name]), str(second[name])) for name in differ)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return (
        "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        if differ
        else ""
    )


def log_banner(
    trainer: Trainer, *, encoder: str, num_distinct: dict[str, int], notices: Sequence[str]
) -> None:
    """Log the lines that describe a run at its start."""
    config, model, data = trainer.config, trainer.model, trainer.train_data
    world_size = distributed.world_size()
    processes = counted(world_size, "process", "processes")
    strategy = f"FSDP {config.fsdp}" if config.fsdp else "DDP" if world_size > 1 else "one process"
    precision = precision_name(
        computing_dtype(config.precision, trainer.device, use_amp=config.use_amp)
    )
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    total, trained = (
        sum(size for size, _ in sizes),
        sum(size for size, is_trained in sizes if is_trained),
    )
    titles = f"{data.num_titles:,} titles of codes, " if data.num_titles else ""
    machine = f"{processes}, {device_name(trainer.device)}"
    if config.device == "auto" and trainer.device.type == "cpu" and torch.backends.cuda.is_built():
        machine += f"; {distributed.missing_gpu()}"
    parts, steps = config.gradient_accumulation_steps, trainer.total_steps
    lines = {
        "script": Path(sys.argv[0]).name,
        "encoder": encoder,
        "parameters": (
            f"{total / 1e6:,.1f} million, of which {trained / 1e6:,.1f} million are trained"
        ),
        "data": f"{len(data) - data.num_titles:,} training rows "
        f"({num_distinct[TRAIN]:,} distinct descriptions), {titles}"
        f"{len(trainer.val_data):,} validation rows, "
        f"{counted(model.config.num_classes, 'code', 'codes')}",
        "machine": machine,
        "strategy": ", ".join(filter(None, [strategy, distributed.backend(), precision])),
        "batch": f"{config.batch_size:,} × "
        f"{f'{parts:,} accumulated × ' if parts > 1 else ''}{processes} "
        f"= {config.step_size(world_size):,} rows a step",
        "steps": (
            f"{steps:,} in {counted(-(-steps // trainer.sampler.num_batches), 'epoch', 'epochs')}"
        ),
    }
    for name, text in lines.items():
        log.info(f"{name:12}{text}")
    for notice in notices:
        log.warning(notice)
    if num_distinct.get(VAL, FEW_TEXTS) < FEW_TEXTS:
        log.info(f"Notice on validation: {too_few(num_distinct[VAL])}")
    if config.step_size(world_size) > len(data.rows):
        log.info(
            f"Notice: a step of {config.step_size(world_size):,} rows is larger than the "
            f"{len(data.rows):,} examples: "
            "each epoch is a single step. Lower --batch-size for more steps."
        )
