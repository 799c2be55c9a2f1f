"""The nearest descriptions, found exactly and by a graph."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("fastapi")
from histocoder.data.examples import Examples
from histocoder.desk import neighbours
from histocoder.desk.neighbours import Neighbours
from histocoder.desk.turns import Turns

NUMBER = 400


class Encoder:
    """Encodes numbers at random."""

    num_encoded = 0

    def embed(self, texts: list[str], _langs: list[str]) -> np.ndarray:
        self.num_encoded += len(texts)
        return np.stack([np.random.default_rng(int(text)).normal(size=16).astype(np.float32) for text in texts])


def opened(cache: Path, coder: Any) -> Neighbours:
    codes = pd.DataFrame({"hisco_1": ["61110"] * NUMBER}, dtype=object)
    examples = Examples([str(i) for i in range(NUMBER)], ["en"] * NUMBER, codes)
    found = Neighbours(examples, cache=cache, source="here")
    assert "0% are encoded" in found.describe()
    found.encode(coder, Turns(), threading.Event())
    return found


def test_a_graph_finds_the_exact_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("faiss")
    coder, asked = Encoder(), np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32)
    asked[7] = np.nan  # a missing description
    exact = opened(tmp_path / "exact.npz", coder)
    monkeypatch.setattr(neighbours, "_MOST_EXACT", 100)
    graph = opened(tmp_path / "graph.npz", coder)
    assert coder.num_encoded == 2 * NUMBER
    kept = [opened(tmp_path / "graph.npz", coder), opened(tmp_path / "graph.npz", coder)]
    assert coder.num_encoded == 2 * NUMBER
    assert exact.describe() == "exact search among 400 descriptions of the training data"
    assert graph.describe() == "approximate search (faiss, HNSW) among 400 descriptions of the training data"
    for other in (graph, *kept):
        for own, found in zip(exact.find(asked), other.find(asked), strict=True):
            assert [place for place, _ in found] == [place for place, _ in own]
            np.testing.assert_allclose([one for _, one in found], [one for _, one in own], atol=1e-6)
    assert exact.find(asked)[7] == [] and len(exact.find(asked)[0]) == 5


def test_without_faiss_the_most_frequent_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(neighbours, "_MOST_EXACT", 100)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    found = opened(tmp_path / "exact.npz", Encoder())
    assert found.describe().startswith("exact search among the 100 most frequent of 400 descriptions")
    assert "pip install faiss-cpu to search more" in found.describe() and len(found.rows) == 100
