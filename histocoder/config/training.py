"""Settings of training: the model and its start, its fitting, and its strategy."""

from __future__ import annotations

from dataclasses import dataclass

from histocoder.config.model import FLAT_LOSSES, check_decoder, check_max_len
from histocoder.config.settings import Settings, fixed, free, require, whole_number

MAX_SEED = 2**32 - 1
"""Largest seed that all generators of random numbers take."""
NORMALIZATIONS = ("none", "nfc", "lower", "lower_ascii")
"""Choices of `data.normalize`."""
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
"""Choices of `model.devices`."""


@dataclass(frozen=True, kw_only=True)
class StartConfig(Settings):
    """The model, and what it starts from."""

    GROUP = "model"

    encoder: str = fixed(
        "google/canine-s",
        "from the hub or a folder: any CANINE, or another with its tokenizer, such as XLM-R, BERT or ByT5; or a preset "
        "trained from scratch: ngram, tiny, small",
        metavar="NAME|PATH",
        is_short=True,
    )
    initial_checkpoint: str | None = free(
        None,
        "weights to start from: a run's folder, a hub repo, or the reference's .bin file",
        metavar="PATH",
        is_short=True,
    )
    only_encoder: bool = free(False, "take only the encoder of --initial-checkpoint", is_negatable=True)
    freeze_encoder: bool = fixed(
        False, "train the decoder and the flat head only; without augmentation texts are encoded once, to --cache-dir"
    )
    max_len: int = fixed(128, "characters of an input, or tokens where the encoder reads such")
    text_normalization: str = fixed(
        None,
        "nfc: one Unicode form for each letter; lower: in lower case and with single blanks as well; lower_ascii: "
        "væver is read as vaever, as by published models",
        choices=NORMALIZATIONS,
    )
    ngram_dropout: float = fixed(0.3, "n-grams left out, with ngram", metavar="P")
    pooling: str = fixed(
        None,
        "what the flat head reads of an encoder of Hugging Face's: the mean over all tokens, or auto, the first token "
        "where it stands for the whole text",
        choices=("auto", "mean"),
    )
    dropout: float = fixed(0.0, "of decoder and heads", metavar="P")
    decoder_dim_feedforward: int | None = fixed(None, "decoder's inner width (default: the encoder's width)")

    def check(self) -> None:
        """Raise a UserError if there can't be such a model."""
        check_max_len(self.max_len)
        check_decoder(dropout=self.dropout, dim_feedforward=self.decoder_dim_feedforward)
        require(
            not self.only_encoder or self.initial_checkpoint is not None,
            "--only-encoder says what to take of --initial-checkpoint; give that as well.",
        )


@dataclass(frozen=True, kw_only=True)
class FitConfig(Settings):
    """Fitting of a model."""

    GROUP = "training"

    recipe: str = free(
        "auto",
        "where flags that are left out get their values: by what the run starts from, see docs/configuration.md, or "
        "OccCANINE's own",
        choices=("auto", "reference"),
    )
    by_recipe: tuple[str, ...] | None = free(None, None)
    """Settings that a recipe has filled in, which a run with another start fills in again."""
    num_epochs: int = free(None, "passes over the data", at_least=1, is_short=True)
    min_steps: int = fixed(
        None,
        "passes are repeated until there have been N steps (default: by the recipe; 0 with --num-epochs)",
        at_least=0,
    )
    early_stopping: int | None = free(
        None, "end after N validations in a row without a better model (default: off)", at_least=1
    )
    max_steps: int | None = free(None, "end after N steps (default: by --num-epochs)", at_least=1)
    batch_size: int = free(None, "rows of a batch, on each process", at_least=1, is_short=True)
    max_epoch_steps: int = fixed(
        None,
        "while an epoch has more than N steps, the batch doubles, up to four times --batch-size, and learning rates "
        "grow with its square root; 0: never (default: by the recipe; 0 with --batch-size or --learning-rate)",
        at_least=0,
    )
    decoder_stride: int = fixed(
        1,
        "the decoder learns from every N-th row of a batch; N doubles whenever --max-epoch-steps doubles the batch",
        at_least=1,
    )
    gradient_accumulation_steps: int = free(
        1, "batches of a step, on each process: as one batch N times as large, in less memory", at_least=1
    )
    tokens_per_batch: int | None = free(
        None,
        "positions of a batch, padding included, in training: as many rows as fit (default: --batch-size)",
        at_least=1,
    )
    learning_rate: float = fixed(
        None,
        "peak of the learning rate, of all weights (default: by the recipe, of encoder and heads apart)",
        metavar="LR",
        above=0,
    )
    encoder_learning_rate: float | None = fixed(
        None, "the encoder's own peak (default: by the recipe)", metavar="LR", above=0
    )
    table_learning_rate: float | None = fixed(
        None, "peak for an n-gram encoder's embeddings (default: by the recipe)", metavar="LR", above=0
    )
    scale_lr: bool = free(False, "times the rows of a step, by all processes, over --base-batch-size")
    base_batch_size: int = free(128, "rows of a step that --learning-rate is meant for", at_least=1)
    seq2seq_weight: float = fixed(
        0.1, "weight of the decoder's loss; the flat head's has 1 - W", metavar="W", between=(0, 1)
    )
    flat_loss: str = fixed(
        None,
        "loss of the flat head: cross-entropy over the codes, or binary cross-entropy, summed or averaged over them",
        choices=FLAT_LOSSES,
    )
    warmup_pct: float = free(None, "share of warm-up steps, to the nearest step", metavar="P", between=(0, 1))
    weight_decay: float = fixed(0.01, "of AdamW", metavar="D", at_least=0)
    max_grad_norm: float = free(1.0, "gradients are clipped to", metavar="N", above=0)
    precision: str = fixed("auto", "auto: bf16 where the hardware has it", choices=PRECISIONS)
    use_amp: bool = free(False, "let auto be fp16 on GPUs without bf16")
    compile: bool = free(False, "let torch compile the model's layers, in the first steps")
    max_skipped_steps: int = free(
        10,
        "end after N consecutive steps with gradients that are not finite; checked when logging",
        at_least=1,
    )

    def check(self) -> None:
        """Raise a UserError if the learning rate is to be scaled by rows that are not fixed."""
        require(
            not self.scale_lr or self.tokens_per_batch is None,
            "--scale-lr goes by rows, which --tokens-per-batch does not fix; choose one of the two.",
        )

    def num_parts(self, num_processes: int) -> int:
        """Return the number of batches of a step: accumulated batches × processes."""
        return self.gradient_accumulation_steps * num_processes

    def step_size(self, num_processes: int) -> int:
        """Return the rows of a step, or its positions if `tokens_per_batch` is given."""
        return (self.tokens_per_batch or self.batch_size) * self.num_parts(num_processes)


@dataclass(frozen=True, kw_only=True)
class SeedConfig(Settings):
    """Seed of all random numbers."""

    GROUP = "training"

    seed: int = fixed(42, "of split, batches, noise, weights", between=(0, MAX_SEED))


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(Settings):
    """Alteration of training descriptions on the fly; see `data.augment`."""

    GROUP = "augmentation, of training descriptions on the fly"

    augmentation_prob: float = fixed(None, "share altered", metavar="P", between=(0, 1))
    num_transformations: int = fixed(3, "edits of an altered description: 1 to N, where OccCANINE makes N", at_least=0)
    unk_lang_prob: float = fixed(None, "share with language withheld", metavar="P", between=(0, 1))
    fn_word_freq: str | None = fixed(
        None, "words to insert: word,freq (default: the data's own)", metavar="CSV", resume="content"
    )


@dataclass(frozen=True, kw_only=True)
class StrategyConfig(Settings):
    """Strategy that spreads a model over processes, without effect on one process."""

    GROUP = "strategy, for models and batches that are large"

    gradient_checkpointing: bool = free(
        False, "compute each layer twice instead of keeping what is in it: less memory, the same bits"
    )
    auto_batch_size: bool = free(
        False,
        "in place of --batch-size: the largest power of two, up to 1024, whose longest step fits; found before "
        "training by trying; needs a GPU",
    )
    fsdp: str | None = free(
        None,
        "each process holds a share of weights, gradients and optimizer state; shard_grad_op: weights are whole from "
        "the forward to the end of the backward pass (default: DDP, all of them on each process)",
        choices=("full_shard", "shard_grad_op"),
    )
    fsdp_min_num_params: int | None = free(
        None,
        "a layer with at least N parameters is its own FSDP unit, the rest is one unit (default: every layer)",
        parse=whole_number,
        at_least=1,
    )
    fsdp_cpu_offload: bool = free(False, "keep shards and optimizer steps in the CPUs' memory; needs GPUs")
    fsdp_state_dict: str = free(
        "full",
        "checkpoints: one state dict as with DDP, or each rank writes its shard into a folder that all see",
        choices=("full", "sharded"),
    )
    fsdp_reduce_dtype: str = free(
        "fp32", "precision in which gradients are summed over processes", choices=("fp32", "bf16")
    )
    ddp_comm_hook: str = free(
        "none",
        "DDP: exchange gradients in bf16, half the bytes; needs GPUs (default: none, in their own precision)",
        choices=("none", "bf16"),
    )

    def check(self) -> None:
        """Raise a UserError if strategies contradict each other."""
        for name in ("fsdp_min_num_params", "fsdp_cpu_offload", "fsdp_state_dict", "fsdp_reduce_dtype"):
            require(
                self.fsdp is not None or getattr(self, name) == getattr(StrategyConfig, name),
                f"--{name.replace('_', '-')} is for --fsdp full_shard or shard_grad_op; add that, or omit it.",
            )
        require(
            self.fsdp is None or self.ddp_comm_hook == "none",
            "--ddp-comm-hook is for DDP; with --fsdp use --fsdp-reduce-dtype.",
        )
