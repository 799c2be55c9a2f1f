"""Search of the training data's descriptions that are nearest by the model's own encodings."""

import hashlib
import threading
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from histocoder.data.examples import Examples
from histocoder.data.normalize import description_keys
from histocoder.files import replacing
from histocoder.inference.coder import Coder

_MOST = 1_000_000  # descriptions: 1 GB of the n-gram encoder's encodings
_NEIGHBOURS = 5
_EMBEDDED_AT_ONCE = 256
_COMPARED_AT_ONCE = 8192


class TrainedRow(NamedTuple):
    """A description of the training data."""

    text: str
    lang: str
    codes: tuple[str, ...]


class Neighbours:
    """The distinct descriptions of the training data, found by the cosine of their encodings.

    If there are more than a million, the most frequent are searched. Their encodings are kept in a file in `folder`;
    `source` identifies the data and the model.
    """

    def __init__(self, examples: Examples, folder: Path, *, source: str) -> None:
        codes = [tuple(code for code in row if code is not None) for row in examples.codes.to_numpy(dtype=object)]
        keys = list(zip(description_keys(examples.texts), examples.langs, codes, strict=True))
        times, written = Counter(keys), dict(zip(keys, examples.texts, strict=True))
        self._total = len(times)
        self.rows = [TrainedRow(written[key], *key[1:]) for key, _ in times.most_common(_MOST)]
        self._path = folder / f"neighbours-{hashlib.sha256(source.encode()).hexdigest()[:16]}.npy"
        self._encodings: np.ndarray | None = None
        self._num_done = 0

    @property
    def is_ready(self) -> bool:
        """Whether all descriptions are encoded."""
        return self._encodings is not None

    def describe(self) -> str:
        """Describe which descriptions are searched."""
        number = f"{len(self.rows):,}"
        if len(self.rows) < self._total:
            number = f"the {number} most frequent of {self._total:,}"
        state = "" if self.is_ready else f"; {self._num_done / len(self.rows):.0%} are encoded"
        return f"exact search among {number} descriptions of the training data{state}"

    def encode(self, coder: Coder, stop: threading.Event) -> None:
        """Encode the descriptions, or find them encoded in the file."""
        if not self._path.is_file():
            encodings = np.empty((len(self.rows), 0), np.float32)
            for start in range(0, len(self.rows), _EMBEDDED_AT_ONCE):
                if stop.is_set():
                    return
                some = self.rows[start : start + _EMBEDDED_AT_ONCE]
                found = _unit(coder.embed([row.text for row in some], [row.lang for row in some]))
                if not start:
                    encodings = np.empty((len(self.rows), found.shape[1]), np.float32)
                encodings[start : start + len(some)] = found
                self._num_done += len(some)
            for earlier in self._path.parent.glob("neighbours*.np[yz]"):
                earlier.unlink()
            with replacing(self._path) as temporary, temporary.open("wb") as file:
                np.save(file, encodings)
        self._encodings = np.load(self._path, mmap_mode="r")

    def find(self, encodings: np.ndarray) -> list[list[tuple[TrainedRow, float]]]:
        """Return the rows nearest to encodings of shape (n, hidden), and their similarity; none for NaN."""
        assert self._encodings is not None
        is_real = ~np.isnan(encodings).any(1)
        wanted = _unit(encodings[is_real])
        parts = []
        for start in range(0, len(self._encodings), _COMPARED_AT_ONCE):
            similar = wanted @ self._encodings[start : start + _COMPARED_AT_ONCE].T
            most = min(_NEIGHBOURS, similar.shape[1])
            indices = np.argpartition(similar, -most, axis=1)[:, -most:]
            parts.append((np.take_along_axis(similar, indices, axis=1), indices + start))
        similar, indices = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
        order = np.argsort(-similar, axis=1, kind="stable")[:, :_NEIGHBOURS]
        found: list[list[tuple[TrainedRow, float]]] = [[] for _ in encodings]
        for row, own, near, best in zip(np.flatnonzero(is_real), similar, indices, order, strict=True):
            found[row] = [(self.rows[near[i]], float(own[i])) for i in best]
        return found


def _unit(encodings: np.ndarray) -> np.ndarray:
    """Return encodings of length 1."""
    return encodings / np.maximum(np.linalg.norm(encodings, axis=1, keepdims=True), 1e-12)
