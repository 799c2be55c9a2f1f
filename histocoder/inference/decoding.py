"""The modes of decoding: encoded descriptions in, their codes out."""

from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder.formatters import build_formatter
from histocoder.inference.combined import CombinedSearch
from histocoder.inference.confidence import set_probability
from histocoder.inference.greedy import greedy
from histocoder.inference.predictions import Prediction
from histocoder.inference.search import TrieSearch
from histocoder.inference.trie import CodeTrie
from histocoder.model import MixerModel, Prior


class Encoded(NamedTuple):
    """A batch of encoded descriptions."""

    memory: Tensor  # encoding of each position, of shape (B, S, dim)
    pooled: Tensor  # encoding of each description, of shape (B, dim)
    memory_mask: Tensor | None  # positions that the decoder may attend to, of shape (B, S); None means all
    characters: Tensor | None = None  # for the linear expert, of shape (B, L); None if the model has none


def encode(model: MixerModel, input_ids: Tensor, characters: Tensor | None, *, at_once: int) -> Encoded:
    """Encode a batch as `MixerModel.encode` does, at most so many descriptions at once."""
    if len(input_ids) <= at_once:
        return Encoded(*model.encode(input_ids), characters)
    config, tokenizer, num_positions = model.config, model.tokenizer, input_ids.shape[1]
    parts = []
    for ids in input_ids.split(at_once):
        # padding is cut off, unless the decoder attends to it
        longest = int(ids.ne(tokenizer.pad_id).sum(1).max())
        needed = tokenizer.num_positions(longest, config.max_len) if config.mask_memory else num_positions
        parts.append(model.encode(ids[:, : min(num_positions, needed)]))
    memories, pooled, masks = zip(*parts, strict=True)
    width = max(memory.shape[1] for memory in memories)
    memory = torch.cat([F.pad(part, (0, 0, 0, width - part.shape[1])) for part in memories])
    if not config.mask_memory:
        return Encoded(memory, torch.cat(pooled), None, characters)
    mask = torch.cat([F.pad(part, (0, width - part.shape[1])) for part in masks])
    return Encoded(memory, torch.cat(pooled), mask, characters)


class Decoding:
    """Decodes encoded descriptions; `computing` is `model` in the precision that its neural part is computed in."""

    def __init__(self, model: MixerModel, computing: MixerModel) -> None:
        self._model, self._computing = model, computing
        self.formatter = build_formatter(**model.config.formatter)
        self.codes = tuple(filter(None, model.config.codes))  # without OccCANINE's class for blank cells

    @cached_property
    def _trie(self) -> CodeTrie:
        return CodeTrie(self.codes, self.formatter).to(self._computing.linear_decoder.weight.device)

    @cached_property
    def _search(self) -> TrieSearch:
        return TrieSearch(self._computing.decoder, self._trie)

    def decode(
        self, batch: Encoded, mode: str, *, thresholds: Tensor | None = None, k: int = 5, constrain: bool = False
    ) -> Prediction:
        """Return the codes of a batch; see `Coder.predict_batch`."""
        if mode == "combined":
            return self.ranked(batch)[0]
        flat_logits = self._computing.classify(batch.pooled)
        if mode == "flat":
            return self._flat(flat_logits, thresholds)
        prior = self._computing.prior(flat_logits)
        if mode == "topk":
            codes, best = self._search.top_k(batch.memory, batch.memory_mask, prior, k=k)
            return Prediction(self._named(codes), _numpy(best), _numpy(best[:, 0]))
        if mode == "full":
            probs = _numpy(self._search.full(batch.memory, batch.memory_mask, prior))
            return Prediction(np.empty((len(probs), 0), dtype=object), probs, probs.max(1))
        if mode == "greedy":
            return self._greedy(batch, prior, constrain=constrain)
        raise ValueError(f"there is no mode {mode!r}")

    def beliefs(self, batch: Encoded) -> dict[str, Tensor]:
        """Return the probabilities of the codes, each (B, num_codes), by the experts other than the decoder."""
        flat_logits = self._computing.classify(batch.pooled)
        beliefs = {"flat": self._real_classes(self._computing.class_probabilities(flat_logits))}
        if self._model.linear_expert is not None:
            beliefs["linear"] = self._real_classes(self._model.linear_expert(batch.characters)).softmax(-1)
        return beliefs

    def combined_search(self, batch: Encoded) -> CombinedSearch:
        """Return the search with the opinions of all the model's experts."""
        prior = self._computing.prior(self._computing.classify(batch.pooled))
        start = (self._computing.decoder, self._trie, batch.memory, batch.memory_mask, prior)
        missing = self.formatter.missing_token(self.codes)
        return CombinedSearch(*start, self.beliefs(batch), num_blocks=self.formatter.num_blocks, missing=missing)

    def ranked(self, batch: Encoded) -> tuple[Prediction, Prediction]:
        """Return the answer of all experts together, and the first codes that they considered, the best first."""
        search = self.combined_search(batch)
        equal = dict.fromkeys(search.experts, 1 / len(search.experts))
        codes, probabilities, conf, ranked, shares = search.decode(self._model.config.experts or equal)
        answer = Prediction(self._named(codes), _numpy(probabilities), _numpy(conf))
        return answer, Prediction(self._named(ranked), _numpy(shares), _numpy(shares[:, 0]))

    def _flat(self, flat_logits: Tensor, thresholds: Tensor | None) -> Prediction:
        probabilities = self._real_classes(self._computing.class_probabilities(flat_logits))
        if thresholds is None:
            thresholds = probabilities.new_full((len(probabilities),), self._model.config.default_threshold)
        best = probabilities.topk(min(self.formatter.num_blocks, len(self.codes)))
        return Prediction.above(self._named(best.indices), _numpy(best.values), _numpy(thresholds))

    def _greedy(self, batch: Encoded, prior: Prior | None, *, constrain: bool) -> Prediction:
        num_blocks, block_size = self.formatter.num_blocks, self.formatter.block_size
        memory, mask, decoder = batch.memory, batch.memory_mask, self._computing.decoder
        sizes = {"num_tokens": num_blocks * block_size, "block_size": block_size}
        tokens, token_probs = greedy(decoder, memory, mask, prior, **sizes, trie=self._trie if constrain else None)
        codes = self.formatter.decode(tokens.cpu().numpy())
        probs = _numpy(token_probs.unflatten(1, (num_blocks, -1)).prod(-1))
        is_code = torch.from_numpy(~pd.isna(codes)).to(tokens.device)
        conf = set_probability(decoder, memory, mask, tokens[:, 1:], token_probs, prior, is_code=is_code)
        return Prediction(codes, np.where(pd.isna(codes), np.nan, probs), _numpy(conf))

    def _real_classes(self, probabilities: Tensor) -> Tensor:
        """Return the classes that are codes: the key of a published model may have a blank one."""
        if len(self.codes) == self._model.config.num_classes:
            return probabilities
        return probabilities[:, [i for i, code in enumerate(self._model.config.codes) if code]]

    def _named(self, indices: Tensor) -> np.ndarray:
        """Return the codes at indices of the key; None for -1."""
        return np.array([*self.codes, None], dtype=object)[indices.cpu().numpy()]


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().double().numpy()  # GPUs of Macs have no doubles
