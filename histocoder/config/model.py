"""The configuration of a model: its config.json."""

import re
from dataclasses import asdict, dataclass, field
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from histocoder.config.settings import require

MODEL_TYPE = "histocoder"
FORMAT_VERSION = 2  # of the files of models; a newer one is refused by name
MAX_TARGET_LEN = 128  # positions of the decoder
LANG_SEP = "[SEP]"  # between language and description, as these five characters
FLAT_LOSSES = ("softmax", "bce", "bce-mean")
DEFAULT_THRESHOLDS = {"softmax": 0.3, "bce": 0.5, "bce-mean": 0.5}
"""Default thresholds by flat loss; in a softmax, two codes of a row have about a half each."""
ALL_LANGUAGES = "*"  # key of the threshold for all languages


def check_target_len(num_blocks: int, block_size: int) -> None:
    require(
        1 + num_blocks * block_size <= MAX_TARGET_LEN,
        f"{num_blocks} codes of {block_size} characters exceed the {MAX_TARGET_LEN - 1} "
        "positions of the decoder; "
        "name fewer --target-cols, or set --block-size to the longest code's length.",
    )


def check_max_len(max_len: int) -> None:
    require(max_len >= 16 and max_len % 4 == 0, "--max-len must be a multiple of 4, 16 or more.")


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value of JSON is of the type that a field is annotated with."""
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is UnionType:
        return any(_fits(value, alternative) for alternative in args)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, args[1]) for item in value.values())
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, args[0]) for item in value)
    if kind is float:
        return isinstance(value, int | float)
    return kind is Any or isinstance(value, kind)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model, what its classes mean, and how text reaches it; saved as config.json."""

    # fields of the encoder's config; `model_type` says which it is, without one CANINE
    encoder: dict[str, Any]
    formatter: dict[str, Any]  # fields of `Formatter.to_config`
    vocab_size: int  # number of tokens of the decoder
    codes: tuple[str, ...]  # the code of each class of the flat head
    target_cols: tuple[str, ...]  # the columns that held the codes
    descriptions: dict[str, str] = field(default_factory=dict)  # of codes, as in the key
    # column -> categories, beside none
    attributes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    languages: tuple[str, ...] = ()  # those of the training data
    # whether a pretrained encoder reads the language in front of the description
    reads_language: bool = True
    decoder_num_layers: int = 3
    decoder_num_heads: int = 8
    # inner width of the decoder; None: the encoder's width
    decoder_dim_feedforward: int | None = None
    dropout: float = 0.0  # in the decoder and before the flat head; the encoder has its own
    # characters, or tokens, of the longest input, special ones and language included
    max_len: int = 128
    mask_memory: bool = True  # whether the decoder ignores padded positions
    pad_to: int | None = None  # positions that every input is padded to; None trims each batch
    text_normalization: str = "none"  # see `text.normalize`
    # of Hugging Face's encoders: "mean", or "auto", the first token if it stands for the text
    pooling: str = "auto"
    # loss, on which the meaning of the flat head's logits depends; see `losses.flat_loss`
    flat_loss: str = "bce-mean"
    flat_head: str = "linear"  # or "cosine"; see `CosineClassifier`
    mode: str = "greedy"  # the best in validation, the default of `Coder.predict`
    # whether the decoder starts from what the flat head expects; see `Prior`
    decoder_prior: bool = False
    decoder_learns: bool = True  # whether it adds anything to that prior
    experts: dict[str, float] = field(default_factory=dict)  # their weights; see `CombinedSearch`
    # those of languages with weights of their own
    experts_by_language: dict[str, dict[str, float]] = field(default_factory=dict)
    # how confidence holds in other sources, by language; see `Confidence`
    confidence: dict[str, dict[str, float]] = field(default_factory=dict)
    license: str = "apache-2.0"  # of the weights: what a model is trained further from decides it
    # weights of the experts on attributes, by column
    attribute_experts: dict[str, dict[str, float]] = field(default_factory=dict)
    num_linear_features: int = 0  # n-grams of the linear expert; 0: there is none
    num_linear_weights: int = 0  # its weights, which are not zero
    linear_threshold: float = 0.0  # smaller ones were left out, which validation did not show
    num_nearest_rows: int = 0  # rows that the nearest-neighbour expert remembers; 0: there is none
    num_attribute_features: int = 0  # n-grams of the linear expert on attributes
    num_attribute_weights: int = 0
    attribute_threshold: float = 0.0
    # descriptions that it was trained on, of which it has hashes; see `key_hashes`
    num_trained_on: int = 0
    # whether it was trained on the validation data as well, once measured
    fitted_to_validation: bool = False
    # confidence that four fifths of the validation descriptions exceed; see `TableCoder.unlike`
    usual_confidence: float = 0.0
    # thresholds of the flat head, by language; see `ALL_LANGUAGES`
    thresholds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_max_len(self.max_len)
        require(
            self.flat_loss in FLAT_LOSSES,
            f"config.json names the flat loss {self.flat_loss!r}, which is unknown.",
        )

    @property
    def num_classes(self) -> int:
        return len(self.codes)

    @property
    def attribute_labels(self) -> list[tuple[str, str | None]]:
        """Column and category of each logit of the attributes; that of none, None, is each column's
        first.
        """
        return [
            (name, label) for name, labels in self.attributes.items() for label in (None, *labels)
        ]

    @property
    def system(self) -> str:
        """The classification's name: the target columns' without their numbers (hisco_1, …), else
        the formatter's.
        """
        stems = {
            re.sub(rf"(_|(?<!\d)){i}$", "", name) for i, name in enumerate(self.target_cols, 1)
        }
        if len(stems) == 1 and stems != {""}:
            return stems.pop()
        return str(self.formatter["name"])

    def code_columns(self, width: int) -> list[str]:
        """Return the names of so many columns of codes: the target columns', and hisco_3 and so on
        behind them.
        """
        further = (f"{self.system}_{i + 1}" for i in range(len(self.target_cols), width))
        return [*self.target_cols[:width], *further]

    @property
    def written_cols(self) -> tuple[str, ...]:
        """Names of the columns of all codes that the model may write, which are more than the
        target columns if the model that it was trained from wrote more.
        """
        return tuple(self.code_columns(self.formatter["num_blocks"]))

    @property
    def default_threshold(self) -> float:
        """Probability from which further classes count, if none was tuned."""
        return DEFAULT_THRESHOLDS[self.flat_loss]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which `from_dict` reads."""
        return {"model_type": MODEL_TYPE, "format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Return the config with the values of `to_dict`; raises UserError if they are not a
        histocoder model's.
        """
        require(
            values.get("model_type") == MODEL_TYPE, "config.json is not that of a histocoder model."
        )
        version = values.get("format_version", 0)
        require(
            isinstance(version, int) and version <= FORMAT_VERSION,
            (
                f"The model has format version {version}; this histocoder reads up to "
                f"{FORMAT_VERSION}. Update histocoder."
            ),
        )

        # fields of a later version that this one does not know are left out
        known: dict[str, Any] = {}
        for name, kind in get_type_hints(cls).items():
            if name in values:
                known[name] = values[name]
                require(_fits(known[name], kind), f"config.json: {name!r} has an invalid value.")
        for name in ("encoder", "formatter", "vocab_size"):
            require(name in known, f"config.json: {name!r} is missing.")

        # JSON has lists in place of tuples
        for name in ("codes", "target_cols", "languages"):
            known[name] = tuple(known.get(name, ()))
        attributes = known.get("attributes", {})
        known["attributes"] = {name: tuple(labels) for name, labels in attributes.items()}
        return cls(**known)
