"""Texts that lie one behind the other in a buffer, such as a file that is mapped into memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class PackedTexts:
    """The texts of n rows in UTF-8; a few are read at a time, without making strings of the others.

    content   … e n [ S E P ] c o o k s v [ S E P ] d r ä n g …
    starts      ↑ of row 0            ↑ of row 1
    """

    content: np.ndarray  # bytes of the buffer
    starts: np.ndarray  # index of each text's first byte, int64 of shape (n,)
    sizes: np.ndarray  # number of bytes of each, of shape (n,)
    lengths: np.ndarray  # number of characters of each, of shape (n,)

    @classmethod
    def of_column(cls, column: pa.ChunkedArray, buffer: pa.Buffer) -> PackedTexts:
        """Return the texts of a column whose chunks lie in a buffer."""
        import pyarrow.compute as pc

        starts = [np.zeros(0, np.int64)]
        for chunk in column.chunks:
            _, offsets, content = chunk.buffers()
            bounds = np.frombuffer(offsets, np.int32)[chunk.offset :][: len(chunk)]

            # a chunk of empty texts alone may have no content
            first = content.address - buffer.address if content is not None else 0
            starts.append(first + bounds.astype(np.int64))
        return cls(
            content=np.frombuffer(buffer, np.uint8),
            starts=np.concatenate(starts),
            sizes=as_smallest(pc.binary_length(column).to_numpy()),
            lengths=as_smallest(pc.utf8_length(column).to_numpy()),
        )

    def texts(self, rows: np.ndarray) -> list[str]:
        """Return the texts of some rows."""
        joined = self._bytes(rows).tobytes().decode()
        ends = np.cumsum(self.lengths[rows], dtype=np.int64).tolist()
        return [joined[start:end] for start, end in itertools.pairwise([0, *ends])]

    def code_points(self, rows: np.ndarray, *, max_length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the Unicode code points of some rows' texts, one behind the other, at most
        `max_length` of each, and how many each has.
        """
        points = self._bytes(rows)
        lengths = self.lengths[rows].astype(np.int64)

        # ASCII has a byte for each character
        if len(points) != lengths.sum():
            points = np.frombuffer(points.tobytes().decode().encode("utf-32-le"), "<u4")
        if lengths.max() <= max_length:
            return points, lengths
        starts = np.cumsum(lengths) - lengths
        lengths = np.minimum(lengths, max_length)
        return points[ragged(starts, lengths)], lengths

    def _bytes(self, rows: np.ndarray) -> np.ndarray:
        return self.content[ragged(self.starts[rows], self.sizes[rows].astype(np.int64))]


def ragged(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the indices start, …, start + length - 1 of each run, one run behind the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])


def as_smallest(values: np.ndarray) -> np.ndarray:
    """Return numbers of 0 or more in the smallest type that holds them all."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))
