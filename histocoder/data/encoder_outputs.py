"""Outputs of a frozen encoder as arrays in files: computed once, mapped into memory by all processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from histocoder.data.examples import Examples
from histocoder.files import replacing_folder

OUTPUTS_FILE = "outputs.json"
_ROWS_AT_ONCE = 1 << 16


class EncoderOutput(NamedTuple):
    """Outputs of an encoder for a batch."""

    memory: Tensor  # one vector per position, of shape (B, M, dim); undefined behind each text
    pooled: Tensor  # one vector per text, of shape (B, dim)


class StoredOutputs:
    """Outputs of an encoder for each row, kept once for equal texts, in a folder that `write_outputs` has filled.

    Pickling keeps the folder alone; who unpickles it maps the files itself.
    """

    def __init__(self, folder: Path) -> None:
        record = json.loads((folder / OUTPUTS_FILE).read_text(encoding="utf-8"))
        self._folder = folder
        self._dtype = getattr(torch, record["dtype"])
        num_bytes = record["dim"] * self._dtype.itemsize
        self._memory, self._pooled = (  # as bytes, since numpy has no bf16
            _map_array(folder / name, np.uint8).reshape(-1, num_bytes) for name in ("memory", "pooled")
        )
        self._offsets = _map_array(folder / "offsets", np.int64)
        self._index = _map_array(folder / "place", record["place"])

    def __reduce__(self) -> tuple[type[StoredOutputs], tuple[Path]]:
        return StoredOutputs, (self._folder,)

    def pad(self, rows: np.ndarray, *, num_positions: int) -> EncoderOutput:
        """Return the outputs for some rows, padded with zeros behind the tokens of each text."""
        indices = self._index[rows]
        memory = np.zeros((len(rows), num_positions, self._memory.shape[1]), dtype=np.uint8)
        for i, index in enumerate(indices.tolist()):
            start, end = self._offsets[index : index + 2].tolist()
            memory[i, : end - start] = self._memory[start:end]
        pooled = torch.from_numpy(self._pooled[indices])
        return EncoderOutput(torch.from_numpy(memory).view(self._dtype), pooled.view(self._dtype))


class DistinctTexts(NamedTuple):
    """Distinct texts of some rows, the shortest first."""

    rows: np.ndarray  # index of a row with each text, of shape (m,)
    text_index: np.ndarray  # index of each row's text, of shape (n,)
    offsets: np.ndarray  # index of each text's first token among those of all, of shape (m + 1,)


def distinct_texts(examples: Examples, lengths: np.ndarray) -> DistinctTexts:
    """Find the distinct texts, by hashes of 128 bits; `lengths` are the numbers of tokens of the n rows."""
    digests = np.empty(len(examples), dtype="S16")
    for start in range(0, len(examples), _ROWS_AT_ONCE):
        texts = examples.inputs(np.arange(start, min(start + _ROWS_AT_ONCE, len(examples))))
        digests[start : start + len(texts)] = [
            hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts
        ]
    _, first, index = np.unique(digests, return_index=True, return_inverse=True)
    lengths = lengths[first].astype(np.int64)
    order = np.argsort(lengths, kind="stable")
    new_index = np.empty(len(order), dtype=np.min_scalar_type(len(order)))
    new_index[order] = np.arange(len(order))
    return DistinctTexts(first[order], new_index[index], np.concatenate([[0], np.cumsum(lengths[order])]))


def has_outputs(folder: Path) -> bool:
    """Return whether a folder holds all files of `write_outputs` in full length, without reading them."""
    try:
        sizes = json.loads((folder / OUTPUTS_FILE).read_text(encoding="utf-8"))["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_outputs(folder: Path, distinct: DistinctTexts, encoded: Iterable[EncoderOutput]) -> None:
    """Write a folder for `StoredOutputs`, whole or not at all, from the outputs for distinct texts in their order."""
    with replacing_folder(folder) as temporary:
        done = 0
        with (temporary / "memory").open("wb") as memory_file, (temporary / "pooled").open("wb") as pooled_file:
            for memory, pooled in encoded:
                lengths = torch.from_numpy(np.diff(distinct.offsets[done : done + len(pooled) + 1]))
                real = torch.arange(memory.shape[1]) < lengths[:, None]
                for file, values in ((memory_file, memory.cpu()[real]), (pooled_file, pooled.cpu())):
                    file.write(values.contiguous().view(torch.uint8).numpy().data)
                done += len(pooled)
        distinct.offsets.tofile(temporary / "offsets")
        distinct.text_index.tofile(temporary / "place")
        record = {
            "dtype": str(pooled.dtype).removeprefix("torch."),
            "dim": pooled.shape[1],
            "place": distinct.text_index.dtype.str,
            "sizes": {path.name: path.stat().st_size for path in temporary.iterdir()},
        }
        (temporary / OUTPUTS_FILE).write_text(json.dumps(record, indent=2), encoding="utf-8")


def _map_array(path: Path, dtype: DTypeLike) -> np.ndarray:
    """Map a file's numbers into memory, as a plain array, since a `memmap` takes microseconds for each slice."""
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
