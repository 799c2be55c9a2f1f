"""Prediction on a pretended GPU: the answers of a CPU, and one wait of the host a batch."""

import pandas as pd
import pytest
import torch
from models import CODES, config_of, tiny_model
from pretended_gpu import pretended_gpu

from histocoder import Coder
from histocoder.formatters import build_formatter
from histocoder.model import MixerModel, load_encoder
from histocoder.model.linear_expert import LinearExpert
from histocoder.text.tokenizers import lower_characters

TEXTS = ["farmer", "husmand og væver", "miner", "a", "weaver of the parish", "baker (deceased)"] * 3
MODES = {"combined": 1, "greedy": 2, "flat": 1, "topk": 2, "full": 1}
"""Waits a batch of rows with one code: in greedy, codes are read from tokens before their
probability is known.
"""


def ngram_model(num_blocks: int) -> MixerModel:
    torch.manual_seed(5)
    encoder, formatter = (
        load_encoder("ngram", max_len=64),
        build_formatter("hisco", num_blocks=num_blocks),
    )
    config = config_of(encoder, formatter, CODES, target_cols=("hisco_1",), num_linear_features=40)
    model = MixerModel(config, encoder)
    model.linear_expert = LinearExpert.of(
        torch.arange(40) * 20_000,
        torch.ones(40),
        torch.randn(40, len(CODES)),
        torch.zeros(len(CODES)),
    )
    torch.nn.init.normal_(model.linear_decoder.weight, std=0.3)
    return model.eval()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [tiny_model, ngram_model])
def test_a_batch_waits_for_its_answer_alone(kind, mode: str):
    expected = Coder(kind(1), "cpu").predict(TEXTS, "en", mode=mode)
    with pretended_gpu() as log:
        coder = Coder(kind(1), "cuda")
        coder.predict(TEXTS[:2], "en", mode=mode)  # tables of codes are made once
        log.clear()
        found = coder.predict(TEXTS, "en", mode=mode)
    pd.testing.assert_frame_equal(found, expected, atol=1e-4, rtol=0)
    assert log.waits.total() <= MODES[mode], log.waits


def test_a_gpu_codes_as_many_rows_as_it_has_room_for():
    with pretended_gpu(free_bytes=8_000_000_000):
        assert Coder(tiny_model(), "cuda").batch_size == 2000
    assert Coder(tiny_model(), "cpu").batch_size == 256


def test_a_linear_expert_follows_its_model_to_a_gpu():
    characters = torch.from_numpy(lower_characters(TEXTS))
    expert = ngram_model(1).linear_expert
    expected = expert(characters)  # which makes an index, on the CPU
    with pretended_gpu():
        found = expert.to("cuda")(characters).cpu()
    torch.testing.assert_close(found, expected)
