"""What else a description may be: its codes, and the other ones that a model would give it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from histocoder.config import PredictOptions
from histocoder.inference.coder import Coder
from histocoder.inference.descriptions import Descriptions
from histocoder.inference.predictions import Part, Prediction
from histocoder.inference.thresholds import thresholds_of
from histocoder.ops.memory import RowsAtOnce


class Ranked(NamedTuple):
    """What `predict_ranked` finds, for each description."""

    codes: pd.DataFrame
    """What `Coder.predict` gives."""
    ranked: pd.DataFrame
    """With the same columns, codes of the key that decoder, flat head and linear expert propose as the first, those
    first that all together find most probable."""
    encodings: np.ndarray
    """What `Coder.embed` gives."""


def predict_ranked(coder: Coder, texts: Sequence[str | None], lang: str | Sequence[str] = "unk") -> Ranked:
    """Code descriptions in a model's own mode, with what else they may be, encoding each once; see `Coder.predict`."""
    config = coder.model.config
    rows = Descriptions.of(texts, lang, languages=config.languages)
    coder.decoding.forget_weights()
    thresholds = torch.from_numpy(thresholds_of(config, rows.distinct["lang"]))
    at_once, width = RowsAtOnce(coder.device), coder.formatter.num_blocks
    codes: list[Part] = []
    ranked: list[Part] = []
    encodings = np.full((len(rows.distinct) + 1, coder.model.encoder.config.hidden_size), np.nan, dtype=np.float32)
    for places, ids, characters in coder.batches(rows.distinct, PredictOptions()):
        limits = thresholds[places].to(coder.device)
        for some, (chosen, others, pooled) in at_once.each(partial(_rank_batch, coder), ids, limits, characters):
            codes.append((places[some], chosen))
            ranked.append((places[some], others))
            encodings[places[some]] = pooled
    of_codes, of_ranked = (
        Prediction.join(parts, len(rows.distinct), width=width)
        .frame(coder.system, config.descriptions)
        .iloc[rows.place]
        .set_axis(rows.index)
        for parts in (codes, ranked)
    )
    return Ranked(of_codes, of_ranked, encodings[rows.place])


@torch.inference_mode()
def _rank_batch(
    coder: Coder, input_ids: Tensor, thresholds: Tensor, characters: Tensor | None
) -> tuple[Prediction, Prediction, np.ndarray]:
    memory, pooled, mask = coder.encode(input_ids)
    flat_logits = coder.computing.classify(pooled)
    chosen, others = coder.decoding.ranked(memory, mask, flat_logits, characters=characters)
    if coder.mode != "combined":
        decode = coder.decoding.of(coder.mode, thresholds=thresholds, characters=characters, k=1, constrain=False)
        chosen = decode(memory, mask, flat_logits)
    return chosen, others, pooled.float().cpu().numpy()
