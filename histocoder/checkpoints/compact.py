"""The compact form of a model's weights, in which its file holds them.

A table of n-grams keeps the rows that were trained, and 4 bits of each number with scales, as
do the rows that the nearest-neighbour expert remembers. Other matrices of a model
with such a table have 16 bits. benchmarks/notes/sizes.md has what this costs in accuracy.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from histocoder.config import ModelConfig
from histocoder.model import encoder_type
from histocoder.model.linear_expert import sparse_parts
from histocoder.model.ngram import NgramConfig

TABLE = "encoder.table"
MEMBERS = f"{TABLE}.members"
NEAREST_ROWS = "nearest_expert.rows"
_MATRICES = ("linear_expert.weight", "attribute_expert.weight")
MAX_LEVEL = 7  # of 4 bits, with a sign
_GROUP = 32  # numbers of a row that share a scale: with one for the row, more answers change


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
    # Copies are aligned in memory as new tensors are, on which the last digits of sums depend.
    weights = {name: part.clone() for name, part in parts.items()}
    for name in (TABLE, NEAREST_ROWS):
        _dequantize_part(weights, name)

    # Rows that are not in the file are zeros, as those of n-grams that no description had.
    if encoder_type(config.encoder) == NgramConfig.model_type and MEMBERS in weights:
        num_rows = NgramConfig.from_dict(config.encoder).num_buckets
        # of numpy's zeros, the system provides only the pages that are written to
        zeros = np.zeros((num_rows, weights[TABLE].shape[1]), np.float32)
        weights = with_whole_table(weights, torch.from_numpy(zeros))

    for name, weight in weights.items():
        if weight.dtype == torch.float16 and weight.dim() == 2 and name not in _MATRICES:
            weights[name] = weight.float()

    # Earlier versions saved matrices with their zeros.
    for name in _MATRICES:
        if name in weights:
            matrix = weights.pop(name)
            for part, values in sparse_parts(matrix).items():
                weights[name.replace("weight", part)] = values
    return weights


def with_table_rows(
    weights: Mapping[str, Tensor], is_row: Tensor, *, is_compact: bool
) -> dict[str, Tensor]:
    """Return weights with only some rows of the table, and a bit for each row, as training states
    have them.
    """
    parts = dict(weights)
    rows = parts.pop(TABLE)[is_row]
    parts[MEMBERS] = pack_bits(is_row)
    if is_compact:
        return parts | _quantized_parts(TABLE, rows)
    return parts | {TABLE: rows}


def with_whole_table(parts: Mapping[str, Tensor], table: Tensor) -> dict[str, Tensor]:
    """Return weights with all rows of the table, which is `table` with the rows that they have."""
    weights = dict(parts)
    _dequantize_part(weights, TABLE)
    weights[TABLE] = fill_rows(table, weights.pop(MEMBERS), weights[TABLE])
    return weights


def fill_rows(table: Tensor, members: Tensor, rows: Tensor) -> Tensor:
    """Set the rows of a table (num_rows, dim) whose bits are set, and return it."""
    is_member = unpack_bits(members, len(table)).to(table.device)
    table[is_member] = rows.to(table)
    return table


def compact_moments(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return AdamW's state of a matrix in a hundredth to an eighth of the memory, for a run that
    has ended.

    Means of gradients have 4 bits. Of their squares, the mean of each row and of each column is
    kept, as in Adafactor (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235). The state of
    other parameters stays as it is.
    """
    step = {"step": moments["step"]}
    mean = moments["exp_avg"]
    squares = moments["exp_avg_sq"]
    if mean.dim() != 2 or mean.shape[1] % 2 or not len(mean):
        return step | {"exp_avg": mean, "exp_avg_sq": squares}
    margins = {"exp_avg_sq.rows": squares.mean(1), "exp_avg_sq.columns": squares.mean(0)}
    return step | _quantized_parts("exp_avg", mean) | margins


def expand_moments(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return AdamW's state of a parameter from the form of `compact_moments`, or as it is."""
    if "exp_avg" in parts:
        return dict(parts)
    rows = parts["exp_avg_sq.rows"]
    columns = parts["exp_avg_sq.columns"]
    shares = columns / columns.mean().clamp(min=torch.finfo(torch.float32).tiny)
    return {
        "step": parts["step"],
        "exp_avg": dequantize(parts[_levels("exp_avg")], parts[_scales("exp_avg")]),
        "exp_avg_sq": rows[:, None] * shares,
    }


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows (n, dim) as pairs of levels, uint8 (n, dim / 2), and scales, bf16 (n, dim / 32).

    A number is a level from -7 to 7 times the scale of its group of 32 numbers; rows whose length
    is not a multiple of 32 are a group each. A byte holds the level of a number in the first half
    of the row, and that of one in the second half times 16. Rows that were quantized before give
    the same levels and scales again.
    """
    dim = rows.shape[1]
    num_groups = dim // _GROUP if dim % _GROUP == 0 else 1
    groups = rows.float().unflatten(1, (num_groups, -1))
    scales = (groups.abs().amax(2) / MAX_LEVEL).bfloat16()
    divisors = scales.float().clamp(min=torch.finfo(torch.float32).tiny)
    levels = (groups / divisors[:, :, None]).round().to(torch.int32).flatten(1) + MAX_LEVEL

    # two levels a byte
    first, second = levels.chunk(2, dim=1)
    return (first + 16 * second).to(torch.uint8), scales


def dequantize(levels: Tensor, scales: Tensor) -> Tensor:
    """Return the rows (n, dim) that `quantize` encoded, in fp32, each number rounded to its nearest
    level.
    """
    level_of_number = torch.cat([levels & 15, levels >> 4], dim=1)
    scales = scales.float().view(len(levels), -1, 1)
    groups = level_of_number.float().unflatten(1, (scales.shape[1], -1))
    # in place, since new memory takes longer than the arithmetic
    return groups.sub_(MAX_LEVEL).mul_(scales).flatten(1)


def pack_bits(is_set: Tensor) -> Tensor:
    """Return flags (n,) as bits, uint8 (ceil(n / 8),)."""
    return torch.from_numpy(np.packbits(is_set.cpu().numpy()))


def unpack_bits(bits: Tensor, num_flags: int) -> Tensor:
    """Return the flags (num_flags,) that `pack_bits` encoded."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=num_flags)).bool()


def _levels(name: str) -> str:
    return f"{name}.levels"


def _scales(name: str) -> str:
    return f"{name}.scales"


def _quantized_parts(name: str, rows: Tensor) -> dict[str, Tensor]:
    levels, scales = quantize(rows)
    return {_levels(name): levels, _scales(name): scales}


def _dequantize_part(parts: dict[str, Tensor], name: str) -> None:
    """Replace the levels and the scales of a tensor by its rows, if it was quantized."""
    if _levels(name) in parts:
        parts[name] = dequantize(parts.pop(_levels(name)), parts.pop(_scales(name)))


def _narrowed(integers: Tensor) -> Tensor:
    """Return integers in the narrowest signed type that holds all of them."""
    for dtype in (torch.int8, torch.int16, torch.int32):
        limits = torch.iinfo(dtype)
        if not integers.numel() or limits.min <= integers.min() <= integers.max() <= limits.max:
            return integers.to(dtype)
    return integers
