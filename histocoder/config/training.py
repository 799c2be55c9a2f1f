"""Settings of training: the model and its start, its fitting, and its strategy."""

from dataclasses import dataclass
from typing import Any

from histocoder.config.model import FLAT_LOSSES, ModelConfig, check_max_len
from histocoder.config.settings import Need, Settings, fixed, free, require

MAX_SEED = 2**32 - 1  # largest seed that all generators of random numbers take
# see `text.normalize`
NORMALIZATIONS = ("none", "nfc2", "lower2", "lower_ascii2", "nfc", "lower", "lower_ascii")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")  # see `model.devices`
AUTO = "auto"
# chosen by --encoder auto where it can be trained, as in `choose_encoder`
PRETRAINED_ENCODER = "google/canine-s"


def _encoder_type(model: ModelConfig) -> str:
    return str(model.encoder.get("model_type", "canine"))


_NGRAMS = Need("an n-gram encoder", lambda run, model: _encoder_type(model) == "ngram")
_POOLED = Need(
    "an encoder of Hugging Face's other than CANINE",
    lambda run, model: _encoder_type(model) not in ("ngram", "canine"),
)
_DECODER = Need(
    "a decoder that learns; for rows of one code only CANINE's does",
    lambda run, model: model.decoder_learns,
)
_TRAINED_ENCODER = Need(
    "an encoder that is trained; omit --freeze-encoder", lambda run, model: not run.freeze_encoder
)
_ATTRIBUTES = Need("--attribute-cols", lambda run, model: bool(run.attribute_cols))
_SOFTMAX = Need("--flat-loss softmax", lambda run, model: run.flat_loss == "softmax")
_ALTERED = Need("--augmentation-prob above 0", lambda run, model: run.augmentation_prob > 0)
_EDITS = Need("--num-transformations above 0", lambda run, model: run.num_transformations > 0)
_LANGUAGE = Need(
    "an encoder that reads the language, for data of several",
    lambda run, model: model.reads_language,
)
_ANY_PRECISION = Need("--precision auto", lambda run, model: run.precision == "auto")


@dataclass(frozen=True, kw_only=True)
class StartConfig(Settings):
    """The model, and what it starts from."""

    GROUP = "model"

    encoder: str = fixed(
        AUTO,
        f"auto: {PRETRAINED_ENCODER} with a GPU and the hub, else ngram, which needs "
        "neither; new: ngram, small, tiny; "
        "from the hub or a folder: CANINE, XLM-R, …",
        metavar="NAME|PATH",
    )
    initial_checkpoint: str | None = free(
        None,
        "model to start from: a folder, hf://OWNER/NAME on the hub, or OccCANINE's .bin file",
        metavar="PATH",
    )
    only_encoder: bool = free(
        False, "use only the encoder of --initial-checkpoint", is_negatable=True
    )
    freeze_encoder: bool = fixed(
        False, "train only what is above the encoder: decoder and classifier"
    )
    max_len: int = fixed(
        128,
        "maximum length of an input, in characters, or in tokens of the encoder's own tokenizer",
    )
    text_normalization: str = fixed(
        None,
        "nfc2: one form of each letter; lower2: also lower case, single blanks; "
        "lower_ascii2: væver is vaever; without "
        "2, of earlier models: long s, ligatures and invisible characters are read as they are",
        choices=NORMALIZATIONS,
    )
    ngram_dropout: float = fixed(
        0.3,
        "with ngram: share of n-grams dropped, below 1",
        metavar="P",
        between=(0, 0.999),
        needs=_NGRAMS,
    )
    pooling: str = fixed(
        None,
        "what the classifier reads: the mean of all tokens; auto: [CLS] if there is one",
        choices=("auto", "mean"),
        needs=_POOLED,
    )
    dropout: float = fixed(
        0.0, "dropout of the decoder and the heads, less than 1", metavar="P", between=(0, 0.999)
    )
    decoder_dim_feedforward: int | None = fixed(
        None, "width of the decoder's feed-forward layers (default: the encoder's)", at_least=1
    )

    def check(self) -> None:
        check_max_len(self.max_len)
        require(
            not self.only_encoder or self.initial_checkpoint is not None,
            "--only-encoder needs --initial-checkpoint; add that, or omit it.",
        )


@dataclass(frozen=True, kw_only=True)
class FitConfig(Settings):
    """Fitting of a model."""

    GROUP = "training"

    recipe: str = free(
        "auto",
        (
            "defaults of flags that are not given: auto, to suit what training starts from; "
            "reference, OccCANINE's own"
        ),
        choices=("auto", "reference"),
    )
    by_recipe: tuple[str, ...] | None = free(None, None)
    """Settings that a recipe has filled in, which a run with another start fills in again."""
    num_epochs: int = free(None, "passes over the data", at_least=1)
    min_steps: int = free(
        None,
        "train for N steps at least (default: chosen for you; 0 with --num-epochs)",
        at_least=0,
    )
    max_steps: int | None = free(None, "stop after N steps (default: by --num-epochs)", at_least=1)
    batch_size: int = free(None, "rows per batch and process", between=(1, 65_536))
    max_epoch_steps: int = fixed(
        None,
        "steps of an epoch beyond which the batch doubles, at most twice; 0: never",
        at_least=0,
    )
    decoder_stride: int = fixed(
        1,
        (
            "the decoder learns from every N-th row; N doubles when --max-epoch-steps doubles "
            "the batch"
        ),
        at_least=1,
        needs=_DECODER,
    )
    gradient_accumulation_steps: int = free(
        1,
        "batches per step and process; the result is that of a batch N times as large",
        between=(1, 65_536),
    )
    learning_rate: float = fixed(
        None,
        "peak learning rate (default: chosen for you, another for the encoder)",
        metavar="LR",
        above=0,
    )
    encoder_learning_rate: float | None = fixed(
        None,
        "peak learning rate of the encoder (default: chosen for you)",
        metavar="LR",
        above=0,
        needs=_TRAINED_ENCODER,
    )
    table_learning_rate: float | None = fixed(
        None,
        "peak learning rate of an n-gram encoder's embeddings (default: chosen for you)",
        metavar="LR",
        above=0,
        needs=_NGRAMS,
    )
    seq2seq_weight: float = fixed(
        0.1,
        "weight of the decoder's loss, if it learns; that of the classifier's is 1 - W",
        metavar="W",
        between=(0, 1),
        needs=_DECODER,
    )
    attribute_weight: float = fixed(
        0.2,
        "weight of the loss of each of --attribute-cols",
        metavar="W",
        at_least=0,
        needs=_ATTRIBUTES,
    )
    flat_loss: str = fixed(
        None,
        (
            "the classifier's loss: cross-entropy over the codes, or binary cross-entropy, "
            "summed or averaged over them"
        ),
        choices=FLAT_LOSSES,
    )
    flat_head: str = fixed(
        None,
        "the classifier's logits: linear, or cosines with a direction per code",
        choices=("linear", "cosine"),
    )
    label_smoothing: float = fixed(
        None,
        "with softmax: share of the target that is spread over all codes",
        metavar="P",
        between=(0, 0.9),
        needs=_SOFTMAX,
    )
    repeats: str = fixed(
        None,
        (
            "each row is an example, or each description once, with its codes by their shares "
            "of its rows"
        ),
        choices=("all", "once"),
    )
    warmup_pct: float = free(
        None, "share of steps in which the learning rate warms up", metavar="P", between=(0, 1)
    )
    weight_decay: float = fixed(0.01, "weight decay of AdamW", metavar="D", at_least=0)
    max_grad_norm: float = free(1.0, "norm to which gradients are clipped", metavar="N", above=0)
    precision: str = fixed("auto", "auto: bf16 if the hardware supports it", choices=PRECISIONS)
    use_amp: bool = free(False, "with auto: fp16 on GPUs without bf16", needs=_ANY_PRECISION)
    max_skipped_steps: int = free(
        10, "stop after N consecutive steps with gradients that are not finite", at_least=1
    )

    def step_size(self, num_processes: int) -> int:
        """Return the rows of a step, over accumulated batches and processes."""
        return self.batch_size * self.gradient_accumulation_steps * num_processes


_REFERENCE: dict[str, Any] = {
    "learning_rate": 2e-5,
    "encoder_learning_rate": None,
    "table_learning_rate": None,
    "batch_size": 128,
    "num_epochs": 5,
    "min_steps": 0,
    "max_epoch_steps": 0,
    "warmup_pct": 0.05,
    "flat_loss": "bce-mean",
    "flat_head": "linear",
    "label_smoothing": 0.0,
    "repeats": "all",
    "pooling": "auto",
    "augmentation_prob": 0.3,
    "unk_lang_prob": 0.25,
    "text_normalization": "nfc",
}
_NEW_HEADS = _REFERENCE | {
    "learning_rate": 1e-3,
    "batch_size": 64,
    "num_epochs": 8,
    "min_steps": 600,
    "flat_loss": "softmax",
    "augmentation_prob": 0.0,
    "unk_lang_prob": 0.1,
    "repeats": "once",
    "text_normalization": "nfc2",
}
RECIPES = {
    "reference": _REFERENCE,
    "ngram": _NEW_HEADS
    | {
        "num_epochs": 5,
        "max_epoch_steps": 200,
        "table_learning_rate": 3e-3,
        "text_normalization": "lower2",
    },
    "scratch": _NEW_HEADS | {"num_epochs": 15, "min_steps": 1000, "augmentation_prob": 0.3},
    "pretrained": _NEW_HEADS
    | {
        "learning_rate": 2e-3,
        "encoder_learning_rate": 1e-4,
        "warmup_pct": 0.1,
        "pooling": "mean",
        "flat_head": "cosine",
        "label_smoothing": 0.1,
    },
    "frozen": _NEW_HEADS
    | {"num_epochs": 30, "min_steps": 2000, "pooling": "mean", "unk_lang_prob": 0.0},
    "continued": _REFERENCE | {"learning_rate": 5e-5},
    "continued n-gram": _NEW_HEADS
    | {"learning_rate": 3e-4, "table_learning_rate": 1e-3, "num_epochs": 5, "min_steps": 0},
}
"""Presets of the settings above, by what a run starts from; `STARTS` says in which case."""
STARTS = {
    "reference": "--recipe reference, whatever the start: OccCANINE's own values",
    "ngram": "--encoder ngram",
    "scratch": "another preset from scratch",
    "pretrained": "a pretrained encoder with new heads (hub name, folder, --only-encoder)",
    "frozen": "--freeze-encoder",
    "continued": "a trained model whose heads are kept (--initial-checkpoint)",
    "continued n-gram": "the same of a model with an n-gram encoder",
}


@dataclass(frozen=True, kw_only=True)
class SeedConfig(Settings):
    """Seed of all random numbers."""

    GROUP = "training"

    seed: int = fixed(42, "seed of split, batches, noise and weights", between=(0, MAX_SEED))


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(Settings):
    """Alteration of training descriptions on the fly; see `data.augment`."""

    GROUP = "augmentation of training descriptions, on the fly"

    augmentation_prob: float = fixed(
        None, "share of descriptions that are altered", metavar="P", between=(0, 1), needs=_EDITS
    )
    num_transformations: int = fixed(
        3,
        "most edits of an altered description (1 to N; OccCANINE makes N)",
        at_least=0,
        needs=_ALTERED,
    )
    unk_lang_prob: float = fixed(
        None,
        "share of descriptions whose language is withheld",
        metavar="P",
        between=(0, 1),
        needs=_LANGUAGE,
    )
    fn_word_freq: str | None = fixed(
        None,
        "words to insert: word,freq (default: the data's own)",
        metavar="CSV",
        resume="content",
        needs=_ALTERED,
    )
