"""Arrays of numbers in files."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing

_COPY_BYTES = 1 << 22


class ArrayFile:
    """Writes chunks of non-negative integers one behind the other, in the smallest type that holds them all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._dtype = np.dtype(np.uint8)
        self._file = path.open("wb")

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, values: np.ndarray) -> None:
        """Write a chunk."""
        dtype = np.promote_types(self._dtype, np.min_scalar_type(int(values.max(initial=0))))
        if dtype != self._dtype:
            self._widen(dtype)
        self._file.write(np.ascontiguousarray(values, dtype).data)

    def _widen(self, dtype: np.dtype) -> None:
        self._file.close()
        narrow = self._path.rename(self._path.with_suffix(".narrow"))
        self._file = self._path.open("wb")
        with narrow.open("rb") as file:
            while chunk := file.read(_COPY_BYTES):
                self._file.write(np.frombuffer(chunk, self._dtype).astype(dtype).tobytes())
        narrow.unlink()
        self._dtype = dtype

    def close(self) -> dict[str, Any]:
        """Say what was written."""
        self._file.close()
        return {
            "dtype": self._dtype.str,
            "bytes": self._path.stat().st_size,
            "crc32": checksum(self._path),
        }


def map_array(path: Path, dtype: np.typing.DTypeLike) -> np.ndarray:
    """Map a file's numbers into memory, as a plain array, since a `memmap` takes microseconds for each slice."""
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_COPY_BYTES):
            value = zlib.crc32(chunk, value)
    return value
