"""Code tables on Spark: distinct descriptions by Python workers, each of which opens the model once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from histocoder.errors import UserError
from histocoder.inference.engines import LANG, ROW, TEXT, Job, refuse_workers
from histocoder.inference.pairs import column_of_language

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_FILE, _START = "histocoder file", "histocoder start"


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

    Spark codes the distinct descriptions each time it computes the returned DataFrame, so write it once. Codes and
    probabilities equal those of `histocoder predict` on the same Parquet files and the same kind of processor. Where
    `df` does not come straight from Parquet files, they are computed in other batches and differ by rounding.

    Parameters
    ----------
    df : DataFrame
    model : path
        Folder of a model that all machines see, or the name of a Hugging Face hub repo.
    input_col, language_col, mode, precision, device, **options
        See the flags of `histocoder predict`; each worker computes on the device, and options are `language`, `k`,
        `threshold`, `constrain`, `min_confidence`, `batch_size` and `columns`.

    Returns
    -------
    DataFrame
        The columns of `df`, then those of the codes.

    Raises
    ------
    UserError
        If the model or a column is missing, a worker has another version of histocoder, or a file can't be read.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    options |= {"input_col": input_col, "language_col": language_col, "mode": mode}
    job = Job.of(model, df.columns, device=device, precision=precision, **options)
    keys = {TEXT: F.coalesce(f"`{input_col}`", F.lit("")), LANG: F.lit(job.config.language)}
    if language_col is not None:
        keys[LANG] = F.coalesce(F.nullif(F.col(f"`{language_col}`"), F.lit("")), F.lit("unk"))
    try:
        _check(df, job)
        rows = _with_rows(df, keys)
    except (PySparkException, Py4JError) as error:
        cause = re.search(r"^(: )?([\w.]+(Error|Exception): .*)", str(error), re.MULTILINE)  # the rest are stacks
        raise UserError(f"Spark can't read the table: {cause[2] if cause else error}") from error
    of_all = {name: F.lit(lang) for name, lang in column_of_language(df.columns, job.config.language).items()}
    joined = df.withColumns(keys | of_all).join(_coded(rows, job), [TEXT, LANG], "left")
    return joined.select(*[f"`{name}`" for name in (*df.columns, *of_all, *job.new)])


def _coded(rows: DataFrame, job: Job) -> DataFrame:
    from pyspark.sql import functions as F

    kinds = {name: "string" if pa.types.is_string(kind) else "double" for name, kind in job.new.items()}
    schema = ", ".join(f"`{name}` {kind}" for name, kind in {TEXT: "string", LANG: "string", **kinds}.items())
    chunk = F.floor(F.col(ROW) / job.chunk_rows)
    num_parts = int(rows.sparkSession.conf.get("spark.sql.shuffle.partitions"))  # else Spark may merge them into one
    pairs = rows.groupBy(TEXT, LANG).agg(F.min(ROW).alias(ROW)).repartition(num_parts, chunk)
    return pairs.groupBy(chunk).applyInArrow(lambda pairs: job.code(pairs.sort_by(ROW)), schema)


def _with_rows(df: DataFrame, keys: dict[str, Column]) -> DataFrame:
    """Return each row's description and language, and its index among all rows in the order of `predict`."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as F

    columns = [column.alias(name) for name, column in keys.items()]
    try:
        rows = df.select(*columns, F.col("_metadata.file_path").alias(_FILE), F.col("_metadata.row_index").alias(ROW))
        sizes = rows.groupBy(_FILE).count().orderBy(_FILE).collect()
    except AnalysisException:  # not straight from Parquet files
        return df.select(*columns, F.monotonically_increasing_id().alias(ROW))
    starts = accumulate((size["count"] for size in sizes), initial=0)
    files = [(size[_FILE], start) for size, start in zip(sizes, starts, strict=False)]
    start = df.sparkSession.createDataFrame(files, f"`{_FILE}` string, `{_START}` long")
    return rows.join(F.broadcast(start), _FILE).withColumn(ROW, F.col(ROW) + F.col(_START))


def _check(df: DataFrame, job: Job) -> None:
    """Raise a UserError if a column that is read does not hold text, or a worker can't do the work."""
    for name, kind in df.dtypes:
        if name in job.config.input_cols and kind != "string":
            raise UserError(f"The column {name!r} is of the type {kind}. Cast it to string.")
    fault = job.probe()

    def probe(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"fault": [fault()]})

    faults = df.sparkSession.range(1000).mapInArrow(probe, "fault string").distinct().collect()
    refuse_workers("Spark", [row.fault for row in faults])
