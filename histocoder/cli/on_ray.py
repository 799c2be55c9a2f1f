"""`histocoder predict --engine ray`."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from histocoder.config import PredictConfig
from histocoder.data.table import TableFile, is_parquet
from histocoder.errors import UserError
from histocoder.ray import code, in_order, tables

_SECONDS = 10.0
"""In which a cluster must answer."""


def tables_on_ray(
    table: TableFile, config: PredictConfig, model: str, *, address: str | None, **how: Any
) -> Iterator[pa.Table]:
    """Yield a Parquet file, or a folder of them, with its codes: an engine for `predict_file_by`.

    Parameters
    ----------
    table : TableFile
    config : PredictConfig
    model : str
    address : str, optional
        Of a Ray cluster; by default Ray starts on this machine.
    **how
        `precision` and `num_gpus` of `code`.
    """
    import ray

    _connect(address)
    try:
        paths = [table.path] if table.path.is_file() else sorted(table.path.rglob("*"))
        dataset = ray.data.read_parquet([str(path.resolve()) for path in paths if is_parquet(path)])
        with in_order(dataset):
            yield from tables(code(dataset, model, **{**asdict(config), "output": "", **how}))
    finally:
        ray.shutdown()


def check_ray(address: str | None) -> None:
    """Raise a UserError where there is no Ray, or nothing at its address."""
    try:
        import ray.data  # noqa: F401
    except ImportError as error:
        raise UserError(f"Ray is not installed ({error}). Install it: pip install 'histocoder[ray]'.") from error
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=_SECONDS).close()  # Ray itself tries for a minute
        except OSError as error:
            raise _unreachable(address, error) from error


def _connect(address: str | None) -> None:
    """Connect to a cluster, or start Ray here."""
    import ray

    try:
        ray.init(address, logging_level="warning")
    except (OSError, RuntimeError, ValueError) as error:
        if address is None:
            raise
        raise _unreachable(address, error) from error


def _unreachable(address: str | None, error: Exception) -> UserError:
    return UserError(f"--address {address}: no Ray can be reached there ({error}). Start it with ray start --head.")
