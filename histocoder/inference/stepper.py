"""Decoding step by step, a token or a level of a tree of tokens at a time, with cached keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from histocoder.inference.packed import PackedLayer
from histocoder.model.decoder import Decoder, DecoderLayer, seen_memory
from histocoder.model.prior import Prior, PriorSteps


def select_rows(
    rows: Tensor | slice, memory: Tensor, memory_mask: Tensor | None, prior: Prior | None
) -> tuple[Tensor, Tensor | None, Prior | None]:
    """Return some rows of what a batch is decoded from."""
    mask = None if memory_mask is None else memory_mask[rows]
    return memory[rows], mask, None if prior is None else prior.rows(rows)


class Stepper:
    """Predicts what follows growing sequences, each step from the newest tokens alone.

    Either one sequence for each row, by `step`, or a tree of sequences, by `step_tree`.

    Parameters
    ----------
    decoder, memory, memory_mask, prior
        See `Decoder.forward`; used without dropout.
    room : int
        Initial capacity of the cache, in nodes of a row.

    Examples
    --------
    >>> decoder = Decoder(8, 4, num_heads=2).eval()
    >>> stepper = Stepper(decoder, torch.zeros(2, 3, 4))
    >>> stepper.step(torch.tensor([2, 2])).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        decoder: Decoder,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        prior: Prior | None = None,
        *,
        room: int = 8,
    ) -> None:
        self._decoder = decoder
        memory, memory_mask = seen_memory(memory, memory_mask)
        self._mask = None if memory_mask is None else memory_mask[:, None, None, :]
        self._layers = [_Layer(layer, memory, room) for layer in decoder.decoder.layers]  # type: ignore[arg-type]
        self._visible = torch.empty(len(memory), 1, 0, dtype=torch.bool, device=memory.device)  # (B, W, nodes)
        self._prior = None if prior is None else PriorSteps(prior)
        self._depth = 0  # position of the next tokens in their sequences, BOS at 0

    def step(self, tokens: Tensor) -> Tensor:
        """Predict what follows `tokens` (B,), each row's newest; return logits of shape (B, vocab_size)."""
        logits = self._logits(tokens, _Nodes(len(tokens), 1), None)
        return logits if self._prior is None else logits.float() + self._prior.step(tokens)

    def step_tree(self, tokens: Tensor, parents: Tensor, real: Tensor) -> Tensor:
        """Predict what follows each node of the next level; return logits of shape (B, W, vocab_size).

        `tokens` (B, W) are the nodes' newest, `parents` (B, W) the indices of their parents in the previous level,
        ignored in the first. Where `real` (B, W) is false there is no node: logits are undefined, and not computed.
        """
        batch, width = tokens.shape
        inherited = self._visible.gather(1, parents[..., None].expand(-1, -1, self._visible.shape[2]))
        itself = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        self._visible = torch.cat([inherited, itself], dim=2)
        nodes = _Nodes(batch, width, real)
        logits = nodes.spread(self._logits(nodes.collect(tokens), nodes, self._visible[:, None]))
        return logits if self._prior is None else logits.float() + self._prior.step_tree(tokens, parents)

    def keep(self, rows: Tensor) -> None:
        """Keep only some rows of the batch, by their indices."""
        self._mask = None if self._mask is None else self._mask[rows]
        self._visible = self._visible[rows]
        if self._prior is not None:
            self._prior.keep(rows)
        for layer in self._layers:
            layer.keep(rows)

    def _logits(self, tokens: Tensor, nodes: _Nodes, visible: Tensor | None) -> Tensor:
        decoder = self._decoder
        x = decoder.token_emb(tokens) + decoder.positional_encoding.pos_embedding[self._depth, 0]
        for layer in self._layers:
            x = layer.step(x, nodes, visible, self._mask)
        self._depth += 1
        return decoder.head(x)


class _Nodes:
    """The newest nodes of a batch, W for each row; only the real ones are computed."""

    def __init__(self, batch: int, width: int, real: Tensor | None = None) -> None:
        self._shape = (batch, width)
        self._places = None if real is None else real.flatten().nonzero()[:, 0]

    def spread(self, x: Tensor) -> Tensor:
        """Spread `x` (real nodes, …) to the shape (B, W, …), 0 where there is no node."""
        if self._places is None or len(self._places) == self._shape[0] * self._shape[1]:
            return x.unflatten(0, self._shape)
        spread = x.new_zeros(self._shape[0] * self._shape[1], *x.shape[1:])
        return spread.index_copy_(0, self._places, x).unflatten(0, self._shape)

    def collect(self, x: Tensor) -> Tensor:
        """Collect the real nodes of `x` (B, W, …)."""
        return x.flatten(0, 1) if self._places is None else x.flatten(0, 1)[self._places]


class _Layer:
    """A decoder layer with the keys and values of memory, and of the nodes so far."""

    def __init__(self, layer: DecoderLayer, memory: Tensor, room: int) -> None:
        self._layer = layer
        self._products = PackedLayer(layer)
        self._keys, self._values = layer.multihead_attn.keys_values(memory)  # (B, heads, S, dim / heads)
        heads, head_dim = layer.self_attn.num_heads, memory.shape[2] // layer.self_attn.num_heads
        self._own = memory.new_empty(len(memory), room, 2, heads, head_dim)  # keys and values, with spare capacity
        self._num_nodes = 0

    def step(self, x: Tensor, nodes: _Nodes, visible: Tensor | None, memory_mask: Tensor | None) -> Tensor:
        """Return the layer's output for new nodes, of shape (real nodes, dim), like `x`.

        `visible` (B, 1, W, all nodes of a row so far) tells what they attend to, everything by default; `memory_mask`
        is of shape (B, 1, 1, S).
        """
        layer, products, attention = self._layer, self._products, self._layer.self_attn
        projected = nodes.spread(products.own(x).view(len(x), 3, attention.num_heads, -1))
        keys, values = self._append(projected[:, :, 1:])
        mixed = attention.mix(projected[:, :, 0].transpose(1, 2), keys, values, attn_mask=visible)
        x = layer.norm1(products.own_out.add_to(x, nodes.collect(mixed)))
        queries = nodes.spread(products.queries(x).view(len(x), attention.num_heads, -1)).transpose(1, 2)
        mixed = layer.multihead_attn.mix(queries, self._keys, self._values, attn_mask=memory_mask)
        x = layer.norm2(products.out.add_to(x, nodes.collect(mixed)))
        return layer.norm3(products.outer.add_to(x, products.inner.relu(x)))

    def keep(self, rows: Tensor) -> None:
        self._keys, self._values, self._own = self._keys[rows], self._values[rows], self._own[rows]

    def _append(self, newest: Tensor) -> tuple[Tensor, Tensor]:
        """Cache keys and values (B, W, 2, heads, head_dim); return all of them, each (B, heads, nodes, head_dim)."""
        start, end = self._num_nodes, self._num_nodes + newest.shape[1]
        if end > self._own.shape[1]:
            room = newest.new_empty(len(newest), end, *newest.shape[2:])  # at least doubles
            self._own = torch.cat([self._own[:, :start], room], dim=1)
        self._own[:, start:end] = newest
        self._num_nodes = end
        keys, values = self._own[:, :end].unbind(2)
        return keys.transpose(1, 2), values.transpose(1, 2)
