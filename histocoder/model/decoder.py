"""A transformer decoder over code tokens, with a key-value cache for decoding step by step.

Parameters carry the names that `torch.nn.TransformerDecoder` gives them, so published state dicts load as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocoder.config import MAX_TARGET_LEN
from histocoder.model.layers import attention, layer_norm, linear, product


class Attention(nn.Module):
    """Multi-head attention with the parameter names of `torch.nn.MultiheadAttention`."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"a width of {dim} can't be shared by {num_heads} heads")
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, heads, L, dim / heads)

    def queries(self, x: Tensor) -> Tensor:
        """Queries of `x` (B, L, dim), of shape (B, heads, L, dim / heads)."""
        dim = x.shape[-1]
        return self._heads(product(x, [self.in_proj_weight[:dim]], [self.in_proj_bias[:dim]]))

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `x` (B, L, dim), each of shape (B, heads, L, dim / heads)."""
        dim = x.shape[-1]
        keys, values = product(x, [self.in_proj_weight[dim:]], [self.in_proj_bias[dim:]]).chunk(2, dim=-1)
        return self._heads(keys), self._heads(values)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention's output, of shape (B, L, dim); see `layers.attention`."""
        return linear(attention(queries, keys, values, mask), self.out_proj)


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention and a feed-forward network, each followed by a layer norm."""

    def __init__(self, dim: int, num_heads: int, dim_feedforward: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(dim, num_heads)
        self.multihead_attn = Attention(dim, num_heads)
        self.linear1 = nn.Linear(dim, dim_feedforward)
        self.linear2 = nn.Linear(dim_feedforward, dim)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.norm3 = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, layer: LayerCache, memory_mask: Tensor | None) -> Tensor:
        """All positions at once: `x` (B, L, dim), `memory_mask` (B, 1, 1, S)."""
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        mixed = self.self_attn.attend(self.self_attn.queries(x), *self.self_attn.keys_values(x), causal)
        x = layer_norm(x + self.dropout(mixed), self.norm1)
        return self._after_self_attention(x, layer.memory_keys, layer.memory_values, memory_mask)

    def step(self, x: Tensor, layer: LayerCache, memory_mask: Tensor | None) -> Tensor:
        """One position: `x` (B, 1, dim), with the positions before it in `layer`."""
        keys, values = layer.append(*self.self_attn.keys_values(x), dim=2)
        x = layer_norm(x + self.dropout(self.self_attn.attend(self.self_attn.queries(x), keys, values)), self.norm1)
        return self._after_self_attention(x, layer.memory_keys, layer.memory_values, memory_mask)

    def step_tree(self, x: Tensor, layer: LayerCache, paths: Tensor, memory_mask: Tensor | None) -> Tensor:
        """One level: `x` (B, W, dim), each attending to the positions that its path (B, W, levels) names."""
        keys, values = layer.append(*(y.transpose(1, 2).flatten(2) for y in self.self_attn.keys_values(x)), dim=1)
        heads = self.self_attn.num_heads
        queries = self.self_attn.queries(x).transpose(1, 2).flatten(0, 1)[:, :, None]  # (B * W, heads, 1, dim / heads)
        own = [_rows(y, paths).unflatten(-1, (heads, -1)).transpose(1, 2) for y in (keys, values)]
        mixed = self.self_attn.attend(queries, *own).view_as(x)
        return self._after_self_attention(
            layer_norm(x + mixed, self.norm1), layer.memory_keys, layer.memory_values, memory_mask
        )

    def _after_self_attention(self, x: Tensor, keys: Tensor, values: Tensor, memory_mask: Tensor | None) -> Tensor:
        mixed = self.multihead_attn.attend(self.multihead_attn.queries(x), keys, values, memory_mask)
        x = layer_norm(x + self.dropout(mixed), self.norm2)
        update = linear(self.dropout(F.relu(linear(x, self.linear1))), self.linear2)
        return layer_norm(x + self.dropout(update), self.norm3)


@dataclass
class LayerCache:
    """Keys and values of one layer: of the memory (B, heads, S, dim / heads), and of what has been decoded so far."""

    memory_keys: Tensor
    memory_values: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor, *, dim: int) -> tuple[Tensor, Tensor]:
        """Add the newest along `dim`; return all there are."""
        if self.keys is None or self.values is None:
            self.keys, self.values = keys, values
        else:
            self.keys, self.values = torch.cat([self.keys, keys], dim=dim), torch.cat([self.values, values], dim=dim)
        return self.keys, self.values


@dataclass
class DecoderCache:
    """What decoding step by step carries from one position to the next."""

    memory_mask: Tensor | None
    """True where memory may be attended to, of shape (B, 1, 1, S)."""
    layers: list[LayerCache]
    length: int = field(default=0)
    """Positions decoded so far."""

    def begun(self, rows: Tensor) -> DecoderCache:
        """The same for some rows of the batch, with nothing decoded yet."""
        layers = [LayerCache(layer.memory_keys[rows], layer.memory_values[rows]) for layer in self.layers]
        return DecoderCache(None if self.memory_mask is None else self.memory_mask[rows], layers)


@dataclass
class TreeCache:
    """What decoding a tree, level by level, carries from one level to the next."""

    memory_mask: Tensor | None
    """True where memory may be attended to, of shape (B, 1, 1, S)."""
    layers: list[LayerCache]
    paths: Tensor
    """Where each node of the newest level has its ancestors and itself among all nodes, of shape (B, W, levels)."""
    num_nodes: int = 0
    """Of each row, in all levels so far."""


def _rows(x: Tensor, paths: Tensor) -> Tensor:
    """Rows of `x` (B, N, dim) that paths (B, W, levels) name, of shape (B * W, levels, dim)."""
    start = torch.arange(len(x), device=x.device)[:, None, None] * x.shape[1]
    return x.flatten(0, 1).index_select(0, (paths + start).flatten()).view(-1, paths.shape[2], x.shape[2])


class TokenEmbedding(nn.Module):
    """Token embeddings scaled by the square root of their width (Vaswani et al. 2017, section 3.4)."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings of `tokens` (B, L), of shape (B, L, dim)."""
        return self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)


class PositionalEncoding(nn.Module):
    """Sinusoidal positions (Vaswani et al. 2017, section 3.5)."""

    pos_embedding: Tensor

    def __init__(self, dim: int, max_len: int = MAX_TARGET_LEN) -> None:
        super().__init__()
        frequencies = torch.exp(-torch.arange(0, dim, 2) * math.log(10000) / dim)
        angles = torch.arange(max_len).unsqueeze(1) * frequencies  # (max_len, dim / 2)
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        self.register_buffer("pos_embedding", table.unsqueeze(1))  # (max_len, 1, dim), as in published state dicts

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Add positions `start`, `start + 1`, … to `x` (B, L, dim)."""
        return x + self.pos_embedding[start : start + x.shape[1], 0]


class DecoderStack(nn.Module):
    """Holds the layers under the name that published state dicts have them under."""

    def __init__(self, layers: list[DecoderLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class Decoder(nn.Module):
    """Predicts each token of a target sequence from the tokens before it and the encoder's memory.

    Parameters
    ----------
    vocab_size : int
        Number of tokens.
    dim : int
        Width, that of the memory.
    num_layers, num_heads, dim_feedforward : int
        Sizes.
    dropout : float
        After attention and within the feed-forward network; never on logits.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        num_layers: int = 3,
        num_heads: int = 8,
        dim_feedforward: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.token_emb = TokenEmbedding(vocab_size, dim)
        self.positional_encoding = PositionalEncoding(dim)
        self.dropout = nn.Dropout(dropout)
        self.decoder = DecoderStack(
            [DecoderLayer(dim, num_heads, dim_feedforward or dim, dropout) for _ in range(num_layers)]
        )
        self.head = nn.Linear(dim, vocab_size)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def _embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        return self.dropout(self.positional_encoding(self.token_emb(tokens), start))

    def forward(self, tokens: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        """Predict all positions at once (teacher forcing).

        Parameters
        ----------
        tokens : Tensor of int, of shape (B, L)
            Target tokens, BOS first, without EOS.
        memory : Tensor of shape (B, S, dim)
            The encoder's output.
        memory_mask : Tensor of bool, of shape (B, S), optional
            True where memory may be attended to; everywhere by default.

        Returns
        -------
        Tensor of shape (B, L, vocab_size)
            Logits of the token that follows each position.
        """
        return self.score(tokens, self.start(memory, memory_mask))

    def score(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """Predict all positions of `tokens` (B, L) at once, as `forward`, for the memory that `cache` began with."""
        x = self._embed(tokens).to(cache.layers[0].memory_keys.dtype)
        for layer, layer_cache in zip(self.decoder.layers, cache.layers, strict=True):
            x = layer(x, layer_cache, cache.memory_mask)
        return linear(x.float(), self.head)

    def start(self, memory: Tensor, memory_mask: Tensor | None = None) -> DecoderCache:
        """Begin decoding step by step; for arguments see `forward`."""
        layers = [LayerCache(*layer.multihead_attn.keys_values(memory)) for layer in self.decoder.layers]  # type: ignore[operator, union-attr]
        return DecoderCache(None if memory_mask is None else memory_mask[:, None, None, :], layers)

    def step(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """Predict what follows `tokens` (B,), the newest position; return logits of shape (B, vocab_size)."""
        x = self._embed(tokens[:, None], cache.length).to(cache.layers[0].memory_keys.dtype)
        for layer, layer_cache in zip(self.decoder.layers, cache.layers, strict=True):
            x = layer.step(x, layer_cache, cache.memory_mask)  # type: ignore[operator]
        cache.length += 1
        return linear(x[:, 0].float(), self.head)

    def start_tree(self, memory: Tensor, memory_mask: Tensor | None = None) -> TreeCache:
        """Begin decoding a tree of sequences for each row, level by level; for arguments see `forward`."""
        start = self.start(memory, memory_mask)
        return TreeCache(
            start.memory_mask, start.layers, torch.empty(len(memory), 1, 0, dtype=torch.long, device=memory.device)
        )

    def step_tree(self, tokens: Tensor, parents: Tensor, cache: TreeCache) -> Tensor:
        """Predict what follows each node of the next level.

        Parameters
        ----------
        tokens : Tensor of int, of shape (B, W)
            The newest token of each node.
        parents : Tensor of int, of shape (B, W)
            Where each node's parent stands in the level before; of no meaning in the first.
        cache : TreeCache

        Returns
        -------
        Tensor of shape (B, W, vocab_size)
            Logits.
        """
        depth = cache.paths.shape[2]
        own = torch.arange(cache.num_nodes, cache.num_nodes + tokens.shape[1], device=tokens.device).expand_as(tokens)
        inherited = cache.paths.gather(1, parents[..., None].expand(-1, -1, depth))
        cache.paths = torch.cat([inherited, own[..., None]], dim=2)
        cache.num_nodes += tokens.shape[1]
        x = self.token_emb(tokens) + self.positional_encoding.pos_embedding[depth, 0]
        x = x.to(cache.layers[0].memory_keys.dtype)
        for layer, layer_cache in zip(self.decoder.layers, cache.layers, strict=True):
            x = layer.step_tree(x, layer_cache, cache.paths, cache.memory_mask)  # type: ignore[operator]
        return linear(x.float(), self.head)
