"""Codes that a person has checked; they override what the data say of the same descriptions."""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from histocoder.config import PrepareConfig
from histocoder.data.checked import CHECKED_COL
from histocoder.data.examples import CODES, LANG_COL, ExampleFiles, Examples, is_codes, row_schema
from histocoder.data.labels import LabelRules
from histocoder.data.languages import language_code
from histocoder.data.normalize import description_keys, normalize
from histocoder.data.table import open_table
from histocoder.formatters import Formatter
from histocoder.log import log

_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.2, 200
_FEWEST = 20  # number of corrections from which some are held out: a fifth of fewer shows nothing
_ANY = "unk"  # language of a correction that applies to every language
_Key = tuple[str, str]  # a spelling, or the key of a description, and language


class _Correction(NamedTuple):
    text: str
    key: str  # see `description_keys`
    codes: list[str | None]


class Corrections:
    """Descriptions with checked codes; of several for the same description the last one counts.

    One applies to all spellings with its key that have none of their own, in its language if it has one. (Spellings
    that differ in accents may be two occupations, as bank and bänk are.)
    """

    def __init__(self, target_cols: Sequence[str], default_language: str) -> None:
        self._target_cols, self._default_language = tuple(target_cols), default_language
        self._found: dict[_Key, _Correction] = {}  # by spelling
        self._by_key: dict[_Key, _Key] = {}  # key -> last of its spellings
        self._used: set[_Key] = set()
        self._held_out: set[str] = set()  # keys

    def __len__(self) -> int:
        return len(self._found)

    @property
    def codes(self) -> set[str]:
        """All codes that occur."""
        return {code for one in self._found.values() for code in one.codes if code is not None}

    def add(self, examples: Examples) -> None:
        spellings, rows = normalize(examples.texts, "lower"), examples.codes.to_numpy(dtype=object).tolist()
        found = zip(examples.texts, description_keys(examples.texts), spellings, examples.langs, rows, strict=True)
        for text, key, spelling, lang, codes in found:
            self._found[spelling, lang] = _Correction(text, key, codes)
            self._by_key[key, lang] = spelling, lang

    def hold_out(self, seed: int) -> int:
        """Set a fifth aside, about 200 at most, to compare models on; return how many.

        The choice depends on the hashes of seed and description alone, so that a later run with more corrections never
        trains on what is held out here, or the other way round, except for those beyond 200.
        """
        if len(self) < _FEWEST:
            return 0
        keys = {one.key for one in self._found.values()}
        digests = {key: hashlib.sha256(f"{seed} {key}".encode()).digest()[:8] for key in keys}
        units = {key: int.from_bytes(digest, "big") / 2**64 for key, digest in digests.items()}
        chosen = sorted((key for key, unit in units.items() if unit < _HELD_OUT_SHARE), key=units.__getitem__)
        self._held_out = set(chosen[:_MOST_HELD_OUT])
        return sum(one.key in self._held_out for one in self._found.values())

    def apply(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray, np.ndarray, np.ndarray]:
        """Return checked rows, which have a `key`, with corrected codes, and masks of shape (n,).

        The masks are those of rows with corrected codes, and, in whatever language, of rows whose description has a
        correction to train on, and of those whose correction is held out. No dropped row is among them.
        """
        langs, keys = rows["lang"].to_pylist(), rows["key"].to_pylist()
        is_kept = np.asarray(rows["reason"].is_null())
        known = {one.key for one in self._found.values()} - self._held_out
        is_held_out, is_known = (
            np.array([key in some for key in keys], dtype=bool) & is_kept for some in (self._held_out, known)
        )
        index = np.flatnonzero(is_known | is_held_out)
        found: dict[int, _Key] = {}
        for row, spelling in zip(index.tolist(), normalize(rows["text"].take(index).to_pylist(), "lower"), strict=True):
            own = [(spelling, lang) for lang in (langs[row], _ANY)]
            other = [self._by_key.get((keys[row], lang)) for lang in (langs[row], _ANY)]
            if place := next((place for place in (*own, *other) if place in self._found), None):
                found[row] = place
        self._used.update(found.values())
        is_corrected = np.zeros(len(rows), dtype=bool)
        is_corrected[list(found)] = True
        for i, name in enumerate(filter(is_codes, rows.schema.names if found else ())):
            column = rows[name].to_pylist()
            for row, place in found.items():
                column[row] = self._found[place].codes[i]
            rows = rows.set_column(rows.schema.get_field_index(name), name, pa.array(column, pa.string()))
        return rows, is_corrected & ~is_held_out, is_known, is_held_out

    def others(self) -> pa.RecordBatch:
        """Return the corrections that were in no row and are not held out, as checked rows."""
        return self._rows(
            at for at, one in self._found.items() if at not in self._used and one.key not in self._held_out
        )

    def held_out(self) -> pa.RecordBatch:
        """Return the held-out corrections as checked rows."""
        return self._rows(at for at, one in self._found.items() if one.key in self._held_out)

    def _rows(self, places: Iterable[_Key]) -> pa.RecordBatch:
        found = {place: self._found[place] for place in places}
        columns = {
            "text": [one.text for one in found.values()],
            "lang": [self._default_language if lang == _ANY else lang for _, lang in found],
            **{f"{CODES}{name}": [one.codes[i] for one in found.values()] for i, name in enumerate(self._target_cols)},
        }
        schema = row_schema(self._target_cols)
        nothing = [None] * len(found)
        return pa.RecordBatch.from_pydict({name: columns.get(name, nothing) for name in schema.names}, schema=schema)


def read_corrections(
    config: PrepareConfig, formatter: Formatter, rules: LabelRules, known: Collection[str] = ()
) -> Corrections:
    """Read the files of `--corrections`, as `histocoder review` writes them and a person fills them in.

    For `rules` and `known` see `ExampleFiles`.

    Raises UserError if a file lacks a column, a checked code does not fit, or nothing is checked.
    """
    corrections = Corrections(config.target_cols, language_code(config.language))
    for path in map(Path, config.corrections or ()):
        columns = [*config.target_cols[1:], *([config.language_col] if config.language_col else [])]
        needed = [config.input_col, CHECKED_COL, config.target_cols[0]]
        file = open_table(path, needed, optional=columns, codes=config.target_cols)
        if lacking := [name for name in config.target_cols[1:] if not file.has(name)]:
            names = ", ".join(map(repr, lacking))
            log.info(f"{path} has no column {names}: the rows that it corrects get no such codes.")
        has_language = config.language_col is not None and file.has(config.language_col)
        if config.language_col and not has_language:
            log.info(
                f"{path} has no column {config.language_col!r}; its codes apply to descriptions in every language."
            )
        files = ExampleFiles(
            (path,),
            config.target_cols,
            formatter,
            input_col=config.input_col,
            language_col=config.language_col or LANG_COL,
            language=None if has_language else _ANY,
            known=known,
            rules=rules,
        )
        for examples in files.chunks(say=log.info):
            corrections.add(examples.coded())
    return corrections
