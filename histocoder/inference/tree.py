"""A decoder over many nodes of one tree at once, which computes once what they share and what memory is needed for."""

import math

import torch
from torch import Tensor

from histocoder.inference.packed import PackedLayer
from histocoder.inference.trie import TreeLayout
from histocoder.model.decoder import Attention, Decoder, DecoderLayer, seen_memory


class TreeDecoder:
    """Predicts what follows each node of a tree of tokens, the same one for all rows.

    What precedes the first attention to memory is the same for all rows, and is computed when this is built, from the
    weights as they are then.
    """

    def __init__(self, decoder: Decoder, layout: TreeLayout) -> None:
        self._layers: list[DecoderLayer] = list(decoder.decoder.layers)  # type: ignore[arg-type]
        self._products = [PackedLayer(layer) for layer in self._layers]
        self._head = decoder.head
        x = decoder.token_emb(layout.tokens) + decoder.positional_encoding.pos_embedding[layout.depths, 0]
        hidden = torch.zeros(layout.visible.shape, dtype=x.dtype, device=x.device)
        self._mask = hidden.masked_fill_(~layout.visible, -torch.inf)[:, None]  # (num_bins, 1, bin_size, bin_size)
        self._shared = self._after_own_nodes(0, x.flatten(0, 1)[None])  # (1, num_nodes, dim)

    def __call__(self, memory: Tensor, memory_mask: Tensor | None, *, nodes_at_once: int) -> Tensor:
        """Return logits (B, num_nodes, vocab_size) of what follows each node; for the memory see `Decoder.forward`.

        So many nodes, of one row or more, go through a layer together: what fits the caches or the device's memory.
        """
        memory, memory_mask = seen_memory(memory, memory_mask)
        memories = [
            _Memory(layer.multihead_attn, products, memory, memory_mask)
            for layer, products in zip(self._layers, self._products, strict=True)
        ]
        step = max(1, nodes_at_once // self._shared.shape[1])
        logits = []
        for start in range(0, len(memory), step):
            rows = slice(start, start + step)
            x = self._shared.repeat(len(memory[rows]), 1, 1)
            for i, (layer, products, seen) in enumerate(zip(self._layers, self._products, memories, strict=True)):
                if i:
                    x = self._after_own_nodes(i, x)
                x = layer.norm2(seen.add_to(x, rows))
                x = layer.norm3(products.outer.add_to(x, products.inner.relu(x)))
            logits.append(self._head(x))
        return torch.cat(logits)

    def _after_own_nodes(self, i: int, x: Tensor) -> Tensor:
        """Return layer `i`'s self-attention within bins and its norm; `x` (B, num_nodes, dim) may be overwritten."""
        layer, products = self._layers[i], self._products[i]
        heads, dim = layer.self_attn.num_heads, x.shape[2]
        projected = products.own(x).view(len(x) * len(self._mask), -1, 3, heads, dim // heads)
        queries, keys, values = projected.permute(2, 0, 3, 1, 4)  # each (B * num_bins, heads, bin_size, dim / heads)
        mask = self._mask.expand(len(x), *self._mask.shape).flatten(0, 1)
        mixed = layer.self_attn.mix(queries, keys, values, attn_mask=mask).view_as(x)
        return layer.norm1(products.own_out.add_to(x, mixed))


class _Memory:
    """Keys and values of memory, for one layer.

    Where memory is short, its keys are kept with the projection of queries in them, and its values with that of the
    output. Attention of a head is softmax(q k') v with q = Wq x + bq and k = Wk m + bk, followed by Wo: with k' Wq in
    place of k' and v Wo in place of v, a node costs two products with heads * S columns and none with dim columns.
    """

    def __init__(self, attention: Attention, products: PackedLayer, memory: Tensor, memory_mask: Tensor | None) -> None:
        self._attention = attention
        self._products = products
        self._keys, self._values = attention.keys_values(memory)
        self._mask = None if memory_mask is None else memory_mask[:, None, None, :]
        self._folded = attention.num_heads * memory.shape[1] <= memory.shape[2]
        if self._folded:
            self._fold()

    def _fold(self) -> None:
        """Turn keys and values (B, heads, S, dim / heads) into (B, heads * S, dim), the mask into (B, 1, heads * S)."""
        heads, dim = self._attention.num_heads, self._attention.out_proj.in_features
        query_weight = self._attention.in_proj_weight[:dim].view(heads, -1, dim)
        query_bias = self._attention.in_proj_bias[:dim].view(heads, -1, 1)
        output_weight = self._attention.out_proj.weight.t().reshape(heads, -1, dim)
        keys = self._keys / math.sqrt(dim // heads)
        bias = keys @ query_bias  # (B, heads, S, 1)
        if self._mask is not None:
            bias = bias.masked_fill(~self._mask.transpose(2, 3), -torch.inf)
        self._mask = bias.flatten(1)[:, None]
        self._keys = _per_head(keys, query_weight)
        # each head's weights sum to 1: a share of the output's bias in each value makes the whole of it
        self._values = _per_head(self._values, output_weight).add_(self._attention.out_proj.bias / heads)

    def add_to(self, x: Tensor, rows: slice) -> Tensor:
        """Add attention to some rows of memory to `x` (rows, N, dim), which may be overwritten."""
        keys, values, mask = self._keys[rows], self._values[rows], None if self._mask is None else self._mask[rows]
        if not self._folded or mask is None:
            queries = self._attention.heads(self._products.queries(x))
            return self._products.out.add_to(x, self._attention.mix(queries, keys, values, attn_mask=mask))
        scores = torch.bmm(x, keys.transpose(1, 2)).add_(mask)
        weights = scores.unflatten(-1, (self._attention.num_heads, -1)).softmax(-1).flatten(-2)  # (rows, N, heads * S)
        return x.baddbmm_(weights, values)


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x` (B, heads, S, dim / heads) times weight (heads, dim / heads, dim), of shape (B, heads * S, dim)."""
    products = torch.bmm(x.transpose(0, 1).flatten(1, 2), weight)  # (heads, B * S, dim)
    return products.unflatten(1, (len(x), -1)).transpose(0, 1).flatten(1, 2)
