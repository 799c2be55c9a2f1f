"""Find the training data's descriptions that are nearest to one by the model's own encodings."""

from __future__ import annotations

import importlib.util
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from histocoder.data.examples import Examples
from histocoder.data.normalize import fold
from histocoder.desk.turns import Turns
from histocoder.files import replacing
from histocoder.inference.coder import Coder

TrainedRow = tuple[str, str, tuple[str, ...]]
"""Text, language and codes of a distinct description of the training data."""
_MOST_EXACT = 200_000
"""Maximum number of distinct descriptions that are searched exactly: 200 MB of the n-gram encoder's encodings, read in
0.1 s."""
_MOST = 1_000_000
_NEIGHBOURS = 5
_EMBEDDED_AT_ONCE = 256
_LINKS, _WALK = 32, 256
"""Links of each node of the graph, and nodes that a search visits. With these, 98 % of the neighbours found among
250,000 encodings were the exact ones, in 2 ms; building the graph took five minutes on one core."""


class Neighbours:
    """The distinct descriptions of the training data, found by the cosine of their encodings.

    Up to 200,000 are searched exactly. More, up to the million most frequent, are searched by faiss's graph (Malkov and
    Yashunin 2018, hierarchical navigable small worlds); where it is not installed, the 200,000 most frequent exactly.

    The encodings are computed once and kept in the file `cache`; `source` identifies data and model.
    """

    def __init__(self, examples: Examples, *, cache: Path, source: str) -> None:
        codes = [tuple(code for code in row if code is not None) for row in examples.codes.to_numpy(dtype=object)]
        keys = list(zip(map(fold, examples.texts), examples.langs, codes, strict=True))
        times, written = Counter(keys), dict(zip(keys, examples.texts, strict=True))
        self._has_graph = len(times) > _MOST_EXACT and importlib.util.find_spec("faiss") is not None
        self._total = len(times)
        most = times.most_common(_MOST if self._has_graph else _MOST_EXACT)
        self.rows: list[TrainedRow] = [(written[key], *key[1:]) for key, _ in most]
        self._cache, self._source = cache, f"{source} {self._has_graph}"
        self._index: _Exact | _Graph | None = None
        self._num_done = 0

    @property
    def is_ready(self) -> bool:
        """Whether all descriptions are encoded."""
        return self._index is not None

    def describe(self) -> str:
        """Describe what is searched, and how."""
        number = f"{len(self.rows):,}"
        if len(self.rows) < self._total:
            number += f" of {self._total:,}, the most frequent,"
        how = "search by a graph (faiss, HNSW)" if self._has_graph else "exact search"
        more = "; pip install faiss-cpu to search more" if len(self.rows) < self._total and not self._has_graph else ""
        state = "" if self.is_ready else f"; {self._num_done / len(self.rows):.0%} are read"
        return f"{how} among {number} descriptions of the training data{more}{state}"

    def encode(self, coder: Coder, turns: Turns, stop: threading.Event) -> None:
        """Encode the descriptions, a batch in each turn, or read the encodings from the cache."""
        index = _Graph() if self._has_graph else _Exact()
        if self._cache.is_file():
            with np.load(self._cache) as kept:
                if str(kept["source"]) == self._source and int(kept["number"]) == len(self.rows):
                    index.restore(kept["index"])
                    self._index, self._num_done = index, len(self.rows)
                    return
        for start in range(0, len(self.rows), _EMBEDDED_AT_ONCE):
            some = self.rows[start : start + _EMBEDDED_AT_ONCE]
            with turns.one(may_refuse=False):
                if stop.is_set():
                    return
                index.add(_unit(coder.embed([row[0] for row in some], [row[1] for row in some])))
            self._num_done += len(some)
        with replacing(self._cache) as temporary, temporary.open("wb") as file:
            np.savez(file, source=np.array(self._source), number=np.array(len(self.rows)), index=index.state())
        self._index = index

    def find(self, encodings: np.ndarray) -> list[list[tuple[TrainedRow, float]]]:
        """Return the nearest descriptions of encodings of shape (n, hidden), with similarities; none for NaN."""
        assert self._index is not None
        is_real = ~np.isnan(encodings).any(1)
        found: list[list[tuple[TrainedRow, float]]] = [[] for _ in encodings]
        similar, places = self._index.search(_unit(encodings[is_real]), min(_NEIGHBOURS, len(self.rows)))
        for row, own, near in zip(np.flatnonzero(is_real), similar, places, strict=True):
            found[row] = [(self.rows[place], float(one)) for place, one in zip(near, own, strict=True) if place >= 0]
        return found


class _Exact:
    """Encodings of length 1, all of which are compared."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []

    def add(self, encodings: np.ndarray) -> None:
        """Add encodings of shape (n, hidden)."""
        self._parts.append(encodings)

    def search(self, encodings: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines and places of the nearest encodings, the nearest first, both of shape (n, number)."""
        similar = encodings @ self.state().T
        places = np.argsort(-similar, axis=1, kind="stable")[:, :number]
        return np.take_along_axis(similar, places, axis=1), places

    def state(self) -> np.ndarray:
        """Return the encodings as one array."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

    def restore(self, state: np.ndarray) -> None:
        """Take over the state of another index."""
        self._parts = [state]


class _Graph:
    """The same interface over faiss's graph of links between near encodings."""

    def __init__(self) -> None:
        self._index: Any = None

    def add(self, encodings: np.ndarray) -> None:
        import faiss

        if self._index is None:
            self._index = faiss.IndexHNSWFlat(encodings.shape[1], _LINKS, faiss.METRIC_INNER_PRODUCT)
            self._index.hnsw.efSearch = _WALK
        self._index.add(encodings)

    def search(self, encodings: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        return self._index.search(encodings, number)

    def state(self) -> np.ndarray:
        import faiss

        return faiss.serialize_index(self._index)

    def restore(self, state: np.ndarray) -> None:
        import faiss

        self._index = faiss.deserialize_index(state)


def _unit(encodings: np.ndarray) -> np.ndarray:
    """Scale encodings to length 1."""
    return encodings / np.maximum(np.linalg.norm(encodings, axis=1, keepdims=True), 1e-12)
