"""A transformer decoder over code tokens, and the prior that the flat head's probabilities give it.

Parameters have the names of `torch.nn.TransformerDecoder`, so that published state dicts load
unchanged.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocoder.config import MAX_TARGET_LEN
from histocoder.formatters import PAD, build_formatter
from histocoder.model.layers import (
    Dropout,
    TransformerLayer,
    Weights,
    add_norm,
    attention,
    dropout,
    linear,
    residual_and_linear,
    reusable,
    scaled_dot_product,
)

_NUM_CLASSES = 64  # number of classes of a row that the prior knows, the most probable ones
_LEAST = 1e-4  # share that is added to each token's, so that the decoder can always disagree


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

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of `x` (B, L, dim), each of shape (B, heads, L, dim / heads)."""
        weight, bias = self.projections(Weights(x.dtype))[1]
        keys, values = F.linear(x, weight, bias).chunk(2, dim=-1)
        return self.heads(keys), self.heads(values)

    def projections(self, weights: Weights) -> list[tuple[Tensor, Tensor]]:
        """Return weight and bias of the projection to queries, and of that to keys and values."""
        dim = self.in_proj_weight.shape[1]
        of_queries, of_source = weights[self.in_proj_weight].split((dim, 2 * dim))
        bias_of_queries, bias_of_source = weights[self.in_proj_bias].split((dim, 2 * dim))
        return [(of_queries, bias_of_queries), (of_source, bias_of_source)]

    def mix(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Return the attention of queries to keys and values, each by heads, of shape (B, L,
        dim).
        """
        mixed = scaled_dot_product(queries, keys, values, mask)
        return mixed.transpose(1, 2).flatten(2)

    def forward(
        self, x: Tensor, source: Tensor | None, mask: Tensor | None, weights: Weights
    ) -> tuple[Tensor, Tensor]:
        """Return `x` (B, L, dim), and its attention to `source` (B, S, dim), or to itself, of the
        same shape.
        """
        if source is None:
            x, product = residual_and_linear(
                x, weights[self.in_proj_weight], weights[self.in_proj_bias]
            )
            sources = [product]
        else:
            of_queries, of_source = self.projections(weights)
            x, queries = residual_and_linear(x, *of_queries)
            sources = [queries, F.linear(source, *of_source)]
        mixed = attention(*sources, num_heads=self.num_heads, mask=mask)
        return x, linear(mixed, self.out_proj, weights)


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
        self.dropout = Dropout(dropout)

    def forward(
        self, x: Tensor, causal: Tensor, memory: Tensor, memory_mask: Tensor | None
    ) -> Tensor:
        """Compute all positions at once from `x` (B, L, dim) and `memory` (B, S, dim).

        `causal` (L, L) and `memory_mask` (B, 1, 1, S) are masks as `attention` takes them.
        """
        weights = Weights(x.dtype, self)
        p = self.dropout.p if self.training else 0.0
        x, update = self.self_attn(x, None, causal, weights)
        x = add_norm(x, update, self.norm1, p, weights)
        x, update = self.multihead_attn(x, memory, memory_mask, weights)
        x = add_norm(x, update, self.norm2, p, weights)
        x, wide = residual_and_linear(x, weights[self.linear1.weight], weights[self.linear1.bias])
        update = linear(dropout(F.relu(wide), p), self.linear2, weights)
        return add_norm(x, update, self.norm3, p, weights)


class Decoder(nn.Module):
    """Predicts each token of a target sequence from the tokens before it and the encoder's memory
    of width `dim`.

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
        self.token_emb: Any = nn.ModuleDict({"embedding": nn.Embedding(vocab_size, dim)})
        self.positional_encoding: Any = nn.Module()

        # on the CPU, so that it has values where the model is built on the meta device
        with torch.device("cpu"):
            frequencies = torch.exp(-torch.arange(0, dim, 2) * math.log(10000) / dim)
            angles = torch.arange(MAX_TARGET_LEN).unsqueeze(1) * frequencies  # (…, dim / 2)
        sinusoids = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).unsqueeze(1)
        self.positional_encoding.register_buffer("pos_embedding", sinusoids)
        self.dropout = Dropout(dropout)
        layers = [
            DecoderLayer(dim, num_heads, dim_feedforward or dim, dropout) for _ in range(num_layers)
        ]
        # named as in published state dicts
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.head = nn.Linear(dim, vocab_size)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def embed(self, tokens: Tensor, positions: slice | int) -> Tensor:
        """Return the embeddings (…, dim) of tokens, scaled by the root of their width, plus those
        of their positions.

        See Vaswani et al. 2017, sections 3.4 and 3.5.
        """
        embedding: nn.Embedding = self.token_emb.embedding
        scaled = embedding(tokens) * math.sqrt(embedding.embedding_dim)
        return scaled + self.positional_encoding.pos_embedding[positions, 0]

    @property
    def layers(self) -> list[DecoderLayer]:
        return [module for module in self.decoder.modules() if isinstance(module, DecoderLayer)]

    def forward(
        self,
        tokens: Tensor,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        prior: "Prior | None" = None,
    ) -> Tensor:
        """Return the logits of the token that follows each position, of shape (B, L, vocab_size):
        teacher forcing.

        `tokens` (B, L) are the target's, BOS first, without EOS; `memory` (B, S, dim) is the
        encoder's output, and `memory_mask` (B, S) is True for memory to attend to, by default all
        of it. A prior is added to the logits.
        """
        x = self.dropout(self.embed(tokens, slice(tokens.shape[1]))).to(memory.dtype)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        mask = None if memory_mask is None else reusable(memory_mask[:, None, None, :], x.dtype)
        causal = reusable(causal, x.dtype)
        for layer in self.layers:
            x = layer(x, causal, memory, mask)
        logits = linear(x.float(), self.head)
        if prior is not None:
            logits = logits + prior.following(tokens)
        return logits


class Prior(NamedTuple):
    """The K most probable classes of each row of a batch, before its codes are decoded."""

    shares: Tensor  # softmax of the flat logits, of shape (B, K)
    blocks: Tensor  # tokens of each class, of shape (B, K, block_size)
    vocab_size: int

    @classmethod
    def from_logits(cls, logits: Tensor, blocks: Tensor, vocab_size: int) -> "Prior":
        """Build the prior from flat logits (B, num_classes) and the classes' blocks (num_classes,
        block_size).
        """
        best = logits.float().softmax(-1).topk(min(_NUM_CLASSES, logits.shape[1]))
        return cls(best.values, blocks[best.indices], vocab_size)

    def rows(self, rows: Tensor | slice) -> "Prior":
        return Prior(self.shares[rows], self.blocks[rows], self.vocab_size)

    def following(self, tokens: Tensor) -> Tensor:
        """Return the log shares (B, L, vocab_size) of what follows each target token (B, L), BOS
        first.

        They are those of `PriorSteps`, at all positions at once.
        """
        length = tokens.shape[1]
        size = self.blocks.shape[2]
        num_blocks = -(-length // size)

        # Which classes begin with the tokens of a block before each of its positions, (B, N, K,
        # size).
        codes = F.pad(tokens[:, 1:], (0, num_blocks * size + 1 - length))
        codes = codes.unflatten(1, (num_blocks, size))
        agrees = (self.blocks[:, None] == codes[:, :, None]).long().cumprod(-1)
        begins = F.pad(agrees[..., :-1], (1, 0), value=1)

        # Classes that are written in earlier blocks compete no more, (B, N, K).
        counts = agrees[..., -1].cumsum(1)
        is_written = counts > agrees[..., -1]

        shares = self.shares[:, None, :, None] * (begins.bool() & ~is_written[..., None])
        following = self.blocks[:, None].expand(shares.shape)
        masses = shares.new_zeros(len(tokens), num_blocks, size, self.vocab_size)
        masses.scatter_add_(3, following.transpose(2, 3), shares.transpose(2, 3))
        masses[:, 1:, 0, PAD] += (self.shares[:, None] * is_written[:, 1:]).sum(-1)

        # Once a row has ended, PAD is all that follows.
        masses = masses.flatten(1, 2)[:, :length]
        has_ended = tokens.eq(PAD).cumsum(1) > 0
        return _log_shares(masses, has_ended)


class PriorSteps:
    """The prior along growing sequences, from BOS on, in step with `IncrementalDecoder`.

    Within a block, a token's share is that of the classes that begin with the block's tokens so
    far. Behind a code, the classes written so far make up the share of PAD, which ends the row; the
    others compete for the next code.
    """

    def __init__(self, prior: Prior) -> None:
        self._shares = prior.shares[:, None]  # (B, 1, K)
        self._blocks = prior.blocks[:, None]  # (B, 1, K, size)
        self._vocab_size = prior.vocab_size
        self._depth = 0

        # Whether a class is not written yet, (B, W, K); whether it also begins with the tokens of
        # the block so far; and whether a row has ended by an unused block, (B, W).
        self._left = torch.ones_like(self._shares, dtype=torch.bool)
        self._fits = self._left
        self._ended = torch.zeros_like(self._shares[..., 0], dtype=torch.bool)

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return the log shares (B, W, vocab_size) of what follows each node of the next level; see
        `IncrementalDecoder`.
        """
        # Each node starts with the state of its parent.
        position = self._depth % self._blocks.shape[3]
        if self._depth:
            parents = parents.long()
            index = parents[..., None].expand(-1, -1, self._fits.shape[2])
            self._left = self._left.gather(1, index)
            self._fits = self._fits.gather(1, index)
            self._ended = self._ended.gather(1, parents) | tokens.eq(PAD)
            self._fits = self._fits & (self._blocks[..., position - 1] == tokens[..., None])

        # Behind a code, the classes that are not written yet compete again.
        is_behind_code = self._depth > 0 and position == 0
        if is_behind_code:
            self._left = self._left & ~self._fits
            self._fits = self._left

        masses = self._shares.new_zeros(*tokens.shape, self._vocab_size)
        following = self._blocks[..., position].expand(self._fits.shape)
        masses.scatter_add_(2, following, self._shares * self._fits)
        if is_behind_code:
            masses[..., PAD] += (self._shares * ~self._left).sum(-1)
        self._depth += 1
        return _log_shares(masses, self._ended)


def _log_shares(masses: Tensor, has_ended: Tensor) -> Tensor:
    """Return the log shares of masses (…, vocab_size); PAD has all of it where a row has ended."""
    masses[..., PAD] = masses[..., PAD].masked_fill(has_ended, 1.0)
    return (masses / masses.sum(-1, keepdim=True).clamp(min=_LEAST) + _LEAST).log()


def class_blocks(codes: Sequence[str], formatter: dict[str, Any]) -> Tensor:
    """Return the tokens of each class, of shape (num_classes, block_size); PAD for a blank one."""
    system = build_formatter(**formatter).system
    return torch.tensor(
        [system.to_block(code) if code else [PAD] * system.block_size for code in codes]
    )
