"""The training loop: epochs, steps, validation, saves."""

import math
import signal
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from histocoder import distributed
from histocoder.checkpoints import training_state
from histocoder.checkpoints.model_files import model_card, save_model
from histocoder.checkpoints.run_folder import RunFolder
from histocoder.checkpoints.training_state import Checkpoint, TrainState
from histocoder.config import TrainConfig
from histocoder.data.dataset import OccupationDataset
from histocoder.data.loader import BatchLoader
from histocoder.data.samplers import BucketSampler
from histocoder.errors import Interrupted, UserError
from histocoder.log import log
from histocoder.model import MixerModel, NgramEncoder
from histocoder.model.devices import fast_products, peak_gpu_memory
from histocoder.signals import StopRequest, handling_stop_signals
from histocoder.training.encoded_rows import FrozenOutputs, frozen_outputs
from histocoder.training.learner import Learner
from histocoder.training.tracking import Meter, Progress, Tracker
from histocoder.training.validation import validate

_RATE_DIVISOR = 10  # of the learning rate of a run that diverged, for the next
_TITLES = {
    "train_loss": "loss",
    "samples_per_sec": "rows/s",
    "lr": "lr",
    "gpu_memory_gb": "GPU GB",
    "skipped_steps": "skipped",
}
"""Names of the numbers that a run shows as it trains."""


class Trainer:
    """Fits a model, on this process or together with others, and saves it.

    The model is on the CPU, with its frozen weights marked. Every rank has all rows; rank 0 writes
    to the run's folder, from `fit` on. `settings` is what a resumed run must agree on. If it
    `keeps_weights`, no step is taken: the model is validated and saved.
    """

    def __init__(
        self,
        model: MixerModel,
        train_data: OccupationDataset,
        val_data: OccupationDataset,
        config: TrainConfig,
        *,
        device: torch.device,
        run: RunFolder,
        settings: dict[str, Any],
        keeps_weights: bool = False,
    ) -> None:
        self.model = model
        self.config = config
        self.device = device
        self.train_data = train_data
        self.val_data = val_data
        self.run = run
        self.settings = settings
        self.sampler, self.train_loader = self.batches_of(train_data)

        # by default a run is as long as its epochs, and is validated once an epoch
        epoch_steps = self.sampler.num_batches
        usual_steps = max(config.num_epochs * epoch_steps, config.min_steps)
        self.total_steps = 0 if keeps_weights else config.max_steps or usual_steps
        self.eval_interval = config.eval_interval or min(max(epoch_steps, 100), 1000)

        self.learner = Learner(model, config, device, total_steps=self.total_steps)
        self.val_outputs: FrozenOutputs | None = None  # computed by `fit`
        self.state = TrainState()
        self.meter = Meter()
        self.saved_step: int | None = None
        self.stop_signals = distributed.DelayedMax()
        self.tracker = Tracker()  # until `fit`

    def batches_of(self, data: OccupationDataset) -> tuple[BucketSampler, BatchLoader]:
        """Return the sampler and the loader of training data."""
        world_size = distributed.world_size()
        sampler = BucketSampler(
            data.lengths,
            data.num_target_blocks,
            batch_size=self.config.step_size(world_size),
            seed=self.config.seed,
            rows=data.rows,
            num_replicas=world_size,
            rank=distributed.rank(),
            num_parts=self.config.gradient_accumulation_steps,
        )

        # the CPU hashes n-grams where it computes with them; for a GPU this is done ahead
        on_gpu = self.device.type == "cuda"
        ngrams = None
        if on_gpu and isinstance(self.model.encoder, NgramEncoder):
            ngrams = self.model.encoder.config
        return sampler, BatchLoader(data, sampler, self.config, on_gpu=on_gpu, ngrams=ngrams)

    def fit(self, tracker: Tracker | None = None) -> dict[str, float]:
        """Train from the start or the restored state, save the model, and return the numbers of the
        last validation.

        Raises Interrupted where the run was asked to stop, with its state saved; a UserError where
        a file can't be written; and a MachineError where a loader worker is killed or hangs.
        """
        if tracker is not None:
            self.tracker = tracker
        with self.learner.strategy.whole() as model:
            self.learner.outputs = frozen_outputs(model, self.train_data)
            self.val_outputs = frozen_outputs(model, self.val_data)
        self.meter.started = time.monotonic()
        stop = StopRequest()
        with (
            closing(Progress(self.total_steps, start=self.state.step)) as progress,
            handling_stop_signals(stop),
            self.train_loader.naming_workers(),
            fast_products(self.device, deterministic=self.config.deterministic),
        ):
            while self.state.step < self.total_steps:
                self.train_epoch(progress, stop)
        results = self.state.results or self.validate()
        self.save_result()
        return results

    def train_epoch(self, progress: Progress, stop: StopRequest) -> None:
        """Train on the remaining batches of the current epoch; a signal to any rank ends all of
        them at one step.
        """
        state = self.state
        config = self.config
        self.model.train()
        self.sampler.set_position(state.epoch, state.samples)
        for parts in self.train_loader.steps():
            loss, grad_norm = self.learner.train_step(parts)
            num_rows = parts[0].num_rows
            self.meter.add(loss, grad_norm, rows=num_rows)
            state.step += 1
            state.samples += num_rows
            state.results = None

            # once in a while, and at the end: log, validate, save
            is_last = state.step == self.total_steps
            if is_last or state.step % config.log_interval == 0:
                progress.line(state.step, self.log_training())
            progress.advance()
            if is_last or state.step % self.eval_interval == 0:
                self.validate()
            if is_last or self._saves_here():
                self.save()

            # ranks exchange signals while they compute: these arrived by the step before, and of the
            # last step there is no step behind it
            signum = self.stop_signals.exchange(stop.signum)
            if is_last:
                signum = signum or self.stop_signals.last()
            if signum:
                self.save()
                raise Interrupted(
                    f"{signal.Signals(signum).name}: saved at step {state.step} of "
                    f"{self.total_steps}. Run the same "
                    "command again, without --overwrite and --resume, to resume from there.",
                    signum,
                )
            if is_last:
                return
        state.epoch += 1
        state.samples = 0

    def _saves_here(self) -> bool:
        """Return whether the settings ask for a checkpoint at this step."""
        config = self.config
        if config.save_interval is not None and self.state.step % config.save_interval == 0:
            return True
        return config.save_each_epoch and self.state.samples == len(self.train_data.rows)

    def log_training(self) -> dict[str, float]:
        """Log the numbers of the steps since the last time; return those to show; raise if too many
        were skipped.
        """
        values = self.meter.read() | peak_gpu_memory(self.device)
        values["lr"] = float(self.learner.scheduler.get_last_lr()[-1])
        values["epoch"] = float(self.state.epoch + 1)
        self.tracker.log(self.state.step, values)

        # a run that diverged skips all further steps
        num_skipped = int(self.meter.skipped_in_a_row)
        if num_skipped >= self.config.max_skipped_steps:
            raise self.not_finite(f"The gradients of the last {num_skipped} steps are not finite")

        # the numbers to show
        numbers = {title: values[name] for name, title in _TITLES.items() if name in values}
        if not values["skipped_steps"]:
            del numbers["skipped"]
        return numbers

    def not_finite(self, fault: str) -> UserError:
        """Return the error of a run that diverged, with flags that differ: a resumed run would take
        the same steps.
        """
        # the model to begin with: the best one, else the last that was saved
        start = None
        state = "there is no earlier checkpoint"
        checkpoints = training_state.list_checkpoints(self.run.path)
        if checkpoints:
            start = checkpoints[-1]
            state = f"the last good checkpoint is {start}"
        if self.run.best.is_dir():
            start = self.run.best
            state += f". {start} holds the best model so far"

        flags = f"--learning-rate {self.config.learning_rate / _RATE_DIVISOR:.2g}"
        if start is not None:
            flags = f"--initial-checkpoint {start} {flags}"
        if self.model.dtype == torch.float16:
            flags += ", or with --precision fp32"
        return UserError(
            f"{fault}, and {state}. The same command would diverge at the same step. Start "
            "a new run in another folder "
            f"with a lower learning rate, such as a tenth: {flags}."
        )

    def validate(self) -> dict[str, float]:
        """Validate, log the numbers, and save the model if it is the best so far."""
        started = time.monotonic()
        with self.learner.strategy.whole() as model:
            results = validate(model, self.val_data, self.config, outputs=self.val_outputs)
        self.state.results = results
        self.tracker.log(self.state.step, results)
        accuracies = (
            f"decoder {results['greedy_seq_acc']:.1f}, "
            f"classifier {results['flat_acc']:.1f}, "
            f"decoder told the true codes so far {results['seq_acc']:.1f} "
            f"(tokens {results['token_acc']:.1f})"
        )
        for name in self.model.config.attributes:
            accuracies += f", {name} {results[f'acc_{name}']:.1f}"
        log.info(
            f"validation at step {self.state.step}: loss {results['val_loss']:.4g}; "
            f"accuracy in %: {accuracies}"
        )

        # whether this is the model to use
        if not math.isfinite(results["val_loss"]):
            raise self.not_finite(f"The validation loss of step {self.state.step} is not finite")
        if self.state.improves(results, num_rows=len(self.val_data)):
            self.save_model(self.run.best, doing="saving the best model")
        self.meter.started += time.monotonic() - started  # a pause, which rows/s exclude
        return results

    def save_model(self, folder: Path, *, doing: str) -> None:
        """Write the model and its card."""
        weights = self.learner.trained_weights()
        model = self.model
        num_train = len(self.train_data)
        if self.total_steps == 0:  # titles are not learned
            num_train -= self.train_data.num_titles
        card = model_card(
            model.config,
            num_train=num_train,
            num_val=len(self.val_data),
            metrics=self.state.results,
        )
        save = partial(
            save_model, folder, model.config, weights, tokenizer=model.tokenizer, card=card
        )
        distributed.run_on_primary(save, doing=doing)

    def save(self) -> None:
        """Write a checkpoint, unless this step has one."""
        if self.saved_step == self.state.step:
            return
        self.saved_step = self.state.step
        started = time.monotonic()

        # states of all ranks, which rank 0 writes
        ranks = {}
        for name, module in _generators(self.device).items():
            ranks[name] = torch.stack(distributed.gather(module.get_rng_state()))
        is_final = self.state.step == self.total_steps
        is_small = is_final and isinstance(self.model.encoder, NgramEncoder)
        checkpoint = Checkpoint(
            path=training_state.checkpoint_path(self.run.path, self.state.step),
            state=self.state,
            learner=self.learner.state(is_compact=is_small),
            ranks=ranks,
            settings=self.settings,
            model_config=self.model.config,
            tokenizer=self.model.tokenizer,
        )

        def write() -> None:
            for weight in checkpoint.learner.weights.values():
                if not weight.isfinite().all():
                    raise self.not_finite("The model's weights are not finite and were not saved")
            num_kept = self.config.num_checkpoints(is_small=is_small)
            training_state.save_checkpoint(checkpoint, keep=num_kept)

        distributed.run_on_primary(write, doing="saving a checkpoint")
        self.meter.started += time.monotonic() - started

    def save_result(self) -> None:
        """Write the model of a finished run."""
        if distributed.is_primary():
            self.run.forget_results()
        self.save_model(self.run.path, doing="saving the model")
        if self.config.save_format != "occcanine":
            return
        parameters = self.model.named_parameters()
        trained = [name for name, parameter in parameters if parameter.requires_grad]
        save = partial(
            training_state.save_last_bin,
            self.run.path,
            self.model.config,
            self.learner.state(),
            step=self.state.step,
            trained=trained,
        )
        distributed.run_on_primary(save, doing="saving last.bin")

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the state of a checkpoint, right before `fit`; the checkpoint is not needed
        afterwards.
        """
        self.learner.restore(checkpoint.learner)
        self.state = checkpoint.state
        self.saved_step = self.state.step

        # with more processes than before, the new ones keep their seeds
        rank = distributed.rank()
        for name, module in _generators(self.device).items():
            states = checkpoint.ranks.get(name, ())
            if rank < len(states):
                module.set_rng_state(states[rank].clone())  # a view would be read beyond its end


def _generators(device: torch.device) -> dict[str, Any]:
    """Return the modules that draw random numbers on this rank, by their names in a checkpoint."""
    modules: dict[str, Any] = {"rng": torch}
    if device.type != "cpu":
        modules[f"rng.{device.type}"] = torch.get_device_module(device)
    return modules
