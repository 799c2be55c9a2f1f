"""Codes tables block by block, each distinct description once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.checkpoints.model_files import local_folder
from histocoder.classes.class_columns import classes_of
from histocoder.classes.crosswalk import CODE_COL
from histocoder.config import SOURCE_COL, PredictConfig
from histocoder.errors import UserError
from histocoder.inference.coder import Coder, ShowProgress
from histocoder.inference.descriptions import Descriptions, DistinctDescriptions
from histocoder.inference.known import Known, KnownCodes
from histocoder.inference.predictions import Prediction, code_columns
from histocoder.tables.output import check_new_columns
from histocoder.tables.table import strings
from histocoder.text.languages import Language, chosen_language

REMEMBERED = 2_000_000
"""Number of distinct descriptions whose codes are kept for later blocks."""
REMEMBERED_CELLS = 40_000_000
"""Number of cells of their codes."""
MAX_BLOCK_ROWS = 100_000
"""Number of rows of a block."""
MAX_BLOCK_CELLS = 2_000_000
"""Number of cells of their codes."""
MIN_LIKELY_PROBABILITY = 0.01
"""Probability of a status and so on, from which on it counts in expected values."""
USUAL_SHARE = 0.2
"""Share of validation descriptions whose confidence is below `ModelConfig.usual_confidence`."""
UNUSUAL_SHARE = 0.5
"""Share of a file's descriptions with less confidence, which shows the file to be unlike."""
MIN_DESCRIPTIONS = 50
"""Number of descriptions that show it."""
LIKELY = "histocoder:likely:"
"""Beginning of the names of columns of candidates, in tables of codes."""
_DECIMALS = 6


class TableCoder:
    """Finds the distinct descriptions of a table's blocks, and gives each row the codes of its
    description.

    `schema` has the columns that are appended: of codes, and of their `classes` and groups, which
    count the rows that `append` has seen. `block_rows` is the number of rows of a block that has
    room in memory.
    """

    def __init__(self, coder: Coder, config: PredictConfig, *, known: Known | None = None) -> None:
        self._coder = coder
        self._config = config
        self._known = known
        self._needs_candidates = bool(config.classes or config.levels)
        self._remembered = self.code(Descriptions([], [], np.arange(0)))
        columns = self._remembered.schema
        fields = [field for field in columns if not field.name.startswith(LIKELY)]
        names = [field.name for field in fields]

        # Classes are of a row's codes, of which alternatives are none.
        alternatives = f"{config.columns}alt_"
        code_names = [name for name in code_columns(names) if not name.startswith(alternatives)]
        self.classes = classes_of(
            code_names,
            config,
            config.classes,
            prefix=config.columns,
            codes=coder.codes,
            expect=True,
        )
        for classes in self.classes:
            fields += classes.fields
        self.schema = pa.schema(fields)

        # Rows of mode full are wide, and fewer of them have room in memory.
        width = len(columns)
        self.block_rows = min(MAX_BLOCK_ROWS, -(-MAX_BLOCK_CELLS // width))
        self._room = min(REMEMBERED, REMEMBERED_CELLS // width)
        self._distinct = DistinctDescriptions(coder.model.config.languages, room=self._room)
        # descriptions by the model's confidence; known ones are in neither number
        self._num_usual = 0
        self._num_low = 0

    def find(self, block: pa.Table) -> Descriptions:
        """Return a block's descriptions that no earlier block has, and the index of each row's."""
        columns = []
        for name in self._config.settings_of_columns:
            columns.append(strings(block[name], f"The column {name!r}").to_pylist())
        texts = columns[0]
        langs = columns[1] if len(columns) > 1 else [self._config.language] * len(block)
        return self._distinct.add(texts, langs)

    def code(self, new: Descriptions, *, progress: ShowProgress = False) -> pa.Table:
        """Return the columns of codes of distinct descriptions.

        The column `source`, if there are hand-coded ones, is "known" or "model". The probability of
        known codes is their share. With classes or groups, columns that begin with `LIKELY` list
        the codes and attributes that each description may have; see `Classes.append`.
        """
        known: list[KnownCodes | None] = [None] * len(new.texts)
        if self._known is not None:
            known = self._known.find(new.texts, new.langs)
        is_new = np.array([answer is None for answer in known], dtype=bool)

        # The model is asked about the descriptions that are not known.
        asked = Descriptions(
            list(itertools.compress(new.texts, is_new)),
            list(itertools.compress(new.langs, is_new)),
            np.where(is_new, is_new.cumsum() - 1, -1),
        )
        ranked = None
        if self._needs_candidates:
            answer, ranked = self._coder.code_ranked(asked, self._config, progress=progress)
        else:
            answer = self._coder.code(asked, self._config, progress=progress)

        # Known codes are written where the model was not asked.
        for row, known_codes in enumerate(known):
            if known_codes is not None:
                answer.write_known(row, known_codes.codes, known_codes.share)
                if ranked is not None:
                    ranked.write_known(row, known_codes.codes[:1], known_codes.share)
        if callable(progress) and len(asked.texts) < len(known):
            progress(len(known) - len(asked.texts))

        frame = answer.frame(self._coder.model.config, has_alternatives=self._config.mode == "topk")
        if self._known is not None:
            frame[SOURCE_COL] = np.where(is_new, "model", "known").astype(object)
        columns = {}
        for name, column in frame.round(_DECIMALS).items():
            dtype = pa.float64() if column.dtype.kind == "f" else pa.string()
            columns[f"{self._config.columns}{name}"] = pa.array(column, dtype)
        if ranked is not None:
            columns |= _candidates(answer, ranked)
        return pa.table(columns)

    def append(self, block: pa.Table, codes: Sequence[pa.Table], rows: np.ndarray) -> pa.Table:
        """Return a block with its language, if one was given for all rows, and the columns of
        `schema` behind its own.

        `codes` are those of the block's new descriptions, `rows` the indices of all its rows'; see
        `find`. Blocks come in the order in which they were found.
        """
        self._count_confidence(codes)
        # `rows` index what is remembered, then what is new, as `DistinctDescriptions.add` counts.
        all_codes = pa.concat_tables([self._remembered, *codes]).combine_chunks()
        if len(self._remembered) < self._room:
            self._remembered = all_codes

        # A language given for all rows has the name of training data's column, unless it is taken.
        if self._config.language != "unk":
            name = "lang"
            while name in block.column_names:
                name = f"pred_{name}"
            language = str(Language(self._config.language))
            block = block.append_column(name, pa.repeat(language, len(block)))

        # Candidates are not written; from them classes derive the values of their columns.
        codes_of_rows = all_codes.take(pa.array(rows, mask=rows < 0))
        likely = {}
        for name, column in zip(codes_of_rows.column_names, codes_of_rows.columns, strict=True):
            if name.startswith(LIKELY):
                likely[name.removeprefix(LIKELY)] = column.combine_chunks()
            else:
                block = block.append_column(name, column)
        for classes in self.classes:
            block = classes.append(block, likely)
        return block

    def _count_confidence(self, codes: Sequence[pa.Table]) -> None:
        """Count the descriptions that the model is as sure of as usual, if it is asked as usual."""
        if self._config.mode != self._coder.mode:
            return
        usual_confidence = self._coder.model.config.usual_confidence
        for part in codes:
            conf = part[f"{self._config.columns}conf"].to_numpy()
            if self._known is not None:
                source = part[f"{self._config.columns}{SOURCE_COL}"]
                conf = conf[pc.equal(source, "model").to_numpy()]
            self._num_usual += int((conf >= usual_confidence).sum())
            self._num_low += int((conf < usual_confidence).sum())

    def unlike(self) -> str | None:
        """Return a sentence if the descriptions of all blocks seem unlike those that the model was
        trained on.
        """
        number = self._num_usual + self._num_low
        if number < MIN_DESCRIPTIONS or self._num_low <= UNUSUAL_SHARE * number:
            return None
        low_percent = 100 * self._num_low / number
        usual_confidence = self._coder.model.config.usual_confidence
        return (
            f"{self._config.input} is unlike the training data: {low_percent:.0f} % of its "
            f"descriptions have a confidence below {usual_confidence:.2f}, as "
            f"{100 * USUAL_SHARE:.0f} % of the validation data have. Check the language."
        )


def _candidates(answer: Prediction, ranked: Prediction) -> dict[str, pa.Array]:
    """Return the columns that list the codes and attributes that each description may have."""
    is_likely = ranked.codes.astype(bool)
    columns = {f"{LIKELY}{CODE_COL}": _lists(ranked.codes, ranked.probs, is_likely)}
    for name, (labels, probs) in answer.attributes.items():
        categories = np.broadcast_to(np.array(labels, dtype=object), probs.shape)
        is_likely = probs >= MIN_LIKELY_PROBABILITY
        columns[f"{LIKELY}{name}"] = _lists(categories, probs, is_likely)
    return columns


def _lists(values: np.ndarray, probs: np.ndarray, is_likely: np.ndarray) -> pa.Array:
    """Return for each row a list of the likely ones among its values (n, K), with their
    probabilities p.
    """
    likely = pa.StructArray.from_arrays(
        [pa.array(values[is_likely], pa.string()), pa.array(probs[is_likely], pa.float64())],
        names=["value", "p"],
    )
    ends = pa.array(np.append(0, is_likely.sum(1).cumsum()), pa.int32())
    return pa.ListArray.from_arrays(ends, likely)


@dataclass(frozen=True)
class BlockCoder:
    """Codes blocks of a cluster's table; it is sent to all workers, each of which opens the model
    once.
    """

    model: str
    config: PredictConfig
    device: str
    precision: str

    @classmethod
    def of(
        cls,
        model: str | Path,
        header: Sequence[str],
        *,
        device: str,
        precision: str,
        **options: Any,
    ) -> BlockCoder:
        """Compare the model and the columns with `options`, fields of `PredictConfig`; raise a
        UserError.
        """
        # Workers are on other machines: a mistake is told here, before any of them starts.
        folder = str(Path(local_folder(model)).resolve())
        coder = Coder.from_pretrained(folder, "cpu")
        config = PredictConfig(**{"input": "The table", **options})
        config = replace(config, mode=config.mode or coder.mode)
        for column in config.settings_of_columns:
            if column not in header:
                raise UserError(
                    f"{config.input} has no column {column!r}; it has: {', '.join(header)}."
                )
        names = TableCoder(coder, config).schema.names
        check_new_columns(names, path=config.input, taken=header, prefix=f"pred_{config.columns}")
        chosen_language(config.language, coder.model.config.languages)
        return cls(folder, config, device, precision)

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        """Yield a block with the codes' columns behind its own, in smaller ones; at least one,
        which may be empty.
        """
        coder = _open(self)
        for start in range(0, max(len(block), 1), coder.block_rows):
            part = block.slice(start, coder.block_rows)
            try:
                new = coder.find(part)
                coded = coder.append(part, [coder.code(new)], new.rows)
            except BaseException:
                _open.cache_clear()  # it remembers descriptions that it has no codes of
                raise
            yield coded


@cache
def _open(job: BlockCoder) -> TableCoder:
    """Open a model, once in a process."""
    return TableCoder(
        Coder.from_pretrained(job.model, job.device, precision=job.precision), job.config
    )
