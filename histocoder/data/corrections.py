"""Corrections of a person, some of which are held out to compare the new model with the one
before.
"""

import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.config import PrepareConfig
from histocoder.data.examples import ATTRIBUTES, LANG_COL, is_codes
from histocoder.data.labelled_files import CHECKED_COL, LabelledFiles
from histocoder.errors import counted
from histocoder.formatters import MISSING
from histocoder.log import log
from histocoder.tables.table import open_table
from histocoder.text.languages import Language
from histocoder.text.normalize import description_keys
from histocoder.text.tokenizers import UNKNOWN

_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.2, 200
_FEWEST = 20  # number of corrections from which some are held out: a fifth of fewer shows nothing
_ANY = "*"  # language of a correction that applies to every one, as it does if it states none


class Corrections:
    """Descriptions with checked codes, by their keys and languages; of several for one description
    the last counts.

    `rows` has the columns of checked rows and `key`; the language of those that apply to every one
    is `_ANY`, but a correction of a row's own language comes first. `rejected` are those that can't
    be used, with the reasons.
    """

    def __init__(
        self, rows: pa.Table, default_language: Language, rejected: pa.Table | None = None
    ) -> None:
        self.rejected = rows.slice(0, 0) if rejected is None else rejected
        distinct = rows.to_pandas().drop_duplicates(
            ["key", "lang", *filter(is_codes, rows.column_names)], keep="last"
        )
        self._rows = distinct.drop_duplicates(["key", "lang"], keep="last", ignore_index=True)
        if number := len(distinct) - len(self):
            replaced = counted(number, "correction is", "corrections are")
            log.info(
                f"{replaced} replaced by a later one, which has other codes for the same "
                "description."
            )
        self._index = pd.MultiIndex.from_frame(self._rows[["key", "lang"]])
        self._default_language, self._schema = default_language, rows.schema
        self._is_used, self._is_held_out = np.zeros((2, len(self)), dtype=bool)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def keys(self) -> set[str]:
        """Keys of all descriptions."""
        return {*self._rows["key"]}

    @property
    def codes(self) -> set[str]:
        """All codes that occur."""
        return {
            code for name in filter(is_codes, self._rows) for code in self._rows[name].dropna()
        } - {MISSING}

    def hold_out(self, seed: int) -> int:
        """Set a fifth aside, about 200 at most, to compare models on; return how many.

        The choice depends on the hashes of seed and description alone, so that a later run with
        more corrections never trains on what is held out here, or the other way round, except for
        those beyond 200.
        """
        if len(self) < _FEWEST:
            return 0
        digests = {
            key: hashlib.sha256(f"{seed} {key}".encode()).digest()[:8] for key in self._rows["key"]
        }
        units = {key: int.from_bytes(digest, "big") / 2**64 for key, digest in digests.items()}
        chosen = sorted(
            (key for key, unit in units.items() if unit < _HELD_OUT_SHARE), key=units.__getitem__
        )
        self._is_held_out = self._rows["key"].isin(chosen[:_MOST_HELD_OUT]).to_numpy()
        return int(self._is_held_out.sum())

    def apply(
        self, rows: pa.RecordBatch
    ) -> tuple[pa.RecordBatch, np.ndarray, np.ndarray, np.ndarray]:
        """Return checked rows, which have a `key`, with corrected codes, and masks of shape (n,).

        The masks are those of rows with corrected codes, and, in whatever language, of rows whose
        description has a correction to train on, and of those whose correction is held out. No
        dropped row is among them.
        """
        frame, is_kept = (
            rows.select(["key", "lang"]).to_pandas(),
            np.asarray(rows["reason"].is_null()),
        )
        held_out = {*self._rows["key"][self._is_held_out]}
        is_held_out = frame["key"].isin(held_out).to_numpy() & is_kept
        is_known = frame["key"].isin(self.keys - held_out).to_numpy() & is_kept
        found = self._index.get_indexer(pd.MultiIndex.from_frame(frame))
        of_all = self._index.get_indexer(pd.MultiIndex.from_frame(frame.assign(lang=_ANY)))
        found = np.where(is_known | is_held_out, np.where(found < 0, of_all, found), -1)
        self._is_used[found[found >= 0]] = True
        for i, name in enumerate(rows.schema.names):
            if (is_codes(name) or name.startswith(ATTRIBUTES)) and (found >= 0).any():
                corrected = pa.array(self._rows[name], pa.string()).take(
                    pa.array(found, mask=found < 0)
                )
                is_given = pa.array(found >= 0) if is_codes(name) else corrected.is_valid()
                rows = rows.set_column(i, name, pc.if_else(is_given, corrected, rows[name]))
        return rows, (found >= 0) & ~is_held_out, is_known, is_held_out

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield as checked rows the corrections that were in no row and are not held out, then
        those that are.
        """
        for mask in (~self._is_used & ~self._is_held_out, self._is_held_out):
            rows = self._rows[mask].assign(row=None, line=None)
            rows["lang"] = rows["lang"].where(rows["lang"] != _ANY, self._default_language)
            yield pa.RecordBatch.from_pandas(rows, self._schema, preserve_index=False)


def read_corrections(
    config: PrepareConfig, table: LabelledFiles, known: Collection[str] = ()
) -> Corrections:
    """Read the files of `--corrections`, as `histocoder review` writes them and a person fills them
    in.

    A checked row without a code is a decision as well: its description has no occupation. One
    without a language counts for every language. Codes are read as those of the `table` that is
    corrected; for `known` see `LabelledFiles`.

    Raises UserError if a file lacks a column, a checked code does not fit, or nothing is checked.
    """
    parts: list[pa.Table] = []
    for path in map(Path, config.corrections or ()):
        file = open_table(path, [config.input_col, CHECKED_COL, config.target_cols[0]])
        has_language = config.column_of_languages is not None and file.has(
            config.column_of_languages
        )
        if config.column_of_languages and not has_language:
            log.info(
                f"{path} has no column {config.column_of_languages!r}; its codes apply to "
                "all languages."
            )
        files = LabelledFiles(
            (path,),
            config.target_cols,
            table.formatter,
            input_col=config.input_col,
            language_col=config.column_of_languages or LANG_COL,
            language=None if has_language else _ANY,
            known=known,
            rules=table.rules,
            column=table.column,
            attribute_cols=config.attribute_cols or (),
            opened={path: file},
        )
        rows = pa.Table.from_batches(list(files.rows(say=log.info)))
        reasons = pc.binary_join_element_wise(str(path), rows["reason"], ": ")
        parts.append(rows.set_column(rows.schema.get_field_index("reason"), "reason", reasons))
    rows = pa.concat_tables(parts)
    keys = pa.array(description_keys(rows["text"].fill_null("").to_pylist()), pa.string())
    langs = pc.if_else(pc.equal(rows["lang"], UNKNOWN), _ANY, rows["lang"])
    rows = rows.append_column("key", keys).set_column(
        rows.schema.get_field_index("lang"), "lang", langs
    )
    is_kept = rows["reason"].is_null()
    rejected = rows.filter(pc.invert(is_kept))
    return Corrections(rows.filter(is_kept), Language(config.language), rejected)
