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
from histocoder.model.devices import moved
from histocoder.model.nearest import NearestExpert
from histocoder.model.ngram import Lookup, NgramEncoder


class Inputs(NamedTuple):
    """A batch of tokenised descriptions, on the CPU."""

    language: str  # whose experts' weights count
    input_ids: Tensor  # see `MixerModel.encode`, of shape (B, S)
    thresholds: Tensor  # thresholds of the flat head, of shape (B,)
    characters: Tensor | None  # for linear experts, of shape (B, L); None if the model has none
    ends: (
        Tensor | None
    )  # for the expert of nearest rows, of shape (B, 2); None if the model has none


class Encoded(NamedTuple):
    """A batch of encoded descriptions."""

    inputs: Inputs
    memory: Tensor  # encoding of each position, of shape (B, S, dim)
    pooled: Tensor  # encoding of each description, of shape (B, dim)
    memory_mask: (
        Tensor | None
    )  # positions that the decoder may attend to, of shape (B, S); None means all


class Decoding:
    """Decodes encoded descriptions; `computing` is `model` in the precision that its neural part is
    computed in.
    """

    def __init__(self, model: MixerModel, computing: MixerModel) -> None:
        self._model, self._computing = model, computing
        self.formatter = build_formatter(**model.config.formatter)
        self.codes = tuple(
            filter(None, model.config.codes)
        )  # without OccCANINE's class for blank cells
        self._named = np.array(
            [*self.codes, None], dtype=object
        )  # by their indices in the key; -1 is none
        self._device = computing.linear_decoder.weight.device
        on_cpu = self._device.type == "cpu"
        in_cache = (
            256 if isinstance(computing.encoder, NgramEncoder) else 64
        )  # descriptions that fit a CPU's caches
        self.num_at_once = in_cache if on_cpu else 4096  # decoding prefers more
        is_code = [i for i, code in enumerate(model.config.codes) if code]
        self._is_code: slice | Tensor = slice(None)  # classes that are codes
        if len(is_code) < len(model.config.codes):
            self._is_code = torch.tensor(is_code, device=self._device)

    @cached_property
    def _trie(self) -> CodeTrie:
        return CodeTrie(self.codes, self.formatter, self._device)

    def encode(self, inputs: Inputs) -> Encoded:
        """Encode a batch as `MixerModel.encode` does, `num_at_once` descriptions at once."""
        config, tokenizer = self._model.config, self._model.tokenizer
        encoder = self._computing.encoder
        parts = []
        for ids in inputs.input_ids.split(self.num_at_once):
            num_positions = ids.shape[1]
            if config.mask_memory:  # else the decoder attends to padding, which is not cut off
                num_positions = tokenizer.num_positions(
                    int(ids.ne(tokenizer.pad_id).sum(1).max()), config.max_len
                )
            trimmed, lookup = ids[:, :num_positions], None
            if self._device.type == "cuda" and isinstance(encoder, NgramEncoder):
                lookup = Lookup.of(trimmed, encoder.config).mapped(
                    partial(moved, device=self._device)
                )
            parts.append(self._computing.encode(moved(trimmed, self._device), lookup=lookup))
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
            indices, values = _numpy(best.indices, best.values)
            codes = self._named[indices.astype(np.int64)]
            return Prediction.above(codes, values, batch.inputs.thresholds.double().numpy())
        source = self._source(batch)
        if mode == "greedy":
            num_blocks, size = self.formatter.num_blocks, self.formatter.block_size
            decoder, trie = self._computing.decoder, self._trie if options.constrain else None
            tokens, probs = greedy(
                decoder, source, num_tokens=num_blocks * size, block_size=size, trie=trie
            )
            codes = self.formatter.decode(tokens.cpu().numpy())
            is_code = moved(torch.from_numpy(~pd.isna(codes)), self._device)
            conf = set_probability(decoder, source, tokens[:, 1:], probs, is_code=is_code)
            numbers = _numpy(probs.unflatten(1, (num_blocks, size)).prod(-1), conf)
            return Prediction(codes, np.where(pd.isna(codes), np.nan, numbers[0]), numbers[1])
        search = TrieSearch(self._computing.decoder, self._trie)
        if mode == "topk":
            indices, values = _numpy(*search.top_k(source, k=options.k))
            return Prediction(self._named[indices.astype(np.int64)], values, values[:, 0])
        (of_all,) = _numpy(search.full(source))
        return Prediction(np.empty((len(of_all), 0), dtype=object), of_all, of_all.max(1))

    def attributes(self, batch: Encoded) -> list[np.ndarray]:
        """Return the probabilities of each attribute's categories, each of shape (B, K)."""
        found = []
        for name, votes in self.attribute_votes(batch).items():
            weights = self._model.config.attribute_experts.get(name, {})
            scores = torch.stack(
                [weights.get(expert, 1.0) * vote for expert, vote in votes.items()]
            ).sum(0)
            found.append(scores.softmax(-1))
        return _numpy(*found)

    def attribute_votes(self, batch: Encoded) -> dict[str, dict[str, Tensor]]:
        """Return the log-odds (B, K) of each attribute's categories, by each expert."""
        attributes, flat = (
            self._model.config.attributes,
            self._computing.classify_attributes(batch.pooled),
        )
        if flat is None:
            return {}
        sizes = [1 + len(labels) for labels in attributes.values()]
        experts = {"flat": flat}
        if self._model.attribute_expert is not None:
            experts["linear"] = self._model.attribute_expert(batch.inputs.characters)
        parts = {name: vote.split(sizes, dim=1) for name, vote in experts.items()}
        return {
            name: {expert: parts[expert][i] for expert in parts}
            for i, name in enumerate(attributes)
        }

    def combined_search(self, batch: Encoded) -> CombinedSearch:
        """Return the search with the opinions of all the model's experts."""
        missing, weights = self.formatter.missing_token(self.codes), self._model.config.experts
        is_needed = (
            self.formatter.num_blocks > 1 or not self._model.config.decoder_prior
        )  # else its prior says all
        source = self._source(batch) if ("decoder" in weights if weights else is_needed) else None
        beliefs = {"flat": self._flat(batch)}
        if self._model.linear_expert is not None:
            beliefs["linear"] = self._model.linear_expert(batch.inputs.characters)[
                :, self._is_code
            ].softmax(-1)
        start = (self._computing.decoder, self._trie, source, beliefs)
        expert = self._model.nearest_expert
        nearest = None if expert is None else partial(self._nearest, expert, batch)
        return CombinedSearch(
            *start, nearest=nearest, num_blocks=self.formatter.num_blocks, missing=missing
        )

    def ranked(self, batch: Encoded) -> tuple[Prediction, Prediction]:
        """Return the answer of all experts together, and the first codes that they considered, the
        best first.
        """
        config = self._model.config
        weights = config.experts_by_language.get(batch.inputs.language, config.experts)
        decoded = self.combined_search(batch).decode(weights)
        codes, probabilities, conf, ranked, shares = _numpy(*decoded)
        answer = Prediction(self._named[codes.astype(np.int64)], probabilities, conf)
        return answer, Prediction(self._named[ranked.astype(np.int64)], shares, shares[:, 0])

    def _nearest(
        self, expert: NearestExpert, batch: Encoded, codes: Tensor, rows: Tensor
    ) -> dict[str, Tensor]:
        """Return an expert's votes, each (R, K), for codes (R, K) of some rows (R,) of the batch, by
        their indices in the key.
        """
        classes = codes if isinstance(self._is_code, slice) else self._is_code[codes]
        assert batch.inputs.ends is not None
        found: dict[str, Tensor] = expert(
            batch.pooled[rows], moved(batch.inputs.ends, self._device)[rows], classes
        )
        return found

    def _flat(self, batch: Encoded) -> Tensor:
        """Return the flat head's probabilities of the codes (B, num_codes)."""
        return self._computing.class_probabilities(self._computing.classify(batch.pooled))[
            :, self._is_code
        ]

    def _source(self, batch: Encoded) -> DecoderInputs:
        prior = self._computing.prior(self._computing.classify(batch.pooled))
        return DecoderInputs(batch.memory, batch.memory_mask, prior)


def _numpy(*tensors: Tensor) -> list[np.ndarray]:
    """Return tensors as arrays of doubles; from a GPU in one copy, so that the host waits once.

    Their numbers are exact in fp32.
    """
    if tensors and tensors[0].device.type != "cpu":
        flat = torch.cat([tensor.float().flatten() for tensor in tensors]).cpu()
        parts = flat.split([tensor.numel() for tensor in tensors])
        tensors = tuple(
            part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
        )
    return [tensor.double().numpy() for tensor in tensors]
