"""The mode combined, which asks the decoder no more than the answer takes."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from models import tiny_model

from histocoder import Coder
from histocoder.inference import combined
from histocoder.inference.incremental import SequenceScorer
from histocoder.model import MixerModel

TEXTS = ["farmer", "husmand og væver", "miner", "a", "weaver of the parish", "baker (deceased)"] * 4
SEEDS = range(6)


def model_of(seed: int, *, num_blocks: int = 3, **weights: float) -> MixerModel:
    model = tiny_model(num_blocks=num_blocks)
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.linear_decoder.weight, std=0.5)
    torch.nn.init.normal_(model.decoder.head.weight, std=0.2)
    experts = {"decoder": 0.3, "flat": 40.0, "few": -1.0, "further": 0.1} | weights
    model.config = replace(model.config, experts=experts)
    return model.eval()


def answers(model: MixerModel) -> pd.DataFrame:
    return Coder(model, "cpu").predict(TEXTS, "en", mode="combined", progress=False)


@pytest.fixture
def num_positions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    compute = SequenceScorer.log_probs

    def counted(self: SequenceScorer, tokens: torch.Tensor, *args, **options) -> torch.Tensor:
        counts.append(tokens.numel())
        return compute(self, tokens, *args, **options)

    monkeypatch.setattr(SequenceScorer, "log_probs", counted)
    return counts


@pytest.mark.parametrize("seed", SEEDS)
def test_fewer_questions_give_the_same_codes(
    monkeypatch: pytest.MonkeyPatch, num_positions: list[int], seed: int
):
    monkeypatch.setattr(combined, "NUM_CANDIDATES", 3 + seed)
    model = model_of(seed)
    found = answers(model)
    asked = sum(num_positions)
    num_positions.clear()
    share = combined.MIN_RELATIVE_SHARE
    monkeypatch.setattr(combined, "MIN_RELATIVE_SHARE", 1e-30)
    expected = answers(model)

    names = [name for name in found if name.startswith("hisco_")]
    pd.testing.assert_frame_equal(found[names], expected[names])
    np.testing.assert_allclose(found["conf"], expected["conf"], atol=2 * share)
    assert found["hisco_2"].notna().any()
    assert asked < sum(num_positions)


def test_the_decoder_is_not_asked_where_others_are_sure(num_positions: list[int]):
    expected = answers(model_of(0, decoder=1e-6, flat=1.0))
    assert num_positions
    num_positions.clear()
    found = answers(model_of(0, decoder=1e-6, flat=1.0, sure=-20.0))
    assert not num_positions
    assert found["hisco_1"].tolist() == expected["hisco_1"].tolist()
    assert found["hisco_2"].isna().all()


def test_unsure_rows_keep_their_answers():
    expected = answers(model_of(1))
    found = answers(model_of(1, sure=50.0))
    pd.testing.assert_frame_equal(found, expected)


def test_ranks_of_sure_and_unsure_batches_are_joined(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(combined, "NUM_CANDIDATES", 3)
    model = model_of(0, decoder=1e-6, flat=1.0)
    conf = Coder(model, "cpu").predict(TEXTS, "en", mode="flat")["conf"]
    sure = float(np.median(np.log(conf / (1 - conf))))
    model.config = replace(model.config, experts=model.config.experts | {"sure": sure})
    coder = Coder(model, "cpu")
    expected = coder.predict_ranked(TEXTS, "en").ranked
    ranked = coder.predict_ranked(TEXTS, "en", batch_size=1).ranked
    np.testing.assert_array_equal(ranked.codes, expected.codes)
    np.testing.assert_allclose(ranked.probs, expected.probs, atol=1e-5)


def test_own_codes_are_sought_where_they_may_count(monkeypatch: pytest.MonkeyPatch):
    search = combined.CombinedSearch
    num_sought: list[int] = []
    write = search._greedy_codes

    def counted(self: combined.CombinedSearch, written: combined.WrittenCodes, part: torch.Tensor):
        num_sought.append(len(part))
        return write(self, written, part)

    monkeypatch.setattr(search, "_greedy_codes", counted)
    monkeypatch.setattr(combined, "NUM_CANDIDATES", 2)
    answers(model_of(0, decoder=1e-3))
    assert sum(num_sought) == 0
    answers(model_of(0, decoder=1.0, flat=0.1))
    assert sum(num_sought) > 0
