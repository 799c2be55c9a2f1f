"""The end of a run: experts, the report, and the best model refitted to the validation data, once
it is measured.
"""

import itertools
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from histocoder import distributed
from histocoder.checkpoints.model_files import (
    CONFIG_FILE,
    is_own_model,
    load_model,
    read_model_config,
)
from histocoder.checkpoints.training_state import BEST_FOLDER
from histocoder.config import FinetuneConfig, MixerConfig, RunConfig
from histocoder.data.dataset import Batch, OccupationDataset
from histocoder.data.examples import HELD_OUT, SEEN, TITLES, TRAIN, Examples
from histocoder.data.hashes import hashes_of
from histocoder.errors import counted
from histocoder.log import log
from histocoder.model.devices import fast_products
from histocoder.training.data import RunData, augmenter_of
from histocoder.training.encoded_rows import frozen_outputs
from histocoder.training.start import Start
from histocoder.training.tracking import Progress
from histocoder.training.trainer import Trainer

REPORT_ROWS = 5_000  # validation rows in the report, at most
_MAX_ROWS = 100_000  # rows up to which the validation data improve the model
# bounds of the steps of two epochs; one epoch is trained but for --max-steps
_MIN_STEPS = 50
_MAX_STEPS = 200
_RATE = 0.3  # share of the peak learning rate at the start
_LEARNED_ALL = "\nAfter this evaluation it was trained on the validation data as well.\n"


def finish(
    config: FinetuneConfig | MixerConfig,
    trainer: Trainer,
    data: RunData,
    *,
    initial: Start | None = None,
) -> None:
    """Fit the experts of a trained model, report on it, and refit the best one; a collective call.

    A run that adapts its `initial` model adapts it instead, to the training data and then to all.
    """
    run = trainer.run
    if initial is not None:
        log.info("The experts of the initial model learn the rows.")
        adapt_to(initial, trainer, data.open(TRAIN), [run.path, run.best])
    elif not config.no_experts:
        log.info("Training finished. Fitting the model of word parts and choosing how to predict.")
        # here, since it takes a second to import
        from histocoder.training.experts import fit_experts

        distributed.run_on_primary(partial(fit_experts, trainer), doing="fitting the experts")
    if not config.no_report:
        log.info(
            "Writing the report: predicting on the validation data and comparing with a "
            "linear model."
        )
        write = partial(report, config, trainer, data)
        distributed.run_on_primary(write, doing="writing the report")

    # once the best model is measured, it may learn the validation data as well
    if _learns_validation_data(config, trainer):
        if initial is None:
            refit(config, trainer, data)
        else:
            readapt(initial, trainer, data)

    end = partial(run.end, keep_checkpoints=config.keep_checkpoints != 0)
    distributed.run_on_primary(end, doing="ending the run")
    log.info(
        f"Saved in {run.path}: the last model ({CONFIG_FILE} and model.safetensors) and the "
        "best in validation (best/)."
    )


def _learns_validation_data(config: RunConfig, trainer: Trainer) -> bool:
    """Return whether the best model is to learn the validation data; a collective call."""
    # the processes of several machines may see different folders
    hosts = distributed.gather_objects(socket.gethostname())
    is_asked = isinstance(config, FinetuneConfig) and not config.no_refit
    is_small = len(trainer.train_data) + len(trainer.val_data) <= _MAX_ROWS
    if not is_asked or not is_small or len(set(hosts)) > 1:
        return False
    return not read_model_config(trainer.run.best).fitted_to_validation


def adapt_to(
    initial: Start, trainer: Trainer, examples: Examples, folders: list[Path], *, remark: str = ""
) -> None:
    """Adapt a run's initial model to some rows, and write it into folders; a collective call."""

    def adapt_model() -> None:
        """Adapt the model, on rank 0 alone, which imports what it takes."""
        from histocoder.training.adapting import adapt

        adapt(
            initial,
            trainer.train_data.of(examples),
            folders,
            config=trainer.model.config,
            device=trainer.device,
            remark=remark,
        )

    distributed.run_on_primary(adapt_model, doing="adapting the model")


def readapt(initial: Start, trainer: Trainer, data: RunData) -> None:
    """Adapt a run's initial model to the validation data as well, in `best/`; a collective call."""
    splits = [split for split in data.splits if split != TITLES]
    examples = data.open(*splits)
    adapt_to(initial, trainer, examples, [trainer.run.best], remark=_LEARNED_ALL)
    validation_rows = counted(len(trainer.val_data), "validation row", "validation rows")
    log.info(
        f"{BEST_FOLDER}/ has now learned all {len(examples):,} rows, including the "
        f"{validation_rows}."
    )


def report(config: RunConfig, trainer: Trainer, data: RunData) -> None:
    """Write `report.html` on the last model and the validation data, or a sample of them; for rank
    0.

    With corrections of a model that histocoder trained, it compares both models.
    """
    # here, since drawing takes a second to import
    from histocoder.evaluation.baselines import AFTER_TRAINING, Baselines
    from histocoder.evaluation.evaluator import evaluate, gain, right_rows
    from histocoder.evaluation.metrics import SeenMetrics
    from histocoder.evaluation.report import write_report
    from histocoder.evaluation.summary import details_in_words, overall_in_words
    from histocoder.inference.coder import Coder
    from histocoder.inference.known import Known

    load = partial(
        Coder.from_pretrained, device=str(trainer.device), precision=trainer.config.precision
    )
    folder = trainer.run.path
    coder = load(folder)
    examples = trainer.val_data.examples.sample(REPORT_ROWS, seed=0)

    # the model beside simple ones, which learn the same rows
    known = Known(languages=coder.model.config.languages)
    baselines = Baselines(examples, known, max_size=AFTER_TRAINING)
    for chunk in data.open(TRAIN).chunks():
        baselines.add(chunk)
    evaluation = evaluate(coder, examples, baselines=baselines)
    metrics = evaluation.metrics

    # what corrections have gained
    corrected_model = _corrected_model(config)
    if corrected_model is not None:
        held_out = None
        if HELD_OUT in data.splits:
            held_out = data.open(HELD_OUT)
        right = evaluation.rows["right"].to_numpy()
        metrics.corrections = gain(load(corrected_model), coder, examples, held_out, right=right)

    # validation rows that are no test, since their descriptions were learned
    seen = data.open(SEEN)
    if len(seen):
        accuracy = float(right_rows(coder, seen.sample(REPORT_ROWS, seed=0)).mean())
        metrics.seen = SeenMetrics(len(seen), accuracy, left_out=data.has_new)

    title = folder.resolve().name
    path = write_report(folder, evaluation, coder, title=title, logs=trainer.run.logs)
    for line in overall_in_words(metrics)[:2] + details_in_words(metrics):
        log.info(line)
    log.info(f"Wrote the report to {path}.")


def _corrected_model(config: RunConfig) -> str | None:
    """Return the model of histocoder that a run's corrections are for, if there is one."""
    if not isinstance(config, FinetuneConfig) or not config.corrections or config.only_encoder:
        return None
    initial = config.initial_checkpoint
    if initial is None or not is_own_model(Path(initial)):
        return None
    return initial


def refit(config: RunConfig, trainer: Trainer, data: RunData) -> None:
    """Train the best model on training and validation data and held-out corrections; a collective
    call.
    """
    run = trainer.run
    log.info(
        f"Evaluation finished. Training {BEST_FOLDER}/ on the validation data as well "
        "(disable with --no-refit)."
    )
    rows = trainer.train_data.of(data.open(*data.splits), once=trainer.train_data.once)
    rows.augmenter = augmenter_of(config, rows)

    # the network first, on which the expert of nearest rows rests
    model = load_model(run.best)
    model.linear_expert = None
    model.attribute_expert = None
    model.nearest_expert = None
    train_further(trainer, model.state_dict(), rows)
    weights = trainer.learner.trained_weights()

    def save() -> None:
        """Write the refitted model in place of the measured one, whole."""
        from histocoder.training.experts import refit_experts, rewrite_model

        model.to(trainer.device).load_state_dict(weights)
        model.has_learned(torch.from_numpy(hashes_of(rows.examples)))
        refit_experts(model, rows)
        model.config = replace(model.config, fitted_to_validation=True)
        rewrite_model(run.best, model, remark=_LEARNED_ALL)

    distributed.run_on_primary(save, doing="saving the model")
    validation_rows = counted(len(trainer.val_data), "validation row", "validation rows")
    held_out = ""
    if HELD_OUT in data.splits:
        held_out = " and the held-out corrections"
    log.info(
        f"{BEST_FOLDER}/ is now trained on all {len(rows) - rows.num_titles:,} rows, including the "
        f"{validation_rows}{held_out}. The last model, in {run.path}, was not trained on those."
    )


def train_further(trainer: Trainer, weights: dict[str, Tensor], rows: OccupationDataset) -> None:
    """Train a run's model from some weights, on other rows; a collective call.

    One or two epochs at a low learning rate are enough.
    """
    config = trainer.config
    learner = trainer.learner
    with learner.strategy.whole() as model:
        learner.outputs = frozen_outputs(model, rows)
    sampler, loader = trainer.batches_of(rows)
    epoch_steps = sampler.num_batches
    total_steps = max(_MIN_STEPS, min(2 * epoch_steps, _MAX_STEPS), epoch_steps)
    if config.max_steps:
        total_steps = min(total_steps, config.max_steps)
    learner.restart(weights, share=_RATE, total_steps=total_steps)
    trainer.model.train()

    def steps() -> Iterator[tuple[Batch, ...]]:
        for epoch in itertools.count():
            sampler.set_position(epoch, 0)
            yield from loader.steps()

    products = fast_products(trainer.device, deterministic=config.deterministic)
    with closing(Progress(total_steps)) as progress, loader.naming_workers(), products:
        for parts in itertools.islice(steps(), total_steps):
            learner.train_step(parts)
            progress.advance()
