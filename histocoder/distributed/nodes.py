"""What processes on several nodes must have alike: the files that rank 0 has made, and the settings they were given."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
        Where rank 0 has it, as this process would name it.
    marker : str
        A file in it that tells its content, such as one with checksums.
    copy : Path, optional
        Where a node that does not see it keeps it; by default at `folder` as well.
    files : str
        Pattern of what belongs to it: by default no folders in it, which belong to others; "**/*" is all.
    is_whole : callable
        Asked once a node, beside the comparison of the markers.

    Raises
    ------
    UserError
        Where a copy can't be written.
    """
    if distributed.world_size() == 1:
        return folder
    mark, sizes = distributed.from_primary(
        lambda: (_read(folder / marker), _sizes(folder, files)), doing=f"looking at {folder.name}"
    )
    is_seen = _read(folder / marker) == mark and _sizes(folder, files) == sizes
    asks = distributed.is_first_here() and not (is_seen and (distributed.is_primary() or is_whole(folder)))
    asking = [rank for rank, answer in enumerate(distributed.gather(torch.tensor(asks))) if answer]
    if not asking:
        return folder
    if distributed.is_primary():
        send = distributed.broadcaster([0, *asking])
        for chunk in _chunks(folder, sizes):
            send(chunk)
    elif asks:
        _receive(copy or folder, sizes, distributed.broadcaster([0, *asking]))
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
    """Bytes of each file, by its path in the folder."""
    found = (path for path in sorted(folder.glob(files)) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}


def _chunks(folder: Path, sizes: dict[str, int]) -> Iterator[Tensor]:
    for name, size in sizes.items():
        with (folder / name).open("rb") as file:
            for start in range(0, size, _CHUNK_BYTES):
                yield torch.frombuffer(bytearray(file.read(min(size - start, _CHUNK_BYTES))), dtype=torch.uint8)


def _receive(folder: Path, sizes: dict[str, int], send: Callable[[Tensor], None]) -> None:
    make_folder(folder.parent)
    with temporary_folder(folder.with_name(f"{folder.name}.{distributed.rank()}")) as temporary:
        for name, size in sizes.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            with (temporary / name).open("wb") as file:
                for start in range(0, size, _CHUNK_BYTES):
                    chunk = torch.empty(min(size - start, _CHUNK_BYTES), dtype=torch.uint8)
                    send(chunk)
                    file.write(chunk.numpy().data)
        shutil.rmtree(folder, ignore_errors=True)  # of other content, or damaged
        os.replace(temporary, folder)
