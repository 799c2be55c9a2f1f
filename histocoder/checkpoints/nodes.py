"""Folders that rank 0 has written, on nodes that do not see its disk."""

from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path

import torch

from histocoder import distributed
from histocoder.files import make_folder, replacing_folder

_CHUNK_BYTES = 1 << 24


def on_each_node(
    folder: Path,
    *,
    marker: str,
    copy: Path | None = None,
    files: Sequence[str] = ("*",),
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
    files : sequence of str
        Patterns of the files to copy: by default those in the folder itself, with "**/*" also those in its subfolders.
    is_whole : callable
        Check of the folder, called once per node if the marker is there.
    """
    if distributed.world_size() == 1:
        return folder

    def content(path: Path) -> tuple[bytes, dict[str, int]]:
        mark = (path / marker).read_bytes() if (path / marker).is_file() else b""
        found = (file for pattern in files for file in sorted(path.glob(pattern)) if file.is_file())
        return mark, {file.relative_to(path).as_posix(): file.stat().st_size for file in found}

    original = distributed.broadcast_from_primary(lambda: content(folder), doing=f"checking {folder.name}")
    target = folder if content(folder) == original else copy or folder
    receives = (
        distributed.is_local_primary()
        and not distributed.is_primary()
        and not (content(target) == original and is_whole(target))
    )
    if distributed.all_reduce(torch.tensor(int(receives)), "max"):
        chunks = _chunks(folder, original[1])
        if receives:
            make_folder(target.parent)
            with replacing_folder(target) as received:
                for name, chunk in chunks:
                    (received / name).parent.mkdir(exist_ok=True)
                    with (received / name).open("ab") as file:
                        file.write(chunk)
        else:
            for _ in chunks:
                pass
        distributed.barrier(doing=f"copying {folder.name} to nodes that do not see it")
    return target


def _chunks(folder: Path, sizes: dict[str, int]) -> Iterator[tuple[str, bytes]]:
    """Yield the content of rank 0's files in pieces, each with the file's name, on every rank."""
    for name, size in sizes.items():
        with (folder / name).open("rb") if distributed.is_primary() else BytesIO() as file:
            yield name, b""  # for a file without content
            for _ in range(0, size, _CHUNK_BYTES):
                yield name, distributed.broadcast(file.read(_CHUNK_BYTES))
