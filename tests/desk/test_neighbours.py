"""The nearest descriptions."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("fastapi")
from histocoder.data.examples import Examples
from histocoder.desk.coding import Code, Neighbours


class Encoder:
    """Encodes numbers at random."""

    num_encoded = 0
    model = SimpleNamespace(encoder=SimpleNamespace(config=SimpleNamespace(hidden_size=16)))

    def embed(self, texts: list[str], _langs: list[str]) -> np.ndarray:
        self.num_encoded += len(texts)
        return np.stack([np.random.default_rng(int(text)).normal(size=16).astype(np.float32) for text in texts])


def test_neighbours_are_those_of_a_full_sort(tmp_path: Path):
    coder, texts = Encoder(), [str(i) for i in range(8195)]  # compared in two blocks, the second of three
    codes = pd.DataFrame({"hisco_1": ["61110"] * 8195}, dtype=object)
    wanted = np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32)
    encodings = coder.embed(texts, texts)
    wanted[:3] = encodings[-3:]  # nearest to descriptions of the second block
    similar = wanted @ encodings.T / np.linalg.norm(encodings, axis=1)
    expected = np.argsort(-similar, axis=1)[:, :5]
    wanted[7] = np.nan  # a missing description
    for _ in range(2):  # the second time from the file
        search = Neighbours(Examples(texts, ["en"] * 8195, codes), tmp_path, source="here")
        assert search.describe().endswith("among 8,195 descriptions of the training data; 0% are encoded")
        search.encode(coder, threading.Event())
        assert search.describe() == "exact search among 8,195 descriptions of the training data"
        for row, found in enumerate(search.find(wanted, lambda code: Code(code=code))):
            assert [int(one.text) for one in found] == ([] if row == 7 else expected[row].tolist())
    assert coder.num_encoded == 2 * 8195
