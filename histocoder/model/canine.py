"""CANINE (Clark et al. 2022, https://arxiv.org/abs/2103.06874), without computations that the encoding does not need.

Modules and parameters have the names of transformers' `CanineModel`, so that its weights load unchanged. transformers
is imported only to load its models, since the import takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocoder.errors import UserError
from histocoder.model.layers import (
    EncoderConfig,
    add_norm,
    additive,
    attention,
    attention_mask,
    layer_norm,
    linear,
    without_weights,
)

if TYPE_CHECKING:
    from transformers import CanineModel

_PRIMES = (31, 43, 59, 61, 73, 97, 103, 113, 137, 149, 157, 173, 181, 193, 211, 223)
"""Multipliers of CANINE's hash functions (section 3.1)."""
_HASH_TABLE = "HashBucketCodepointEmbedder_"
POSITIONS = "char_embeddings.char_position_embeddings.weight"  # in a `Canine`'s state dict


@dataclass
class CanineConfig(EncoderConfig):
    """Sizes of a CANINE under transformers' names; by default those of CANINE-s."""

    model_type: ClassVar[str] = "canine"

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 16384
    type_vocab_size: int = 16
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    downsampling_rate: int = 4
    upsampling_kernel_size: int = 4
    num_hash_functions: int = 8
    num_hash_buckets: int = 16384
    local_transformer_stride: int = 128

    def __post_init__(self) -> None:
        if self.hidden_act != "gelu":
            raise UserError(f"CANINE with hidden_act {self.hidden_act!r} is not supported; hidden_act must be gelu.")


class Canine(nn.Module):
    """CANINE with random weights.

    Returns what transformers' `CanineModel` returns for `attention_mask=input_ids != 0`, faster: local attention is
    attention within blocks, convolutions are matrix products, and the second convolution computes the part of a
    molecule once instead of once for each of its characters.
    """

    def __init__(self, config: CanineConfig) -> None:
        super().__init__()
        self.config = config
        self.char_embeddings = _embeddings(config)
        self.initial_char_encoder = _layers(config, 1)
        self.chars_to_molecules = _convolution(config, inputs=1, taps=config.downsampling_rate)
        self.encoder = _layers(config, config.num_hidden_layers)
        self.projection = _convolution(config, inputs=2, taps=config.upsampling_kernel_size)
        self.final_char_encoder = _layers(config, 1)
        self.pooler = _dense(config.hidden_size, config.hidden_size)
        self.apply(self._initialize)

    @classmethod
    def from_transformers(cls, model: CanineModel) -> Canine:
        """Return a CANINE that shares the weights of transformers' `model`."""
        with without_weights():
            found = cls(CanineConfig.from_dict(model.config.to_dict()))
        weights = model.float().state_dict()
        found.load_state_dict({name: weights[name] for name in found.state_dict()}, assign=True)
        return found

    def trim_positions(self, num_positions: int) -> None:
        """Drop the positions beyond `num_positions`, which would take gradients and optimizer state."""
        table = self.char_embeddings.char_position_embeddings
        kept = table.weight.detach()[:num_positions].clone()
        table.weight = nn.Parameter(kept, table.weight.requires_grad)

    def _initialize(self, module: nn.Module) -> None:
        """Initialize weights as CANINE's authors do."""
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear | nn.Conv1d) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor, *, dtype: torch.dtype, trimmed: bool) -> tuple[Tensor, Tensor]:
        """Encode `input_ids` (B, L), 0 where padded, with L a multiple of 4, in the precision `dtype`.

        If L is `trimmed_length`'s, the last 6 positions are padding in every row: 4 for the molecule that CANINE drops,
        and 2 that the last convolution looks at. With `trimmed` they are not computed.

        Returns
        -------
        encoding : Tensor of shape (B, L, dim), or (B, L - 6, dim) if `trimmed`
        pooled : Tensor of shape (B, dim)
        """
        p = self.config.hidden_dropout_prob if self.training else 0.0
        rate, length = self.config.downsampling_rate, input_ids.shape[1]
        num_chars, num_encoded = (length - rate, length - rate - 2) if trimmed else (length, length)

        chars = F.dropout(self._embedded(input_ids[:, :num_chars]).to(dtype), p)
        mask = input_ids.ne(0)
        molecule_mask = mask.unflatten(1, (-1, rate)).any(-1)  # of L / rate, CLS included
        molecule_mask, mask = (attention_mask(m[:, None, None], chars) for m in (molecule_mask, mask))
        chars = _apply(self.initial_char_encoder, chars, self._within_blocks(mask[..., :num_chars], dtype))
        molecules = _apply(self.encoder, self._molecules(chars, drop_last=not trimmed), molecule_mask)
        pooled = torch.tanh(linear(molecules[:, 0], self.pooler.dense))
        encoded = F.dropout(self._projected(chars, molecules[:, 1:], num_encoded), p)
        return _apply(self.final_char_encoder, encoded, mask[..., :num_encoded]), pooled

    def _embedded(self, input_ids: Tensor) -> Tensor:
        """Return embeddings of characters, by several hashes of each, of positions, and of the first token type."""
        config, tables = self.config, self.char_embeddings
        hashes = (input_ids.long() + 1)[..., None] * _primes(config.num_hash_functions, input_ids.device)
        hashes = hashes % config.num_hash_buckets
        shards = [tables[f"{_HASH_TABLE}{i}"](hashes[..., i]) for i in range(config.num_hash_functions)]
        positions = tables.char_position_embeddings.weight[: input_ids.shape[1]]
        return tables.LayerNorm(torch.cat(shards, dim=-1) + (positions + tables.token_type_embeddings.weight[0]))

    def _molecules(self, chars: Tensor, *, drop_last: bool) -> Tensor:
        """Return CLS and one molecule for every `rate` characters of `chars` (B, L, dim)."""
        conv = self.chars_to_molecules.conv
        windows = chars.unflatten(1, (-1, self.config.downsampling_rate)).flatten(2)  # (B, L / rate, rate * dim)
        weight = conv.weight.to(chars.dtype).permute(0, 2, 1).flatten(1)
        molecules = F.gelu(F.linear(windows, weight, conv.bias.to(chars.dtype)))
        molecules = molecules[:, :-1] if drop_last else molecules
        return layer_norm(torch.cat([chars[:, :1], molecules], dim=1), self.chars_to_molecules.LayerNorm)

    def _projected(self, chars: Tensor, molecules: Tensor, num_encoded: int) -> Tensor:
        """Convolve over the first characters (B, L, dim), each beside its molecule of (B, M, dim)."""
        conv = self.projection.conv
        weight = conv.weight.to(chars.dtype)  # (dim, 2 * dim, taps), for characters, then for molecules
        dim, _, taps = weight.shape
        of_chars, of_molecules = weight.split(dim, dim=1)
        before, length, rate = (taps - 1) // 2, chars.shape[1], self.config.downsampling_rate
        padded = F.pad(chars, (0, 0, before, taps - 1 - before))
        windows = torch.cat([padded[:, k : k + length] for k in range(taps)], dim=-1)  # (B, L, taps * dim)
        out = F.linear(windows, of_chars.permute(0, 2, 1).flatten(1), conv.bias.to(chars.dtype))
        # contiguous, or torch copies the weight for each row of the batch when no gradients are needed
        by_tap = F.linear(molecules.contiguous(), of_molecules.permute(2, 0, 1).flatten(0, 1))
        by_tap = by_tap.unflatten(-1, (taps, dim))  # (B, M, taps, dim)
        missing = length // rate - molecules.shape[1]  # the last molecule stands in for one that was dropped
        by_tap = torch.cat([by_tap, by_tap[:, -1:].expand(-1, missing, -1, -1)], dim=1) if missing else by_tap
        for k in range(taps):
            ahead = k - before
            out = out + F.pad(by_tap[:, :, k].repeat_interleave(rate, dim=1), (0, 0, -ahead, ahead))
        return layer_norm(F.gelu(out)[:, :num_encoded], self.projection.LayerNorm)

    def _within_blocks(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Restrict `mask` (B, 1, 1, L) to attention within blocks, if there are several."""
        length, stride = mask.shape[-1], self.config.local_transformer_stride
        if length <= stride:
            return mask
        block = torch.arange(length, device=mask.device) // stride
        return additive(mask, dtype).masked_fill(block[:, None] != block, -torch.inf)


@cache
def _primes(num: int, device: torch.device) -> Tensor:
    """Return the first `num` primes, copied to a GPU once instead of for each batch."""
    with torch.inference_mode(mode=False):
        return torch.tensor(_PRIMES[:num], device=device)


class CanineLayer(nn.Module):
    """Self-attention and a feed-forward network, each followed by a layer norm."""

    def __init__(self, config: CanineConfig) -> None:
        super().__init__()
        dim, wide = config.hidden_size, config.intermediate_size
        self.config = config
        projections = nn.ModuleDict({name: nn.Linear(dim, dim) for name in ("query", "key", "value")})
        self.attention: Any = nn.ModuleDict({"self": projections, "output": _dense(dim, dim, _norm(config))})
        self.intermediate = _dense(dim, wide)
        self.output = _dense(wide, dim, _norm(config))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Compute the layer over `x` (B, L, dim), with a `mask` (B, 1, 1 or L, L) as `attention` takes it."""
        config, update = self.config, self.attention.output
        hidden_p, attention_p = config.hidden_dropout_prob, config.attention_probs_dropout_prob
        if not self.training:
            hidden_p = attention_p = 0.0
        sources = [linear(x, projection) for projection in self.attention["self"].values()]
        mixed = attention(*sources, num_heads=config.num_attention_heads, mask=mask, dropout_p=attention_p)
        x = add_norm(x, linear(mixed, update.dense), update.LayerNorm, hidden_p)
        wide = F.gelu(linear(x, self.intermediate.dense))
        return add_norm(x, linear(wide, self.output.dense), self.output.LayerNorm, hidden_p)


# Parts of the model: containers that name their weights as transformers does, in its order


def _norm(config: CanineConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def _dense(width: int, out: int, norm: nn.LayerNorm | None = None) -> Any:
    """Return a linear layer; with a norm, the end of a residual branch."""
    return nn.ModuleDict({"dense": nn.Linear(width, out), **({} if norm is None else {"LayerNorm": norm})})


def _layers(config: CanineConfig, number: int) -> Any:
    return nn.ModuleDict({"layer": nn.ModuleList(CanineLayer(config) for _ in range(number))})


def _apply(layers: Any, x: Tensor, mask: Tensor) -> Tensor:
    for layer in layers.layer:
        x = layer(x, mask)
    return x


def _convolution(config: CanineConfig, *, inputs: int, taps: int) -> Any:
    """Return a convolution over `taps` neighbours of `inputs` vectors each, and the norm behind it."""
    conv = nn.Conv1d(inputs * config.hidden_size, config.hidden_size, taps)
    return nn.ModuleDict({"conv": conv, "LayerNorm": _norm(config)})


def _embeddings(config: CanineConfig) -> Any:
    dim, buckets = config.hidden_size // config.num_hash_functions, config.num_hash_buckets
    tables = {f"{_HASH_TABLE}{i}": nn.Embedding(buckets, dim) for i in range(config.num_hash_functions)}
    tables["char_position_embeddings"] = nn.Embedding(buckets, config.hidden_size)
    tables["token_type_embeddings"] = nn.Embedding(config.type_vocab_size, config.hidden_size)
    return nn.ModuleDict({**tables, "LayerNorm": _norm(config)})
