"""Corrections of a person, some of which are held out to compare the new model with the one
before.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.config import PrepareConfig
from histocoder.data.examples import ATTRIBUTES_PREFIX, LANG_COL, NO_SPLIT, SPLITS, TRAIN, is_codes
from histocoder.data.labelled_files import CHECKED_COL, LabelledFiles, checked_tables
from histocoder.data.labels import more_names
from histocoder.errors import UserError, counted
from histocoder.formatters import MISSING
from histocoder.log import log
from histocoder.tables.table import TableFile, open_table
from histocoder.text.languages import Language
from histocoder.text.normalize import description_keys
from histocoder.text.tokenizers import UNKNOWN

HELD_OUT_SHARE = 0.2
MAX_HELD_OUT = 200
MIN_TO_HOLD_OUT = 20
"""Number of corrections from which some are held out: a fifth of fewer shows nothing."""
ANY_LANGUAGE = "*"
"""Language of a correction that applies to every one, as it does if it states none."""


class Corrections:
    """Descriptions with checked codes, by their keys and languages; of several for one description
    the last counts.

    `rows` has the columns of checked rows and `key`; the language of those that apply to every one
    is `ANY_LANGUAGE`, but a correction of a row's own language comes first. `rejected` are those
    that can't be used, with the reasons.
    """

    def __init__(self, rows: pa.Table, default_language: Language, rejected: pa.Table) -> None:
        self.rejected = rejected
        self.num_corrected = 0
        """Number of rows to which `apply` has given other codes, but for those that are held out."""
        self._schema = rows.schema
        self._default_language = default_language

        # the last correction of a description counts
        code_cols = filter(is_codes, rows.column_names)
        distinct = rows.to_pandas().drop_duplicates(["key", "lang", *code_cols], keep="last")
        self._rows = distinct.drop_duplicates(["key", "lang"], keep="last", ignore_index=True)
        self._index = pd.MultiIndex.from_frame(self._rows[["key", "lang"]])
        self._is_used = np.zeros(len(self._rows), dtype=bool)
        self._is_held_out = np.zeros(len(self._rows), dtype=bool)

        # one that only repeats the codes of another is not worth a notice
        num_replaced = len(distinct) - len(self._rows)
        if num_replaced:
            replaced = counted(num_replaced, "correction is", "corrections are")
            log.info(
                f"{replaced} replaced by a later one, which has other codes for the same "
                "description."
            )

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def keys(self) -> set[str]:
        """Keys of all descriptions."""
        return set(self._rows["key"])

    @property
    def codes(self) -> set[str]:
        """All codes that occur."""
        columns = [self._rows[name].dropna() for name in filter(is_codes, self._rows)]
        return set().union(*columns) - {MISSING}

    def hold_out(self, seed: int) -> int:
        """Set a fifth aside, about 200 at most, to compare models on; return how many.

        The choice depends on the hashes of seed and description alone, so that a later run with
        more corrections never trains on what is held out here, or the other way round, except for
        those beyond 200.
        """
        if len(self) < MIN_TO_HOLD_OUT:
            return 0

        # the descriptions with the lowest hashes, whatever else is corrected
        units = {}
        for key in self._rows["key"]:
            digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
            unit = int.from_bytes(digest[:8], "big") / 2**64
            if unit < HELD_OUT_SHARE:
                units[key] = unit
        chosen = sorted(units, key=units.__getitem__)[:MAX_HELD_OUT]
        self._is_held_out = self._rows["key"].isin(chosen).to_numpy()
        return int(self._is_held_out.sum())

    def apply(self, rows: pa.RecordBatch, split: np.ndarray) -> tuple[pa.RecordBatch, np.ndarray]:
        """Return checked rows, which have a `key`, with corrected codes, and their splits.

        Rows whose description has a correction, in whatever language, are to train on; if that
        correction is held out, they are in no split. Dropped rows stay as they are.
        """
        if not len(self):
            return rows, split

        # a description that a person has decided on is no test of the model
        frame = rows.select(["key", "lang"]).to_pandas()
        is_usable = np.asarray(rows["reason"].is_null())
        held_out_keys = set(self._rows["key"][self._is_held_out])
        is_held_out = frame["key"].isin(held_out_keys).to_numpy() & is_usable
        has_decided_key = frame["key"].isin(self.keys).to_numpy() & is_usable
        split = np.where(has_decided_key, SPLITS.index(TRAIN), split)
        split = np.where(is_held_out, NO_SPLIT, split)

        # a correction of the row's own language comes first; -1: there is none
        index_in_lang = self._index.get_indexer(pd.MultiIndex.from_frame(frame))
        any_lang = frame.assign(lang=ANY_LANGUAGE)
        index_in_any = self._index.get_indexer(pd.MultiIndex.from_frame(any_lang))
        index = np.where(index_in_lang < 0, index_in_any, index_in_lang)
        is_corrected = has_decided_key & (index >= 0)
        self._is_used[index[is_corrected]] = True
        self.num_corrected += int((is_corrected & ~is_held_out).sum())
        if not is_corrected.any():
            return rows, split

        # rows without a correction take null, and stay as they are
        index_or_null = pa.array(index, mask=~is_corrected)
        for i, name in enumerate(rows.schema.names):
            if is_codes(name) or name.startswith(ATTRIBUTES_PREFIX):
                cells = pa.array(self._rows[name], pa.string()).take(index_or_null)
                # all columns of codes are replaced; an attribute that is not stated stays
                is_replaced = pa.array(is_corrected) if is_codes(name) else cells.is_valid()
                rows = rows.set_column(i, name, pc.if_else(is_replaced, cells, rows[name]))
        return rows, split

    def added(self) -> pa.RecordBatch:
        """Return the corrections for which `apply` found no row in any batch, as checked rows: they
        are training data.
        """
        return self._checked_rows(~self._is_used & ~self._is_held_out)

    def held_out(self) -> pa.RecordBatch:
        """Return the corrections that are held out, as checked rows."""
        return self._checked_rows(self._is_held_out)

    def _checked_rows(self, is_chosen: np.ndarray) -> pa.RecordBatch:
        rows = self._rows[is_chosen].assign(row=None, line=None)
        rows["lang"] = rows["lang"].where(rows["lang"] != ANY_LANGUAGE, self._default_language)
        return pa.RecordBatch.from_pandas(rows, self._schema, preserve_index=False)


def _refuse_further_codes(file: TableFile, target_cols: tuple[str, ...]) -> None:
    """Raise a UserError if a file has codes in a column that follows the target columns."""
    names = more_names(target_cols, len(target_cols) + 1)
    if not file.has(names[-1]):
        return
    for table in checked_tables(file, names[-1:], lambda _: None):
        if len(table.columns[names[-1]].drop_null()):
            raise UserError(
                f"{file.path} has codes in {names[-1]!r}, too, which --target-cols does not name.",
                target_cols=names,
            )


def read_corrections(config: PrepareConfig, corrected_files: LabelledFiles) -> Corrections:
    """Read the files of `--corrections`, as `histocoder review` writes them and a person fills them
    in; without any, no description is corrected.

    A checked row without a code is a decision as well: its description has no occupation. One
    without a language counts for every language. Codes are read as those of the
    `corrected_files`.

    Raises UserError if a file lacks a column, a checked code does not fit, or nothing is checked.
    """
    parts = [corrected_files.schema.empty_table()]
    language_col = config.column_of_languages
    for path in map(Path, config.corrections or ()):
        file = open_table(path, [config.input_col, CHECKED_COL, config.target_cols[0]])
        _refuse_further_codes(file, config.target_cols)
        has_language = language_col is not None and file.has(language_col)
        if language_col is not None and not has_language:
            log.info(f"{path} has no column {language_col!r}; its codes apply to all languages.")

        # read like the corrected files, without what applies to those alone
        files = replace(
            corrected_files,
            paths=(path,),
            needed={},
            language_col=language_col or LANG_COL,
            language=None if has_language else ANY_LANGUAGE,
            key=None,
            known=corrected_files.known_codes,
            sheet=None,
            encoding=None,
            opened={path: file},
        )
        rows = pa.Table.from_batches(list(files.rows(say=log.info)))

        # reasons name the file; the null of a row that can be used stays null
        reasons = pc.binary_join_element_wise(str(path), rows["reason"], ": ")
        parts.append(_with_column(rows, "reason", reasons))

    # a correction is found by the key of its description
    rows = pa.concat_tables(parts)
    keys = description_keys(rows["text"].fill_null("").to_pylist())
    rows = rows.append_column("key", pa.array(keys, pa.string()))

    # one that states no language counts for every one
    is_unknown = pc.equal(rows["lang"], UNKNOWN)
    rows = _with_column(rows, "lang", pc.if_else(is_unknown, ANY_LANGUAGE, rows["lang"]))
    is_usable = rows["reason"].is_null()
    rejected = rows.filter(pc.invert(is_usable))
    return Corrections(rows.filter(is_usable), Language(config.language), rejected)


def _with_column(rows: pa.Table, name: str, column: pa.ChunkedArray) -> pa.Table:
    return rows.set_column(rows.schema.get_field_index(name), name, column)
