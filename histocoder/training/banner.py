"""Text that a run prints before it trains: its data, model and machine, and what a person should know."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from histocoder import distributed
from histocoder.config import FinetuneConfig, MixerConfig, ModelConfig, without_effect
from histocoder.data.examples import SEEN, TRAIN, VAL, Examples
from histocoder.data.prepare import identifiers_notice
from histocoder.errors import counted
from histocoder.evaluation.summary import FEW_TEXTS, too_few
from histocoder.formatters import MISSING
from histocoder.launcher import missing_gpu
from histocoder.log import log
from histocoder.model.devices import computing_dtype, device_name, precision_name
from histocoder.training.data import RunData, cut_notice
from histocoder.training.start import EncoderChoice, Start
from histocoder.training.trainer import Trainer


def notices(
    config: FinetuneConfig | MixerConfig, data: RunData, start: Start, trainer: Trainer
) -> list[str]:
    """Return what a person should know before a run trains, each in a sentence or two."""
    train_data = trainer.train_data
    model_config = trainer.model.config

    # on descriptions: learned before, or longer than the model reads
    unit = "characters" if train_data.tokenizer.reads_characters else "tokens"
    num_cut = train_data.num_cut + trainer.val_data.num_cut
    sentences = [seen_notice(data, start), cut_notice(num_cut, config.max_len, unit)]

    # on codes; `prepare` has looked at a user's table
    if isinstance(config, MixerConfig):
        column = config.columns[0]
        sentences.append(identifiers_notice(model_config.num_classes, len(train_data), column))

    # on settings that mean nothing here; the loader knows how many workers it has
    with_workers = replace(config, num_workers=trainer.train_loader.num_workers)
    for sentence in without_effect(with_workers, model_config):
        sentences.append(f"Notice: {sentence}")
    return [sentence for sentence in sentences if sentence is not None]


def seen_notice(data: RunData, start: Start) -> str | None:
    """Return a notice if the model has, or may have, learned from descriptions that it is validated
    on.
    """
    # descriptions that are known to be learned
    num_seen = len(data.open(SEEN))
    if num_seen:
        consequence = "There are too few others to choose a model by, so accuracy is too high."
        if data.has_new:
            consequence = (
                "The others alone choose and judge the model; the report has both accuracies."
            )
        descriptions = counted(data.record["num_distinct"][SEEN], "description", "descriptions")
        return (
            f"Notice: {num_seen:,} of {len(data.open(VAL, SEEN)):,} validation rows "
            f"({descriptions}) are of "
            f"descriptions in the training data, or in those of the initial model. {consequence}"
        )

    # models of earlier versions and of OccCANINE don't say what they have learned
    if start.path is not None and start.trained_on is None:
        return (
            f"Notice: {start.path} does not record what it was trained on. "
            "If that is in these "
            "validation data, accuracy is too high."
        )
    return None


def rows_without_codes(train_rows: Examples, model: ModelConfig) -> str:
    """Return a notice if training rows have no code and the model can't answer with none; an empty
    text otherwise.
    """
    num_rows = len(train_rows) - len(train_rows.coded())
    if not num_rows or model.formatter["num_blocks"] > 1:
        return ""
    return (
        f"Notice: {counted(num_rows, 'training row has', 'training rows have')} no code, and "
        "nothing is learned from them: a model with one column of codes always answers with one. "
        "Give such rows a code of their own (in HISCO -1)."
    )


def codes_not_learned(train_rows: Examples, val_rows: Examples) -> str:
    """Return a notice if validation rows have a code that no training row has; an empty text
    otherwise.
    """
    val_codes = np.array(val_rows.code_table, dtype=object)
    learned_codes = set(train_rows.code_table) | {MISSING}
    is_new = np.array([code not in learned_codes for code in val_codes], dtype=bool)
    if not is_new.any():
        return ""
    new_codes = val_codes[is_new]

    # index 0 of `code_index` stands for no code
    has_new_code = np.insert(is_new, 0, False)[val_rows.code_index].any(axis=1)
    num_rows = int(has_new_code.sum())

    # a few such rows hardly matter; where they are most of them, accuracy says nothing
    consequence = "so these rows count as wrong."
    if 2 * num_rows > len(val_rows):
        consequence = "so its accuracy is low. Add rows with them."

    # some of them, to look up in the table
    examples = ", ".join(new_codes[:5])
    if len(new_codes) > 5:
        examples += ", …"
    return (
        f"Notice: {counted(num_rows, 'validation row has', 'validation rows have')} a code "
        "that no training row has, "
        f"of {len(val_rows):,}: {examples}. The model can't learn these "
        f"codes, {consequence}"
    )


def log_banner(
    config: FinetuneConfig | MixerConfig,
    data: RunData,
    start: Start,
    trainer: Trainer,
    encoder: EncoderChoice,
) -> None:
    """Log the lines that describe a run at its start, and then what a person should know."""
    rows = trainer.train_data
    num_distinct = data.record["num_distinct"]
    num_codes = trainer.model.config.num_classes
    step_size = trainer.config.step_size(distributed.world_size())

    # the last epoch may end before its last step
    num_epochs = -(-trainer.total_steps // trainer.sampler.num_batches)
    is_trained = trainer.total_steps > 0
    titles = ""
    if rows.num_titles and is_trained:
        titles = f"{rows.num_titles:,} titles of codes, "
    chosen_encoder = config.encoder
    if encoder.reason:
        chosen_encoder += f": {encoder.reason}"
    lines = {
        "script": Path(sys.argv[0]).name,
        "encoder": chosen_encoder,
        "parameters": _parameters(trainer),
        "data": f"{len(rows) - rows.num_titles:,} training rows "
        f"({num_distinct[TRAIN]:,} distinct descriptions), {titles}"
        f"{len(trainer.val_data):,} validation rows, {counted(num_codes, 'code', 'codes')}",
        "machine": _machine(trainer),
        "strategy": _strategy(trainer),
        "batch": _batch(trainer, step_size),
        "steps": f"{trainer.total_steps:,} in {counted(num_epochs, 'epoch', 'epochs')}",
    }
    if not is_trained:
        del lines["parameters"], lines["batch"]
        lines["steps"] = (
            "none: these rows are few, and the initial model's word parts and nearest rows learn "
            "them, without titles of codes; its network is kept (--num-epochs N to train it)"
        )
    for name, text in lines.items():
        log.info(f"{name:12}{text}")

    for sentence in notices(config, data, start, trainer):
        log.warning(sentence)
    if num_distinct.get(VAL, FEW_TEXTS) < FEW_TEXTS:
        log.info(f"Notice on validation: {too_few(num_distinct[VAL])}")
    if is_trained and step_size > len(rows.rows):
        log.info(
            f"Notice: a step of {step_size:,} rows is larger than the "
            f"{len(rows.rows):,} examples: "
            "each epoch is a single step. Lower --batch-size for more steps."
        )


def _parameters(trainer: Trainer) -> str:
    num_parameters = 0
    num_trained = 0
    for parameter in trainer.model.parameters():
        num_parameters += parameter.numel()
        if parameter.requires_grad:
            num_trained += parameter.numel()
    trained = f"{num_trained / 1e6:,.1f} million are trained"
    return f"{num_parameters / 1e6:,.1f} million, of which {trained}"


def _processes() -> str:
    return counted(distributed.world_size(), "process", "processes")


def _machine(trainer: Trainer) -> str:
    text = f"{_processes()}, {device_name(trainer.device)}"
    is_auto = trainer.config.device == "auto"
    if is_auto and trainer.device.type == "cpu" and torch.backends.cuda.is_built():
        text += f"; {missing_gpu()}"
    return text


def _strategy(trainer: Trainer) -> str:
    config = trainer.config
    strategy = "one process"
    if config.fsdp:
        strategy = f"FSDP {config.fsdp}"
    elif distributed.world_size() > 1:
        strategy = "DDP"
    dtype = computing_dtype(config.precision, trainer.device, use_amp=config.use_amp)
    parts = [strategy, distributed.backend(), precision_name(dtype)]
    return ", ".join(part for part in parts if part)


def _batch(trainer: Trainer, step_size: int) -> str:
    factors = [f"{trainer.config.batch_size:,}"]
    if trainer.config.gradient_accumulation_steps > 1:
        factors.append(f"{trainer.config.gradient_accumulation_steps:,} accumulated")
    factors.append(_processes())
    return f"{' × '.join(factors)} = {step_size:,} rows a step"
