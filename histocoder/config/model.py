"""What a model is: its config.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from histocoder.config.settings import require

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
ALL_LANGUAGES = "*"
"""Stands for all of them among thresholds."""


def check_target_len(num_blocks: int, block_size: int) -> None:
    """Raise a UserError where so many codes of so many tokens are more than the decoder has positions for."""
    require(
        1 + num_blocks * block_size <= MAX_TARGET_LEN,
        f"{num_blocks} codes of {block_size} characters are more than the {MAX_TARGET_LEN - 1} places of the decoder; "
        "set --block-size to the longest code's length.",
    )


def check_max_len(max_len: int) -> None:
    """Raise a UserError where the encoder can't have so many positions."""
    require(max_len >= 16 and max_len % 4 == 0, "--max-len must be a multiple of 4, 16 or more.")


def check_decoder(*, dropout: float, dim_feedforward: int | None) -> None:
    """Raise a UserError where there can be no decoder with these."""
    require(0 <= dropout < 1, f"--dropout is {dropout:g}; it must be 0 or more and less than 1.")
    require(
        dim_feedforward is None or dim_feedforward >= 1,
        f"--decoder-dim-feedforward is {dim_feedforward}; it must be 1 or more.",
    )


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value of JSON is of the type that a field is annotated with."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, one) for one in args)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(one, args[1]) for one in value.values())
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(one, args[0]) for one in value)
    return kind is Any or isinstance(value, (int, float) if kind is float else kind)


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
    """The mode that validated best: the default of `Coder.predict`."""
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
        require(self.flat_loss in FLAT_LOSSES, f"config.json names the flat loss {self.flat_loss!r}, which is unknown.")

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
        require(values.get("model_type") == MODEL_TYPE, "config.json is not that of a histocoder model.")
        version = values.get("format_version", 0)
        require(
            isinstance(version, int) and version <= FORMAT_VERSION,
            f"The model has format version {version}; this histocoder reads up to {FORMAT_VERSION}. Update histocoder.",
        )
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        for name, kind in get_type_hints(cls).items():
            require(name not in known or _fits(known[name], kind), f"config.json: {name!r} does not hold what it must.")
        for name in ("encoder", "formatter", "vocab_size"):
            require(name in known, f"config.json: {name!r} is missing.")
        for name in ("codes", "target_cols", "languages"):
            known[name] = tuple(known.get(name, ()))
        return cls(**known)
