"""Training states of which each rank writes its shard, in the files of `torch.distributed.checkpoint`."""

import pickle
import uuid
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from histocoder import distributed
from histocoder.distributed import broadcast_from_primary, gather, run_on_primary
from histocoder.errors import DamagedError, UserError

_INDEX_FILE = ".metadata"
_KNOWN = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "float32", "float16", "bfloat16", "float64", "int64", "int32"),
    "pathlib": ("PosixPath", "WindowsPath"),
}
"""Classes and functions in the index of a checkpoint that contains only tensors."""


def write_shards(folder: Path, weights: dict[str, Tensor], moments: dict[int, dict[str, Tensor]]) -> None:
    """Write weights and the optimizer's state by parameter, each rank its shards; a collective call.

    Tensors are DTensors, or plain tensors that are the same on all ranks. All ranks raise a UserError if one of them
    can't write, or they see different folders.
    """
    state = {f"model.{name}": tensor for name, tensor in weights.items()}
    state |= {f"optimizer.{i}.{name}": tensor for i, values in moments.items() for name, tensor in values.items()}
    run_on_primary(lambda: folder.mkdir(parents=True, exist_ok=True), doing="making a checkpoint's folder")
    try:
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(folder),
            process_group=distributed._group and distributed._group.control,
        )
    except (dcp.api.CheckpointException, OSError) as error:
        reasons = error.failures.values() if isinstance(error, dcp.api.CheckpointException) else [(error, None)]
        reason = "; ".join(sorted({str(failure) for failure, _ in reasons}))
        raise UserError(
            f"Could not save the checkpoint in {folder.parent} ({reason}). Older checkpoints are intact. Make room, or "
            "fix the folder, and run the same command again."
        ) from error
    run_on_primary(lambda: _check_all_written(folder), doing="checking the shards of a checkpoint")


def check_folder(folder: Path) -> None:
    """Raise a UserError, on all ranks, if one of them does not see what rank 0 writes into an existing folder."""

    def touch() -> str:
        name = f".seen.{uuid.uuid4().hex}.tmp"
        (folder / name).touch()
        return name

    probe = folder / broadcast_from_primary(touch, doing="looking at the run's folder")
    blind = [rank for rank, seen in enumerate(gather(torch.tensor([probe.exists()]))) if not seen]
    run_on_primary(probe.unlink, doing="looking at the run's folder")
    if blind:
        raise _not_seen(f"rank {blind[0]} does not see what rank 0 writes", folder)


def _check_all_written(folder: Path) -> None:
    parts = {entry.relative_path for entry in _Reader(folder).read_metadata().storage_data.values()}
    if missing := sorted(part for part in parts if not (folder / part).is_file()):
        raise _not_seen(f"rank 0 does not find {', '.join(missing)}", folder.parent)


def _not_seen(what: str, folder: Path) -> UserError:
    return UserError(
        f"--fsdp-state-dict sharded needs a folder that all processes see; {what} in {folder}. Use --fsdp-state-dict "
        "full."
    )


def read_shards(folder: Path) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Read weights and the optimizer's state by parameter, whole, into CPU memory; each process for itself."""
    reader = _Reader(folder)
    state: dict[str, Any] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise UserError(f"{folder} contains objects other than tensors, such as {name}.")
        state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    try:
        with warnings.catch_warnings():  # it is disabled on purpose, even if there are other ranks
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.load(state, storage_reader=reader, no_dist=True)
    except (dcp.api.CheckpointException, OSError) as error:
        raise DamagedError(f"The shards in {folder} can't be read ({str(error).splitlines()[0]}).") from error
    weights: dict[str, Tensor] = {}
    moments: dict[int, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            weights[rest] = tensor
        else:
            parameter, _, moment = rest.partition(".")
            moments.setdefault(int(parameter), {})[moment] = tensor
    return weights, dict(sorted(moments.items()))


class _Reader(dcp.FileSystemReader):
    """Reads the index, which is a pickle, without executing anything in it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index; raise a DamagedError if it contains anything that an index of tensors does not."""
        path = Path(self.path) / _INDEX_FILE
        try:
            with path.open("rb") as file:
                index = _Unpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, OSError) as error:
            raise DamagedError(f"{path} is not the index of a sharded model ({error}).") from error
        index.storage_meta.load_id = self.load_id
        return index


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it holds {module}.{name}")
        return super().find_class(module, name)
