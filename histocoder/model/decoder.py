"""A transformer decoder over code tokens.

Parameters have the names of `torch.nn.TransformerDecoder`, so that published state dicts load unchanged.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocoder.config import MAX_TARGET_LEN
from histocoder.model.layers import TransformerLayer, add_norm, attention, linear
from histocoder.model.prior import Prior


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

    def heads(self, x: Tensor) -> Tensor:
        """Split `x` (B, L, dim) into heads, of shape (B, heads, L, dim / heads)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def query_projection(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the projection to queries."""
        return self._projections(dtype)[0]

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of `x` (B, L, dim), each of shape (B, heads, L, dim / heads)."""
        weight, bias = self._projections(x.dtype)[1]
        keys, values = F.linear(x, weight, bias).chunk(2, dim=-1)
        return self.heads(keys), self.heads(values)

    def _projections(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Return weight and bias of the projection to queries, and of that to keys and values."""
        dim = self.in_proj_weight.shape[1]
        both = (x.to(dtype).split((dim, 2 * dim)) for x in (self.in_proj_weight, self.in_proj_bias))
        return list(zip(*both, strict=True))

    def mix(self, queries: Tensor, keys: Tensor, values: Tensor, **mask: Tensor | bool | None) -> Tensor:
        """Return the attention of queries to keys and values, each by heads, of shape (B, L, dim)."""
        mixed = F.scaled_dot_product_attention(queries, keys, values, **mask)  # type: ignore[arg-type]
        return mixed.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, source: Tensor | None, mask: Tensor | None) -> Tensor:
        """Return the attention of `x` (B, L, dim) to `source` (B, S, dim), or to itself, of shape (B, L, dim)."""
        if source is None:
            sources = [F.linear(x, self.in_proj_weight.to(x.dtype), self.in_proj_bias.to(x.dtype))]
        else:
            of_queries, of_source = self._projections(x.dtype)
            sources = [F.linear(x, *of_queries), F.linear(source, *of_source)]
        return linear(attention(*sources, num_heads=self.num_heads, mask=mask), self.out_proj)


class DecoderLayer(TransformerLayer):
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

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None) -> Tensor:
        """Compute all positions at once from `x` (B, L, dim), `memory` (B, S, dim), `memory_mask` (B, 1, 1, S)."""
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        p = self.dropout.p if self.training else 0.0
        x = add_norm(x, self.self_attn(x, None, causal), self.norm1, p)
        x = add_norm(x, self.multihead_attn(x, memory, memory_mask), self.norm2, p)
        update = linear(F.dropout(F.relu(linear(x, self.linear1)), p), self.linear2)
        return add_norm(x, update, self.norm3, p)


def seen_memory(memory: Tensor, memory_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Drop the last positions of memory (B, S, dim) and its mask (B, S) that no row attends to.

    The number of positions stays a multiple of 32 if possible, for which softmax is fastest.
    """
    if memory_mask is None:
        return memory, None
    num_seen = int(memory_mask.any(0).nonzero().max()) + 1
    num_kept = 32 * math.ceil(num_seen / 32)
    return memory[:, :num_kept], memory_mask[:, :num_kept]


class TokenEmbedding(nn.Module):
    """Token embeddings scaled by the square root of their width (Vaswani et al. 2017, section 3.4)."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of `tokens` (B, L), of shape (B, L, dim)."""
        return self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)


class PositionalEncoding(nn.Module):
    """Sinusoidal positions (Vaswani et al. 2017, section 3.5)."""

    pos_embedding: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        with torch.device("cpu"):  # see `without_weights`
            frequencies = torch.exp(-torch.arange(0, dim, 2) * math.log(10000) / dim)
            angles = torch.arange(MAX_TARGET_LEN).unsqueeze(1) * frequencies  # (MAX_TARGET_LEN, dim / 2)
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        self.register_buffer("pos_embedding", table.unsqueeze(1))  # as published, (MAX_TARGET_LEN, 1, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Add positions 0, 1, … to `x` (B, L, dim)."""
        return x + self.pos_embedding[: x.shape[1], 0]


class DecoderStack(nn.Module):
    """Container that names the layers as published state dicts do."""

    def __init__(self, layers: list[DecoderLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class Decoder(nn.Module):
    """Predicts each token of a target sequence from the tokens before it and the encoder's memory of width `dim`.

    Dropout follows attention and the feed-forward network's inner layer; none is on logits.
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

    def forward(
        self, tokens: Tensor, memory: Tensor, memory_mask: Tensor | None = None, prior: Prior | None = None
    ) -> Tensor:
        """Return the logits of the token that follows each position, of shape (B, L, vocab_size): teacher forcing.

        Parameters
        ----------
        tokens : Tensor of int, of shape (B, L)
            Target tokens, BOS first, without EOS.
        memory : Tensor of shape (B, S, dim)
            The encoder's output.
        memory_mask : Tensor of bool, of shape (B, S), optional
            True for memory to attend to; by default all of it.
        prior : Prior, optional
            Logarithms of shares that are added to the logits.
        """
        x = self.dropout(self.positional_encoding(self.token_emb(tokens))).to(memory.dtype)
        mask = None if memory_mask is None else memory_mask[:, None, None, :]
        for layer in self.decoder.layers:
            x = layer(x, memory, mask)
        logits = linear(x.float(), self.head)
        return logits if prior is None else logits + prior.following(tokens)
