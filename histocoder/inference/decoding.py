"""The modes of decoding: encoded descriptions in, their codes out."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder.config import PredictOptions
from histocoder.formatters import build_formatter
from histocoder.inference.combined import CombinedSearch
from histocoder.inference.descriptions import Inputs
from histocoder.inference.incremental import DecoderInputs
from histocoder.inference.predictions import (
    NUM_CANDIDATES,
    Attribute,
    Prediction,
    RankedPrediction,
)
from histocoder.inference.search import CodeTrie, TrieSearch, greedy, set_probability
from histocoder.model import MixerModel
from histocoder.model.devices import moved
from histocoder.model.ngram import Lookup, NgramEncoder


class Encoded(NamedTuple):
    """A batch of encoded descriptions."""

    inputs: Inputs
    memory: Tensor  # encoding of each position, of shape (B, S, dim)
    pooled: Tensor  # encoding of each description, of shape (B, dim)
    # positions that the decoder may attend to, of shape (B, S); None means all
    memory_mask: Tensor | None


class BatchPredictor:
    """Decodes encoded descriptions.

    Parameters
    ----------
    model : MixerModel
    computing : MixerModel
        The model in the precision that its neural part is computed in.

    Attributes
    ----------
    num_at_once : int
        Number of descriptions that a CPU's caches have room for, or with which a GPU is busy.
    num_ranked : int
        Number of candidates for the first code in `ranked`.
    """

    def __init__(self, model: MixerModel, computing: MixerModel) -> None:
        self._model = model
        self._computing = computing
        self.formatter = build_formatter(**model.config.formatter)
        self._device = computing.linear_decoder.weight.device
        if self._device.type != "cpu":
            self.num_at_once = 4096
        elif isinstance(computing.encoder, NgramEncoder):
            self.num_at_once = 256
        else:
            self.num_at_once = 64

        # OccCANINE has a class for blank cells, which is no code.
        classes = [i for i, code in enumerate(model.config.codes) if code]
        self.codes = tuple(filter(None, model.config.codes))
        self._is_code: slice | Tensor = slice(None)
        if len(self.codes) < len(model.config.codes):
            self._is_code = torch.tensor(classes, device=self._device)
        # Indices in the key choose names, and -1 chooses the last, which is none.
        self._code_names = np.array((*self.codes, None), dtype=object)
        self.num_ranked = min(NUM_CANDIDATES, len(self.codes)) + 1

    @cached_property
    def _trie(self) -> CodeTrie:
        return CodeTrie(self.codes, self.formatter, self._device)

    def encode(self, inputs: Inputs) -> Encoded:
        """Encode a batch as `MixerModel.encode` does, `num_at_once` descriptions at once."""
        config = self._model.config
        tokenizer = self._model.tokenizer
        encoder = self._computing.encoder
        memories: list[Tensor] = []
        pooled: list[Tensor] = []
        masks: list[Any] = []
        for ids in torch.from_numpy(inputs.input_ids).split(self.num_at_once):
            num_positions = ids.shape[1]
            if config.mask_memory:  # else the decoder attends to padding, which is not cut off
                longest = int(ids.ne(tokenizer.pad_id).sum(1).max())
                num_positions = tokenizer.num_positions(longest, config.max_len)
            trimmed = ids[:, :num_positions]

            # A GPU gets n-grams that were counted here.
            lookup = None
            if self._device.type == "cuda" and isinstance(encoder, NgramEncoder):
                lookup = Lookup.of(trimmed, encoder.config)
                lookup = lookup.mapped(partial(moved, device=self._device))
            encoding = self._computing.encode(moved(trimmed, self._device), lookup=lookup)
            memories.append(encoding[0])
            pooled.append(encoding[1])
            masks.append(encoding[2])

        # The parts are as wide as their longest descriptions; the batch is as wide as the widest.
        width = max(memory.shape[1] for memory in memories)
        memory = torch.cat([F.pad(part, (0, 0, 0, width - part.shape[1])) for part in memories])
        memory_mask = None
        if config.mask_memory:
            memory_mask = torch.cat([F.pad(mask, (0, width - mask.shape[1])) for mask in masks])
        return Encoded(inputs, memory, torch.cat(pooled), memory_mask)

    def width(self, options: PredictOptions) -> int:
        """Return the number of codes that a row has in the answer of a mode, blank ones included;
        in mode full that of probabilities.
        """
        if options.mode == "full":
            return len(self.codes)
        if options.mode == "topk":
            return min(options.k, len(self.codes))
        if options.mode == "flat":
            return min(self.formatter.num_blocks, len(self.codes))
        return self.formatter.num_blocks

    def missing(self, num_rows: int, options: PredictOptions) -> Prediction:
        """Return what `decode` would return for rows without a description."""
        missing = Prediction.missing(num_rows, self.width(options), self._model.config.attributes)
        if options.mode == "full":
            return missing._replace(codes=missing.codes[:, :0])
        return missing

    def decode(self, batch: Encoded, options: PredictOptions) -> Prediction:
        """Return the codes of a batch; see `Coder.predict_batch`."""
        mode = options.mode or self._model.config.mode
        if mode == "combined":
            return self.ranked(batch).answer
        if mode == "flat":
            return self._decode_flat(batch, options)
        if mode == "greedy":
            return self._decode_greedy(batch, options)

        # The other modes search the codes of the key exactly, each as the only code of a row.
        search = TrieSearch(self._computing.decoder, self._trie)
        source = self._source(batch)
        if mode == "topk":
            indices, values = _numpy(search.top_k(source, k=options.k))
            return Prediction(self._named(indices), values, values[:, 0])
        (values,) = _numpy([search.full(source)])
        return Prediction(np.empty((len(values), 0), dtype=object), values, values.max(1))

    def _decode_flat(self, batch: Encoded, options: PredictOptions) -> Prediction:
        """Return the flat head's codes, further ones above their thresholds."""
        best = self._flat(batch).topk(self.width(options))
        indices, values = _numpy([best.indices, best.values])
        thresholds = batch.inputs.thresholds.astype(np.float64)
        return Prediction.above(self._named(indices), values, thresholds)

    def _decode_greedy(self, batch: Encoded, options: PredictOptions) -> Prediction:
        """Return the codes that the decoder writes token by token."""
        num_blocks = self.formatter.num_blocks
        size = self.formatter.block_size
        decoder = self._computing.decoder
        source = self._source(batch)
        tokens, probs = greedy(
            decoder,
            source,
            num_tokens=num_blocks * size,
            block_size=size,
            trie=self._trie if options.constrain else None,
        )
        codes = self.formatter.decode(tokens.cpu().numpy())
        is_missing = pd.isna(codes)

        # The probability of a set is that of all orders in which it can be written.
        is_code = moved(torch.from_numpy(~is_missing), self._device)
        conf = set_probability(decoder, source, tokens[:, 1:], probs, is_code=is_code)
        of_blocks = probs.unflatten(1, (num_blocks, size)).prod(-1)
        of_codes, conf_array = _numpy([of_blocks, conf])
        return Prediction(codes, np.where(is_missing, np.nan, of_codes), conf_array)

    def _named(self, indices: np.ndarray) -> np.ndarray:
        """Return codes by their indices in the key, None for -1."""
        return self._code_names[indices.astype(np.int64)]

    def attributes(self, batch: Encoded) -> dict[str, Attribute]:
        """Return the attributes of a batch, by the names of their columns."""
        config = self._model.config
        votes = self.attribute_votes(batch)
        probs = []
        for name, votes_of_experts in votes.items():
            weights = config.attribute_experts.get(name, {})
            weighted = [
                weights.get(expert, 1.0) * vote for expert, vote in votes_of_experts.items()
            ]
            probs.append(torch.stack(weighted).sum(0).softmax(-1))

        # All of them are copied from a GPU at once.
        attributes = {}
        for name, array in zip(votes, _numpy(probs), strict=True):
            attributes[name] = Attribute.of(config.attributes[name], array)
        return attributes

    def attribute_votes(self, batch: Encoded) -> dict[str, dict[str, Tensor]]:
        """Return the log-odds (B, K) of each attribute's categories, by each expert."""
        flat = self._computing.classify_attributes(batch.pooled)
        if flat is None:
            return {}
        log_odds = {"flat": flat}
        if self._model.attribute_expert is not None:
            log_odds["linear"] = self._model.attribute_expert(
                torch.from_numpy(batch.inputs.characters)
            )

        # The columns of an expert's log-odds are the categories of one attribute after another.
        votes: dict[str, dict[str, Tensor]] = {}
        start = 0
        for name, labels in self._model.config.attributes.items():
            end = start + 1 + len(labels)
            votes[name] = {expert: columns[:, start:end] for expert, columns in log_odds.items()}
            start = end
        return votes

    def combined_search(self, batch: Encoded) -> CombinedSearch:
        """Return the search with the opinions of all the model's experts."""
        config = self._model.config
        beliefs = {"flat": self._flat(batch)}
        if self._model.linear_expert is not None:
            linear = self._model.linear_expert(torch.from_numpy(batch.inputs.characters))
            beliefs["linear"] = linear[:, self._is_code].softmax(-1)

        # Of rows with one code, the decoder's prior says all that it knows.
        has_decoder = self.formatter.num_blocks > 1 or not config.decoder_prior
        if config.experts:
            has_decoder = "decoder" in config.experts
        return CombinedSearch(
            self._computing.decoder,
            self._trie,
            self._source(batch) if has_decoder else None,
            beliefs,
            nearest=self._nearest(batch),
            num_blocks=self.formatter.num_blocks,
            missing=self.formatter.missing_token(self.codes),
        )

    def ranked(self, batch: Encoded) -> RankedPrediction:
        """Return the answer of all experts together, and the first codes that they considered."""
        config = self._model.config
        weights = config.experts_by_language.get(batch.inputs.language, config.experts)
        decoded = self.combined_search(batch).decode(weights)

        # The decoder adds a candidate where it is asked, which it may be in no row of a batch.
        num_missing = self.num_ranked - decoded.ranked.shape[1]
        decoded = decoded._replace(
            ranked=F.pad(decoded.ranked, (0, num_missing), value=-1),
            ranked_probabilities=F.pad(decoded.ranked_probabilities, (0, num_missing)),
        )
        codes, probs, conf, ranked, ranked_probs = _numpy(decoded)
        return RankedPrediction(
            Prediction(self._named(codes), probs, conf),
            Prediction(self._named(ranked), ranked_probs, ranked_probs[:, 0]),
        )

    def _nearest(self, batch: Encoded) -> Callable[[Tensor, Tensor], dict[str, Tensor]] | None:
        """Return a function for the votes of the expert of nearest rows, each (R, K), if there is
        one: on codes (R, K), by their indices in the key, of some rows (R,) of the batch.
        """
        expert = self._model.nearest_expert
        if expert is None:
            return None
        ends = moved(torch.from_numpy(batch.inputs.ends), self._device)

        def votes(codes: Tensor, rows: Tensor) -> dict[str, Tensor]:
            classes = codes if isinstance(self._is_code, slice) else self._is_code[codes]
            by_name: dict[str, Tensor] = expert(batch.pooled[rows], ends[rows], classes)
            return by_name

        return votes

    def _flat(self, batch: Encoded) -> Tensor:
        """Return the flat head's probabilities of the codes (B, num_codes)."""
        return self._computing.class_probabilities(self._computing.classify(batch.pooled))[
            :, self._is_code
        ]

    def _source(self, batch: Encoded) -> DecoderInputs:
        prior = self._computing.prior(self._computing.classify(batch.pooled))
        return DecoderInputs(batch.memory, batch.memory_mask, prior)


def _numpy(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Return tensors as arrays of doubles; from a GPU in one copy, so that the host waits once.

    Their numbers are exact in fp32.
    """
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.double().numpy() for tensor in tensors]
    numbers = torch.cat([tensor.float().flatten() for tensor in tensors]).cpu().double().numpy()
    arrays = []
    start = 0
    for tensor in tensors:
        end = start + tensor.numel()
        arrays.append(numbers[start:end].reshape(tensor.shape))
        start = end
    return arrays
