"""Training of the best model on the validation data, once it is measured on them."""

import itertools
import socket
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from histocoder import distributed
from histocoder.checkpoints.model_files import read_model_config
from histocoder.checkpoints.occcanine import initial_weights
from histocoder.checkpoints.training_state import BEST_FOLDER
from histocoder.config import FinetuneConfig, RunConfig
from histocoder.data.dataset import Batch, OccupationDataset
from histocoder.data.examples import ExampleFiles
from histocoder.data.prepare import held_out
from histocoder.log import log
from histocoder.training.console import Progress
from histocoder.training.data import augmenter_of, open_data
from histocoder.training.frozen import use_encodings
from histocoder.training.trainer import Trainer

_MAX_ROWS = 100_000  # rows up to which the validation data improve the model
_LEAST_STEPS, _MOST_STEPS = 50, 200  # bounds of the steps of two epochs; one epoch is trained but for --max-steps
_RATE = 0.3  # share of the peak learning rate at the start


def refits(config: FinetuneConfig, trainer: Trainer) -> bool:
    """Return whether the best model is to be refitted: not if asked, with many rows, or on several machines."""
    num_rows = len(trainer.train_data) + len(trainer.val_data)
    if config.no_refit or num_rows > _MAX_ROWS or len(set(distributed.gather_objects(socket.gethostname()))) > 1:
        return False
    return not read_model_config(trainer.run.best).fitted_to_validation


def refit(config: RunConfig, trainer: Trainer, train_files: ExampleFiles, val_files: ExampleFiles) -> None:
    """Train the best model on training and validation data and held-out corrections; a collective call."""
    run = trainer.run
    corrections = held_out(run.path)
    files = replace(train_files, paths=train_files.paths + val_files.paths + corrections)
    log.info(f"Evaluation finished. Training {BEST_FOLDER}/ on the validation data as well (disable with --no-refit).")
    arrays = open_data(config, [train_files, val_files, files], run, trainer.model.tokenizer)[-1]
    data = trainer.train_data.of(arrays, augmenter=augmenter_of(config, arrays))
    weights, _ = initial_weights(run.best)
    _train_on(trainer, data, {name: value for name, value in weights.items() if not name.startswith("linear_expert.")})
    weights = trainer.learner.weights()

    def save() -> None:
        from histocoder.training.experts import save_refitted
        from histocoder.training.svm import fit_linear_expert

        num_classes = trainer.model.config.num_classes
        expert = None if config.no_experts else fit_linear_expert(data, num_classes=num_classes)
        save_refitted(run, weights, expert)

    distributed.run_on_primary(save, doing="saving the model")
    measured = f"{len(trainer.val_data):,} validation rows{' and the held-out corrections' if corrections else ''}"
    log.info(
        f"{BEST_FOLDER}/ is now trained on all {len(data):,} rows, including the {measured}. The last model, in "
        f"{run.path}, was not trained on those."
    )


def _train_on(trainer: Trainer, data: OccupationDataset, weights: dict[str, Tensor]) -> None:
    """Train from a model's weights for one or two epochs, at a low learning rate."""
    with trainer.learner.whole() as model:
        use_encodings(model, [data], folder=trainer.run.path)
    sampler, loader = trainer.batches_of(data)
    epoch_steps = sampler.num_batches(0)
    total_steps = max(_LEAST_STEPS, min(2 * epoch_steps, _MOST_STEPS), epoch_steps)
    total_steps = min(total_steps, trainer.config.max_steps or total_steps)
    trainer.learner.restart(weights, share=_RATE, total_steps=total_steps)
    trainer.model.train()
    progress = Progress(total_steps, show=distributed.is_primary())

    def steps() -> Iterator[tuple[Batch, ...]]:
        for epoch in itertools.count():
            sampler.set_position(epoch, 0)
            yield from zip(*[iter(loader)] * trainer.config.gradient_accumulation_steps, strict=True)

    with loader.naming_workers():
        for parts in itertools.islice(steps(), total_steps):
            trainer.learner.train_step(parts)
            progress.advance()
    progress.close()
