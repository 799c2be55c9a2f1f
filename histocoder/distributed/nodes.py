"""Files and settings that processes on several nodes share: those that rank 0 has made, and those they were given."""

import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from histocoder import distributed
from histocoder.errors import UserError
from histocoder.files import make_folder, temporary_folder

_CHUNK_BYTES = 1 << 24


def on_each_node(
    folder: Path,
    *,
    marker: str,
    copy: Path | None = None,
    files: str = "*",
    is_whole: Callable[[Path], bool] = Path.is_dir,
) -> Path:
    """Return the path of a folder that rank 0 has finished; nodes that do not see it receive a copy.

    Parameters
    ----------
    folder : Path
    marker : str
        Name of a file that identifies the folder's content, such as a manifest.
    copy : Path, optional
        Path of the copy on nodes that do not see the folder (default: `folder`).
    files : str
        Pattern of the files to copy: by default those in the folder itself, with "**/*" also those in its subfolders.
    is_whole : callable
        Check of the folder, called once per node if the marker is there.
    """
    if distributed.world_size() == 1:
        return folder
    mark, sizes = distributed.broadcast_from_primary(
        lambda: (_read(folder / marker), _sizes(folder, files)), doing=f"checking {folder.name}"
    )
    is_seen = _read(folder / marker) == mark and _sizes(folder, files) == sizes
    asks = distributed.is_local_primary() and not (is_seen and (distributed.is_primary() or is_whole(folder)))
    asking = [rank for rank, answer in enumerate(distributed.gather(torch.tensor(asks))) if answer]
    if not asking:
        return folder
    if distributed.is_primary() or asks:
        # without local synchronization, other ranks would have to join a split of NCCL's communicator (pytorch#145376)
        group = dist.new_group([0, *asking], backend="gloo", use_local_synchronization=True)
        if distributed.is_primary():
            _broadcast_files(folder, sizes, group)
        else:
            target = copy or folder
            make_folder(target.parent)
            with temporary_folder(target.with_name(f"{target.name}.{distributed.rank()}")) as temporary:
                _broadcast_files(temporary, sizes, group)
                shutil.rmtree(target, ignore_errors=True)  # a damaged copy, or one of other content
                os.replace(temporary, target)
    distributed.wait_for_all(doing=f"copying {folder.name} to nodes that do not see it")
    return folder if is_seen else copy or folder


def refuse_differences(settings: dict[str, Any]) -> None:
    """Raise a UserError, on every rank, if one has settings that differ from rank 0's."""
    mine = torch.tensor([zlib.crc32(repr(value).encode()) for value in settings.values()])
    first, *others = distributed.gather(mine)
    for rank, theirs in enumerate(others, start=1):
        if names := [name for name, same in zip(settings, theirs == first, strict=True) if not same]:
            raise UserError(
                f"Rank {rank} was launched with settings that differ from rank 0's: {', '.join(names)}. Give all nodes "
                "the same flags and files."
            )


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _sizes(folder: Path, files: str) -> dict[str, int]:
    """Return the size in bytes of each file, by its path in the folder."""
    found = (path for path in sorted(folder.glob(files)) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}


def _broadcast_files(folder: Path, sizes: dict[str, int], group: dist.ProcessGroup) -> None:
    """Send files from rank 0's folder, and write them into those of the others."""
    is_sender = distributed.is_primary()
    for name, size in sizes.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with (folder / name).open("rb" if is_sender else "wb") as file:
            for start in range(0, size, _CHUNK_BYTES):
                num_bytes = min(size - start, _CHUNK_BYTES)
                chunk = bytearray(file.read(num_bytes) if is_sender else num_bytes)
                dist.broadcast(torch.frombuffer(chunk, dtype=torch.uint8), src=0, group=group)
                if not is_sender:
                    file.write(chunk)
