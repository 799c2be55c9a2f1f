"""Columns as spreadsheets and statistics programs can hold them."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

MOST_DIGITS = 2**53
"""The largest whole number that programs which compute with doubles tell from the next."""


def for_sheets(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column as spreadsheets and statistics programs can hold it.

    Times with a zone become what clocks showed there, and whole numbers that would lose digits, text.
    """
    kind = column.type
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pc.local_timestamp(column)
    if pa.types.is_integer(kind) and max(abs(end.as_py() or 0) for end in pc.min_max(column).values()) > MOST_DIGITS:
        return column.cast(pa.string())
    return column
