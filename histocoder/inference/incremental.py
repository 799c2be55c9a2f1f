"""Decoding step by step, a token of each sequence at a time, with cached keys and values."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder.model.decoder import Attention, Decoder, DecoderLayer, Prior, PriorSteps
from histocoder.model.layers import Weights, add_norm, attend_to_paths, attention, linear

_WORTH_COPYING = (
    0.75  # memory of rows that have ended is dropped if no more than this share remains
)


SEQUENCES_AT_ONCE = 1 << 10
"""Number of sequences of a few tokens that are scored at once: they fit a CPU's caches."""


class DecoderInputs(NamedTuple):
    """Encoded rows that are decoded; see `Decoder.forward`."""

    memory: Tensor  # of shape (B, S, dim)
    memory_mask: Tensor | None = None  # of shape (B, S)
    prior: Prior | None = None

    def rows(self, rows: Tensor | slice) -> DecoderInputs:
        mask, prior = self.memory_mask, self.prior
        return DecoderInputs(
            self.memory[rows],
            None if mask is None else mask[rows],
            None if prior is None else prior.rows(rows),
        )


class IncrementalDecoder:
    """Predicts what follows growing sequences, each step from the newest tokens alone.

    Each row of the batch has one sequence or several, which may share their beginnings: a step adds
    a level of W nodes to the row's tree, and each node attends to its ancestors and itself.

    Parameters
    ----------
    decoder : Decoder
        Used without dropout.
    source : DecoderInputs
    many_nodes : bool
        Whether rows have more nodes than memory has positions, so that projecting memory pays, if
        it is short.
    shared : list of Tensor, optional
        Where all rows have the same nodes: what precedes the first attention to memory, level by
        level, which the first of several steppers computes and appends.

    Examples
    --------
    >>> decoder = Decoder(8, 4, num_heads=2).eval()
    >>> stepper = IncrementalDecoder(decoder, DecoderInputs(torch.zeros(2, 3, 4)))
    >>> stepper.step(torch.tensor([[2], [2]])).shape
    torch.Size([2, 1, 8])
    """

    def __init__(
        self,
        decoder: Decoder,
        source: DecoderInputs,
        *,
        many_nodes: bool = False,
        shared: list[Tensor] | None = None,
    ) -> None:
        self._decoder, self._shared = decoder, shared
        num_heads, (_, num_positions, dim) = (
            decoder.layers[0].self_attn.num_heads,
            source.memory.shape,
        )
        kind = _ProjectedMemory if many_nodes and num_heads * num_positions <= dim else _Memory
        self._layers = [
            _Layer(layer, kind(layer.multihead_attn, source)) for layer in decoder.layers
        ]
        self._prior = None if source.prior is None else PriorSteps(source.prior)
        self._rows = torch.arange(
            len(source.memory), device=source.memory.device
        )  # those that have nodes still
        self._index = torch.zeros_like(self._rows)[
            :, None
        ]  # of the previous level's nodes in their level, (B, W)
        self._paths = self._rows.new_empty(
            0, len(self._rows)
        )  # node of each level on the way to them, (depth, N)

    def step(
        self, tokens: Tensor, parents: Tensor | None = None, real: Tensor | None = None
    ) -> Tensor:
        """Predict what follows each node of the next level.

        Parameters
        ----------
        tokens : Tensor of int, of shape (B, W)
            Tokens of the nodes.
        parents : Tensor of int, shaped like tokens, optional
            Indices of the nodes' parents in the previous level; by default the first.
        real : Tensor of bool, shaped like tokens, optional
            Where there is a node; by default everywhere. A row without any node has ended, and must
            stay without.

        Returns
        -------
        Tensor of shape (B, W, vocab_size)
            Logits; without a meaning where there is no node.
        """
        parents = torch.zeros_like(tokens) if parents is None else parents
        # a GPU computes all nodes, since the host would wait until it has counted the real ones
        has_all = real is None or tokens.device.type != "cpu"
        real = torch.ones_like(tokens, dtype=torch.bool) if has_all or real is None else real

        # the nodes of this level, and those of each level on the way to them
        ancestors = self._index.gather(1, parents)  # (N,), of the N nodes there are
        ancestors = ancestors.flatten() if has_all else ancestors[real]
        self._index = (real.flatten().cumsum(0) - 1).view_as(real)
        x = self._decoder.embed(tokens.flatten() if has_all else tokens[real], len(self._paths))
        paths = self._paths = torch.cat(
            [self._paths[:, ancestors], torch.arange(len(x), device=x.device)[None]]
        )
        if not has_all:
            self._drop_rows(real.any(1))
        nodes = _Nodes(real[self._rows], has_all=has_all)
        for i, layer in enumerate(self._layers):
            if self._shared is not None and i == 0:
                if len(self._shared) < len(paths):
                    num_nodes = tokens.shape[1]
                    self._shared.append(
                        layer.attend_to_ancestors(x[:num_nodes], paths[:, :num_nodes])
                    )
                x = self._shared[len(paths) - 1].repeat(len(tokens), 1)
            else:
                x = layer.attend_to_ancestors(x, paths)
            x = layer.attend_to_memory(x, nodes)
        logits = _Nodes(real, has_all=has_all).spread(self._decoder.head(x))
        return logits if self._prior is None else logits.float() + self._prior.step(tokens, parents)

    def _drop_rows(self, has_nodes: Tensor) -> None:
        """Drop the memory of rows (B,) without nodes, if that is worth copying the rest."""
        if int(has_nodes.sum()) > _WORTH_COPYING * len(self._rows):
            return
        kept = has_nodes[self._rows]
        self._rows = self._rows[kept]
        for layer in self._layers:
            layer.memory.keep_rows(kept)


class _Nodes:
    """The newest nodes of some rows, W for each row; only the real ones (R, W) are computed, or all
    of them.
    """

    def __init__(self, real: Tensor, *, has_all: bool) -> None:
        self._shape = real.shape
        self._indices = None if has_all else real.flatten().nonzero()[:, 0]

    def spread(self, x: Tensor) -> Tensor:
        """Spread `x` (N, dim) of the real nodes to the shape (R, W, dim), 0 where there is no
        node.
        """
        if self._indices is None or len(x) == self._shape.numel():
            return x.unflatten(0, self._shape)
        spread = x.new_zeros(self._shape.numel(), x.shape[1])
        return spread.index_copy_(0, self._indices, x).unflatten(0, self._shape)

    def collect(self, x: Tensor) -> Tensor:
        """Collect the real nodes of `x` (R, W, dim), of shape (N, dim)."""
        x = x.flatten(0, 1)
        return x if self._indices is None or len(x) == len(self._indices) else x[self._indices]


class _Memory:
    """Keys, values and mask of memory, for one layer."""

    def __init__(self, attention: Attention, source: DecoderInputs) -> None:
        self._attention = attention
        self._keys, self._values = attention.keys_values(
            source.memory
        )  # each (R, heads, S, dim / heads)
        self._mask = (
            None if source.memory_mask is None else source.memory_mask[:, None, None, :]
        )  # (R, 1, 1, S)

    def keep_rows(self, rows: Tensor) -> None:
        self._keys, self._values = self._keys[rows], self._values[rows]
        self._mask = None if self._mask is None else self._mask[rows]

    def attended(self, x: Tensor, nodes: _Nodes) -> Tensor:
        """Return the attention of `x` (N, dim) of the real nodes to memory, of the same shape."""
        attention = self._attention
        queries = attention.heads(
            nodes.spread(F.linear(x, *attention.projections(Weights(x.dtype))[0]))
        )
        mixed = attention.mix(queries, self._keys, self._values, self._mask)
        return linear(nodes.collect(mixed), attention.out_proj)


class _ProjectedMemory(_Memory):
    """Keys of memory with the projection of queries in them, and values with that of the output.

    Attention of a head is softmax(q k') v with q = Wq x + bq, followed by Wo: with k' Wq in place
    of k' and Wo v in place of v, a node costs products with heads * S columns in place of dim
    columns.
    """

    def __init__(self, attention: Attention, source: DecoderInputs) -> None:
        super().__init__(attention, source)
        (weight, bias), heads = (
            attention.projections(Weights(source.memory.dtype))[0],
            attention.num_heads,
        )
        keys = self._keys / math.sqrt(self._keys.shape[-1])
        scores = torch.einsum("bhsi,hi->bhs", keys, bias.view(heads, -1))
        if self._mask is not None:
            scores = scores.masked_fill(~self._mask[:, 0], -torch.inf)
        self._mask = scores.flatten(1)[:, None]  # (R, 1, heads * S)
        out = attention.out_proj.weight.to(weight.dtype).t().reshape(heads, -1, len(weight))
        self._keys = torch.einsum(
            "bhsi,hid->bdhs", keys, weight.view(heads, -1, len(weight))
        ).flatten(2)
        self._values = torch.einsum("bhsi,hid->bhsd", self._values, out).flatten(
            1, 2
        )  # (R, heads * S, dim)

    def attended(self, x: Tensor, nodes: _Nodes) -> Tensor:
        assert self._mask is not None
        scores = torch.baddbmm(self._mask, nodes.spread(x), self._keys)  # (R, W, heads * S)
        weights = scores.unflatten(-1, (self._attention.num_heads, -1)).softmax(-1).flatten(-2)
        return nodes.collect(torch.bmm(weights, self._values)) + self._attention.out_proj.bias.to(
            x.dtype
        )


class _Layer:
    """A decoder layer with its memory, and what it projected of the nodes of each level."""

    def __init__(self, layer: DecoderLayer, memory: _Memory) -> None:
        self._layer, self.memory = layer, memory
        self._levels: list[
            Tensor
        ] = []  # queries, keys and values of each level's nodes, (nodes, 3 * dim)

    def attend_to_ancestors(self, x: Tensor, paths: Tensor) -> Tensor:
        """Return self-attention and its norm of new nodes `x` (N, dim), by the nodes on the way to
        them (depth, N).
        """
        attention = self._layer.self_attn
        self._levels.append(
            F.linear(x, attention.in_proj_weight.to(x.dtype), attention.in_proj_bias.to(x.dtype))
        )
        mixed = attend_to_paths(self._levels, paths, num_heads=attention.num_heads)
        return add_norm(x, linear(mixed, attention.out_proj), self._layer.norm1, 0.0)

    def attend_to_memory(self, x: Tensor, nodes: _Nodes) -> Tensor:
        """Return the rest of the layer for `x` (N, dim)."""
        layer = self._layer
        x = add_norm(x, self.memory.attended(x, nodes), layer.norm2, 0.0)
        return add_norm(
            x, linear(linear(x, layer.linear1).relu_(), layer.linear2), layer.norm3, 0.0
        )


class SequenceScorer:
    """Computes the log-probabilities of given sequences, at all positions at once.

    Keys and values of memory are computed once, however many sequences of a row are scored.
    """

    def __init__(self, decoder: Decoder, source: DecoderInputs) -> None:
        self._decoder = decoder
        self._source = source
        self._layers = decoder.layers
        weights = Weights(source.memory.dtype)
        self._keys_values = [  # side by side, of shape (B, S, 2 * dim)
            F.linear(source.memory, *layer.multihead_attn.projections(weights)[1])
            for layer in self._layers
        ]

    @torch.no_grad()
    def log_probs(self, tokens: Tensor, rows: Tensor, *, num_last: int) -> Tensor:
        """Return the log-probabilities of what follows each of the last tokens.

        Parameters
        ----------
        tokens : Tensor of int, of shape (N, L)
            Sequences, BOS first.
        rows : Tensor of int, of shape (N,)
            Indices of their rows in the batch.
        num_last : int
            Number of tokens to predict from.

        Returns
        -------
        Tensor of shape (N, num_last, vocab_size)
        """
        parts = []
        for part, part_rows in zip(
            tokens.split(SEQUENCES_AT_ONCE), rows.split(SEQUENCES_AT_ONCE), strict=True
        ):
            parts.append(self._log_probs(part, part_rows, num_last))
        return torch.cat(parts)

    def _log_probs(self, tokens: Tensor, rows: Tensor, num_last: int) -> Tensor:
        memory, mask, prior = self._source
        x = self._decoder.embed(tokens, slice(tokens.shape[1])).to(memory.dtype)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            mask = mask[rows, None, None]  # (N, 1, 1, S)
        weights = Weights(x.dtype)
        for layer, keys_values in zip(self._layers, self._keys_values, strict=True):
            x, update = layer.self_attn(x, None, causal, weights)
            x = add_norm(x, update, layer.norm1, 0.0, weights)
            if layer is self._layers[-1]:
                x = x[:, -num_last:]  # the positions before have said what they have to say
            cross = layer.multihead_attn
            queries = F.linear(x, *cross.projections(weights)[0])
            mixed = attention(queries, keys_values[rows], num_heads=cross.num_heads, mask=mask)
            x = add_norm(x, linear(mixed, cross.out_proj), layer.norm2, 0.0, weights)
            wide = linear(x, layer.linear1).relu_()
            x = add_norm(x, linear(wide, layer.linear2), layer.norm3, 0.0, weights)
        logits = linear(x.float(), self._decoder.head)
        if prior is not None:
            logits = logits + prior.rows(rows).following(tokens)[:, -num_last:]
        return logits.log_softmax(-1)
