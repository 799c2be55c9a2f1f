"""What a run is made of, checked where it is built."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass, field, fields
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from histocoder.errors import UserError

MODEL_TYPE = "histocoder"
FORMAT_VERSION = 1
"""Version of the model's and the checkpoints' files; a newer one is refused by name."""


MAX_TARGET_LEN = 128
"""Positions that the decoder knows."""
LANG_SEP = "[SEP]"
"""Stands between language and description, as these five characters."""
FLAT_LOSSES = ("softmax", "bce", "bce-mean")
DEFAULT_THRESHOLDS = {"softmax": 0.3, "bce": 0.5, "bce-mean": 0.5}
"""Of a softmax, two codes of a row have about a half each."""
MAX_SEED = 2**32 - 1
"""What all generators of random numbers take."""
ALL_LANGUAGES = "*"
"""Stands for all of them among thresholds."""
_WORKERS_EACH = 8
"""Loader processes for each processor at most: more than one are of no use, and each takes memory."""
NUM_GREEDY = 1024
"""Validation rows that are decoded freely during training; all are scored with teacher forcing."""


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


def check_target_len(num_blocks: int, block_size: int) -> None:
    """Raise a UserError where so many codes of so many tokens are more than the decoder has positions for."""
    _require(
        1 + num_blocks * block_size <= MAX_TARGET_LEN,
        f"{num_blocks} codes of {block_size} characters are more than the {MAX_TARGET_LEN - 1} places of the decoder; "
        "set --block-size to the longest code's length.",
    )


def check_max_len(max_len: int) -> None:
    """Raise a UserError where the encoder can't have so many positions."""
    _require(max_len >= 16 and max_len % 4 == 0, "--max-len must be a multiple of 4, 16 or more.")


def check_decoder(*, dropout: float, dim_feedforward: int | None) -> None:
    """Raise a UserError where there can be no decoder with these."""
    _require(0 <= dropout < 1, f"--dropout is {dropout:g}; it must be 0 or more and less than 1.")
    _require(
        dim_feedforward is None or dim_feedforward >= 1,
        f"--decoder-dim-feedforward is {dim_feedforward}; it must be 1 or more.",
    )


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON is of the type that a field is annotated with."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, one) for one in args)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(one, args[1]) for one in value.values())
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(one, args[0]) for one in value)
    return kind is Any or isinstance(value, (int, float) if kind is float else kind)


@dataclass(frozen=True)
class PrepareConfig:
    """How a user's table becomes training and validation data."""

    dataset: str
    """A CSV or Parquet file."""
    target_cols: tuple[str, ...]
    """Columns that hold codes, the first code's column first."""
    input_col: str = "occ1"
    """Column that holds descriptions."""
    language: str = "unk"
    """The language of all rows."""
    language_col: str | None = None
    """Column that holds each row's language, instead."""
    block_size: int = 5
    """Tokens of the longest code."""
    use_within_block_sep: bool = False
    """Whether "," separates the tokens within a code."""
    zero_pad_codes: bool = False
    """Whether codes of too few digits get their leading zeros back."""
    allow_short_codes: bool = False
    """Whether codes may be shorter than the block."""
    drop_bad_labels: bool = False
    """Whether rows whose labels do not fit are dropped and listed, instead of stopping the run."""
    blank_means_no_occupation: bool = False
    """Whether rows without any code are kept, to be trained on as "no code", instead of being dropped and listed."""
    share_val: float = 0.1
    """Share set aside for validation."""
    split_by: str = "text"
    """What is split: "text" (distinct descriptions) or "row"."""
    seed: int = 42
    """Seed of the split."""
    key: str | None = None
    """A file of the codes that there may be; None: those that there are."""
    corrections: tuple[str, ...] = ()
    """Files of checked codes, the last word on their descriptions; see `data.corrections`."""

    def __post_init__(self) -> None:
        _require(bool(self.target_cols), "No target columns are given; name them with --target-cols COL [COL ...].")
        _require(len(set(self.target_cols)) == len(self.target_cols), "A column stands twice in --target-cols.")
        _require(
            not {"occ1", "lang"} & set(self.target_cols),
            "A target column can't be called occ1 or lang, as the prepared data's own columns are; rename it.",
        )
        _require(self.input_col not in self.target_cols, f"{self.input_col!r} is both input and target column.")
        _require(
            self.language == "unk" or self.language_col is None,
            "Give --language (one for all rows) or --language-col (one for each row), not both.",
        )
        _require(self.block_size >= 1, f"--block-size is {self.block_size}; it must be 1 or more.")
        check_target_len(len(self.target_cols), self.block_size)
        _require(
            0 < self.share_val < 1, f"--share-val is {self.share_val:g}; it must lie between 0 and 1, as 0.1 does."
        )
        _require(
            not (self.zero_pad_codes and self.use_within_block_sep),
            "--zero-pad-codes is for codes of digits; it can't go with --use-within-block-sep.",
        )


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model, what its classes mean, and how text reaches it; saved as config.json."""

    encoder: dict[str, Any]
    """Fields of the encoder's config; `model_type` says which it is, without one it is CANINE."""
    formatter: dict[str, Any]
    """See `Formatter.to_config`."""
    vocab_size: int
    """Tokens that the decoder knows."""
    codes: tuple[str, ...]
    """The code of each class of the flat head."""
    target_cols: tuple[str, ...]
    """The columns that held the codes."""
    descriptions: dict[str, str] = field(default_factory=dict)
    """What codes mean, where the key says so."""
    languages: tuple[str, ...] = ()
    """The languages of the training data."""
    decoder_num_layers: int = 3
    decoder_num_heads: int = 8
    decoder_dim_feedforward: int | None = None
    """None: the encoder's width."""
    dropout: float = 0.0
    """Of the decoder and before the flat head; the encoder has its own."""
    max_len: int = 128
    """Characters, or tokens, of the longest input, special tokens and language included; the rest is cut off."""
    mask_memory: bool = True
    """Whether the decoder leaves padded positions out."""
    pad_to: int | None = None
    """Positions that every input is padded to; None trims each batch."""
    text_normalization: str = "none"
    """See `data.normalize`."""
    pooling: str = "auto"
    """What the flat head reads of Hugging Face's encoders: "mean" (over all tokens), or "auto", the first token where
    it stands for the whole text, else the mean."""
    flat_loss: str = "bce-mean"
    """What the flat head was trained with, and so what its logits mean; see `losses.flat_loss`."""
    mode: str = "greedy"
    """The mode that validated best: what `Coder.predict` does unless told otherwise."""
    decoder_prior: bool = False
    """Whether the decoder starts from what the flat head expects; see `model.prior`."""
    experts: dict[str, float] = field(default_factory=dict)
    """Weights of the experts of the mode "combined": "decoder", "flat", "linear"; see `inference.combined`."""
    num_linear_features: int = 0
    """N-grams of the linear expert; 0: there is none."""
    fitted_to_validation: bool = False
    """Whether the model has learned from the validation data as well, once all was measured on them."""
    thresholds: dict[str, float] = field(default_factory=dict)
    """By language, the probability from which the flat head's classes count; `ALL_LANGUAGES` for all others."""

    def __post_init__(self) -> None:
        check_max_len(self.max_len)
        check_decoder(dropout=self.dropout, dim_feedforward=self.decoder_dim_feedforward)
        _require(
            self.flat_loss in FLAT_LOSSES, f"config.json names the flat loss {self.flat_loss!r}, which is unknown."
        )

    @property
    def num_classes(self) -> int:
        """Classes of the flat head."""
        return len(self.codes)

    @property
    def system(self) -> str:
        """The classification's name: the common stem of the columns of codes (hisco_1, …), else the formatter's."""
        stems = {column.rstrip("0123456789").rstrip("_") for column in self.target_cols}
        return (stems.pop() if len(stems) == 1 else "") or str(self.formatter["name"])

    @property
    def default_threshold(self) -> float:
        """The probability from which on classes count beside the best one, where none was tuned."""
        return DEFAULT_THRESHOLDS[self.flat_loss]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` reads them back."""
        return {"model_type": MODEL_TYPE, "format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Read what `to_dict` wrote.

        Raises
        ------
        UserError
            Where the values are no model's of this program, or those of a newer version of it.
        """
        _require(values.get("model_type") == MODEL_TYPE, "config.json is not that of a histocoder model.")
        version = values.get("format_version", 0)
        _require(
            isinstance(version, int) and version <= FORMAT_VERSION,
            f"The model has format version {version}; this histocoder reads up to {FORMAT_VERSION}. Update histocoder.",
        )
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        for name, kind in get_type_hints(cls).items():
            _require(
                name not in known or _fits(known[name], kind), f"config.json: {name!r} does not hold what it must."
            )
        for name in ("encoder", "formatter", "vocab_size"):
            _require(name in known, f"config.json: {name!r} is missing.")
        for name in ("codes", "target_cols", "languages"):
            known[name] = tuple(known.get(name, ()))
        return cls(**known)


@dataclass(frozen=True)
class AugmentConfig:
    """How training descriptions are altered on the fly; see `data.augment`."""

    augmentation_prob: float = 0.3
    """Share of descriptions that are altered."""
    num_transformations: int = 3
    """Alterations of one description at most."""
    unk_lang_prob: float = 0.25
    """Share of descriptions whose language is withheld."""

    def __post_init__(self) -> None:
        for name, value in (("augmentation-prob", self.augmentation_prob), ("unk-lang-prob", self.unk_lang_prob)):
            _require(0 <= value <= 1, f"--{name} is {value:g}; it must lie between 0 and 1.")
        _require(self.num_transformations >= 0, "--num-transformations must be 0 or more.")


@dataclass(frozen=True)
class StrategyConfig:
    """How a model is spread over processes; for one process alone all of it is as if it were not."""

    fsdp: str | None = None
    """"full_shard" (each process holds a share of weights, gradients and optimizer state), "shard_grad_op" (weights are
    whole between forward and backward pass), or None: DDP, all of it on each process."""
    fsdp_min_num_params: int | None = None
    """Parameters from which on a layer is gathered by itself, others with what is no layer; None: each layer is."""
    fsdp_cpu_offload: bool = False
    """Whether shares lie in CPU memory, and the optimizer works there."""
    fsdp_state_dict: str = "full"
    """What checkpoints hold: "full", or "sharded" (each process writes its share)."""
    fsdp_reduce_dtype: str = "fp32"
    """Precision in which gradients are summed over processes: "fp32" or "bf16"."""
    zero_optimizer: bool = False
    """Whether each process holds a share of the optimizer's state (ZeRO-1)."""
    ddp_comm_hook: str = "none"
    """Precision in which DDP exchanges gradients: "none" (their own), "bf16" or "fp16"."""

    def __post_init__(self) -> None:
        for name in ("fsdp_min_num_params", "fsdp_cpu_offload", "fsdp_state_dict", "fsdp_reduce_dtype"):
            _require(
                self.fsdp is not None or getattr(self, name) == getattr(StrategyConfig, name),
                f"--{name.replace('_', '-')} is for --fsdp full_shard or shard_grad_op; add that, or leave it away.",
            )
        _require(
            self.fsdp_min_num_params is None or self.fsdp_min_num_params >= 1,
            f"--fsdp-min-num-params is {self.fsdp_min_num_params}; it must be 1 or more.",
        )
        _require(
            self.fsdp is None or not self.zero_optimizer,
            "--fsdp shares out the optimizer's state as well; leave --zero-optimizer away.",
        )
        _require(
            self.fsdp is None or self.ddp_comm_hook == "none",
            "--ddp-comm-hook is for DDP; with --fsdp take --fsdp-reduce-dtype.",
        )

    def flags(self) -> list[str]:
        """Those that need several processes, as they are given."""
        hook = [f"--ddp-comm-hook {self.ddp_comm_hook}"] if self.ddp_comm_hook != "none" else []
        zero = ["--zero-optimizer"] if self.zero_optimizer else []
        return zero + hook


@dataclass(frozen=True)
class TrainConfig:
    """How the model is fitted."""

    batch_size: int
    """Rows of a batch on each process."""
    num_epochs: int
    learning_rate: float
    """Its peak."""
    seq2seq_weight: float
    """Weight of the sequence loss; the flat head's has the rest."""
    encoder_learning_rate: float | None = None
    """The encoder's peak; None: `learning_rate`, likewise below."""
    table_learning_rate: float | None = None
    """Of an n-gram encoder's table."""
    weight_decay: float = 0.01
    warmup_pct: float = 0.05
    """Share of all steps in which the learning rate rises."""
    max_grad_norm: float = 1.0
    precision: str = "auto"
    """See `precision.computing_dtype`, likewise below."""
    use_amp: bool = False
    compile: bool = False
    """Whether torch compiles the model's layers."""
    max_skipped_steps: int = 10
    """Steps in a row without finite gradients, at which a run ends."""
    max_steps: int | None = None
    """Steps of the whole run, whatever `num_epochs` says."""
    min_steps: int = 0
    """Epochs are repeated until there have been so many."""
    early_stopping: int | None = None
    """Validations in a row without a better model, at which a run ends."""
    tokens_per_batch: int | None = None
    """Padded positions of a batch for each process, in place of `batch_size` rows; see `samplers.TokenBudget`."""
    gradient_accumulation_steps: int = 1
    """Batches of a step on each process."""
    gradient_checkpointing: bool = False
    """Whether layers are computed a second time in the backward pass, instead of what lies in them being kept."""
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    seed: int = 42
    log_interval: int = 100
    eval_interval: int | None = None
    """None: the steps of an epoch, but 100 at least and 1,000 at most."""
    save_interval: int | None = 1000
    """None: no saves between."""
    save_each_epoch: bool = False
    keep_checkpoints: int = 2
    save_format: str = "histocoder"
    """What is written at the end: "histocoder", or "occcanine" for `last.bin` as well."""
    profile_steps: int | None = None
    """Steps that are profiled, near the start; None: none."""

    def __post_init__(self) -> None:
        for name in (
            "batch_size",
            "num_epochs",
            "log_interval",
            "keep_checkpoints",
            "max_skipped_steps",
            "gradient_accumulation_steps",
        ):
            value = getattr(self, name)
            _require(value >= 1, f"--{name.replace('_', '-')} is {value}; it must be 1 or more.")
        for name in ("max_steps", "save_interval", "eval_interval", "early_stopping", "tokens_per_batch"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"--{name.replace('_', '-')} is {value}; it must be 1 or more.")
        _require(
            self.profile_steps is None or self.profile_steps >= 1,
            f"--profile is {self.profile_steps}; it must be 1 or more.",
        )
        for name in ("seq2seq_weight", "warmup_pct"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"--{name.replace('_', '-')} is {value:g}; it must lie between 0 and 1.")
        for name in ("learning_rate", "encoder_learning_rate", "table_learning_rate"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"--{name.replace('_', '-')} is {value}; it must be more than 0.")
        _require(self.min_steps >= 0, f"--min-steps is {self.min_steps}; it must be 0 or more.")
        _require(self.max_grad_norm > 0, f"--max-grad-norm is {self.max_grad_norm:g}; it must be more than 0.")
        _require(self.weight_decay >= 0, f"--weight-decay is {self.weight_decay:g}; it must be 0 or more.")
        _require(0 <= self.seed <= MAX_SEED, f"--seed is {self.seed}; it must lie between 0 and {MAX_SEED}.")


@dataclass(frozen=True)
class LoaderConfig:
    """How batches reach the device."""

    num_workers: int = 0
    """Processes that make batches; 0: the training process itself."""
    prefetch_factor: int = 2
    """Batches that each worker holds ready."""
    pin_memory: bool | None = None
    """None: where there is a GPU."""
    persistent_workers: bool = False
    """Whether workers live through all epochs."""
    worker_timeout: float = 300.0
    """Seconds after which a worker that gives no batch is taken to hang."""

    def __post_init__(self) -> None:
        _require(self.worker_timeout > 0, f"--worker-timeout is {self.worker_timeout:g}; it must be more than 0.")
        _require(self.num_workers >= 0, f"--num-workers is {self.num_workers}; it must be 0 or more.")
        processors = os.cpu_count() or 1
        _require(
            self.num_workers <= _WORKERS_EACH * processors,
            f"--num-workers is {self.num_workers}, far more than the {processors} processors of this machine; choose "
            "as many as there are for each process, or fewer.",
        )
        _require(self.prefetch_factor >= 1, f"--prefetch-factor is {self.prefetch_factor}; it must be 1 or more.")


_Config = TypeVar("_Config", PrepareConfig, AugmentConfig, StrategyConfig, TrainConfig, LoaderConfig)


def config_of(kind: type[_Config], args: argparse.Namespace, **given: Any) -> _Config:
    """A configuration whose fields are what is given, and for the rest the arguments of the same names."""
    return kind(**given, **{f.name: getattr(args, f.name) for f in fields(kind) if f.name not in given})
