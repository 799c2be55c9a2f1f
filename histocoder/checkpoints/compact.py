"""The compact form of a model's weights, in which its file holds them.

A table of n-grams keeps the rows that were trained, and 4 bits of each number with a scale for
each row, as do the rows that the nearest-neighbour expert remembers. Other matrices of a model
with such a table have 16 bits. BENCHMARKS.md has what each of these costs in accuracy: nothing.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from histocoder.config import ModelConfig
from histocoder.model import encoder_type
from histocoder.model.ngram import NgramConfig, sparse_parts

TABLE = "encoder.table"
MEMBERS = f"{TABLE}.members"
NEAREST_ROWS = "nearest_expert.rows"
LINEAR_EXPERTS = ("linear_expert", "attribute_expert")
MAX_LEVEL = 7  # of 4 bits, with a sign


def compact(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's weights in their compact form, without the rows of a table that are zero."""
    parts: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name == TABLE:
            is_member = weight.any(1)
            parts[MEMBERS] = pack_bits(is_member)
            parts |= _quantized_parts(name, weight[is_member])
        elif name == NEAREST_ROWS:
            parts |= _quantized_parts(name, weight)
        elif not weight.is_floating_point():
            parts[name] = _narrowed(weight)
        elif TABLE in weights and weight.dim() == 2:
            parts[name] = weight.half()
        else:
            parts[name] = weight
    return parts


def expand(parts: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the weights of a model by their names, from the compact form or an earlier version's.

    Those of a training state, which has a table's rows as they are, can be expanded as well.
    Raises a KeyError or a RuntimeError if parts are missing or do not fit each other.
    """
    weights = dict(parts)
    for name in (TABLE, NEAREST_ROWS):
        if _levels(name) in weights:
            levels = weights.pop(_levels(name))
            weights[name] = dequantize(levels, weights.pop(_scales(name)))

    # Rows that are not in the file are zeros, as those of n-grams that no description had.
    if encoder_type(config.encoder) == NgramConfig.model_type and MEMBERS in weights:
        num_rows = NgramConfig.from_dict(config.encoder).num_buckets
        rows = weights[TABLE]
        table = torch.zeros(num_rows, rows.shape[1])
        table[unpack_bits(weights.pop(MEMBERS), num_rows)] = rows
        weights[TABLE] = table

    # Earlier versions saved matrices with their zeros.
    for expert in LINEAR_EXPERTS:
        if f"{expert}.weight" in weights:
            matrix = weights.pop(f"{expert}.weight")
            for part, values in sparse_parts(matrix).items():
                weights[f"{expert}.{part}"] = values
    return weights


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows (n, dim) as pairs of levels, uint8 (n, dim / 2), and their scales, bf16 (n,).

    A number is a level from -7 to 7 times its row's scale. A byte holds the level of a number in
    the first half of the row, and that of one in the second half times 16. Rows that were
    quantized before give the same levels and scales again.
    """
    scales = (rows.float().abs().amax(1) / MAX_LEVEL).bfloat16()
    divisors = scales.float().clamp(min=torch.finfo(torch.float32).tiny)
    levels = (rows.float() / divisors[:, None]).round().to(torch.int32) + MAX_LEVEL
    first, second = levels.chunk(2, dim=1)
    return (first + 16 * second).to(torch.uint8), scales


def dequantize(levels: Tensor, scales: Tensor) -> Tensor:
    """Return the rows (n, dim) that `quantize` was given, in fp32, each number as near as a level
    is.
    """
    both = torch.cat([levels & 15, levels >> 4], dim=1)
    return (both.float() - MAX_LEVEL) * scales.float()[:, None]


def pack_bits(is_set: Tensor) -> Tensor:
    """Return flags (n,) as bits, uint8 (ceil(n / 8),)."""
    return torch.from_numpy(np.packbits(is_set.cpu().numpy()))


def unpack_bits(bits: Tensor, num_flags: int) -> Tensor:
    """Return the flags (num_flags,) that `pack_bits` was given."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=num_flags)).bool()


def _levels(name: str) -> str:
    return f"{name}.levels"


def _scales(name: str) -> str:
    return f"{name}.scales"


def _quantized_parts(name: str, rows: Tensor) -> dict[str, Tensor]:
    levels, scales = quantize(rows)
    return {_levels(name): levels, _scales(name): scales}


def _narrowed(integers: Tensor) -> Tensor:
    """Return integers in the narrowest signed type that holds all of them."""
    for dtype in (torch.int8, torch.int16, torch.int32):
        limits = torch.iinfo(dtype)
        if not integers.numel() or limits.min <= integers.min() <= integers.max() <= limits.max:
            return integers.to(dtype)
    return integers
