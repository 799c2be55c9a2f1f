"""Examples as arrays in files, made once: later runs, and all processes of a node, map the same ones into memory."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from histocoder.data.arrays import ArrayFile, checksum, map_array
from histocoder.data.examples import ExampleFiles
from histocoder.data.normalize import normalize
from histocoder.data.table import fingerprint
from histocoder.data.tokens import join_language, ragged, tokenize
from histocoder.files import make_folder, replacing_folder
from histocoder.formatters.tokenizers import CHARACTERS, Tokenizer

CACHE_FILE, CACHE_VERSION = "cache.json", 5
_ARRAYS = ("characters", "offsets", "lengths", "langs", "codes", "num_codes")


@dataclass
class ExampleArrays:
    """Descriptions and codes of n rows, mapped into memory: processes that hold them share one copy.

    A worker that is handed one maps the files itself.
    """

    folder: Path
    tokenizer: Tokenizer
    """The encoder's."""
    characters: np.ndarray
    """Unicode code points of the descriptions, one behind the other, of shape (total,)."""
    offsets: np.ndarray
    """Of shape (n + 1,): where each description begins."""
    lengths: np.ndarray
    """Of shape (n,): tokens of each row's language and description."""
    langs: np.ndarray
    """Of shape (n,): each row's language, by its place in `languages`."""
    codes: np.ndarray
    """Of shape (n, num_blocks): each code's place in `code_table`, counted from 1; 0 where there is none."""
    num_codes: np.ndarray
    """Of shape (n,)."""
    code_table: tuple[str, ...]
    """The codes that occur, the mark of a missing one among them."""
    languages: tuple[str, ...]
    """Those that occur."""
    notices: tuple[str, ...]
    """Notices to the user on how the files were read."""
    num_distinct: int
    """Distinct descriptions."""
    fingerprint: str
    """Of the files' content."""

    def __len__(self) -> int:
        return len(self.num_codes)

    def __reduce__(self) -> tuple[Callable[[Path, Tokenizer], ExampleArrays], tuple[Path, Tokenizer]]:
        return open_cache, (self.folder, self.tokenizer)

    def descriptions(self, rows: np.ndarray) -> list[str]:
        """Return the descriptions of some rows."""
        starts, ends = self.offsets[rows].astype(np.int64), self.offsets[rows + 1].astype(np.int64)
        lengths = ends - starts
        joined = self.characters[ragged(starts, lengths)].astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
        ends = np.cumsum(lengths)
        return [joined[start:end] for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]

    def texts(self, rows: np.ndarray) -> list[str]:
        """Return languages and descriptions of some rows, as `tokenize` takes them."""
        return join_language(self.descriptions(rows), [self.languages[place] for place in self.langs[rows]])


def open_cache(folder: Path, tokenizer: Tokenizer = CHARACTERS) -> ExampleArrays:
    """Map what `build_cache` has written, with the same tokenizer, into memory."""
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
    files: ExampleFiles,
    cache_dir: Path,
    *,
    max_len: int,
    text_normalization: str,
    tokenizer: Tokenizer = CHARACTERS,
    say: Callable[[str], None] = print,
) -> Path:
    """Read files into a folder of their own within the cache's, unless it is there already.

    The folder is named after what determines its content: the files, how they are read and how they are tokenised.
    One that is damaged is built again.

    Parameters
    ----------
    files : ExampleFiles
    cache_dir : Path
    max_len : int
        Maximum number of tokens of an input.
    text_normalization : str
        See `normalize`.
    tokenizer : Tokenizer
        By default CANINE's.
    say : callable
        Receives a message once the cache is built.

    Returns
    -------
    Path
        For `open_cache`.

    Raises
    ------
    UserError
        Where the files can't be read as examples, or the cache can't be written; nothing half-built is left.
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
    say(f"Tokenised {', '.join(p.name for p in files.paths)} into {folder} ({num_bytes / 1e6:,.1f} MB).")
    return folder


def prune_cache(cache_dir: Path, keep: list[Path]) -> None:
    """Delete what a run's own cache holds of other data and settings."""
    for record in cache_dir.glob(f"*/{CACHE_FILE}"):
        if record.parent not in keep:
            shutil.rmtree(record.parent, ignore_errors=True)


def _made_from(files: ExampleFiles, max_len: int, text_normalization: str, tokenizer: Tokenizer) -> dict[str, Any]:
    fingerprint_of_tokenizer = tokenizer.fingerprint()
    return {
        "format_version": CACHE_VERSION,
        "sources": [fingerprint(path) for path in files.paths],
        "columns": [files.input_col, files.language_col, *files.target_cols],
        "formatter": files.formatter.to_config(),
        "key": None if files.key is None else hashlib.sha256("&".join(files.key.codes).encode()).hexdigest(),
        "rules": asdict(files.rules),
        "max_len": max_len,
        "text_normalization": text_normalization,
        **({} if files.language is None else {"language": files.language}),
        **({} if fingerprint_of_tokenizer is None else {"tokenizer": fingerprint_of_tokenizer}),
    }


def is_whole(folder: Path, made_from: dict[str, Any] | None = None) -> bool:
    """Return whether a folder holds what `build_cache` has written, made from the same."""
    try:
        record = json.loads((folder / CACHE_FILE).read_text(encoding="utf-8"))
        return made_from in (None, record["made_from"]) and all(
            checksum(folder / name) == form["crc32"] for name, form in record["arrays"].items()
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
        arrays = {name: stack.enter_context(ArrayFile(folder / name)) for name in _ARRAYS}
        arrays["offsets"].append(np.zeros(1, dtype=np.int64))
        for examples in files.chunks(say=notices.append):
            descriptions = normalize(examples.texts, text_normalization)
            hashes.append(_distinct(np.fromiter(map(hash, descriptions), dtype=np.int64, count=len(descriptions))))
            characters = "".join(descriptions).encode("utf-32-le", "surrogatepass")
            ends = num_characters + np.cumsum(np.fromiter(map(len, descriptions), dtype=np.int64))
            num_characters += len(characters) // 4
            texts = join_language(descriptions, examples.langs)
            codes = np.zeros((len(examples), files.formatter.num_blocks), dtype=np.int64)
            for i, column in enumerate(examples.codes.columns):
                codes[:, i] = _places(examples.codes[column].to_numpy(), places) + 1
            arrays["characters"].append(np.frombuffer(characters, dtype="<u4"))
            arrays["offsets"].append(ends)
            arrays["lengths"].append(tokenize(texts, max_len=max_len, tokenizer=tokenizer).lengths)
            arrays["langs"].append(_places(examples.langs, languages))
            arrays["codes"].append(codes)
            arrays["num_codes"].append((codes > 0).sum(1))
        forms = {name: array.close() for name, array in arrays.items()}
    return {
        "arrays": forms,
        "codes": list(places),
        "languages": list(languages),
        "notices": notices,
        "num_distinct": _num_distinct(hashes),
    }


def _num_distinct(parts: Sequence[np.ndarray]) -> int:
    """Count the distinct int64 values of several sorted arrays; in pieces, since they may be large."""
    bounds = np.arange(-7, 8, dtype=np.int64) << 60
    shares = zip(*(np.split(part, np.searchsorted(part, bounds)) for part in parts), strict=True)
    return sum(len(_distinct(np.concatenate(share))) for share in shares)


def _distinct(values: np.ndarray) -> np.ndarray:
    """Return the distinct values in order, as `np.unique` does, in a fraction of its time."""
    ordered = np.sort(values)
    is_new = np.ones(len(ordered), dtype=bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_new]


def _places(values: Sequence[str] | np.ndarray, places: dict[str, int]) -> np.ndarray:
    """Return each value's index in a table, an array of int of shape (n,); -1 if missing. New values are added."""
    index, distinct = pd.factorize(np.asarray(values, dtype=object))
    table = [places.setdefault(value, len(places)) for value in distinct]
    return np.array([*table, -1])[index]  # a missing value's index is -1
