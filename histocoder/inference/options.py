"""How descriptions are coded: the options of a call, and the thresholds of the flat head."""

from __future__ import annotations

from dataclasses import dataclass

from histocoder.config import ALL_LANGUAGES, ModelConfig
from histocoder.data.languages import same_language
from histocoder.errors import UserError

SOURCE_COL = "source"
"""The column that says who gave a row its codes; see `known`."""
MODES = ("combined", "greedy", "flat", "topk", "full")


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """How descriptions are coded; see `Coder.predict`."""

    mode: str | None = None
    k: int = 5
    threshold: float | None = None
    constrain: bool | None = None
    min_confidence: float = 0.0
    batch_size: int = 256

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in MODES:
            raise UserError(f"Unknown mode {self.mode!r}; choose one of {', '.join(MODES)}.")
        if self.constrain is False and self.mode in ("combined", "topk", "full"):
            raise UserError(f"The mode {self.mode!r} gives codes of the key only; omit constrain.")
        if self.k < 1:
            raise UserError(f"k is {self.k}; it must be 1 or more.")
        if self.batch_size < 1:
            raise UserError(f"batch_size is {self.batch_size}; it must be 1 or more.")
        if self.threshold is not None and not 0 <= self.threshold < 1:
            raise UserError(f"The threshold is {self.threshold:g}; it must be 0 or more and less than 1.")


def threshold_of(config: ModelConfig, lang: str) -> float:
    """Return the flat head's threshold for a language; languages that the model does not know are "unk"."""
    known = lang if not config.languages or same_language(lang, config.languages) else "unk"
    own = config.thresholds.get(same_language(known, config.thresholds) or ALL_LANGUAGES)
    return config.default_threshold if own is None else own
