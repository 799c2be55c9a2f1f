"""Codes of descriptions, as arrays and as a table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from zipfile import BadZipFile

import numpy as np

from histocoder.files import replacing

if TYPE_CHECKING:
    import pandas as pd

    from histocoder.config import ModelConfig


class Prediction(NamedTuple):
    """Codes of n descriptions, the first or most probable first."""

    codes: np.ndarray
    """Strings of shape (n, width); None where there is none."""
    probs: np.ndarray
    """Each code's probability, of shape (n, width); NaN where there is none."""
    conf: np.ndarray
    """Confidence in the whole prediction, of shape (n,)."""

    @classmethod
    def join(cls, parts: Sequence[Part], num_rows: int, *, width: int) -> Prediction:
        """Put batches, if any, in order, and add a row for missing descriptions; `width` is that of no batches."""
        code_width = max((part.codes.shape[1] for _, part in parts), default=width)
        prob_width = max((part.probs.shape[1] for _, part in parts), default=width)
        codes = np.full((num_rows + 1, code_width), None, dtype=object)
        probs, conf = np.full((num_rows + 1, prob_width), np.nan), np.full(num_rows + 1, np.nan)
        for places, part in parts:
            codes[places, : part.codes.shape[1]] = part.codes
            probs[places, : part.probs.shape[1]] = part.probs
            conf[places] = part.conf
        return cls(codes, probs, conf)

    def drop_unsure(self, min_confidence: float) -> None:
        """Make the codes of rows with less `conf` missing, in place."""
        unsure = self.conf < min_confidence
        self.codes[unsure], self.probs[unsure] = None, np.nan

    def frame(self, config: ModelConfig) -> pd.DataFrame:
        """Return the columns of `Coder.predict`, named as `column_names` names them."""
        import pandas as pd

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


Part: TypeAlias = tuple[np.ndarray, Prediction]  # indices of a batch's rows, of shape (n,), and their codes


def save_parts(path: Path, parts: Sequence[Part]) -> None:
    """Write batches into a file, whole or not at all; `load_parts` reads them."""
    arrays: dict[str, np.ndarray] = {}
    for i, (places, part) in enumerate(parts):
        codes = np.where(part.codes.astype(bool), part.codes, "").astype(str)
        arrays |= {f"{i:06d}.{j}": array for j, array in enumerate((places, codes, part.probs, part.conf))}
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # its one other argument is not among these names


def load_parts(path: Path) -> list[Part]:
    """Read what `save_parts` wrote; return an empty list if the file is missing or damaged."""
    try:
        with np.load(path) as file:
            arrays = [file[name] for name in sorted(file.files)]
    except (OSError, ValueError, EOFError, BadZipFile):
        return []
    parts: list[Part] = []
    for places, texts, probs, conf in zip(*[iter(arrays)] * 4, strict=True):
        codes = texts.astype(object)
        codes[texts == ""] = None
        parts.append((places, Prediction(codes, probs, conf)))
    return parts
