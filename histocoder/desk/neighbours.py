"""Search of the training data's descriptions that are nearest by the model's own encodings."""

import importlib.util
import threading
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from histocoder.data.examples import Examples
from histocoder.data.normalize import description_keys
from histocoder.desk.turns import Turns
from histocoder.files import replacing
from histocoder.inference.coder import Coder

_MOST_EXACT = 200_000  # descriptions searched exactly: 200 MB of the n-gram encoder's, read in 0.1 s
_MOST = 1_000_000
_NEIGHBOURS = 5
_EMBEDDED_AT_ONCE = 256
_LINKS, _WALK = 32, 256
"""Sizes of the graph: with these 98 % of 250,000 encodings' neighbours were the exact ones, found in 2 ms; building it
took five minutes on one core."""


class TrainedRow(NamedTuple):
    """A description of the training data."""

    text: str
    lang: str
    codes: tuple[str, ...]


class Neighbours:
    """The distinct descriptions of the training data, found by the cosine of their encodings.

    Up to 200,000 are searched exactly. More, up to the million most frequent, are searched by faiss's graph (Malkov and
    Yashunin 2018, hierarchical navigable small worlds); without faiss, the 200,000 most frequent are searched exactly.

    The encodings are kept in the file `cache`; `source` identifies the data and the model.
    """

    def __init__(self, examples: Examples, *, cache: Path, source: str) -> None:
        codes = [tuple(code for code in row if code is not None) for row in examples.codes.to_numpy(dtype=object)]
        keys = list(zip(description_keys(examples.texts), examples.langs, codes, strict=True))
        times, written = Counter(keys), dict(zip(keys, examples.texts, strict=True))
        self._total = len(times)
        self._has_graph = self._total > _MOST_EXACT and importlib.util.find_spec("faiss") is not None
        most = _MOST if self._has_graph else _MOST_EXACT
        self.rows = [TrainedRow(written[key], *key[1:]) for key, _ in times.most_common(most)]
        self._cache, self._source = cache, f"{source} {self._has_graph}"
        self._index: Any = None  # _Exact, or faiss's index, which has the same methods
        self._num_done = 0

    @property
    def is_ready(self) -> bool:
        """Whether all descriptions are encoded."""
        return self._index is not None

    def describe(self) -> str:
        """Describe the search, and how many descriptions it finds."""
        number, more = f"{len(self.rows):,}", ""
        if len(self.rows) < self._total:
            number = f"the {number} most frequent of {self._total:,}"
            more = "" if self._has_graph else "; pip install faiss-cpu to search more"
        how = "approximate search (faiss, HNSW)" if self._has_graph else "exact search"
        state = "" if self.is_ready else f"; {self._num_done / len(self.rows):.0%} are encoded"
        return f"{how} among {number} descriptions of the training data{more}{state}"

    def encode(self, coder: Coder, turns: Turns, stop: threading.Event) -> None:
        """Encode the descriptions, a batch in each turn, or read them from the cache."""
        if self._cache.is_file():
            with np.load(self._cache) as kept:
                if str(kept["source"]) == self._source and int(kept["number"]) == len(self.rows):
                    self._index = self._restored(kept["index"])
                    return
        index: Any = None
        for start in range(0, len(self.rows), _EMBEDDED_AT_ONCE):
            some = self.rows[start : start + _EMBEDDED_AT_ONCE]
            with turns.one(may_refuse=False):
                if stop.is_set():
                    return
                encodings = _unit(coder.embed([row.text for row in some], [row.lang for row in some]))
                if index is None:
                    index = _graph(encodings.shape[1]) if self._has_graph else _Exact()
                index.add(encodings)
            self._num_done += len(some)
        with replacing(self._cache) as temporary, temporary.open("wb") as file:
            np.savez(file, source=np.array(self._source), number=np.array(len(self.rows)), index=self._state(index))
        self._index = index

    def _state(self, index: Any) -> np.ndarray:
        if not self._has_graph:
            return index.encodings
        import faiss

        return faiss.serialize_index(index)

    def _restored(self, state: np.ndarray) -> Any:
        if not self._has_graph:
            return _Exact(state)
        import faiss

        return faiss.deserialize_index(state)

    def find(self, encodings: np.ndarray) -> list[list[tuple[TrainedRow, float]]]:
        """Return the rows nearest to encodings of shape (n, hidden), and their similarity; none for NaN."""
        assert self._index is not None
        is_real = ~np.isnan(encodings).any(1)
        found: list[list[tuple[TrainedRow, float]]] = [[] for _ in encodings]
        number = min(_NEIGHBOURS, len(self.rows))
        similar, places = self._index.search(_unit(encodings[is_real]), number)
        for row, own, near in zip(np.flatnonzero(is_real), similar, places, strict=True):
            found[row] = [(self.rows[place], float(one)) for place, one in zip(near, own, strict=True) if place >= 0]
        return found


class _Exact:
    """Encodings of length 1, all of which are compared."""

    def __init__(self, *parts: np.ndarray) -> None:
        self._parts = [*parts]

    def add(self, encodings: np.ndarray) -> None:
        self._parts.append(encodings)

    @property
    def encodings(self) -> np.ndarray:
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

    def search(self, encodings: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the cosines of the nearest and their places, the nearest first, each of shape (n, number)."""
        similar = encodings @ self.encodings.T
        places = np.argsort(-similar, axis=1, kind="stable")[:, :number]
        return np.take_along_axis(similar, places, axis=1), places


def _graph(size: int) -> Any:
    """Return an empty graph of encodings of length 1, which are compared along links between near ones."""
    import faiss

    index = faiss.IndexHNSWFlat(size, _LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efSearch = _WALK
    return index


def _unit(encodings: np.ndarray) -> np.ndarray:
    """Return encodings of length 1."""
    return encodings / np.maximum(np.linalg.norm(encodings, axis=1, keepdims=True), 1e-12)
