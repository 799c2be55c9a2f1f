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

from histocoder import distributed
from histocoder.checkpoints.model_files import (
    CONFIG_FILE,
    is_own_model,
    load_model,
    read_model_config,
)
from histocoder.checkpoints.training_state import BEST_FOLDER
from histocoder.config import FinetuneConfig, MixerConfig, RunConfig
from histocoder.data.dataset import Batch
from histocoder.data.examples import HELD_OUT, SEEN, TITLES, TRAIN, Examples
from histocoder.data.hashes import hashes_of
from histocoder.log import log
from histocoder.model.devices import fast_products
from histocoder.training.data import RunData, augmenter_of
from histocoder.training.encoded_rows import frozen_outputs
from histocoder.training.start import Start
from histocoder.training.tracking import Progress
from histocoder.training.trainer import Trainer, batched

REPORT_ROWS = 5_000  # validation rows in the report, at most
_MAX_ROWS = 100_000  # rows up to which the validation data improve the model
_LEAST_STEPS, _MOST_STEPS = (
    50,
    200,
)  # bounds of the steps of two epochs; one epoch is trained but for --max-steps
_LEARNED_ALL = "\nAfter this evaluation it was trained on the validation data as well.\n"
_RATE = 0.3  # share of the peak learning rate at the start


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
    folder = trainer.run.path
    if initial is not None:
        log.info("The experts of the initial model learn the rows.")
        folders = [folder, trainer.run.best]
        distributed.run_on_primary(
            lambda: adapt_to(initial, trainer, data.open(TRAIN), folders),
            doing="adapting the model",
        )
    elif not config.no_experts:
        log.info("Training finished. Fitting the model of word parts and choosing how to predict.")
        from histocoder.training.experts import (
            fit_experts,
        )  # here, since it takes a second to import

        distributed.run_on_primary(lambda: fit_experts(trainer), doing="fitting the experts")
    if not config.no_report:
        log.info(
            "Writing the report: predicting on the validation data and comparing with a "
            "linear model."
        )
        distributed.run_on_primary(
            lambda: report(config, trainer, data), doing="writing the report"
        )
    is_small = len(trainer.train_data) + len(trainer.val_data) <= _MAX_ROWS
    is_one_machine = len(set(distributed.gather_objects(socket.gethostname()))) == 1
    is_asked = isinstance(config, FinetuneConfig) and not config.no_refit
    if (
        is_small
        and is_one_machine
        and is_asked
        and not read_model_config(trainer.run.best).fitted_to_validation
    ):
        if initial is None:
            refit(config, trainer, data)
        else:
            readapt(initial, trainer, data)

    end = partial(trainer.run.end, keep_checkpoints=config.keep_checkpoints != 0)
    distributed.run_on_primary(end, doing="ending the run")
    log.info(
        f"Saved in {folder}: the last model ({CONFIG_FILE} and model.safetensors) and the "
        "best in validation (best/)."
    )


def adapt_to(
    initial: Start, trainer: Trainer, examples: Examples, folders: list[Path], *, remark: str = ""
) -> None:
    """Adapt a run's initial model to some rows, and write it into folders; for rank 0."""
    from histocoder.training.adapting import adapt

    rows = trainer.train_data.of(examples, augmenter=None)
    adapt(
        initial,
        rows,
        folders,
        config=trainer.model.config,
        device=trainer.device,
        remark=remark,
    )


def readapt(initial: Start, trainer: Trainer, rows: RunData) -> None:
    """Adapt a run's initial model to the validation data as well, in `best/`; a collective call."""
    examples = rows.open(*(split for split in rows.splits if split != TITLES))
    best = trainer.run.best
    distributed.run_on_primary(
        lambda: adapt_to(initial, trainer, examples, [best], remark=_LEARNED_ALL),
        doing="adapting the model",
    )
    log.info(
        f"{BEST_FOLDER}/ has now learned all {len(examples):,} rows, including the "
        f"{len(trainer.val_data):,} validation rows."
    )


def report(config: RunConfig, trainer: Trainer, data: RunData) -> None:
    """Write `report.html` on the last model and the validation data, or a sample of them; for rank
    0.

    With corrections of a model that histocoder trained, it compares both models.
    """
    from histocoder.evaluation.baselines import AFTER_TRAINING, Baselines
    from histocoder.evaluation.evaluator import (
        evaluate,
        gain,
        right_rows,
    )  # here, since drawing takes a second to import
    from histocoder.evaluation.metrics import SeenMetrics
    from histocoder.evaluation.report import write_report
    from histocoder.evaluation.summary import details_in_words, overall_in_words
    from histocoder.inference.coder import Coder
    from histocoder.inference.known import Known

    load = partial(
        Coder.from_pretrained, device=str(trainer.device), precision=trainer.config.precision
    )
    coder = load(trainer.run.path)
    examples = trainer.val_data.examples.sample(REPORT_ROWS, seed=0)
    baselines = Baselines(
        examples, Known(languages=coder.model.config.languages), max_size=AFTER_TRAINING
    )
    for chunk in data.open(TRAIN).chunks():
        baselines.add(chunk)
    found = evaluate(coder, examples, trained=baselines)
    before = None if config.only_encoder else config.initial_checkpoint
    if (
        before is not None
        and isinstance(config, FinetuneConfig)
        and config.corrections
        and is_own_model(Path(before))
    ):
        corrections, right = (
            data.open(HELD_OUT) if HELD_OUT in data.splits else None,
            found.rows["right"].to_numpy(),
        )
        found.metrics.corrections = gain(load(before), coder, examples, corrections, right=right)
    if len(seen := data.open(SEEN)):
        accuracy = float(right_rows(coder, seen.sample(REPORT_ROWS, seed=0)).mean())
        found.metrics.seen = SeenMetrics(len(seen), accuracy, left_out=data.has_new)
    folder = trainer.run.path
    path = write_report(folder, found, coder, title=folder.resolve().name, logs=trainer.run.logs)
    for line in overall_in_words(found.metrics)[:2] + details_in_words(found.metrics):
        log.info(line)
    log.info(f"Wrote the report to {path}.")


def refit(config: RunConfig, trainer: Trainer, rows: RunData) -> None:
    """Train the best model on training and validation data and held-out corrections; a collective
    call.

    One or two epochs at a low learning rate are enough.
    """
    run = trainer.run
    log.info(
        f"Evaluation finished. Training {BEST_FOLDER}/ on the validation data as well "
        "(disable with --no-refit)."
    )
    data = trainer.train_data.of(
        rows.open(*rows.splits), augmenter=None, once=trainer.train_data.once
    )
    data.augmenter = augmenter_of(config, data)
    model = load_model(run.best)
    model.linear_expert = model.attribute_expert = model.nearest_expert = None
    with trainer.learner.whole() as whole:
        trainer.learner.outputs = frozen_outputs(whole, data)
    sampler, loader = trainer.batches_of(data)
    epoch_steps = sampler.num_batches
    total_steps = max(_LEAST_STEPS, min(2 * epoch_steps, _MOST_STEPS), epoch_steps)
    total_steps = min(total_steps, trainer.config.max_steps or total_steps)
    trainer.learner.restart(model.state_dict(), share=_RATE, total_steps=total_steps)
    trainer.model.train()

    def steps() -> Iterator[tuple[Batch, ...]]:
        for epoch in itertools.count():
            sampler.set_position(epoch, 0)
            yield from batched(loader, trainer.config.gradient_accumulation_steps)

    products = fast_products(trainer.device, deterministic=trainer.config.deterministic)
    with closing(Progress(total_steps)) as progress, loader.naming_workers(), products:
        for parts in itertools.islice(steps(), total_steps):
            trainer.learner.train_step(parts)
            progress.advance()
    weights = trainer.learner.trained_weights()

    def save() -> None:
        """Write the refitted model in place of the measured one, whole."""
        from histocoder.training.encoded_rows import fit_nearest_expert
        from histocoder.training.experts import rewrite_model, set_experts
        from histocoder.training.svm import fit_attribute_expert, fit_linear_expert

        model.to(trainer.device).load_state_dict(weights)
        model.has_learned(torch.from_numpy(hashes_of(data.examples)))
        votes = model.config.experts
        linear = None
        if "linear" in votes:
            linear = fit_linear_expert(data, num_classes=model.config.num_classes)
        if linear is not None:
            linear = linear.pruned(model.config.linear_threshold)
        of_attributes = None
        if model.config.attribute_experts:
            of_attributes = fit_attribute_expert(data)
        if of_attributes is not None:
            of_attributes = of_attributes.pruned(model.config.attribute_threshold)
        nearest = fit_nearest_expert(model, data) if "nearest" in votes else None
        set_experts(model, linear, of_attributes, nearest)
        model.config = replace(model.config, fitted_to_validation=True)
        rewrite_model(run.best, model, remark=_LEARNED_ALL)

    distributed.run_on_primary(save, doing="saving the model")
    held_out = " and the held-out corrections" if HELD_OUT in rows.splits else ""
    log.info(
        f"{BEST_FOLDER}/ is now trained on all {len(data) - data.num_titles:,} rows, including the "
        f"{len(trainer.val_data):,} validation rows{held_out}. The last model, in "
        f"{run.path}, was not trained on those."
    )
