"""Examples as arrays in files, which later runs, and all processes of a node, map into memory."""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing
import pandas as pd

from histocoder.data.examples import ExampleFiles
from histocoder.data.normalize import normalize
from histocoder.data.table import fingerprint
from histocoder.data.tokens import ragged
from histocoder.files import make_folder, replacing_folder
from histocoder.formatters.tokenizers import CHARACTERS, Tokenizer, join_language
from histocoder.log import log

CACHE_FILE, CACHE_VERSION = "cache.json", 7
_ARRAYS = ("characters", "offsets", "lengths", "langs", "codes", "num_codes")
_COPY_BYTES = 1 << 22


@dataclass
class ExampleArrays:
    """Descriptions and codes of n rows, mapped into memory, so that all processes of a node share one copy.

    Pickling keeps the folder alone; who unpickles it maps the files itself.
    """

    folder: Path
    tokenizer: Tokenizer
    characters: np.ndarray  # Unicode code points of all descriptions, one behind the other, of shape (total,)
    offsets: np.ndarray  # index of each description's first character, of shape (n + 1,)
    lengths: np.ndarray  # number of tokens of each row's language and description, of shape (n,)
    langs: np.ndarray  # index of each row's language in `languages`, of shape (n,)
    codes: np.ndarray  # index of each code in `code_table`, from 1; 0 where there is none; of shape (n, num_blocks)
    num_codes: np.ndarray  # number of codes of each row, of shape (n,)
    code_table: tuple[str, ...]  # codes that occur, the mark of a missing one among them
    languages: tuple[str, ...]
    notices: tuple[str, ...]  # notices to the user on how the files were read
    num_distinct: int  # number of distinct descriptions
    fingerprint: str  # hash of the files' content

    def __len__(self) -> int:
        return len(self.num_codes)

    def __reduce__(self) -> tuple[Callable[[Path, Tokenizer], ExampleArrays], tuple[Path, Tokenizer]]:
        return open_cache, (self.folder, self.tokenizer)

    def descriptions(self, rows: np.ndarray) -> list[str]:
        starts, ends = self.offsets[rows].astype(np.int64), self.offsets[rows + 1].astype(np.int64)
        lengths = ends - starts
        joined = self.characters[ragged(starts, lengths)].astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
        ends = np.cumsum(lengths)
        return [joined[start:end] for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]

    def texts(self, rows: np.ndarray) -> list[str]:
        """Return the languages and descriptions of some rows, joined for `tokenize`."""
        return join_language(self.descriptions(rows), [self.languages[place] for place in self.langs[rows]])


def open_cache(folder: Path, tokenizer: Tokenizer = CHARACTERS) -> ExampleArrays:
    """Map a cache that `build_cache` wrote with the same tokenizer into memory."""
    record = json.loads((folder / CACHE_FILE).read_text(encoding="utf-8"))
    arrays = {name: map_array(folder / name, form["dtype"]) for name, form in record["arrays"].items()}
    arrays["codes"] = arrays["codes"].reshape(len(arrays["num_codes"]), -1)
    return ExampleArrays(
        folder,
        tokenizer,
        **arrays,
        code_table=tuple(record["codes"]),
        languages=tuple(record["languages"]),
        notices=tuple(record["notices"]),
        num_distinct=record["num_distinct"],
        fingerprint=hashlib.sha256("".join(record["made_from"]["sources"]).encode()).hexdigest()[:8],
    )


def build_cache(
    files: ExampleFiles, cache_dir: Path, *, max_len: int, text_normalization: str, tokenizer: Tokenizer = CHARACTERS
) -> Path:
    """Return the folder of some files' cache, for `open_cache`; it is built if it is missing or damaged.

    Its name is a hash of what determines its content: the files, how they are read and how they are tokenised.

    Raises UserError if the files can't be read as examples, or the cache can't be written; nothing half-built is left.
    """
    made_from = _made_from(files, max_len, text_normalization, tokenizer)
    name = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_dir / name
    if is_whole(folder, made_from):
        return folder
    make_folder(cache_dir)
    with replacing_folder(folder) as temporary:
        arrays = _write_arrays(files, temporary, max_len, text_normalization, tokenizer)
        record = {"made_from": made_from, **arrays}
        (temporary / CACHE_FILE).write_text(json.dumps(record, indent=2), encoding="utf-8")
    num_bytes = sum(form["bytes"] for form in record["arrays"].values())
    log.info(f"Tokenised {', '.join(p.name for p in files.paths)} into {folder} ({num_bytes / 1e6:,.1f} MB).")
    return folder


def prune_cache(cache_dir: Path, keep: list[Path]) -> None:
    for record in cache_dir.glob(f"*/{CACHE_FILE}"):
        if record.parent not in keep:
            shutil.rmtree(record.parent, ignore_errors=True)


def _made_from(files: ExampleFiles, max_len: int, text_normalization: str, tokenizer: Tokenizer) -> dict[str, Any]:
    optional = {"language": files.language, "tokenizer": tokenizer.fingerprint()}
    return {
        "format_version": CACHE_VERSION,
        "sources": [fingerprint(path) for path in files.paths],
        "columns": [files.input_col, files.language_col, *files.target_cols],
        "formatter": files.formatter.to_config(),
        "key": None if files.key is None else hashlib.sha256("&".join(files.key.codes).encode()).hexdigest(),
        "rules": asdict(files.rules),
        "max_len": max_len,
        "text_normalization": text_normalization,
        **{name: value for name, value in optional.items() if value is not None},
    }


def is_whole(folder: Path, made_from: dict[str, Any] | None = None) -> bool:
    """Return whether a folder holds an undamaged cache (made from `made_from`, if that is given)."""
    try:
        record = json.loads((folder / CACHE_FILE).read_text(encoding="utf-8"))
        return made_from in (None, record["made_from"]) and all(
            _checksum(folder / name) == form["crc32"] for name, form in record["arrays"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_arrays(
    files: ExampleFiles, folder: Path, max_len: int, text_normalization: str, tokenizer: Tokenizer
) -> dict[str, Any]:
    places: dict[str, int] = {}
    languages: dict[str, int] = {}
    notices: list[str] = []
    num_characters = 0
    hashes = []
    with ExitStack() as stack:
        arrays = {name: stack.enter_context(closing(_ArrayFile(folder / name))) for name in _ARRAYS}
        arrays["offsets"].append(np.zeros(1, dtype=np.int64))
        for examples in files.chunks(say=notices.append):
            descriptions = normalize(examples.texts, text_normalization)
            distinct = pd.unique(np.fromiter(map(hash, descriptions), dtype=np.int64, count=len(descriptions)))
            hashes.append(np.sort(distinct))
            characters = "".join(descriptions).encode("utf-32-le", "surrogatepass")
            ends = num_characters + np.cumsum(np.fromiter(map(len, descriptions), dtype=np.int64))
            num_characters += len(characters) // 4
            codes = np.zeros((len(examples), files.formatter.num_blocks), dtype=np.int64)
            for i, column in enumerate(examples.codes.columns):
                codes[:, i] = _places(examples.codes[column].to_numpy(), places) + 1
            arrays["characters"].append(np.frombuffer(characters, dtype="<u4"))
            arrays["offsets"].append(ends)
            arrays["lengths"].append(tokenizer.lengths(descriptions, examples.langs, max_len=max_len))
            arrays["langs"].append(_places(examples.langs, languages))
            arrays["codes"].append(codes)
            arrays["num_codes"].append((codes > 0).sum(1))
    return {
        "arrays": {name: array.form() for name, array in arrays.items()},
        "codes": list(places),
        "languages": list(languages),
        "notices": notices,
        "num_distinct": _num_distinct(hashes),
    }


def _num_distinct(parts: Sequence[np.ndarray]) -> int:
    """Count the distinct values of several sorted arrays of int64, a range of values at a time to save memory."""
    bounds = np.arange(-7, 8, dtype=np.int64) << 60
    shares = zip(*(np.split(part, np.searchsorted(part, bounds)) for part in parts), strict=True)
    return sum(len(pd.unique(np.concatenate(share))) for share in shares)


def _places(values: Sequence[str] | np.ndarray, places: dict[str, int]) -> np.ndarray:
    """Return each value's index in a table, of shape (n,), -1 if missing; adds new values to the table."""
    index, distinct = pd.factorize(np.asarray(values, dtype=object))
    table = [places.setdefault(value, len(places)) for value in distinct]
    return np.array([*table, -1])[index]  # a missing value's index is -1


class _ArrayFile:
    """Writes chunks of non-negative integers one behind the other, in the smallest type that holds them all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._dtype = np.dtype(np.uint8)
        self._file = path.open("wb")

    def append(self, values: np.ndarray) -> None:
        dtype = np.promote_types(self._dtype, np.min_scalar_type(int(values.max(initial=0))))
        if dtype != self._dtype:
            self._widen(dtype)
        self._file.write(np.ascontiguousarray(values, dtype).data)

    def _widen(self, dtype: np.dtype) -> None:
        self._file.close()
        narrow = self._path.rename(self._path.with_suffix(".narrow"))
        self._file = self._path.open("wb")
        with narrow.open("rb") as file:
            while chunk := file.read(_COPY_BYTES):
                self._file.write(np.frombuffer(chunk, self._dtype).astype(dtype).tobytes())
        narrow.unlink()
        self._dtype = dtype

    def close(self) -> None:
        self._file.close()

    def form(self) -> dict[str, Any]:
        """Return the type, size and checksum of what was written."""
        return {"dtype": self._dtype.str, "bytes": self._path.stat().st_size, "crc32": _checksum(self._path)}


def map_array(path: Path, dtype: np.typing.DTypeLike) -> np.ndarray:
    """Map a file's numbers into memory, as a plain array, since a `memmap` takes microseconds for each slice."""
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_COPY_BYTES):
            value = zlib.crc32(chunk, value)
    return value
