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
from histocoder.errors import Interrupted, StopRequest, UserError, handling_stop_signals
from histocoder.log import log
from histocoder.model import MixerModel, NgramEncoder
from histocoder.model.devices import fast_products, peak_gpu_memory
from histocoder.training.encoded_rows import FrozenOutputs, frozen_outputs
from histocoder.training.learner import Learner
from histocoder.training.tracking import Meter, Progress, Tracker
from histocoder.training.validation import validate

_TIMES_SLOWER = 10  # learning rate of a run that diverged, by that of the next


class Trainer:
    """Fits a model, on this process or together with others, and saves it.

    The model is on the CPU, with its frozen weights marked. Every rank has all rows; rank 0 writes
    to the run's folder, from `fit` on. `settings` is what a resumed run must agree on.
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
    ) -> None:
        self.model, self.config, self.device = model, config, device
        self.train_data, self.val_data = train_data, val_data
        self.run, self.settings = run, settings
        self.sampler, self.train_loader = self.batches_of(train_data)
        epoch_steps = self.sampler.num_batches
        self.total_steps = config.max_steps or max(
            config.num_epochs * epoch_steps, config.min_steps
        )
        self.eval_interval = config.eval_interval or min(max(epoch_steps, 100), 1000)
        kind = Learner
        if config.fsdp is not None:
            from histocoder.training.fsdp import (
                ShardedLearner as kind,
            )  # here, since it takes a while to import
        self.learner = kind(model, config, device, total_steps=self.total_steps)
        self.val_outputs: FrozenOutputs | None = None  # computed by `fit`
        self.state, self.meter = TrainState(), Meter()
        self.saved_step: int | None = None
        self.stop_signals = distributed.DelayedMax()
        self.tracker: Tracker = Tracker()  # until `fit`

    def batches_of(self, data: OccupationDataset) -> tuple[BucketSampler, BatchLoader]:
        """Return the sampler and the loader of training data."""
        config, world_size = self.config, distributed.world_size()
        sampler = BucketSampler(
            data.lengths,
            data.num_target_blocks,
            batch_size=config.step_size(world_size),
            seed=config.seed,
            rows=data.rows,
            num_replicas=world_size,
            rank=distributed.rank(),
            num_parts=config.gradient_accumulation_steps,
        )
        encoder = self.model.encoder
        on_gpu = self.device.type == "cuda"
        # the CPU hashes n-grams where it computes with them; for a GPU this is done ahead
        ngrams = encoder.config if isinstance(encoder, NgramEncoder) and on_gpu else None
        return sampler, BatchLoader(data, sampler, config, on_gpu=on_gpu, ngrams=ngrams)

    def fit(self, tracker: Tracker | None = None) -> dict[str, float]:
        """Train from the start or the restored state, save the model, and return the numbers of the
        last validation.

        Raises Interrupted where the run was asked to stop, with its state saved; a UserError where
        a file can't be written; and a MachineError where a loader worker is killed or hangs.
        """
        self.tracker = tracker or self.tracker
        with self.learner.whole() as model:
            self.learner.outputs = frozen_outputs(model, self.train_data)
            self.val_outputs = frozen_outputs(model, self.val_data)
        self.meter.started = time.monotonic()
        progress, stop = Progress(self.total_steps, start=self.state.step), StopRequest()
        products = fast_products(self.device, deterministic=self.config.deterministic)
        with (
            closing(progress),
            handling_stop_signals(stop),
            self.train_loader.naming_workers(),
            products,
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
        state, config = self.state, self.config
        self.model.train()
        self.sampler.set_position(state.epoch, state.samples)
        for parts in zip(
            *[iter(self.train_loader)] * config.gradient_accumulation_steps, strict=True
        ):
            loss, grad_norm = self.learner.train_step(parts)
            state.step += 1
            state.samples += parts[0].num_rows
            self.meter.add(loss, grad_norm, rows=parts[0].num_rows)
            state.results = None
            is_last = state.step == self.total_steps
            if state.step % config.log_interval == 0 or is_last:
                progress.line(state.step, self.log_training())
            progress.advance()
            if state.step % self.eval_interval == 0 or is_last:
                self.validate()
            end_of_epoch = config.save_each_epoch and state.samples == len(self.train_data.rows)
            if (
                is_last
                or end_of_epoch
                or (config.save_interval and state.step % config.save_interval == 0)
            ):
                self.save()
            # of several ranks, the signals that they had at the step before: they are exchanged
            # during a step
            if signum := self.stop_signals.exchange(stop.signum):
                self.save()
                raise Interrupted(
                    f"{signal.Signals(signum).name}: saved at step {state.step} of "
                    f"{self.total_steps}. Run the same "
                    "command again, without --overwrite and --resume, to resume from there.",
                    signum,
                )
            if is_last:
                break
        else:
            state.epoch, state.samples = state.epoch + 1, 0

    def log_training(self) -> dict[str, float]:
        """Log the numbers of the steps since the last time; return those to show; raise if too many
        were skipped.
        """
        values = self.meter.read() | peak_gpu_memory(self.device)
        values |= {
            "lr": float(self.learner.scheduler.get_last_lr()[-1]),
            "epoch": float(self.state.epoch + 1),
        }
        self.tracker.log(self.state.step, values)
        shown = {
            "loss": "train_loss",
            "rows/s": "samples_per_sec",
            "lr": "lr",
            "GPU GB": "gpu_memory_gb",
        }
        if values["skipped_steps"]:
            shown["skipped"] = "skipped_steps"
        if (in_a_row := int(self.meter.skipped_in_a_row)) >= self.config.max_skipped_steps:
            raise self.not_finite(f"The gradients of the last {in_a_row} steps are not finite")
        return {title: values[name] for title, name in shown.items() if name in values}

    def not_finite(self, what: str) -> UserError:
        """Return the error of a run that diverged, with flags that differ: a resumed run would take
        the same steps.
        """
        checkpoints, best = training_state.list_checkpoints(self.run.path), self.run.best
        state = "there is no earlier checkpoint"
        if checkpoints:
            state = f"the last good checkpoint is {checkpoints[-1]}"
        start = checkpoints[-1] if checkpoints else None
        if best.is_dir():
            state += f". {best} holds the best model so far"
            start = best

        rate = f"--learning-rate {self.config.learning_rate / _TIMES_SLOWER:.2g}"
        flags = rate if start is None else f"--initial-checkpoint {start} {rate}"
        precision = ""
        if self.model.dtype == torch.float16:
            precision = ", or with --precision fp32"
        return UserError(
            f"{what}, and {state}. The same command would diverge at the same step. Start "
            "a new run in another folder "
            f"with a lower learning rate, such as a tenth: {flags}{precision}."
        )

    def validate(self) -> dict[str, float]:
        """Validate, log the numbers, and save the model if it is the best so far."""
        started = time.monotonic()
        with self.learner.whole() as model:
            results = validate(model, self.val_data, self.config, outputs=self.val_outputs)
        self.state.results = results
        self.tracker.log(self.state.step, results)
        log.info(
            f"validation at step {self.state.step}: loss {results['val_loss']:.4g}; "
            f"accuracy in %: decoder {results['greedy_seq_acc']:.1f}, "
            f"classifier {results['flat_acc']:.1f}, "
            f"decoder told the true codes so far {results['seq_acc']:.1f} "
            f"(tokens {results['token_acc']:.1f})"
            + "".join(
                f", {name} {results[f'acc_{name}']:.1f}" for name in self.model.config.attributes
            )
        )
        if not math.isfinite(results["val_loss"]):
            raise self.not_finite(f"The validation loss of step {self.state.step} is not finite")
        if self.state.improves(results, num_rows=len(self.val_data)):
            self.save_model(self.run.best, doing="saving the best model")
        self.meter.started += time.monotonic() - started  # a pause, which rows/s exclude
        return results

    def save_model(self, folder: Path, *, doing: str) -> None:
        """Write the model and its card."""
        weights, model = self.learner.trained_weights(), self.model
        facts: dict[str, Any] = {"num_train": len(self.train_data), "num_val": len(self.val_data)}
        card = model_card(model.config, **facts, metrics=self.state.results)
        distributed.run_on_primary(
            lambda: save_model(folder, model.config, weights, tokenizer=model.tokenizer, card=card),
            doing=doing,
        )

    def save(self) -> None:
        """Write a checkpoint, unless this step has one."""
        if self.saved_step == self.state.step:
            return
        self.saved_step = self.state.step
        started = time.monotonic()
        mine = {"rng": torch.get_rng_state()}
        if self.device.type != "cpu":
            mine[f"rng.{self.device.type}"] = torch.get_device_module(self.device).get_rng_state()
        ranks = {name: torch.stack(distributed.gather(values)) for name, values in mine.items()}
        checkpoint = Checkpoint(
            path=training_state.checkpoint_path(self.run.path, self.state.step),
            state=self.state,
            learner=self.learner.state(),
            ranks=ranks,
            settings=self.settings,
            model_config=self.model.config,
            tokenizer=self.model.tokenizer,
        )

        def write() -> None:
            if not all(
                bool(weight.isfinite().all()) for weight in checkpoint.learner.weights.values()
            ):
                raise self.not_finite("The model's weights are not finite and were not saved")
            training_state.save_checkpoint(checkpoint, keep=self.config.keep_checkpoints)

        distributed.run_on_primary(write, doing="saving a checkpoint")
        self.meter.started += time.monotonic() - started

    def save_result(self) -> None:
        """Write the model of a finished run."""
        if distributed.is_primary():
            self.run.forget_results()
        self.save_model(self.run.path, doing="saving the model")
        if self.config.save_format == "occcanine":
            learner, model = self.learner.state(), self.model
            trained = [
                name for name, parameter in model.named_parameters() if parameter.requires_grad
            ]
            path, step = self.run.path, self.state.step
            save = partial(
                training_state.save_last_bin,
                path,
                model.config,
                learner,
                step=step,
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
        rank = distributed.rank()
        if rank < len(
            checkpoint.ranks["rng"]
        ):  # with more processes than before, the new ones keep their seeds
            torch.set_rng_state(
                checkpoint.ranks["rng"][rank].clone()
            )  # a view would be read beyond its end
        states_of_device = checkpoint.ranks.get(f"rng.{self.device.type}", ())
        if rank < len(states_of_device):
            torch.get_device_module(self.device).set_rng_state(states_of_device[rank].clone())
