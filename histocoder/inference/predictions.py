"""Codes of descriptions, as arrays and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from zipfile import BadZipFile

import numpy as np

from histocoder.files import replacing

if TYPE_CHECKING:
    import pandas as pd


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

    def frame(self, system: str, descriptions: Mapping[str, str]) -> pd.DataFrame:
        """Return the columns of `Coder.predict`, those of codes named after `system`."""
        import pandas as pd

        columns: dict[str, np.ndarray] = {}
        for i in range(self.codes.shape[1]):
            codes = self.codes[:, i]
            columns[f"{system}_{i + 1}"] = codes
            columns[f"prob_{i + 1}"] = self.probs[:, i]
            if descriptions:
                columns[f"desc_{i + 1}"] = np.array([descriptions.get(code) for code in codes], dtype=object)
        columns["conf"] = self.conf
        return pd.DataFrame(columns)


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
