"""The modes of decoding: encoded descriptions in, their codes out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from histocoder.formatters import formatter_from_config
from histocoder.inference.combined import Belief, CombinedSearch
from histocoder.inference.confidence import set_probability
from histocoder.inference.flat import chosen_classes
from histocoder.inference.greedy import greedy
from histocoder.inference.predictions import Prediction
from histocoder.inference.search import TrieSearch
from histocoder.inference.trie import CodeTrie
from histocoder.model import MixerModel


class Decoding:
    """A model's ways from an encoding to codes.

    They take `memory` of shape (B, S, dim), `memory_mask` (B, S) or None, and the `flat_logits` (B, num_classes).

    Parameters
    ----------
    model : MixerModel
        Whose config and linear expert count.
    computing : MixerModel
        The same, in the precision of its computations.
    """

    def __init__(self, model: MixerModel, computing: MixerModel) -> None:
        self._model, self._computing = model, computing
        self.formatter = formatter_from_config(model.config.formatter)
        self.codes = tuple(filter(None, model.config.codes))  # without OccCANINE's class for blank cells

    @cached_property
    def _trie(self) -> CodeTrie:
        return CodeTrie(self.codes, self.formatter).to(self._computing.linear_decoder.weight.device)

    @cached_property
    def _search(self) -> TrieSearch:
        return TrieSearch(self._computing.decoder, self._trie)

    def forget_weights(self) -> None:
        """Drop what was computed from the weights, which may have changed since."""
        self.__dict__.pop("_search", None)

    def of(
        self, mode: str, *, thresholds: Tensor | None, characters: Tensor | None, k: int, constrain: bool
    ) -> Callable[[Tensor, Tensor | None, Tensor], Prediction]:
        """Return the function that decodes memory, its mask, and the flat head's logits; see `Coder.predict_batch`."""
        modes: dict[str, Callable[[Tensor, Tensor | None, Tensor], Prediction]] = {
            "combined": partial(self._combined, characters=characters),
            "flat": partial(self._flat, thresholds=thresholds),
            "topk": partial(self._topk, k=k),
            "full": self._full,
            "greedy": partial(self._greedy, constrain=constrain),
        }
        return modes[mode]

    def combined_search(
        self, memory: Tensor, memory_mask: Tensor | None, flat_logits: Tensor, *, characters: Tensor | None
    ) -> CombinedSearch:
        """Return the search with the opinions of all the model's experts."""
        beliefs = {"flat": Belief(self._real_classes(self._computing.class_probabilities(flat_logits)))}
        if self._model.linear_expert is not None:
            log_odds = self._real_classes(self._model.linear_expert(characters))
            beliefs["linear"] = Belief(log_odds.softmax(-1), log_odds.sigmoid())
        prior, num_blocks = self._computing.prior(flat_logits), self.formatter.num_blocks
        decoder = self._computing.decoder
        return CombinedSearch(decoder, self._trie, memory, memory_mask, prior, beliefs, num_blocks=num_blocks)

    def _combined(
        self, memory: Tensor, memory_mask: Tensor | None, flat_logits: Tensor, *, characters: Tensor | None
    ) -> Prediction:
        return self.ranked(memory, memory_mask, flat_logits, characters=characters)[0]

    def ranked(
        self, memory: Tensor, memory_mask: Tensor | None, flat_logits: Tensor, *, characters: Tensor | None
    ) -> tuple[Prediction, Prediction]:
        """Return the answer of all experts together, and the first codes that they considered, the best first."""
        search = self.combined_search(memory, memory_mask, flat_logits, characters=characters)
        equal = dict.fromkeys(search.experts, 1 / len(search.experts))
        found = search.decode(self._model.config.experts or equal)
        answer = Prediction(self._named(found.codes), _numpy(found.probabilities), _numpy(found.conf))
        return answer, Prediction(self._named(found.ranked), _numpy(found.shares), _numpy(found.shares[:, 0]))

    def _flat(
        self, _memory: Tensor, _mask: Tensor | None, flat_logits: Tensor, *, thresholds: Tensor | None
    ) -> Prediction:
        probabilities = self._real_classes(self._computing.class_probabilities(flat_logits))
        if thresholds is None:
            thresholds = probabilities.new_full((len(probabilities),), self._model.config.default_threshold)
        chosen = chosen_classes(probabilities, thresholds[:, None], most=self.formatter.num_blocks)
        best = probabilities.topk(int(chosen.sum(1).max()))
        codes, probs = self._named(best.indices), _numpy(best.values)
        conf = probs[:, 0].copy()
        left_out = ~chosen.gather(1, best.indices).cpu().numpy()
        codes[left_out], probs[left_out] = None, np.nan
        return Prediction(codes, probs, conf)

    def _topk(self, memory: Tensor, memory_mask: Tensor | None, flat_logits: Tensor, *, k: int) -> Prediction:
        places, best = self._search.top_k(memory, memory_mask, self._computing.prior(flat_logits), k=k)
        return Prediction(self._named(places), _numpy(best), _numpy(best[:, 0]))

    def _full(self, memory: Tensor, memory_mask: Tensor | None, flat_logits: Tensor) -> Prediction:
        probs = _numpy(self._search.full(memory, memory_mask, self._computing.prior(flat_logits)))
        return Prediction(np.empty((len(probs), 0), dtype=object), probs, probs.max(1))

    def _greedy(
        self, memory: Tensor, memory_mask: Tensor | None, flat_logits: Tensor, *, constrain: bool
    ) -> Prediction:
        decoder, prior = self._computing.decoder, self._computing.prior(flat_logits)
        num_blocks, block_size = self.formatter.num_blocks, self.formatter.block_size
        tokens, token_probs = greedy(
            decoder,
            memory,
            memory_mask,
            prior,
            num_tokens=num_blocks * block_size,
            block_size=block_size,
            trie=self._trie if constrain else None,
        )
        codes = self.formatter.decode(tokens.cpu().numpy())
        probs = _numpy(token_probs.unflatten(1, (num_blocks, -1)).prod(-1))
        is_code = torch.from_numpy(~pd.isna(codes)).to(tokens.device)
        conf = set_probability(decoder, memory, memory_mask, tokens[:, 1:], token_probs, prior, is_code=is_code)
        return Prediction(codes, np.where(pd.isna(codes), np.nan, probs), _numpy(conf))

    def _real_classes(self, probabilities: Tensor) -> Tensor:
        """Return the classes that are codes, out of all: the key of a published model may have a blank one."""
        if len(self.codes) == self._model.config.num_classes:
            return probabilities
        return probabilities[:, [place for place, code in enumerate(self._model.config.codes) if code]]

    def _named(self, places: Tensor) -> np.ndarray:
        """Return the codes at places in the key; None for -1."""
        return np.array([*self.codes, None], dtype=object)[places.cpu().numpy()]


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().double().numpy()  # GPUs of Macs have no doubles
