"""The manifest of a model or a checkpoint: which files it was written with, and their checksums."""

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from histocoder.errors import DamagedError
from histocoder.files import file_names, write_text

MANIFEST_FILE = "manifest.json"
# Its key; manifests of earlier versions have SHA-256 sums without one, and are not compared
_CHECKSUMS = "crc32"
_CHUNK_BYTES = 1 << 22


def crc32(path: Path) -> str:
    """Return a file's CRC-32 in hexadecimal; it finds any flipped bit, and reads 2 GB a second from
    memory.
    """
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"


def write_manifest(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write the manifest of some files in a folder, by default of all; raise an OSError if the disk
    is full.
    """
    if names is None:
        names = sorted(file_names(folder) - {MANIFEST_FILE})
    checksums = {name: crc32(folder / name) for name in names}
    write_text(folder / MANIFEST_FILE, json.dumps({_CHECKSUMS: checksums}, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, str]:
    """Return the checksum of each file by its path in the folder; empty for models and checkpoints
    without checksums.

    Raises a DamagedError if the manifest can't be read.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return {}
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise DamagedError(f"{path} is damaged ({error}).") from error
    if isinstance(content, dict):
        content = content.get(_CHECKSUMS, {})
    if not isinstance(content, dict):
        raise DamagedError(f"{path} is damaged (it holds no checksums).")
    return content


def manifest_names(folder: Path) -> tuple[str, ...]:
    """Return the paths of the files that a folder was written with; empty if there is no manifest
    that can be read.
    """
    try:
        return tuple(read_manifest(folder))
    except DamagedError:
        return ()


def verify_manifest(folder: Path) -> None:
    """Compare the files of a model or a checkpoint with its manifest, if it has one.

    Raises a DamagedError that names the first file that is missing or differs.
    """
    for name, checksum in read_manifest(folder).items():
        path = folder / name
        try:
            is_intact = path.is_file() and crc32(path) == checksum
        except OSError as error:
            raise DamagedError(f"{path} can't be read ({error}).") from error
        if not is_intact:
            raise DamagedError(
                f"{path} is missing or damaged: its checksum differs. Use another copy; if "
                "you changed the file "
                f"yourself, delete {MANIFEST_FILE} beside it."
            )
