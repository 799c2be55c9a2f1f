"""Code tables on Ray: distinct descriptions by actors, each of which opens the model once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from histocoder.config import PredictConfig
from histocoder.data.table import TableFile, is_parquet
from histocoder.errors import UserError
from histocoder.inference.engines import Actor, Distinct, Job, by_key, in_a_row, refuse_workers

if TYPE_CHECKING:
    from ray.data import ActorPoolStrategy, Dataset

_CONNECT_SECONDS = 10.0  # seconds in which a cluster must answer


def code(
    dataset: Dataset,
    model: str | Path,
    *,
    input_col: str = "occ1",
    language_col: str | None = None,
    mode: str | None = None,
    precision: str = "auto",
    num_gpus: float | None = None,
    compute: ActorPoolStrategy | None = None,
    **options: Any,
) -> Dataset:
    """Code a table: add to a dataset what `histocoder predict` adds to a file.

    This call codes the distinct descriptions; the codes join the rows when the returned dataset is read. Codes and
    probabilities equal those of `histocoder predict` for rows in the same order, on the same kind of processor.

    Parameters
    ----------
    dataset : Dataset
    model : path
        Folder of a model that all machines see, or the name of a Hugging Face hub repo.
    num_gpus, compute : float, ray.data.ActorPoolStrategy, optional
        GPUs per actor, by default 1 if there are any; and number of actors, by default up to one per GPU or CPU.
    input_col, language_col, mode, precision, **options
        See the flags of `histocoder predict`; options are `language`, `k`, `threshold`, `constrain`, `min_confidence`,
        `batch_size` and `columns`.

    Returns
    -------
    Dataset
        The columns of `dataset`, then those of the codes.

    Raises
    ------
    UserError
        If Ray, the model or a column is missing, a worker has another version of histocoder, or a file can't be read.
    """
    import ray

    num_gpus, most = _actors(num_gpus, ray.cluster_resources())
    options |= {"input_col": input_col, "language_col": language_col, "mode": mode}
    with _in_order(dataset):
        device = "cuda" if num_gpus else "cpu"
        job = Job.of(model, dataset.schema().names, device=device, precision=precision, **options)
        _check_nodes(job)
        distinct = Distinct(job.chunk_rows)
        texts = dataset.select_columns(job.config.input_cols)
        for table in _tables(texts.map_batches(job.distinct, batch_size=None, batch_format="pyarrow")):
            distinct.add(table)
    coded = ray.data.from_arrow([in_a_row(chunk) for chunk in distinct.chunks()]).map_batches(
        Actor,
        fn_constructor_args=(job,),
        batch_size=1,
        batch_format="pyarrow",
        num_gpus=num_gpus,
        compute=compute or ray.data.ActorPoolStrategy(min_size=1, max_size=most),
    )
    found = ray.put(by_key(pa.concat_tables(_tables(coded))))
    return dataset.map_batches(lambda table: job.add(table, ray.get(found)), batch_size=None, batch_format="pyarrow")


def _actors(num_gpus: float | None, resources: dict[str, float]) -> tuple[float, int]:
    """Return the GPUs of an actor, and the number of actors that fit on the cluster."""
    num_gpus = min(1, resources.get("GPU", 0)) if num_gpus is None else num_gpus
    most = resources.get("GPU", 0) / num_gpus if num_gpus else resources.get("CPU", 1)
    return num_gpus, max(int(most), 1)


def _check_nodes(job: Job) -> None:
    """Raise a UserError if a machine of the cluster can't do the work."""
    import ray

    probe = ray.remote(num_cpus=0)(job.probe())
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    on = [ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    refuse_workers("Ray", ray.get([probe.options(scheduling_strategy=where).remote() for where in on]))


def _tables(dataset: Dataset) -> Iterator[pa.Table]:
    return dataset.iter_batches(batch_size=None, batch_format="pyarrow")


@contextmanager
def _in_order(dataset: Dataset) -> Iterator[None]:
    """Make Ray keep the order of rows, and raise a UserError where it can't read them."""
    import ray

    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield
    except ray.exceptions.RayError as error:
        cause = str(error).partition("\n\n")[0].strip().splitlines()[-1]  # its consequences are below it
        raise UserError(f"Ray can't read the table: {cause}") from error
    finally:
        options.preserve_order = before


def code_file(
    table: TableFile, config: PredictConfig, model: str, *, address: str | None, **how: Any
) -> Iterator[pa.Table]:
    """Yield Parquet with its codes: an engine for `predict_file_by`.

    Parameters
    ----------
    address : str, optional
        Address of a Ray cluster; by default Ray starts on this machine.
    **how
        `precision` and `num_gpus` of `code`.
    """
    import ray

    try:
        ray.init(address, logging_level="warning")
    except (OSError, RuntimeError, ValueError) as error:
        if address is None:
            raise
        raise _unreachable(address, error) from error
    try:
        paths = [table.path] if table.path.is_file() else sorted(table.path.rglob("*"))
        dataset = ray.data.read_parquet([str(path.resolve()) for path in paths if is_parquet(path)])
        with _in_order(dataset):
            yield from _tables(code(dataset, model, **{**asdict(config), "output": "", **how}))
    finally:
        ray.shutdown()


def check_ray(address: str | None) -> None:
    """Raise a UserError if Ray is not installed, or nothing answers at its address."""
    try:
        import ray.data  # noqa: F401
    except ImportError as error:
        raise UserError(f"Ray is not installed ({error}). Install it: pip install 'histocoder[ray]'.") from error
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()  # Ray itself tries a minute
        except OSError as error:
            raise _unreachable(address, error) from error


def _unreachable(address: str | None, error: Exception) -> UserError:
    return UserError(f"--address {address}: no Ray can be reached there ({error}). Start it with ray start --head.")
