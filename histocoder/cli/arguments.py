"""The flags that both training scripts have, in groups."""

from __future__ import annotations

import argparse

from histocoder import distributed
from histocoder.cli.parser import Parser
from histocoder.config import FLAT_LOSSES
from histocoder.data.normalize import NORMALIZATIONS
from histocoder.model import PRESETS
from histocoder.model.precision import PRECISIONS

DEFAULT_ENCODER = "google/canine-s"


def add_data_arguments(parser: Parser) -> None:
    """Flags for what the data look like."""
    group = parser.add_argument_group("data")
    group.add_argument("--input-col", default="occ1", metavar="COL", help="column of descriptions (default: occ1)")
    group.add_argument("--drop-bad-labels", action="store_true", help="leave out rows whose labels do not fit")
    group.add_argument(
        "--blank-means-no-occupation",
        action="store_true",
        help="train on rows without any code as descriptions of no occupation (default: they are left out)",
    )
    group.add_argument("--zero-pad-codes", action="store_true", help="give codes of digits their leading zeros back")
    group.add_argument(
        "--allow-codes-shorter-than-block-size",
        action="store_true",
        help="take codes shorter than --block-size as meant",
    )
    group.add_argument(
        "--cache-dir", metavar="DIR", help="where tokenised data are kept, for several runs (default: the run's cache/)"
    )


def add_model_arguments(parser: Parser) -> None:
    """Flags for the model and what it starts from."""
    group = parser.add_argument_group("model")
    presets = ", ".join(PRESETS)
    group.add_argument(
        "--encoder",
        default=DEFAULT_ENCODER,
        metavar="NAME|PATH",
        help="from the hub or a folder: any CANINE, or another with its tokenizer, such as XLM-R, BERT or ByT5; or a "
        f"preset trained from scratch: {presets} (default: {DEFAULT_ENCODER})",
    )
    group.add_argument(
        "--initial-checkpoint",
        metavar="PATH",
        help="weights to start from: a run's folder, or the reference's .bin file",
    )
    group.add_argument(
        "--only-encoder",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="take only the encoder of --initial-checkpoint",
    )
    group.add_argument(
        "--freeze-encoder",
        action="store_true",
        help="train the decoder and the flat head only; without augmentation texts are encoded once, to --cache-dir",
    )
    group.add_argument(
        "--max-len",
        type=int,
        default=128,
        metavar="N",
        help="characters of an input, or tokens where the encoder reads such (default: 128)",
    )
    group.add_argument(
        "--text-normalization",
        choices=NORMALIZATIONS,
        help="nfc: one Unicode form for each letter; lower: in lower case and with single blanks as well; lower_ascii: "
        "væver is read as vaever, as by published models (default: by the recipe)",
    )
    group.add_argument(
        "--ngram-dropout", type=float, default=0.3, metavar="P", help="n-grams left out, with ngram (default: 0.3)"
    )
    group.add_argument(
        "--pooling",
        choices=("auto", "mean"),
        help="what the flat head reads of an encoder of Hugging Face's: the mean over all tokens, or auto, the first "
        "token where it stands for the whole text (default: by the recipe)",
    )
    group.add_argument("--dropout", type=float, default=0.0, metavar="P", help="of decoder and heads (default: 0)")
    group.add_argument(
        "--decoder-dim-feedforward", type=int, metavar="N", help="decoder's inner width (default: the encoder's width)"
    )


def add_training_arguments(parser: Parser, *, num_epochs: int, batch_size: int, seq2seq_weight: float) -> None:
    """Flags for fitting; the defaults that differ between the scripts are arguments."""
    parser.set_defaults(script_num_epochs=num_epochs, script_batch_size=batch_size)
    group = parser.add_argument_group("training")
    group.add_argument(
        "--recipe",
        default="auto",
        choices=("auto", "reference"),
        help="where flags that are left out get their values: by what the run starts from, see docs/configuration.md, "
        "or OccCANINE's own (default: auto)",
    )
    group.add_argument("--num-epochs", type=int, metavar="N", help="passes over the data (default: by the recipe)")
    group.add_argument(
        "--min-steps",
        type=int,
        metavar="N",
        help="passes are repeated until there have been N steps (default: by the recipe; 0 with --num-epochs)",
    )
    group.add_argument(
        "--early-stopping",
        type=int,
        metavar="N",
        help="end after N validations in a row without a better model (default: off)",
    )
    group.add_argument("--max-steps", type=int, metavar="N", help="end after so many steps (default: by --num-epochs)")
    group.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help=f"rows of a batch, on each process (default: by the recipe, or {batch_size})",
    )
    group.add_argument(
        "--gradient-accumulation-steps",
        type=int,
        default=1,
        metavar="N",
        help="batches of a step, on each process: as one batch N times as large, in less memory (default: 1)",
    )
    group.add_argument(
        "--tokens-per-batch",
        type=int,
        metavar="N",
        help="positions of a batch, padding included, in training: as many rows as fit (default: --batch-size)",
    )
    group.add_argument(
        "--learning-rate",
        type=float,
        metavar="LR",
        help="peak of the learning rate, of all weights (default: by the recipe, of encoder and heads apart)",
    )
    group.add_argument(
        "--encoder-learning-rate", type=float, metavar="LR", help="the encoder's own peak (default: by the recipe)"
    )
    group.add_argument(
        "--table-learning-rate",
        type=float,
        metavar="LR",
        help="peak for an n-gram encoder's embeddings (default: by the recipe)",
    )
    group.add_argument(
        "--scale-lr",
        action="store_true",
        help="times the rows of a step, by all processes, over --base-batch-size",
    )
    group.add_argument(
        "--base-batch-size",
        type=int,
        default=batch_size,
        metavar="N",
        help=f"rows of a step that --learning-rate is meant for (default: {batch_size})",
    )
    group.add_argument(
        "--seq2seq-weight",
        type=float,
        default=seq2seq_weight,
        metavar="W",
        help=f"weight of the decoder's loss; the flat head's has 1 - W (default: {seq2seq_weight:g})",
    )
    group.add_argument(
        "--flat-loss",
        choices=FLAT_LOSSES,
        help="loss of the flat head: cross-entropy over the codes, or binary cross-entropy, summed or averaged over "
        "them (default: by the recipe)",
    )
    group.add_argument(
        "--warmup-pct",
        type=float,
        metavar="P",
        help="share of warm-up steps, to the nearest step (default: by the recipe)",
    )
    group.add_argument("--weight-decay", type=float, default=0.01, metavar="D", help="of AdamW (default: 0.01)")
    group.add_argument(
        "--max-grad-norm", type=float, default=1.0, metavar="N", help="gradients are clipped to (default: 1)"
    )
    group.add_argument(
        "--precision", default="auto", choices=PRECISIONS, help="auto: bf16 where the hardware has it (default: auto)"
    )
    group.add_argument("--use-amp", action="store_true", help="let auto be fp16 on GPUs without bf16")
    group.add_argument(
        "--compile", action="store_true", help="let torch compile the model's layers, in the first steps"
    )
    group.add_argument(
        "--max-skipped-steps",
        type=int,
        default=10,
        metavar="N",
        help="end at so many steps in a row whose gradients are not finite; looked at when logging (default: 10)",
    )
    group.add_argument(
        "--seed", type=int, default=42, metavar="N", help="of split, batches, noise, weights (default: 42)"
    )
    _add_augmentation_arguments(parser)


def _add_augmentation_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("augmentation, of training descriptions on the fly")
    group.add_argument("--augmentation-prob", type=float, metavar="P", help="share altered (default: by the recipe)")
    group.add_argument(
        "--num-transformations",
        type=int,
        default=3,
        metavar="N",
        help="edits of an altered description: 1 to N, where OccCANINE makes N (default: 3)",
    )
    group.add_argument(
        "--unk-lang-prob", type=float, metavar="P", help="share with language withheld (default: by the recipe)"
    )
    group.add_argument("--fn-word-freq", metavar="CSV", help="words to insert: word,freq (default: the data's own)")


def _whole_number(text: str) -> int:
    """Of a form such as 1e6, too."""
    value = float(text)
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text} is no whole number")
    return int(value)


def add_strategy_arguments(parser: Parser) -> None:
    """Flags for what lies in whose memory; see `StrategyConfig`."""
    group = parser.add_argument_group("strategy, for models and batches that are large")
    group.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="compute each layer twice instead of keeping what is in it: less memory, the same bits",
    )
    group.add_argument(
        "--auto-batch-size",
        action="store_true",
        help="in place of --batch-size: the largest power of two, up to 1024, whose longest step fits; found before "
        "training by trying on a GPU, and by measuring small batches on a CPU",
    )
    group.add_argument(
        "--fsdp",
        choices=("full_shard", "shard_grad_op"),
        help="each process holds a share of weights, gradients and optimizer state; shard_grad_op: weights are whole "
        "from the forward to the end of the backward pass (default: DDP, all of them on each process)",
    )
    group.add_argument(
        "--fsdp-min-num-params",
        type=_whole_number,
        metavar="N",
        help="layers of so many parameters or more are gathered one by one, the rest at once (default: every layer)",
    )
    group.add_argument(
        "--fsdp-cpu-offload", action="store_true", help="keep shares, and step them, in the CPUs' memory; needs GPUs"
    )
    group.add_argument(
        "--fsdp-state-dict",
        default="full",
        choices=("full", "sharded"),
        help="checkpoints: as DDP's, or each process writes its share into a folder that all see (default: full)",
    )
    group.add_argument(
        "--fsdp-reduce-dtype",
        default="fp32",
        choices=("fp32", "bf16"),
        help="precision in which gradients are summed over processes (default: fp32)",
    )
    group.add_argument(
        "--zero-optimizer",
        action="store_true",
        help="DDP: each process holds a share of the optimizer's state (ZeRO-1), in place of all of it",
    )
    group.add_argument(
        "--ddp-comm-hook",
        default="none",
        choices=("none", "bf16", "fp16"),
        help="DDP: exchange gradients in half the bytes; bf16 needs GPUs (default: none, in their own precision)",
    )


def add_run_arguments(parser: Parser, *, save_interval: int) -> None:
    """Flags for saving, logging and the machine."""
    add_strategy_arguments(parser)
    _add_saving_arguments(parser, save_interval)
    _add_debugging_arguments(parser)
    _add_machine_arguments(parser)


def _add_saving_arguments(parser: Parser, save_interval: int) -> None:
    group = parser.add_argument_group("saving and logging")
    group.add_argument(
        "--save-interval",
        type=int,
        default=save_interval,
        metavar="N",
        help=f"steps between checkpoints (default: {save_interval})",
    )
    group.add_argument("--save-each-epoch", action="store_true", help="save at the end of each epoch as well")
    group.add_argument(
        "--keep-checkpoints", type=int, default=2, metavar="N", help="the newest N are kept (default: 2)"
    )
    group.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="checkpoint to go on from (default: auto, the newest)",
    )
    group.add_argument("--overwrite", action="store_true", help="throw away what an earlier run left in the folder")
    group.add_argument(
        "--save-format",
        default="histocoder",
        choices=("histocoder", "occcanine"),
        help="occcanine: write last.bin in the reference's form as well, at the end",
    )
    group.add_argument(
        "--log-interval", type=int, default=100, metavar="N", help="steps between lines of the log (default: 100)"
    )
    group.add_argument(
        "--eval-interval",
        type=int,
        metavar="N",
        help="steps between validations (default: those of an epoch, but 1000 at most and 100 at least)",
    )
    group.add_argument(
        "--no-report", action="store_true", help="leave out report.html on the validation data, at the end"
    )
    group.add_argument(
        "--no-experts",
        action="store_true",
        help="fit no linear expert and no combination of experts, at the end; the mode to predict in stays greedy",
    )
    group.add_argument(
        "--no-refit",
        action="store_true",
        help="do not let best/ learn from the validation data too, at the end, once it is measured on them",
    )
    group.add_argument("--log-tensorboard", action="store_true", help="log to TensorBoard as well, in tensorboard/")
    group.add_argument("--log-wandb", action="store_true", help="log to Weights & Biases as well")
    group.add_argument(
        "--wandb-project-name", default="histco-v2-mixer", metavar="NAME", help="W&B project (default: histco-v2-mixer)"
    )
    group.add_argument(
        "--run-name",
        metavar="NAME",
        help="the run's name in W&B (default: as canine-s_hisco_gpu4, by encoder, columns of codes, and processes)",
    )
    group.add_argument(
        "--wandb-artifact",
        action="store_true",
        help="with --log-wandb: send the final model as well, which may take ten minutes at most",
    )


def _add_debugging_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("profiling and debugging")
    group.add_argument(
        "--profile",
        type=int,
        metavar="N",
        help="write where the time of N steps goes, behind the first five, to profile/: a trace and a table",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="let torch use only algorithms that give the same bits each time; slower on a GPU",
    )


def _add_machine_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda", "mps"),
        help="where to compute (default: auto, a GPU if there is one)",
    )
    group.add_argument("--distributed", action="store_true", help="insist on a launcher, such as torchrun")
    group.add_argument(
        "--rank-timeout",
        type=float,
        default=distributed.RANK_TIMEOUT,
        metavar="S",
        help="seconds without a sign of life after which a process is taken for hung, and all end (default: 300)",
    )
    group.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    group.add_argument("--world-size", type=int, help=argparse.SUPPRESS)  # as in OccCANINE's command lines
    group.add_argument("--num-workers", type=int, default=0, metavar="N", help="processes that load data (default: 0)")
    group.add_argument(
        "--prefetch-factor", type=int, default=2, metavar="N", help="batches that a worker holds ready (default: 2)"
    )
    group.add_argument(
        "--pin-memory",
        action=argparse.BooleanOptionalAction,
        help="page-locked batches (default: where there is a GPU)",
    )
    group.add_argument("--persistent-workers", action="store_true", help="keep workers from epoch to epoch")
    group.add_argument(
        "--worker-timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds without a batch after which a worker is taken to hang (default: 300)",
    )
