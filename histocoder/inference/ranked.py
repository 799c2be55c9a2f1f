"""Codes of descriptions together with the other codes that a model would give them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from histocoder.config import PredictOptions
from histocoder.inference.coder import Coder
from histocoder.inference.descriptions import Descriptions
from histocoder.inference.predictions import Part, Prediction


class Ranked(NamedTuple):
    """Codes, other codes and encodings of descriptions."""

    codes: pd.DataFrame
    """Result of `Coder.predict`."""
    ranked: pd.DataFrame
    """Codes of the key that decoder, flat head and linear expert propose as the first, in the same columns, by their
    combined probability."""
    encodings: np.ndarray
    """Result of `Coder.embed`."""


def predict_ranked(
    coder: Coder, texts: Sequence[str | None], lang: str | Sequence[str] = "unk", *, batch_size: int = 256
) -> Ranked:
    """Code descriptions in a model's own mode and rank other codes, encoding each once; see `Coder.predict`."""

    @torch.inference_mode()
    def work(ids: Tensor, thresholds: Tensor, characters: Tensor | None) -> tuple[Prediction, Prediction, np.ndarray]:
        batch = coder.encode(ids, characters)
        chosen, others = coder.decoding.ranked(batch)
        if coder.mode != "combined":
            chosen = coder.decoding.decode(batch, coder.mode, thresholds=thresholds)
        return chosen, others, batch.pooled.float().cpu().numpy()

    config = coder.model.config
    rows = Descriptions.of(texts, lang, languages=config.languages)
    codes: list[Part] = []
    ranked: list[Part] = []
    encodings = np.full((len(rows.distinct) + 1, coder.model.encoder.config.hidden_size), np.nan, dtype=np.float32)
    for places, (chosen, others, pooled) in coder.each_batch(
        work, rows.distinct, PredictOptions(batch_size=batch_size)
    ):
        codes.append((places, chosen))
        ranked.append((places, others))
        encodings[places] = pooled

    def frame(parts: list[Part]) -> pd.DataFrame:
        prediction = Prediction.join(parts, len(rows.distinct), width=coder.formatter.num_blocks)
        return rows.spread(prediction.frame(config))

    return Ranked(frame(codes), frame(ranked), encodings[rows.place])
