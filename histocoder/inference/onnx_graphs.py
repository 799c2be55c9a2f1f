"""Parts of a model as modules that torch can export to ONNX; see `onnx_export`."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocoder.formatters.tokens import PAD
from histocoder.model import MixerModel
from histocoder.model.linear_expert import linear_ngrams
from histocoder.model.ngram import NgramEncoder, Ngrams
from histocoder.model.prior import log_shares


class EncoderGraph(nn.Module):
    """Encoder and flat head."""

    def __init__(self, model: MixerModel) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        if isinstance(model.encoder, NgramEncoder):
            self.model.encoder = _DenseNgrams.of(model.encoder)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return flat logits (B, num_classes), memory (B, S, dim) and its mask (B, S)."""
        memory, pooled, mask = self.model.encode(input_ids)
        if mask is None:
            mask = torch.ones_like(memory[..., 0], dtype=torch.bool)
        return self.model.classify(pooled), memory, mask


class _DenseNgrams(NgramEncoder):
    """An n-gram encoder of operators whose output sizes follow from input sizes; its last n-gram is zeros, for none."""

    @classmethod
    def of(cls, encoder: NgramEncoder) -> NgramEncoder:
        dense = copy.deepcopy(encoder)
        dense.__class__ = cls
        dense.table = nn.Parameter(F.pad(encoder.table, (0, 0, 0, 1)))
        return dense

    def _words(self, ngrams: Ngrams, num_words: int) -> tuple[Tensor, Tensor]:
        torch._check(num_words >= 1)
        torch._check(num_words <= self.config.max_words + 1)
        real, number = ngrams.buckets >= 0, torch.arange(num_words)
        buckets = torch.where(real, ngrams.buckets, self.config.num_buckets)
        total = F.embedding(buckets, self.table).sum(2)  # (B, S, dim)
        in_word = (ngrams.words[:, None] == number[:, None]).float()  # (B, W, S)
        counts = torch.matmul(in_word, real.sum(-1, keepdim=True).float())  # (B, W, 1)
        return torch.matmul(in_word, total) / counts.clamp(min=1), (counts[..., 0] > 0) | (number == 0)


class StartGraph(nn.Module):
    """The decoder's computations that are made once for each row."""

    def __init__(self, model: MixerModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, memory: Tensor, flat_logits: Tensor) -> tuple[Tensor, ...]:
        """Return memory's keys and values (B, layers, 2, heads, S, dim / heads); the prior's shares (B, K) and blocks
        (B, K, block_size), if there is one.
        """
        layers: Any = self.model.decoder.decoder.layers
        of_memory = [torch.stack(layer.multihead_attn.keys_values(memory), dim=1) for layer in layers]
        prior = self.model.prior(flat_logits)
        return torch.stack(of_memory, dim=1), *(() if prior is None else (prior.shares, prior.blocks))


class StepGraph(nn.Module):
    """The next level of trees of tokens, as `Stepper.step_tree` computes it."""

    def __init__(self, model: MixerModel) -> None:
        super().__init__()
        self.decoder = model.decoder

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        depth: Tensor,
        of_memory: Tensor,
        memory_mask: Tensor,
        own: Tensor,
        visible: Tensor,
        prior: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, ...]:
        """Predict what follows each node; return log_probs (B, W, vocab_size), and the state for the next step.

        Parameters
        ----------
        tokens, parents : Tensor of int, of shape (B, W)
        depth : Tensor of int, of shape (1,)
            Place of the tokens in their sequences, BOS at 0.
        of_memory : Tensor of shape (B, layers, 2, heads, S, dim / heads)
        memory_mask : Tensor of bool, of shape (B, S)
        own : Tensor of shape (B, layers, 2, heads, N, dim / heads)
            Keys and values of the nodes so far.
        visible : Tensor of bool, of shape (B, P, N)
            Which nodes each node of the previous level attends to.
        prior : tuple of Tensor
            Nothing; or shares and blocks of `StartGraph`, and of `PriorSteps` left and fits (B, P, K) and ended (B, P).
        """
        decoder, width = self.decoder, tokens.shape[1]
        places = torch.arange(width, device=tokens.device)
        itself = (places[:, None] == places).expand(tokens.shape[0], -1, -1)  # len would be a constant
        inherited = visible.gather(1, parents[..., None].expand(-1, -1, visible.shape[2]))
        visible = torch.cat([inherited, itself], dim=2)
        x = decoder.token_emb(tokens) + decoder.positional_encoding.pos_embedding[depth, 0]
        kept = []
        layers: Any = decoder.decoder.layers
        for i, layer in enumerate(layers):
            attention = layer.self_attn
            queries, keys, values = map(
                attention.heads, F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=-1)
            )
            keys, values = torch.cat([own[:, i, 0], keys], dim=2), torch.cat([own[:, i, 1], values], dim=2)
            kept.append(torch.stack([keys, values], dim=1))
            mixed = attention.mix(queries, keys, values, attn_mask=visible[:, None])
            x = layer.norm1(x + attention.out_proj(mixed))
            attention = layer.multihead_attn
            queries = attention.heads(F.linear(x, *attention.query_projection))
            mixed = attention.mix(queries, of_memory[:, i, 0], of_memory[:, i, 1], attn_mask=memory_mask[:, None, None])
            x = layer.norm2(x + attention.out_proj(mixed))
            x = layer.norm3(x + layer.linear2(layer.linear1(x).relu()))
        logits = decoder.head(x)
        if not prior:
            return logits.log_softmax(-1), torch.stack(kept, dim=1), visible
        expected, *known = self._prior(tokens, parents, depth, *prior)
        return (logits + expected).log_softmax(-1), torch.stack(kept, dim=1), visible, *known

    def _prior(
        self,
        tokens: Tensor,
        parents: Tensor,
        depth: Tensor,
        shares: Tensor,
        blocks: Tensor,
        left: Tensor,
        fits: Tensor,
        ended: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the logits (B, W, vocab_size) of `PriorSteps.step_tree` at any depth, then left, fits and ended."""
        size = blocks.shape[2]
        index = parents[..., None].expand(-1, -1, left.shape[2])
        left, fits = left.gather(1, index), fits.gather(1, index)
        ended = ended.gather(1, parents) | tokens.eq(PAD)
        last = blocks.index_select(2, (depth - 1) % size).transpose(1, 2)  # (B, 1, K)
        fits = fits & ((last == tokens[..., None]) | depth.eq(0))
        is_behind_code = depth.gt(0) & (depth % size).eq(0)
        left = left & ~(fits & is_behind_code)
        fits = (left & is_behind_code) | (fits & ~is_behind_code)  # onnxruntime has no where of bool
        following = blocks.index_select(2, depth % size).transpose(1, 2).expand(fits.shape)
        masses = torch.zeros(*tokens.shape, self.decoder.head.out_features, device=tokens.device)
        masses = masses.scatter_add(2, following, shares[:, None] * fits)
        written = (shares[:, None] * ~left).sum(-1) * is_behind_code
        is_pad = torch.arange(masses.shape[2], device=tokens.device) == PAD
        masses = torch.where(is_pad, torch.where(ended, 1.0, masses[..., PAD] + written)[..., None], masses)
        return log_shares(masses), left, fits, ended


class NgramsGraph(nn.Module):
    """Buckets of the n-grams that the linear expert reads."""

    def forward(self, characters: Tensor) -> Tensor:
        return linear_ngrams(characters)
