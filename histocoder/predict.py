"""The public prediction API: descriptions in, a table of codes out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from histocoder.checkpoint import load_model
from histocoder.data.dataset import TokenizedTexts, join_language
from histocoder.data.samplers import SequentialSampler
from histocoder.decoding.greedy import greedy
from histocoder.errors import UserError
from histocoder.formatters import formatter_from_config
from histocoder.model import MixerModel

MODES = ("greedy", "flat")


class Coder:
    """Codes occupational descriptions with a trained model.

    Parameters
    ----------
    model : MixerModel
    device : str, optional
        By default a GPU if there is one.

    Examples
    --------
    coder = Coder.from_pretrained("out")
    coder.predict(["wine and spirit merchant", "husmand"], ["en", "da"])
    """

    def __init__(self, model: MixerModel, device: str | None = None) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model = model.to(self.device).eval()
        self.formatter = formatter_from_config(model.config.formatter)
        self.system = _stem(model.config.target_cols) or self.formatter.name

    @classmethod
    def from_pretrained(cls, path: str | Path, device: str | None = None) -> Coder:
        """Open a run's folder, or any other with its `config.json` and `model.safetensors`.

        Raises
        ------
        UserError
            Where there is no model, or one of a newer format version.
        """
        return cls(load_model(Path(path)), device)

    def predict(
        self,
        texts: str | Sequence[str | None] | pd.Series,
        lang: str | Sequence[str] | pd.Series = "unk",
        *,
        mode: str = "greedy",
        threshold: float = 0.5,
        batch_size: int = 256,
    ) -> pd.DataFrame:
        """Code descriptions.

        Parameters
        ----------
        texts : str, or sequence or Series of str, of n descriptions
            A missing or blank one gets missing codes.
        lang : str, or sequence of n
            Language of all, or of each.
        mode : {"greedy", "flat"}
            The sequence decoder, or the classes that the flat head puts above `threshold`, the most probable first.
        threshold : float
        batch_size : int

        Returns
        -------
        DataFrame
            With the input's index and order: for each code `{system}_1`, `prob_1` and so on.

        Raises
        ------
        UserError
            For an unknown mode.
        """
        if mode not in MODES:
            raise UserError(f"There is no mode {mode!r}; there are {', '.join(MODES)}.")
        series = (
            texts if isinstance(texts, pd.Series) else pd.Series([texts] if isinstance(texts, str) else list(texts))
        )
        langs = (
            pd.Series(lang, index=series.index) if isinstance(lang, str) else pd.Series(list(lang), index=series.index)
        )
        pairs = pd.DataFrame({"text": series.astype(object), "lang": langs.astype(object)})
        known = pairs["text"].notna() & (pairs["text"].astype(str).str.strip() != "")
        distinct = pairs[known].drop_duplicates()
        codes, probs = self._predict_distinct(distinct, mode, threshold, batch_size)

        position = pd.MultiIndex.from_frame(distinct).get_indexer(pd.MultiIndex.from_frame(pairs.where(known)))
        columns: dict[str, np.ndarray] = {}
        for i in range(codes.shape[1]):
            columns[f"{self.system}_{i + 1}"] = codes[position, i]
            columns[f"prob_{i + 1}"] = probs[position, i]
        return pd.DataFrame(columns, index=series.index)

    def _predict_distinct(
        self, distinct: pd.DataFrame, mode: str, threshold: float, batch_size: int
    ) -> tuple[np.ndarray, np.ndarray]:
        codes = np.full((len(distinct) + 1, self.formatter.num_blocks), None, dtype=object)
        probs = np.full((len(distinct) + 1, self.formatter.num_blocks), np.nan)  # the last row is for missing texts
        predict_batch = self._greedy if mode == "greedy" else lambda ids: self._flat(ids, threshold)
        for rows, input_ids in self._batches(distinct, batch_size):
            codes[rows], probs[rows] = predict_batch(input_ids)
        return codes, probs

    def _batches(self, distinct: pd.DataFrame, batch_size: int) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Batches of like lengths: their rows, and token ids of shape (B, S)."""
        config = self.model.config
        joined = join_language(distinct["text"].tolist(), distinct["lang"].tolist())
        texts = TokenizedTexts(joined, max_len=config.max_len)
        for share in SequentialSampler(texts.lengths, batch_size=batch_size):
            yield share.rows, torch.from_numpy(texts.pad(share.rows, max_len=config.max_len)).to(self.device)

    @torch.inference_mode()
    def _greedy(self, input_ids: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Codes and each one's probability given those before it, both of shape (B, num_blocks)."""
        memory, _, memory_mask = self.model.encode(input_ids)
        num_tokens = self.formatter.num_blocks * self.formatter.block_size
        tokens, probabilities = greedy(self.model.decoder, memory, memory_mask, num_tokens=num_tokens)
        codes = self.formatter.decode(tokens.cpu().numpy())
        probs = probabilities.unflatten(1, (self.formatter.num_blocks, -1)).prod(-1).cpu().numpy().astype(float)
        return codes, np.where(codes == None, np.nan, probs)  # noqa: E711

    @torch.inference_mode()
    def _flat(self, input_ids: Tensor, threshold: float) -> tuple[np.ndarray, np.ndarray]:
        """The most probable classes above the threshold, and their probabilities, both of shape (B, num_blocks)."""
        _, pooled, _ = self.model.encode(input_ids)
        probabilities = self.model.linear_decoder(pooled).float().sigmoid()
        best = probabilities.topk(min(self.formatter.num_blocks, probabilities.shape[1]))
        codes = np.full((len(input_ids), self.formatter.num_blocks), None, dtype=object)
        probs = np.full(codes.shape, np.nan)
        values, indices = best.values.cpu().numpy(), best.indices.cpu().numpy()
        above = values > threshold
        rows, columns = np.nonzero(above)
        codes[rows, columns] = np.array(self.model.config.codes, dtype=object)[indices[above]]
        probs[rows, columns] = values[above]
        return codes, probs

    def describe(self, code: str) -> str | None:
        """What a code means, where the key says so."""
        return self.model.config.descriptions.get(code)


def _stem(columns: Sequence[str]) -> str:
    """The common stem of columns such as hisco_1, hisco_2; empty where they have none."""
    stems = {column.rstrip("0123456789").rstrip("_") for column in columns}
    return stems.pop() if len(stems) == 1 else ""
