"""Codes of descriptions together with the other codes that a model would give them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from histocoder.config import PredictOptions
from histocoder.inference.coder import Coder
from histocoder.inference.descriptions import Descriptions
from histocoder.inference.predictions import Prediction


class Ranked(NamedTuple):
    """Codes, other codes and encodings of n descriptions."""

    codes: Prediction
    """Result of `Coder.code` in the model's own mode."""
    ranked: Prediction
    """Codes of the key that decoder, flat head and linear expert propose as the first, by their combined
    probability."""
    encodings: np.ndarray
    """Result of `Coder.embed`, of shape (n, hidden)."""


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

    distinct = Descriptions.of(texts, lang, languages=coder.model.config.languages)
    codes, ranked = [], []
    width = coder.model.encoder.config.hidden_size
    encodings = np.full((len(distinct.texts) + 1, width), np.nan, dtype=np.float32)  # the last one of missing ones
    options = PredictOptions(batch_size=batch_size)
    for rows, (chosen, others, pooled) in coder.each_batch(work, distinct.texts, distinct.langs, options):
        codes.append((rows, chosen))
        ranked.append((rows, others))
        encodings[rows] = pooled

    def of_rows(parts: list[tuple[np.ndarray, Prediction]]) -> Prediction:
        return Prediction.join(parts, len(distinct.texts), width=coder.formatter.num_blocks).take(distinct.rows)

    return Ranked(of_rows(codes), of_rows(ranked), encodings[distinct.rows])
