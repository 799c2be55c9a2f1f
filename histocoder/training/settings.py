"""What the arguments of a run mean for training, and which of them a resumed run must agree on."""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import torch

from histocoder import distributed
from histocoder.checkpoints.resume import BATCH_SETTINGS
from histocoder.config import (
    AugmentConfig,
    LoaderConfig,
    StrategyConfig,
    TrainConfig,
    check_decoder,
    check_max_len,
    config_of,
)
from histocoder.data.cache import ExampleArrays
from histocoder.data.examples import ExampleFiles
from histocoder.data.key import Key
from histocoder.data.table import fingerprint
from histocoder.errors import UserError
from histocoder.model.devices import check_compiler
from histocoder.model.precision import computing_dtype
from histocoder.training.console import say
from histocoder.training.strategies import check_strategy

_LEARNING_RATES = ("learning_rate", "encoder_learning_rate", "table_learning_rate")


def check_arguments(args: argparse.Namespace, device: torch.device) -> None:
    """Raise a UserError where training can't be as the arguments say, before any work is done or any undone."""
    check_max_len(args.max_len)
    check_decoder(dropout=args.dropout, dim_feedforward=args.decoder_dim_feedforward)
    if args.only_encoder and args.initial_checkpoint is None:
        raise UserError("--only-encoder says what to take of --initial-checkpoint; give that as well.")
    config_of(AugmentConfig, args)
    config_of(LoaderConfig, args)
    strategy = train_config_of(args).strategy
    check_strategy(strategy, device, computing_dtype(args.precision, device, use_amp=args.use_amp))
    if args.world_size is not None:
        say(f"Notice: --world-size has no effect; by its launcher the run has {distributed.world_size()} process(es).")
    if args.compile:
        check_compiler(device)
    if distributed.world_size() == 1 and (flags := strategy.flags()):
        say(f"Notice: there is one process, which leaves {' and '.join(flags)} without effect.")


def train_config_of(args: argparse.Namespace) -> TrainConfig:
    """The training configuration that the arguments describe; raises UserError where it makes no sense."""
    if args.tokens_per_batch is not None and args.tokens_per_batch < args.max_len:
        raise UserError(
            f"--tokens-per-batch is {args.tokens_per_batch}; a single row takes up to {args.max_len} positions "
            "(--max-len)."
        )
    if args.auto_batch_size and args.tokens_per_batch is not None:
        raise UserError("--auto-batch-size finds a number of rows, which --tokens-per-batch replaces; choose one.")
    if args.scale_lr and args.tokens_per_batch is not None:
        raise UserError("--scale-lr goes by rows, which --tokens-per-batch does not fix; choose one of the two.")
    if args.base_batch_size < 1:
        raise UserError(f"--base-batch-size is {args.base_batch_size}; it must be 1 or more.")
    scale = rows_of_a_step(args) / args.base_batch_size if args.scale_lr else 1
    return config_of(
        TrainConfig,
        args,
        **{name: getattr(args, name) and getattr(args, name) * scale for name in _LEARNING_RATES},
        strategy=config_of(StrategyConfig, args),
        profile_steps=args.profile,
    )


def rows_of_a_step(args: argparse.Namespace) -> int:
    """The effective batch: of all processes together, and over all batches that accumulate."""
    return args.batch_size * args.gradient_accumulation_steps * distributed.world_size()


def settings_of(
    args: argparse.Namespace,
    config: TrainConfig,
    train_files: ExampleFiles,
    train_arrays: ExampleArrays,
    val_arrays: ExampleArrays,
    key: Key,
) -> dict[str, Any]:
    """What a resumed run must agree on: all that decides batches, sizes, and the state of the optimizer."""
    num_tokens, num_parts = args.tokens_per_batch, args.gradient_accumulation_steps * distributed.world_size()
    return {
        "data to train on": f"{len(train_arrays):,} rows ({train_arrays.fingerprint})",
        "data to validate on": f"{len(val_arrays):,} rows ({val_arrays.fingerprint})",
        "codes": f"{len(key.codes)} ({hashlib.sha256('&'.join(key.codes).encode()).hexdigest()[:8]})",
        "columns": ", ".join((train_files.input_col, train_files.language_col, *train_files.target_cols)),
        "formatter": ", ".join(f"{name} {value}" for name, value in train_files.formatter.to_config().items()),
        "--encoder": args.encoder,
        "--freeze-encoder": args.freeze_encoder,
        "--max-len": args.max_len,
        "--text-normalization": args.text_normalization,
        "--seed": args.seed,
        **{f"--{name.replace('_', '-')}": getattr(config, name) for name in _LEARNING_RATES},
        "--flat-loss": args.flat_loss,
        "--pooling": args.pooling,
        "--min-steps": args.min_steps,
        "--weight-decay": args.weight_decay,
        "--seq2seq-weight": args.seq2seq_weight,
        "--precision": args.precision,
        "--dropout": args.dropout,
        "--ngram-dropout": args.ngram_dropout,
        "--decoder-dim-feedforward": args.decoder_dim_feedforward,
        "--augmentation-prob": args.augmentation_prob,
        "--num-transformations": args.num_transformations,
        "--unk-lang-prob": args.unk_lang_prob,
        "--fn-word-freq": args.fn_word_freq and fingerprint(args.fn_word_freq)[:8],
        BATCH_SETTINGS["--batch-size"]: rows_of_a_step(args) if num_tokens is None else None,
        BATCH_SETTINGS["--tokens-per-batch"]: None if num_tokens is None else num_tokens * num_parts,
    }
