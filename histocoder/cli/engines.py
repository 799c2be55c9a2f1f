"""`histocoder predict --engine`: code a table on a cluster, whose workers write the output."""

import glob
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.dataset

from histocoder.checkpoints.model_files import local_folder
from histocoder.checkpoints.run_folder import holding
from histocoder.cli.arguments import config_of
from histocoder.cli.flags import PredictFlags
from histocoder.config import PredictConfig
from histocoder.errors import Interrupted, UserError
from histocoder.files import make_folder, replacing_folder
from histocoder.launcher import read_launch
from histocoder.log import log
from histocoder.ray import code as code_on_ray
from histocoder.signals import handling_stop_signals
from histocoder.spark import code as code_on_spark
from histocoder.tables.parquet_files import ParquetFiles, parquet_files, paths_of, split
from histocoder.tables.table import EXCEL, PARQUET, STATA, TEXT, TableFile, open_table

_NAMES = {"ray": "Ray", "spark": "Spark"}
_MODULES = {"ray": "ray.data", "spark": "pyspark.sql"}
_CONNECT_SECONDS = 10.0  # time in which a cluster must answer
# names of the files that engines write
_WRITTEN = re.compile(r".+\.parquet|_SUCCESS|\..+\.crc")
# how an error of a worker, which arrives as a traceback, names a mistake of the user's
_MISTAKE = re.compile(r"^\S*UserError: (.+)$", re.MULTILINE)


def predict_on_engine(config: PredictFlags) -> None:
    """Code the table of `--input` by the workers of an engine, into a folder of Parquet files.

    They write a folder beside it, which takes its place when all rows are there.
    """
    assert config.engine is not None
    paths = paths_of((config.input, *config.texts))
    _check_output(config, paths)

    # mistakes are found before the engine is started, which takes a while
    parquet = parquet_files(paths)
    table = _open_table(config, paths[0], parquet)
    options = _options(config, table)
    _check_engine(config.engine)
    model = local_folder(config.model)

    output = Path(os.path.abspath(config.output))
    make_folder(output.parent)
    lock = output.with_name(f".{output.name}.lock")
    with holding(lock, path=output, instead="another --output"):
        _remove_leftovers(output)
        with replacing_folder(output) as folder:
            parts = folder / "_input"
            if parquet is None:
                parquet = split(table, parts)
            num_rows = parquet.open().count_rows()
            if not num_rows:
                raise UserError(f"{config.input} has columns but no rows.")

            run = _run_ray if config.engine == "ray" else _run_spark
            with _mistakes_of_workers():
                run(parquet, folder, model, config, options)
            shutil.rmtree(parts, ignore_errors=True)

            # a folder that the machines do not share loses rows, and engines do not say so
            num_written = pa.dataset.dataset(str(folder), format="parquet").count_rows()
            if num_written != num_rows:
                raise UserError(
                    f"{num_written:,} of {num_rows:,} rows have arrived in {config.output}. Name "
                    "an --output that all machines see under the same path."
                )
    log.info(
        f"Coded {num_rows:,} rows of {config.input} into the folder {config.output}, on "
        f"{_NAMES[config.engine]}."
    )


def _check_engine(engine: str) -> None:
    """Raise a UserError if an engine is not installed, or a launcher started several processes."""
    try:
        import_module(_MODULES[engine])
    except ImportError as error:
        raise UserError(
            f"--engine {engine} needs {_NAMES[engine]} ({error}). Install it: pip install "
            f"'histocoder[{engine}]'."
        ) from error
    if read_launch().world_size > 1:
        raise UserError(
            f"{_NAMES[engine]} starts its processes itself; start one process, without a launcher."
        )


def _check_output(config: PredictFlags, inputs: Sequence[Path]) -> None:
    """Raise a UserError if a folder can't be written to the output without loss."""
    output = Path(config.output)
    if output.suffix.lower() in (*TEXT, *PARQUET, *EXCEL, *STATA, ".gz"):
        raise UserError(
            f"--engine {config.engine} writes a folder of Parquet files; name a folder with "
            f"--output, such as {output.with_suffix('')}."
        )
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; name a folder with --output.")
    for path in inputs:
        if path.resolve().is_relative_to(output.resolve()):
            raise UserError(f"--output {output} holds the input, {path}; choose another.")
    names = sorted(path.name for path in output.glob("*"))
    others = [name for name in names if not _WRITTEN.fullmatch(name)]
    if others:
        raise UserError(
            f"{output} contains {', '.join(others[:5])}, which is not part of a coded table. "
            "Choose another --output."
        )
    if names and not config.overwrite:
        raise UserError(
            f"{output} already exists. Add --overwrite to replace it, or choose another --output."
        )


def _open_table(config: PredictFlags, path: Path, parquet: ParquetFiles | None) -> TableFile:
    """Open Parquet files as one table, or the file of another format at a path."""
    if parquet is None:
        columns = config.settings_of_columns | config.settings_of_qualifiers
        table = open_table(path, columns, sheet=config.sheet, encoding=config.file_encoding)
        for notice in table.notices:
            log.info(notice)
        return table

    # for what it says of a missing file, and of flags that are not for Parquet
    open_table(parquet.files[0], (), sheet=config.sheet, encoding=config.file_encoding)
    return TableFile(Path(config.input), parquet.open(), [])


def _options(config: PredictFlags, table: TableFile) -> dict[str, Any]:
    """Return the settings of prediction, with names of columns as the table has them."""
    columns = config.settings_of_columns | config.settings_of_qualifiers
    changes: dict[str, Any] = {}
    for name, setting in columns.items():
        changes[setting] = table.column(name, setting)
    if config.classes:
        changes["classes"] = os.path.abspath(config.classes)  # workers have a folder of their own
    return vars(replace(config_of(PredictConfig, config), **changes))


def _remove_leftovers(output: Path) -> None:
    """Delete what killed runs have left of an output."""
    start = f".{output.name}."
    for path in output.parent.glob(f"{glob.escape(start)}*.tmp"):
        if path.name.removeprefix(start).removesuffix(".tmp").isdecimal():
            shutil.rmtree(path, ignore_errors=True)


def _run_ray(
    parquet: ParquetFiles, folder: Path, model: Path, config: PredictFlags, options: dict[str, Any]
) -> None:
    """Code a table on the Ray cluster of RAY_ADDRESS, or on this machine."""
    import ray
    from ray.data.datasource.partitioning import Partitioning

    try:
        host, _, port = os.environ.get("RAY_ADDRESS", "").removeprefix("ray://").rpartition(":")
        if host and port.isdecimal():
            # Ray itself tries for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        ray.init(logging_level="warning")
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"Ray can't be started or reached ({_first_line(error)}). RAY_ADDRESS names a cluster; "
            "without it, Ray starts on this machine."
        ) from error
    try:
        with handling_stop_signals(_stop):
            ray.data.DataContext.get_current().execution_options.preserve_order = True
            table = ray.data.read_parquet(
                parquet.files, partitioning=Partitioning("hive", base_dir=parquet.base)
            )
            num_gpus = {"auto": None, "cpu": 0, "cuda": 1}[config.device]
            coded = code_on_ray(
                table, model, precision=config.precision, num_gpus=num_gpus, **options
            )
            coded.write_parquet(str(folder))
    finally:
        ray.shutdown()


def _run_spark(
    parquet: ParquetFiles, folder: Path, model: Path, config: PredictFlags, options: dict[str, Any]
) -> None:
    """Code a table on the Spark that spark-submit or Spark's own settings name."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # not the first python3 of PATH
    try:
        session = SparkSession.builder.appName("histocoder").getOrCreate()
    except Exception as error:
        raise UserError(
            f"Spark can't be started or reached ({_first_line(error)}). It needs Java 17 or later."
        ) from error
    try:
        with handling_stop_signals(_stop):
            reader = session.read.option("basePath", f"file://{parquet.base}")
            table = reader.parquet(*(f"file://{file}" for file in parquet.files))
            device = "cuda" if config.device == "cuda" else "cpu"
            coded = code_on_spark(
                table, model, precision=config.precision, device=device, **options
            )
            coded.write.mode("append").parquet(f"file://{folder}")
    finally:
        session.stop()


@contextmanager
def _mistakes_of_workers() -> Iterator[None]:
    """Raise a UserError in place of an engine's error if a worker has raised one."""
    try:
        yield
    except Exception as error:
        # Ray's error is a UserError, too, whose message is the traceback
        mistake = _MISTAKE.search(str(error))
        if mistake is None:
            raise
        raise UserError(mistake[1]) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _stop(signum: int, _frame: object) -> NoReturn:
    raise Interrupted("Interrupted. Nothing is written.", signum)
