"""Code tables on Ray: actors, each of which opens the model once, map the table's blocks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from histocoder.inference.table_coder import BlockCoder

if TYPE_CHECKING:
    from ray.data import ActorPoolStrategy, Dataset

_BLOCK_ROWS = 10_000  # number of rows that an actor receives at once


def code(
    dataset: Dataset,
    model: str | Path,
    *,
    precision: str = "auto",
    num_gpus: float | None = None,
    compute: ActorPoolStrategy | None = None,
    **options: Any,
) -> Dataset:
    """Add to a dataset the columns that `histocoder predict` adds to a file, when the returned
    dataset is read.

    Parameters
    ----------
    model : path
        Folder of a model that all machines see, or the name of a Hugging Face hub repo.
    num_gpus, compute : float, ray.data.ActorPoolStrategy, optional
        GPUs per actor, by default 1 if there are any; and actors, by default up to one per GPU, or
        per CPU but one.
    precision, **options
        See the flags of `histocoder predict`; options are `input_col`, `language_col`, `language`,
        `mode`, `k`, `threshold`, `constrain`, `min_confidence`, `batch_size`, `columns`, `classes`
        and `levels`.

    Raises
    ------
    UserError
        If the model or a column is missing, or a column of the codes exists already.
    """
    import ray

    # As many actors as have a GPU; without GPUs, as have a CPU, of which Ray needs one to read with.
    resources = ray.cluster_resources()
    gpus = resources.get("GPU", 0)
    cpus = resources.get("CPU", 1)
    if num_gpus is None:
        num_gpus = min(1, gpus)
    device = "cpu"
    num_actors = cpus - 1
    if num_gpus:
        device = "cuda"
        num_actors = gpus / num_gpus
    if compute is None:
        compute = ray.data.ActorPoolStrategy(min_size=1, max_size=max(int(num_actors), 1))

    # Ray reads small files as one block, which it would give to one actor.
    header = dataset.columns() or []
    coder = BlockCoder.of(model, header, device=device, precision=precision, **options)
    return dataset.repartition(target_num_rows_per_block=_BLOCK_ROWS).map_batches(
        BlockCoder,
        fn_constructor_kwargs=vars(coder),
        batch_size=None,
        batch_format="pyarrow",
        num_gpus=num_gpus,
        num_cpus=0 if cpus <= 1 else None,  # Ray needs a CPU to read the table with
        compute=compute,
    )
