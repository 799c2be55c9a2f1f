"""Code tables on Spark: Python workers, each of which opens the model once, map the table's
partitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from histocoder.inference.table_coder import BlockCoder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def code(
    df: DataFrame,
    model: str | Path,
    *,
    precision: str = "auto",
    device: str = "cpu",
    **options: Any,
) -> DataFrame:
    """Add to a DataFrame the columns that `histocoder predict` adds to a file, each time Spark
    computes it.

    Parameters
    ----------
    model : path
        Folder of a model that all machines see, or the name of a Hugging Face hub repo.
    precision, device, **options
        See the flags of `histocoder predict`; each worker computes on the device, and options are
        `input_col`, `language_col`, `language`, `mode`, `k`, `threshold`, `constrain`,
        `min_confidence`, `batch_size`, `columns`, `classes` and `levels`.

    Raises
    ------
    UserError
        If the model or a column is missing, or a column of the codes exists already.
    """
    from pyspark.sql.types import StructType

    # Spark has to know the new columns before any row is coded, and a driver has no GPU.
    coder = BlockCoder.of(model, df.columns, device=device, precision=precision, **options)
    (empty,) = replace(coder, device="cpu", precision="fp32")(df.limit(0).toArrow())
    schema = StructType(list(df.schema.fields))
    for field in list(empty.schema)[len(df.columns) :]:
        schema.add(field.name, "string" if pa.types.is_string(field.type) else "double")

    # A block is coded in smaller ones, of which each goes back as it is.
    def coded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for chunk in coder(pa.Table.from_batches([batch])):
                yield from chunk.to_batches()

    return df.mapInArrow(coded, schema)
