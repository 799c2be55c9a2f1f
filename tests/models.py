"""Tiny models with random weights, as files, for tests of what is done with a trained one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from histocoder.checkpoints.model_files import save_model
from histocoder.config import ModelConfig
from histocoder.data.examples import Examples
from histocoder.formatters import Formatter, build_formatter
from histocoder.inference.coder import Coder
from histocoder.model import MixerModel, load_encoder
from histocoder.model.devices import has_bf16

CODES = ("-1", "01110", "41025", "61110", "61115", "77610", "80110", "95410")

slow_in_bf16 = (
    pytest.mark.skipif(False, reason="") if has_bf16(torch.device("cpu")) else pytest.mark.slow
)
"""Of tests that train in it: a CPU without it, where `auto` is fp32, takes a minute for what others
do in seconds.
"""


def some_ids(lengths: list[int], width: int) -> torch.Tensor:
    """Token ids of random letters, of shape (len(lengths), width)."""
    ids = torch.randint(97, 123, (len(lengths), width), generator=torch.Generator().manual_seed(0))
    for row, length in enumerate(lengths):
        ids[row, 0], ids[row, length - 1] = 0xE000, 0xE001
        ids[row, length:] = 0
    return ids


def config_of(
    encoder: nn.Module, formatter: Formatter, codes: Sequence[str], **settings: Any
) -> ModelConfig:
    """The config of a model of an encoder and a formatter, of 64 positions unless it is said."""
    form = {
        "formatter": formatter.to_config(),
        "vocab_size": formatter.vocab_size + 1,
        "codes": tuple(codes),
    }
    return ModelConfig(encoder=encoder.config.to_diff_dict(), **form, **{"max_len": 64, **settings})


def tiny_model(num_blocks: int = 2, *, codes: Sequence[str] = CODES, **changes: Any) -> MixerModel:
    """A HISCO model that knows Danish and English, and eight codes."""
    torch.manual_seed(5)
    encoder = load_encoder("tiny", max_len=64)
    formatter = build_formatter("hisco", num_blocks=num_blocks)
    settings = {
        "descriptions": {"61110": "Farmer", "77610": "Baker"},
        "languages": ("da", "en", "unk"),
        **changes,
    }
    target_cols = tuple(f"hisco_{i + 1}" for i in range(num_blocks))
    model = MixerModel(
        config_of(encoder, formatter, codes, target_cols=target_cols, **settings), encoder
    )
    torch.nn.init.normal_(model.decoder.head.weight, std=0.5)
    torch.nn.init.normal_(model.linear_decoder.weight, std=0.3)
    return model.eval()


def save_tiny_model(folder: Path) -> Path:
    model = tiny_model()
    save_model(folder, model.config, model.state_dict(), tokenizer=model.tokenizer)
    return folder


SIX_CODES = ("-1", "61110", "61115", "80110", "77610", "95410")


def tiny_coder(**changes: Any) -> Coder:
    """One of six codes and any language."""
    settings = {"descriptions": {"61110": "General <b>Farmer</b>"}, "languages": (), **changes}
    return Coder(tiny_model(codes=SIX_CODES, **settings), device="cpu")


def few_examples() -> Examples:
    texts = [
        "farmer",
        "husmand & væver",
        "farmer",
        "<script>alert('baker')</script>",
        "cobbler",
        "none given",
    ]
    first = ["61110", "61115", "61110", "77610", "80110", "?"]
    codes = pd.DataFrame(
        {"hisco_1": first, "hisco_2": [None, "80110", None, None, None, None]}, dtype=object
    )
    return Examples.of(texts, ["en", "da", "en", "en", "en", "da"], codes)
