"""The modes of decoding: encoded descriptions in, their codes out."""

from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder.config import PredictOptions
from histocoder.formatters import build_formatter
from histocoder.inference.combined import CombinedSearch, set_probability
from histocoder.inference.predictions import Prediction
from histocoder.inference.search import CodeTrie, TrieSearch, greedy
from histocoder.inference.stepper import DecoderInputs
from histocoder.model import MixerModel
from histocoder.model.nearest import NearestExpert
from histocoder.model.ngram import NgramEncoder


class Inputs(NamedTuple):
    """A batch of tokenised descriptions."""

    input_ids: Tensor  # see `MixerModel.encode`, of shape (B, S)
    thresholds: Tensor  # thresholds of the flat head, of shape (B,)
    characters: Tensor | None  # for linear experts, of shape (B, L); None if the model has none
    ends: Tensor | None  # for the expert of nearest rows, of shape (B, 2); None if the model has none


class Encoded(NamedTuple):
    """A batch of encoded descriptions."""

    inputs: Inputs
    memory: Tensor  # encoding of each position, of shape (B, S, dim)
    pooled: Tensor  # encoding of each description, of shape (B, dim)
    memory_mask: Tensor | None  # positions that the decoder may attend to, of shape (B, S); None means all


class Decoding:
    """Decodes encoded descriptions; `computing` is `model` in the precision that its neural part is computed in."""

    def __init__(self, model: MixerModel, computing: MixerModel) -> None:
        self._model, self._computing = model, computing
        self.formatter = build_formatter(**model.config.formatter)
        self.codes = tuple(filter(None, model.config.codes))  # without OccCANINE's class for blank cells
        self._named = np.array([*self.codes, None], dtype=object)  # by their indices in the key; -1 is none
        on_cpu = computing.linear_decoder.weight.device.type == "cpu"
        in_cache = 256 if isinstance(computing.encoder, NgramEncoder) else 64  # descriptions that fit a CPU's caches
        self.num_at_once = in_cache if on_cpu else 4096  # decoding prefers more
        is_code = [i for i, code in enumerate(model.config.codes) if code]
        self._is_code = slice(None) if len(is_code) == len(model.config.codes) else is_code

    @cached_property
    def _trie(self) -> CodeTrie:
        return CodeTrie(self.codes, self.formatter, self._computing.linear_decoder.weight.device)

    def encode(self, inputs: Inputs) -> Encoded:
        """Encode a batch as `MixerModel.encode` does, `num_at_once` descriptions at once."""
        config, tokenizer = self._model.config, self._model.tokenizer
        parts = []
        for ids in inputs.input_ids.split(self.num_at_once):
            num_positions = ids.shape[1]
            if config.mask_memory:  # else the decoder attends to padding, which is not cut off
                num_positions = tokenizer.num_positions(int(ids.ne(tokenizer.pad_id).sum(1).max()), config.max_len)
            parts.append(self._computing.encode(ids[:, :num_positions]))
        memories, pooled, masks = zip(*parts, strict=True)
        width = max(memory.shape[1] for memory in memories)
        memory = torch.cat([F.pad(part, (0, 0, 0, width - part.shape[1])) for part in memories])
        mask = None
        if config.mask_memory:
            mask = torch.cat([F.pad(part, (0, width - part.shape[1])) for part in masks])
        return Encoded(inputs, memory, torch.cat(pooled), mask)

    def decode(self, batch: Encoded, options: PredictOptions) -> Prediction:
        """Return the codes of a batch; see `Coder.predict_batch`."""
        mode = options.mode or self._model.config.mode
        if mode == "combined":
            return self.ranked(batch)[0]
        if mode == "flat":
            best = self._flat(batch).topk(min(self.formatter.num_blocks, len(self.codes)))
            codes = self._named[best.indices.cpu().numpy()]
            return Prediction.above(codes, _numpy(best.values), _numpy(batch.inputs.thresholds))
        source = self._source(batch)
        if mode == "greedy":
            num_blocks, size = self.formatter.num_blocks, self.formatter.block_size
            decoder, trie = self._computing.decoder, self._trie if options.constrain else None
            tokens, probs = greedy(decoder, source, num_tokens=num_blocks * size, block_size=size, trie=trie)
            codes = self.formatter.decode(tokens.cpu().numpy())
            is_code = torch.from_numpy(~pd.isna(codes)).to(tokens.device)
            conf = set_probability(decoder, source, tokens[:, 1:], probs, is_code=is_code)
            of_codes = _numpy(probs.unflatten(1, (num_blocks, size)).prod(-1))
            return Prediction(codes, np.where(pd.isna(codes), np.nan, of_codes), _numpy(conf))
        search = TrieSearch(self._computing.decoder, self._trie)
        if mode == "topk":
            indices, probs = search.top_k(source, k=options.k)
            return Prediction(self._named[indices.cpu().numpy()], _numpy(probs), _numpy(probs[:, 0]))
        of_all = _numpy(search.full(source))
        return Prediction(np.empty((len(of_all), 0), dtype=object), of_all, of_all.max(1))

    def attributes(self, batch: Encoded) -> list[np.ndarray]:
        """Return the probabilities of each attribute's categories, each of shape (B, K)."""
        found = []
        for name, votes in self.attribute_votes(batch).items():
            weights = self._model.config.attribute_experts.get(name, {})
            scores = torch.stack([weights.get(expert, 1.0) * vote for expert, vote in votes.items()]).sum(0)
            found.append(_numpy(scores.softmax(-1)))
        return found

    def attribute_votes(self, batch: Encoded) -> dict[str, dict[str, Tensor]]:
        """Return the log-odds (B, K) of each attribute's categories, by each expert."""
        attributes, flat = self._model.config.attributes, self._computing.classify_attributes(batch.pooled)
        if flat is None:
            return {}
        sizes = [1 + len(labels) for labels in attributes.values()]
        experts = {"flat": flat}
        if self._model.attribute_expert is not None:
            experts["linear"] = self._model.attribute_expert(batch.inputs.characters)
        parts = {name: vote.split(sizes, dim=1) for name, vote in experts.items()}
        return {name: {expert: parts[expert][i] for expert in parts} for i, name in enumerate(attributes)}

    def combined_search(self, batch: Encoded) -> CombinedSearch:
        """Return the search with the opinions of all the model's experts."""
        missing, weights = self.formatter.missing_token(self.codes), self._model.config.experts
        is_needed = self.formatter.num_blocks > 1 or not self._model.config.decoder_prior  # else its prior says all
        source = self._source(batch) if ("decoder" in weights if weights else is_needed) else None
        beliefs = {"flat": self._flat(batch)}
        if self._model.linear_expert is not None:
            beliefs["linear"] = self._model.linear_expert(batch.inputs.characters)[:, self._is_code].softmax(-1)
        start = (self._computing.decoder, self._trie, source, beliefs)
        expert = self._model.nearest_expert
        nearest = None if expert is None else partial(self._nearest, expert, batch)
        return CombinedSearch(*start, nearest=nearest, num_blocks=self.formatter.num_blocks, missing=missing)

    def ranked(self, batch: Encoded) -> tuple[Prediction, Prediction]:
        """Return the answer of all experts together, and the first codes that they considered, the best first."""
        search = self.combined_search(batch)
        equal = dict.fromkeys(search.experts, 1 / len(search.experts))
        codes, probabilities, conf, ranked, shares = search.decode(self._model.config.experts or equal)
        answer = Prediction(self._named[codes.cpu().numpy()], _numpy(probabilities), _numpy(conf))
        return answer, Prediction(self._named[ranked.cpu().numpy()], _numpy(shares), _numpy(shares[:, 0]))

    def _nearest(self, expert: NearestExpert, batch: Encoded, codes: Tensor) -> dict[str, Tensor]:
        """Return an expert's votes, each (B, K), for codes (B, K) by their indices in the key."""
        classes = codes if isinstance(self._is_code, slice) else codes.new_tensor(self._is_code)[codes]
        found: dict[str, Tensor] = expert(batch.pooled, batch.inputs.ends, classes)
        return found

    def _flat(self, batch: Encoded) -> Tensor:
        """Return the flat head's probabilities of the codes (B, num_codes)."""
        return self._computing.class_probabilities(self._computing.classify(batch.pooled))[:, self._is_code]

    def _source(self, batch: Encoded) -> DecoderInputs:
        prior = self._computing.prior(self._computing.classify(batch.pooled))
        return DecoderInputs(batch.memory, batch.memory_mask, prior)


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().double().numpy()  # GPUs of Macs have no doubles
