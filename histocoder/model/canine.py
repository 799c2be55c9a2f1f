"""CANINE's forward pass, which does for short texts only what their encoding depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocoder.model.canine_weights import Canine, CanineConfig, Layer
from histocoder.model.copies import in_precision
from histocoder.model.layers import (
    activated,
    add_norm,
    additive,
    affine,
    attention,
    attention_mask,
    branch,
    dropout,
    layer_norm,
    linear,
)

LayerFunction = Callable[..., Tensor]
_PRIMES = (31, 43, 59, 61, 73, 97, 103, 113, 137, 149, 157, 173, 181, 193, 211, 223)
"""Of CANINE's hash functions (Clark et al. 2022, section 3.1)."""


def canine(
    model: Canine,
    input_ids: Tensor,
    *,
    dtype: torch.dtype,
    trimmed: bool,
    layer_function: LayerFunction | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what transformers' `CanineModel` gives for `input_ids` and `attention_mask=input_ids != 0`, faster.

    Local attention is attention within blocks, convolutions are matrix products, and the molecules' part of the
    second one is computed once for each molecule instead of once for each of its characters.

    Parameters
    ----------
    model : Canine
        In training mode its dropout applies.
    input_ids : Tensor of int, of shape (B, L)
        0 where padded; L a multiple of 4.
    dtype : torch.dtype
        Precision of the computation; the weights stay in their own.
    trimmed : bool
        Whether L is `trimmed_length`'s, so that the last 6 positions are padding in every row. The last 4 are there
        for the molecule that CANINE drops, and the 2 before for the last convolution to look at; with this they are
        not computed.
    layer_function : callable, optional
        `encoder_layer`, compiled.

    Returns
    -------
    encoding : Tensor of shape (B, L, dim), or (B, L - 6, dim) where `trimmed`
    pooled : Tensor of shape (B, dim)
    """
    layer_function = layer_function or encoder_layer
    p = model.config.hidden_dropout_prob if model.training else 0.0
    rate = model.config.downsampling_rate
    length = input_ids.shape[1]
    num_chars, num_encoded = (length - rate, length - rate - 2) if trimmed else (length, length)

    chars = _embed(model.char_embeddings, input_ids[:, :num_chars], p).to(dtype)
    chars = dropout(chars, p)
    mask = input_ids.ne(0)
    molecule_mask = mask.unflatten(1, (-1, rate)).any(-1)  # of L / rate, CLS included
    molecule_mask, mask = (attention_mask(m[:, None, None], chars) for m in (molecule_mask, mask))
    local = mask[..., :num_chars]
    if num_chars > model.config.local_transformer_stride:
        block = torch.arange(num_chars, device=mask.device) // model.config.local_transformer_stride
        local = additive(local, dtype).masked_fill(block[:, None] != block, -torch.inf)
    for layer in model.initial_char_encoder.layer:
        chars = layer_function(layer, chars, local)

    molecules = _downsample(model.chars_to_molecules, chars, drop_last=not trimmed)
    for layer in model.encoder.layer:
        molecules = layer_function(layer, molecules, molecule_mask)
    pooled = torch.tanh(linear(molecules[:, 0], model.pooler.dense))

    encoded = _upsample(model.projection, chars, molecules[:, 1:])[:, :num_encoded]
    encoded = dropout(layer_norm(encoded, model.projection.LayerNorm), p)
    for layer in model.final_char_encoder.layer:
        encoded = layer_function(layer, encoded, mask[..., :num_encoded])
    return encoded, pooled


def _embed(embeddings: Any, input_ids: Tensor, p: float) -> Tensor:
    config = embeddings.config
    primes = _primes(config.num_hash_functions, input_ids.device)
    hashes = (input_ids.long() + 1)[..., None] * primes % config.num_hash_buckets
    shards = [
        getattr(embeddings, f"HashBucketCodepointEmbedder_{i}")(hashes[..., i])
        for i in range(config.num_hash_functions)
    ]
    positions = embeddings.char_position_embeddings.weight[: input_ids.shape[1]]
    x = torch.cat(shards, dim=-1) + (positions + embeddings.token_type_embeddings.weight[0])
    return embeddings.LayerNorm(x)


@cache
def _primes(num: int, device: torch.device) -> Tensor:
    """Return the first so many, kept on a device: numbers on their way to a GPU would keep each batch waiting."""
    with torch.inference_mode(mode=False):
        return torch.tensor(_PRIMES[:num], device=device)


def used_together(model: nn.Module) -> Iterator[tuple[nn.Linear, ...]]:
    """Yield the linear layers of each attention that read the same input; none of Hugging Face's encoders."""
    for layer in layers_of(model):
        own: Any = layer.attention["self"]
        yield own.query, own.key, own.value


def layers_of(model: nn.Module) -> Iterator[Any]:
    """All transformer layers that `encoder_layer` computes."""
    return (module for module in model.modules() if isinstance(module, Layer))


def encoder_layer(layer: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Return a transformer layer over `x` (B, L, dim), with a `mask` (B, 1, 1 or L, L) as `attention` takes it."""
    config: CanineConfig = layer.config
    hidden_p, attention_p = config.hidden_dropout_prob, config.attention_probs_dropout_prob
    if not layer.training:
        hidden_p = attention_p = 0.0
    own, output = layer.attention["self"], layer.attention["output"]
    *sources, x = branch(x, own.query, own.key, own.value)
    mixed = attention(*sources, num_heads=config.num_attention_heads, mask=mask, dropout_p=attention_p)
    update = linear(mixed, output.dense)
    x = add_norm(x, update, output.LayerNorm, hidden_p)
    wide, x = branch(x, layer.intermediate.dense)
    update = linear(activated(wide, config.activation), layer.output.dense)
    return add_norm(x, update, layer.output.LayerNorm, hidden_p)


def _downsample(module: Any, chars: Tensor, *, drop_last: bool) -> Tensor:
    """CLS, and a molecule for every `rate` characters of `chars` (B, L, dim)."""
    weight = in_precision(module.conv.weight, chars.dtype)  # (dim, dim, rate)
    bias = in_precision(module.conv.bias, chars.dtype)
    rate = weight.shape[2]
    windows = chars.unflatten(1, (-1, rate)).flatten(2)  # (B, L / rate, rate * dim)
    molecules = activated(affine(windows, weight.permute(0, 2, 1).flatten(1), bias), module.config.activation)
    return layer_norm(
        torch.cat([chars[:, :1], molecules[:, : molecules.shape[1] - drop_last]], dim=1), module.LayerNorm
    )


def _upsample(module: Any, chars: Tensor, molecules: Tensor) -> Tensor:
    """Return the convolution over each character (B, L, dim) and the molecule (B, M, dim) that it is in; activated."""
    weight = in_precision(module.conv.weight, chars.dtype)  # (dim, 2 * dim, taps): of characters, then of molecules
    bias = in_precision(module.conv.bias, chars.dtype)
    dim, _, taps = weight.shape
    of_chars, of_molecules = weight.split(dim, dim=1)
    rate = module.config.downsampling_rate
    before = (taps - 1) // 2
    length = chars.shape[1]
    padded = F.pad(chars, (0, 0, before, taps - 1 - before))
    windows = torch.cat([padded[:, k : k + length] for k in range(taps)], dim=-1)  # (B, L, taps * dim)
    out = affine(windows, of_chars.permute(0, 2, 1).flatten(1), bias)
    # contiguous: else torch copies the weight for each row of the batch where no gradients are asked for
    by_tap = affine(molecules.contiguous(), of_molecules.permute(2, 0, 1).flatten(0, 1))
    by_tap = by_tap.unflatten(-1, (taps, dim))  # (B, M, taps, dim)
    missing = length // rate - molecules.shape[1]  # the last molecule stands in for one that was dropped
    by_tap = torch.cat([by_tap, by_tap[:, -1:].expand(-1, missing, -1, -1)], dim=1) if missing else by_tap
    for k in range(taps):
        ahead = k - before
        out = out + F.pad(by_tap[:, :, k].repeat_interleave(rate, dim=1), (0, 0, -ahead, ahead))
    return activated(out, module.config.activation)
