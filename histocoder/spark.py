"""Code tables on Spark: distinct descriptions by Python workers, each of which opens the model once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from histocoder.errors import UserError
from histocoder.inference.engines import LANG, ROW, TEXT, Job, refuse_workers

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_FILE, _START, _CHUNK = "histocoder file", "histocoder start", "histocoder chunk"


def code(
    df: DataFrame,
    model: str | Path,
    *,
    input_col: str = "occ1",
    language_col: str | None = None,
    mode: str | None = None,
    precision: str = "auto",
    device: str = "cpu",
    **options: Any,
) -> DataFrame:
    """Code a table: add to a DataFrame what `histocoder predict` adds to a file.

    Spark codes the distinct descriptions whenever it computes the returned DataFrame: write it once. Codes and
    probabilities equal those of `histocoder predict` on the same Parquet files, on the same kind of processor. Of other
    DataFrames the probabilities may differ in their last digits, since other descriptions stand in a batch.

    Parameters
    ----------
    df : DataFrame
    model : path
        Folder of a model that all machines see, or the name of a Hugging Face hub repo.
    input_col, language_col, mode, precision
        See the flags of `histocoder predict`.
    device : str
        Where each worker computes: "cpu" or "cuda".
    **options
        `language`, `k`, `threshold`, `constrain`, `min_confidence`, `batch_size` and `columns`: see the flags.

    Returns
    -------
    DataFrame
        The columns of `df`, then those of the codes.

    Raises
    ------
    UserError
        If the model or a column is missing, a worker has another version of histocoder, or a file can't be read.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    job = Job.of(model, df.columns, device=device, precision=precision, input_col=input_col, language_col=language_col, mode=mode, **options)
    config = job.config
    types = dict(df.dtypes)
    for column in config.input_cols:
        if types[column] != "string":
            raise UserError(f"The column {column!r} is of type {types[column]}. Cast it to string.")
    try:
        _check_workers(df, job)
        keyed = df.withColumns({TEXT: F.coalesce(input_col, F.lit("")), LANG: _language(config)})
        located = _located(keyed)
    except PySparkException as error:
        raise UserError(f"Spark can't read the table: {_cause(error)}") from error
    ...
