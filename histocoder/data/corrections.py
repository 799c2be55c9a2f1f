"""Codes that a person has checked; they override what the data say of the same descriptions."""

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from histocoder.config import PrepareConfig
from histocoder.data.codes import LabelRules
from histocoder.data.example_files import CHECKED_COL, ExampleFiles
from histocoder.data.examples import CODES, LANG_COL, Examples, is_codes, row_schema
from histocoder.data.languages import Language
from histocoder.data.normalize import description_keys
from histocoder.data.table import open_table
from histocoder.formatters import Formatter
from histocoder.log import log

_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.2, 200
_FEWEST = 20  # number of corrections from which some are held out: a fifth of fewer shows nothing
_ANY = Language()  # that of a correction that applies to every language


class Corrections:
    """Descriptions with checked codes, by their keys and languages; of several for one description the last counts."""

    def __init__(self, target_cols: Sequence[str], default_language: Language) -> None:
        self._target_cols, self._default_language = tuple(target_cols), default_language
        self._found: dict[tuple[str, str], tuple[str, list[str | None]]] = {}  # key, language -> description, codes
        self._used: set[tuple[str, str]] = set()
        self._held_out: set[str] = set()  # keys

    def __len__(self) -> int:
        return len(self._found)

    @property
    def codes(self) -> set[str]:
        """All codes that occur."""
        return {code for _, codes in self._found.values() for code in codes if code is not None}

    def add(self, examples: Examples) -> None:
        rows = examples.codes.to_numpy(dtype=object).tolist()
        keys = zip(description_keys(examples.texts), examples.langs, strict=True)
        self._found |= dict(zip(keys, zip(examples.texts, rows, strict=True), strict=True))

    def hold_out(self, seed: int) -> int:
        """Set a fifth aside, about 200 at most, to compare models on; return how many.

        The choice depends on the hashes of seed and description alone, so that a later run with more corrections never
        trains on what is held out here, or the other way round, except for those beyond 200.
        """
        if len(self) < _FEWEST:
            return 0
        digests = {key: hashlib.sha256(f"{seed} {key}".encode()).digest()[:8] for key, _ in self._found}
        units = {key: int.from_bytes(digest, "big") / 2**64 for key, digest in digests.items()}
        chosen = sorted((key for key, unit in units.items() if unit < _HELD_OUT_SHARE), key=units.__getitem__)
        self._held_out = set(chosen[:_MOST_HELD_OUT])
        return sum(key in self._held_out for key, _ in self._found)

    def apply(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray, np.ndarray, np.ndarray]:
        """Return checked rows, which have a `key`, with corrected codes, and masks of shape (n,).

        The masks are those of rows with corrected codes, and, in whatever language, of rows whose description has a
        correction to train on, and of those whose correction is held out. No dropped row is among them.
        """
        langs, keys = rows["lang"].to_pylist(), rows["key"].to_pylist()
        is_kept = np.asarray(rows["reason"].is_null())
        known = {key for key, _ in self._found} - self._held_out
        is_held_out, is_known = (
            np.array([key in some for key in keys], dtype=bool) & is_kept for some in (self._held_out, known)
        )
        found: dict[int, tuple[str, str]] = {}
        for row in np.flatnonzero(is_known | is_held_out).tolist():
            own, of_all = (keys[row], langs[row]), (keys[row], str(_ANY))
            if own in self._found or of_all in self._found:
                found[row] = own if own in self._found else of_all
        self._used.update(found.values())
        is_corrected = np.zeros(len(rows), dtype=bool)
        is_corrected[list(found)] = True
        for i, name in enumerate(filter(is_codes, rows.schema.names if found else ())):
            column = rows[name].to_pylist()
            for row, own_key in found.items():
                column[row] = self._found[own_key][1][i]
            rows = rows.set_column(rows.schema.get_field_index(name), name, pa.array(column, pa.string()))
        return rows, is_corrected & ~is_held_out, is_known, is_held_out

    def others(self) -> pa.RecordBatch:
        """Return the corrections that were in no row and are not held out, as checked rows."""
        return self._rows([one for one in self._found if one not in self._used and one[0] not in self._held_out])

    def held_out(self) -> pa.RecordBatch:
        """Return the held-out corrections as checked rows."""
        return self._rows([one for one in self._found if one[0] in self._held_out])

    def _rows(self, chosen: Sequence[tuple[str, str]]) -> pa.RecordBatch:
        columns = {
            "text": [self._found[one][0] for one in chosen],
            "lang": [self._default_language if lang == _ANY else lang for _, lang in chosen],
            **{
                f"{CODES}{name}": [self._found[one][1][i] for one in chosen] for i, name in enumerate(self._target_cols)
            },
        }
        schema = row_schema(self._target_cols)
        nothing = [None] * len(chosen)
        return pa.RecordBatch.from_pydict({name: columns.get(name, nothing) for name in schema.names}, schema=schema)


def read_corrections(
    config: PrepareConfig, formatter: Formatter, rules: LabelRules, known: Collection[str] = ()
) -> Corrections:
    """Read the files of `--corrections`, as `histocoder review` writes them and a person fills them in.

    For `rules` and `known` see `ExampleFiles`.

    Raises UserError if a file lacks a column, a checked code does not fit, or nothing is checked.
    """
    corrections = Corrections(config.target_cols, Language(config.language))
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
