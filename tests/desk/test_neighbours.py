"""The nearest descriptions."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("fastapi")
from histocoder.data.examples import Examples
from histocoder.desk import neighbours
from histocoder.desk.neighbours import Neighbours


class Encoder:
    """Encodes numbers at random."""

    num_encoded = 0

    def embed(self, texts: list[str], _langs: list[str]) -> np.ndarray:
        self.num_encoded += len(texts)
        return np.stack([np.random.default_rng(int(text)).normal(size=16).astype(np.float32) for text in texts])


def test_neighbours_are_those_of_a_full_sort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(neighbours, "_COMPARED_AT_ONCE", 99)  # the last block has fewer than five
    coder, texts = Encoder(), [str(i) for i in range(400)]
    codes = pd.DataFrame({"hisco_1": ["61110"] * 400}, dtype=object)
    wanted = np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32)
    similar = wanted @ coder.embed(texts, texts).T / np.linalg.norm(coder.embed(texts, texts), axis=1)
    expected = np.argsort(-similar, axis=1)[:, :5]
    wanted[7] = np.nan  # a missing description
    for _ in range(2):  # the second time from the file
        search = Neighbours(Examples(texts, ["en"] * 400, codes), tmp_path, source="here")
        assert search.describe().endswith("among 400 descriptions of the training data; 0% are encoded")
        search.encode(coder, threading.Event())
        assert search.describe() == "exact search among 400 descriptions of the training data"
        for row, found in enumerate(search.find(wanted)):
            assert [int(one.text) for one, _ in found] == ([] if row == 7 else expected[row].tolist())
    assert coder.num_encoded == 3 * 400


def test_the_most_frequent_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(neighbours, "_MOST", 1)
    codes = pd.DataFrame({"hisco_1": ["61110"] * 3}, dtype=object)
    search = Neighbours(Examples(["1", "2", "2"], ["en"] * 3, codes), tmp_path, source="here")
    assert [row.text for row in search.rows] == ["2"]
    assert search.describe().startswith("exact search among the 1 most frequent of 2 descriptions")
