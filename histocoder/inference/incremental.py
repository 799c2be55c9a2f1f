"""Decoding step by step, a token of each sequence at a time, with cached keys and values."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from histocoder.model.decoder import Attention, Decoder, DecoderLayer, Prior, PriorSteps
from histocoder.model.layers import Weights, add_norm, attend_to_paths, attention, linear

MAX_SHARE_TO_COPY = 0.75
"""Share of rows that remain, up to which the memory of rows that have ended is dropped."""
SEQUENCES_AT_ONCE = 1 << 10
"""Number of sequences of a few tokens that are scored at once: they fit a CPU's caches."""


class DecoderInputs(NamedTuple):
    """Encoded rows that are decoded; see `Decoder.forward`."""

    memory: Tensor  # of shape (B, S, dim)
    memory_mask: Tensor | None = None  # of shape (B, S)
    prior: Prior | None = None

    def rows(self, rows: Tensor | slice) -> DecoderInputs:
        """Return some of the rows."""
        mask = None if self.memory_mask is None else self.memory_mask[rows]
        prior = None if self.prior is None else self.prior.rows(rows)
        return DecoderInputs(self.memory[rows], mask, prior)


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
        self._decoder = decoder
        self._shared = shared
        self._prior = None if source.prior is None else PriorSteps(source.prior)

        # Projected memory has heads * S columns in place of dim.
        num_columns = decoder.layers[0].self_attn.num_heads * source.memory.shape[1]
        memory_class = _Memory
        if many_nodes and num_columns <= source.memory.shape[2]:
            memory_class = _ProjectedMemory
        self._layers = []
        for layer in decoder.layers:
            self._layers.append(_Layer(layer, memory_class(layer.multihead_attn, source)))

        # rows that have nodes still
        self._rows = torch.arange(len(source.memory), device=source.memory.device)
        # of the previous level's nodes in their level, (B, W)
        self._index = torch.zeros_like(self._rows)[:, None]
        # node of each level on the way to them, (depth, N)
        self._paths = self._rows.new_empty(0, len(self._rows))

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
        if parents is None:
            parents = torch.zeros_like(tokens)
        # A GPU computes all nodes, since the host would wait until it has counted the real ones.
        has_all = real is None or tokens.device.type != "cpu"
        if has_all or real is None:
            real = torch.ones_like(tokens, dtype=torch.bool)

        # The N real nodes of this level, and those of each level on the way to them.
        real_nodes = _Nodes(real, has_all=has_all)
        ancestors = real_nodes.collect(self._index.gather(1, parents))
        self._index = (real.flatten().cumsum(0) - 1).view_as(real)
        x = self._decoder.embed(real_nodes.collect(tokens), len(self._paths))
        newest = torch.arange(len(x), device=x.device)[None]
        paths = torch.cat([self._paths[:, ancestors], newest])
        self._paths = paths
        if not has_all:
            self._drop_rows(real.any(1))

        # Rows that share their nodes differ from the first attention to memory on.
        nodes = _Nodes(real[self._rows], has_all=has_all)
        for layer in self._layers:
            if self._shared is None or layer is not self._layers[0]:
                x = layer.attend_to_ancestors(x, paths)
            else:
                if len(self._shared) < len(paths):
                    width = tokens.shape[1]
                    self._shared.append(layer.attend_to_ancestors(x[:width], paths[:, :width]))
                x = self._shared[len(paths) - 1].repeat(len(tokens), 1)
            x = layer.attend_to_memory(x, nodes)
        logits = real_nodes.spread(self._decoder.head(x))
        return logits if self._prior is None else logits.float() + self._prior.step(tokens, parents)

    def _drop_rows(self, has_nodes: Tensor) -> None:
        """Drop the memory of rows (B,) without nodes, if that is worth copying the rest."""
        if int(has_nodes.sum()) > MAX_SHARE_TO_COPY * len(self._rows):
            return
        has_nodes = has_nodes[self._rows]
        self._rows = self._rows[has_nodes]
        for layer in self._layers:
            layer.memory.keep_rows(has_nodes)


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
        """Collect the real nodes of `x` (R, W, …), of shape (N, …)."""
        x = x.flatten(0, 1)
        if self._indices is None or len(x) == len(self._indices):
            return x
        return x[self._indices]


class _Memory:
    """Keys, values and mask of memory, for one layer."""

    def __init__(self, attention: Attention, source: DecoderInputs) -> None:
        self._attention = attention
        # each (R, heads, S, dim / heads)
        self._keys, self._values = attention.keys_values(source.memory)
        self._mask: Tensor | None = None
        if source.memory_mask is not None:
            self._mask = source.memory_mask[:, None, None, :]  # (R, 1, 1, S)

    def keep_rows(self, rows: Tensor) -> None:
        """Drop the memory of rows other than those of a mask (R,)."""
        self._keys = self._keys[rows]
        self._values = self._values[rows]
        if self._mask is not None:
            self._mask = self._mask[rows]

    def attended(self, x: Tensor, nodes: _Nodes) -> Tensor:
        """Return the attention of `x` (N, dim) of the real nodes to memory, of the same shape."""
        attention = self._attention
        (weight, bias), _ = attention.projections(Weights(x.dtype))
        queries = attention.heads(nodes.spread(F.linear(x, weight, bias)))
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
        (weight, bias), _ = attention.projections(Weights(source.memory.dtype))
        num_heads = attention.num_heads

        # What the bias of queries adds to scores is the same for all nodes, as a mask is.
        keys = self._keys / math.sqrt(self._keys.shape[-1])
        scores = torch.einsum("bhsi,hi->bhs", keys, bias.view(num_heads, -1))
        if self._mask is not None:
            scores = scores.masked_fill(~self._mask[:, 0], -torch.inf)
        self._mask = scores.flatten(1)[:, None]  # (R, 1, heads * S)

        # i runs over the numbers of a head, and d over the numbers of the model's width.
        of_queries = weight.view(num_heads, -1, len(weight))
        out = attention.out_proj.weight.to(weight.dtype).t().reshape(num_heads, -1, len(weight))
        keys = torch.einsum("bhsi,hid->bdhs", keys, of_queries)
        values = torch.einsum("bhsi,hid->bhsd", self._values, out)
        self._keys = keys.flatten(2)  # (R, dim, heads * S)
        self._values = values.flatten(1, 2)  # (R, heads * S, dim)

    def attended(self, x: Tensor, nodes: _Nodes) -> Tensor:
        assert self._mask is not None
        scores = torch.baddbmm(self._mask, nodes.spread(x), self._keys)  # (R, W, heads * S)
        weights = scores.unflatten(-1, (self._attention.num_heads, -1)).softmax(-1).flatten(-2)
        mixed = torch.bmm(weights, self._values)
        return nodes.collect(mixed) + self._attention.out_proj.bias.to(x.dtype)


class _Layer:
    """A decoder layer with its memory, and what it projected of the nodes of each level."""

    def __init__(self, layer: DecoderLayer, memory: _Memory) -> None:
        self._layer = layer
        self.memory = memory
        # queries, keys and values of each level's nodes, (nodes, 3 * dim)
        self._levels: list[Tensor] = []

    def attend_to_ancestors(self, x: Tensor, paths: Tensor) -> Tensor:
        """Return self-attention and its norm of new nodes `x` (N, dim), by the nodes on the way to
        them (depth, N).
        """
        attention = self._layer.self_attn
        weight = attention.in_proj_weight.to(x.dtype)
        self._levels.append(F.linear(x, weight, attention.in_proj_bias.to(x.dtype)))
        mixed = attend_to_paths(self._levels, paths, num_heads=attention.num_heads)
        return add_norm(x, linear(mixed, attention.out_proj), self._layer.norm1, 0.0)

    def attend_to_memory(self, x: Tensor, nodes: _Nodes) -> Tensor:
        """Return the rest of the layer for `x` (N, dim)."""
        layer = self._layer
        x = add_norm(x, self.memory.attended(x, nodes), layer.norm2, 0.0)
        wide = linear(x, layer.linear1).relu_()
        return add_norm(x, linear(wide, layer.linear2), layer.norm3, 0.0)


class SequenceScorer:
    """Computes the log-probabilities of given sequences, at all positions at once.

    Keys and values of memory are computed once, however many sequences of a row are scored.
    """

    def __init__(self, decoder: Decoder, source: DecoderInputs) -> None:
        self._decoder = decoder
        self._source = source
        self._layers = decoder.layers
        weights = Weights(source.memory.dtype)
        # side by side, of shape (B, S, 2 * dim)
        self._keys_values = []
        for layer in self._layers:
            _, (weight, bias) = layer.multihead_attn.projections(weights)
            self._keys_values.append(F.linear(source.memory, weight, bias))

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
        batches = zip(tokens.split(SEQUENCES_AT_ONCE), rows.split(SEQUENCES_AT_ONCE), strict=True)
        for part, part_rows in batches:
            parts.append(self._log_probs(part, part_rows, num_last))
        return torch.cat(parts)

    def _log_probs(self, tokens: Tensor, rows: Tensor, num_last: int) -> Tensor:
        # Each token attends to those before it, and to the memory of its row.
        memory, mask, prior = self._source
        x = self._decoder.embed(tokens, slice(tokens.shape[1])).to(memory.dtype)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            mask = mask[rows, None, None]  # (N, 1, 1, S)
        weights = Weights(x.dtype)
        for layer, keys_values in zip(self._layers, self._keys_values, strict=True):
            x, update = layer.self_attn(x, None, causal, weights)
            x = add_norm(x, update, layer.norm1, 0.0, weights)

            # Behind the last self-attention, no token needs those before it.
            if layer is self._layers[-1]:
                x = x[:, -num_last:]
            cross = layer.multihead_attn
            (weight, bias), _ = cross.projections(weights)
            queries = F.linear(x, weight, bias)
            mixed = attention(queries, keys_values[rows], num_heads=cross.num_heads, mask=mask)
            x = add_norm(x, linear(mixed, cross.out_proj), layer.norm2, 0.0, weights)
            wide = linear(x, layer.linear1).relu_()
            x = add_norm(x, linear(wide, layer.linear2), layer.norm3, 0.0, weights)
        logits = linear(x.float(), self._decoder.head)
        if prior is not None:
            logits = logits + prior.rows(rows).following(tokens)[:, -num_last:]
        return logits.log_softmax(-1)
