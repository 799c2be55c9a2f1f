"""Files and folders that are written whole or not at all."""

import hashlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from histocoder.errors import UserError

_OLD = ".replaced.tmp"  # end of the name of a folder that is being replaced
# names that this module and `delete_checkpoint` give
_TEMPORARY = re.compile(r"\..+\.(\d+|replaced|old)\.tmp")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write; it replaces `path` on success, and is deleted on failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"Could not write {path}: {error.strerror or error}.") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def replace_by_link(path: Path, original: Path) -> None:
    """Replace a file by a hard link to an equal one; it stays where the file system has no
    links.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with suppress(OSError):
        os.link(original, temporary)
        os.replace(temporary, path)
    temporary.unlink(missing_ok=True)


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder beside `path`, to fill and to move files from; it is deleted in the
    end.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
        temporary.mkdir()
        yield temporary
    except OSError as error:
        raise UserError(f"Could not write {path}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder to fill; it replaces `path` on success, and is deleted on failure.

    `path` is the old folder or the new one, complete and on the disk, wherever the process is
    killed; between the renames it is missing until `remove_leftovers` puts the old one back.
    """
    old = path.with_name(f".{path.name}{_OLD}")
    with temporary_folder(path) as temporary:
        yield temporary
        for written in (*temporary.rglob("*"), temporary):
            sync(written)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(path, old)
        try:
            os.replace(temporary, path)
        except OSError:
            _put_back(old)
            raise
        sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)


def _put_back(old: Path) -> None:
    """Undo the first rename of `replacing_folder`, if there was one without the second."""
    path = old.with_name(old.name[1 : -len(_OLD)])
    if old.exists() and not path.exists():
        old.rename(path)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files and folders of killed processes; no other process may be writing
    in the folder.

    A folder whose replacement was killed is put back first. Files of other programs that end in
    .tmp stay.
    """
    for old in folder.glob(f".*{_OLD}"):
        _put_back(old)
    for path in folder.glob(".*.tmp"):
        if not _TEMPORARY.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def existing(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yield the files in a folder that have some names, links among them."""
    for name in dict.fromkeys(names):
        path = folder / name
        if path.is_file() or path.is_symlink():
            yield path


def file_names(folder: Path) -> set[str]:
    """Return the paths in a folder of all files there, links among them."""
    paths = (path for path in folder.rglob("*") if not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in paths}


def remove_files(paths: Iterable[Path]) -> None:
    """Delete files, and then their folders that are empty; others' files in these stay."""
    folders = set()
    for path in list(paths):
        path.unlink(missing_ok=True)
        folders.add(path.parent)

    # the deepest first, so that a folder of folders is empty in its turn
    for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
        with suppress(OSError):
            folder.rmdir()


def make_folder(path: Path) -> None:
    """Create a folder and its parents; raise a UserError if it is a file or can't be written to."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; name a folder to save to.")
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"Can't write to {path}: {error.strerror or error}. Choose another folder."
        ) from error


def is_same_file(path: str | Path, second: str | Path) -> bool:
    """Return whether two paths, of which the first exists, lead to the same file or folder."""
    return os.path.exists(second) and os.path.samefile(path, second)


def from_here(path: str | Path) -> str:
    """Return an absolute path, or a relative one within the current folder."""
    absolute = Path(path).absolute()
    if absolute.is_relative_to(Path.cwd()):
        return str(absolute.relative_to(Path.cwd()))
    return str(path)


def finetune_command(words: Sequence[str]) -> str:
    """Return the line for a shell that trains with some words: `histocoder finetune` if the shell
    finds this one's.
    """
    installed = shutil.which("histocoder")
    script = Path(__file__).parents[1] / "finetune.py"
    if installed and is_same_file(Path(sys.executable).parent, Path(installed).parent):
        command = ["histocoder", "finetune"]
    elif script.is_file():
        command = [from_here(sys.executable), from_here(script)]
    else:
        command = [from_here(sys.executable), "-m", "histocoder.cli.finetune"]
    return shlex.join([*command, *words])


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # on Windows folders can't be opened, and files must be opened for writing
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
