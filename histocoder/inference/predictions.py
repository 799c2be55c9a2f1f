"""Codes of descriptions, as arrays and as a table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from histocoder.config import ModelConfig

NUM_CANDIDATES = 8  # codes of a row that experts beside the decoder propose; the decoder adds its own
LEAST = 1e-9  # least probability of an expert, which is not 0 so that none has a veto


class Prediction(NamedTuple):
    """Codes of n descriptions, the first or most probable first.

    In mode full there are no codes, but the probability of each code of the key.
    """

    codes: np.ndarray
    """Strings of shape (n, width); None where there is none."""
    probs: np.ndarray
    """Each code's probability, of shape (n, width); NaN where there is none."""
    conf: np.ndarray
    """Confidence in the whole prediction, of shape (n,)."""

    @classmethod
    def join(cls, parts: Sequence[tuple[np.ndarray, Prediction]], num_rows: int, *, width: int) -> Prediction:
        """Put batches, each with the indices of its rows, in order; `width` is that of no batches."""
        code_width = max((part.codes.shape[1] for _, part in parts), default=width)
        prob_width = max((part.probs.shape[1] for _, part in parts), default=width)
        codes = np.full((num_rows, code_width), None, dtype=object)
        probs, conf = np.full((num_rows, prob_width), np.nan), np.full(num_rows, np.nan)
        for rows, part in parts:
            codes[rows, : part.codes.shape[1]] = part.codes
            probs[rows, : part.probs.shape[1]] = part.probs
            conf[rows] = part.conf
        return cls(codes, probs, conf)

    def take(self, rows: np.ndarray) -> Prediction:
        """Return the predictions at some indices; -1 stands for a missing description, which has no codes."""
        missing = (np.full_like(array, None, shape=(1, *array.shape[1:])) for array in self)
        return Prediction(*(np.concatenate(pair)[rows] for pair in zip(self, missing, strict=True)))

    @classmethod
    def above(cls, codes: np.ndarray, probs: np.ndarray, thresholds: np.ndarray) -> Prediction:
        """Keep the first code of each row, and others with probabilities above its threshold (n,), in place."""
        conf, left_out = probs[:, 0].copy(), probs <= thresholds[:, None]
        left_out[:, 0] = False
        codes[left_out], probs[left_out] = None, np.nan
        width = int((~left_out).sum(1).max())
        return cls(codes[:, :width], probs[:, :width], conf)

    def drop_unsure(self, min_confidence: float) -> None:
        """Make the codes of rows with less `conf` missing, in place."""
        unsure = self.conf < min_confidence
        self.codes[unsure], self.probs[unsure] = None, np.nan

    def frame(self, config: ModelConfig) -> pd.DataFrame:
        """Return the columns of `Coder.predict`, named as `column_names` names them."""
        import pandas as pd

        if self.codes.shape[1] < self.probs.shape[1]:
            return pd.DataFrame(self.probs, columns=list(filter(None, config.codes)))
        columns: list[np.ndarray] = []
        for codes, probs in zip(self.codes.T, self.probs.T, strict=True):
            columns += [codes, probs]
            if config.descriptions:
                columns.append(np.array([config.descriptions.get(code) for code in codes], dtype=object))
        return pd.DataFrame(dict(zip(column_names(config, self.codes.shape[1]), [*columns, self.conf], strict=True)))


def column_names(config: ModelConfig, width: int) -> list[str]:
    """Return the names of the columns of so many codes, of their probabilities and meanings, and of the confidence."""
    more = ("prob", "desc") if config.descriptions else ("prob",)
    names = enumerate(config.code_columns(width), 1)
    return [*(name for i, code in names for name in (code, *(f"{one}_{i}" for one in more))), "conf"]


def code_columns(names: Iterable[str]) -> dict[str, str]:
    """Return the columns of codes among `column_names`, or names with prefixes -> those of their probabilities."""
    pairs = itertools.pairwise(names)
    return {code: prob for code, prob in pairs if re.search(r"prob_[0-9]+$", prob)}
