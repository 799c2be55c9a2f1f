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

    header, resources = dataset.columns() or [], ray.cluster_resources()
    gpus, cpus = resources.get("GPU", 0), resources.get("CPU", 1)
    num_gpus = min(1, gpus) if num_gpus is None else num_gpus
    most = gpus / num_gpus if num_gpus else cpus - 1
    coder = BlockCoder.of(
        model, header, device="cuda" if num_gpus else "cpu", precision=precision, **options
    )
    # Ray reads small files as one block, which it would give to one actor
    return dataset.repartition(target_num_rows_per_block=_BLOCK_ROWS).map_batches(
        BlockCoder,
        fn_constructor_kwargs=vars(coder),
        batch_size=None,
        batch_format="pyarrow",
        num_gpus=num_gpus,
        num_cpus=0 if cpus <= 1 else None,  # Ray needs a CPU to read the table with
        compute=compute or ray.data.ActorPoolStrategy(min_size=1, max_size=max(int(most), 1)),
    )
