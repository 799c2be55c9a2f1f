"""Codes tables block by block, each distinct description once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from histocoder.checkpoints.model_files import local_folder
from histocoder.classes.class_columns import LIKELY, SHARE, classes_of
from histocoder.classes.crosswalk import CODE_COL
from histocoder.config import SOURCE_COL, PredictConfig
from histocoder.errors import UserError
from histocoder.inference.coder import Coder, ShowProgress
from histocoder.inference.descriptions import Descriptions, DistinctDescriptions
from histocoder.inference.known import Known, KnownCodes
from histocoder.inference.predictions import code_columns
from histocoder.tables.output import check_new_columns
from histocoder.tables.table import strings
from histocoder.text.languages import Language, chosen_language

REMEMBERED, REMEMBERED_CELLS = (
    500_000,
    10_000_000,
)  # distinct descriptions, and cells of their codes, kept for later
_BLOCK_ROWS, _BLOCK_CELLS = (
    100_000,
    2_000_000,
)  # largest number of rows of a block, and of cells of their codes
_DECIMALS = 6
_LIKELY = 0.01  # least probability of a status and so on that counts in expected values
USUAL_SHARE = (
    0.2  # share of validation descriptions whose confidence is below `ModelConfig.usual_confidence`
)
_UNUSUAL_SHARE, _FEWEST = (
    0.5,
    50,
)  # share of a file's descriptions that shows it to be unlike, if there are so many


class TableCoder:
    """Finds the distinct descriptions of a table's blocks, and gives each row the codes of its
    description.

    `schema` has the columns that are appended: of codes, and of their `classes` and groups, which
    count the rows that `append` has seen. `block_rows` is the number of rows of a block that has
    room in memory.
    """

    def __init__(self, coder: Coder, config: PredictConfig, *, known: Known | None = None) -> None:
        self._coder, self._config, self._known = coder, config, known
        self._remembered = self.code(Descriptions([], [], np.arange(0)))
        names, alternatives = self._remembered.column_names, f"{config.columns}alt_"
        columns = [name for name in code_columns(names) if not name.startswith(alternatives)]
        how: dict[str, Any] = {"prefix": config.columns, "codes": coder.codes, "expect": True}
        self.classes, width = classes_of(columns, config, config.classes, **how), len(names)
        own = [
            field for field in self._remembered.schema if not field.name.startswith((LIKELY, SHARE))
        ]
        self.schema = pa.schema(
            [*own, *(field for classes in self.classes for field in classes.fields)]
        )
        self.block_rows = min(_BLOCK_ROWS, -(-_BLOCK_CELLS // width))
        self._room = min(REMEMBERED, REMEMBERED_CELLS // width)
        self._distinct = DistinctDescriptions(coder.model.config.languages, room=self._room)
        self._num_usual = self._num_low = (
            0  # descriptions by the model's confidence; known ones are in neither
        )

    def find(self, block: pa.Table) -> Descriptions:
        """Return a block's descriptions that no earlier block has, and the index of each row's."""
        columns = self._config.settings_of_columns
        texts, *langs = (
            strings(block[name], f"The column {name!r}").to_pylist() for name in columns
        )
        return self._distinct.add(
            texts, langs[0] if langs else [self._config.language] * len(block)
        )

    def code(self, new: Descriptions, *, progress: ShowProgress = False) -> pa.Table:
        """Return the columns of codes of distinct descriptions.

        The column `source`, if there are hand-coded ones, is "known" or "model". The probability of
        known codes is their share.
        """
        known: list[KnownCodes | None] = [None] * len(new.texts)
        if self._known is not None:
            known = self._known.find(new.texts, new.langs)
        is_new = np.array([answer is None for answer in known], dtype=bool)
        texts, langs = (
            [values[row] for row in np.flatnonzero(is_new)] for values in (new.texts, new.langs)
        )
        asked = Descriptions(texts, langs, np.where(is_new, is_new.cumsum() - 1, -1))
        if self._config.classes or self._config.levels:
            found, ranked = self._coder.code_ranked(asked, self._config, progress=progress)
        else:
            found, ranked = self._coder.code(asked, self._config, progress=progress), None
        for row, answer in enumerate(known):
            if answer is not None:
                codes, found.conf[row] = answer
                found.codes[row, : len(codes)], found.probs[row, : len(codes)] = codes, answer.share
                if ranked is not None:
                    ranked.codes[row], ranked.probs[row, 0] = None, answer.share
                    ranked.codes[row, : len(codes[:1])] = codes[:1]
        if callable(progress) and len(texts) < len(known):
            progress(len(known) - len(texts))
        frame = found.frame(self._coder.model.config, has_alternatives=self._config.mode == "topk")
        if self._known is not None:
            frame[SOURCE_COL] = np.where(is_new, "model", "known").astype(object)
        frame = frame.round(_DECIMALS).add_prefix(self._config.columns)
        kinds = [pa.float64() if kind.kind == "f" else pa.string() for kind in frame.dtypes]
        schema = pa.schema(list(zip(frame.columns, kinds, strict=True)))
        table = pa.Table.from_pandas(frame, schema, preserve_index=False).replace_schema_metadata()
        if ranked is not None:
            likely = {CODE_COL: (ranked.codes, ranked.probs, ranked.codes.astype(bool))}
            for name, (labels, probs) in found.attributes.items():
                likely[name] = (
                    np.broadcast_to(np.array(labels, dtype=object), probs.shape),
                    probs,
                    probs >= _LIKELY,
                )
            for name, (values, shares, is_likely) in likely.items():
                ends = pa.array(np.append(0, is_likely.sum(1).cumsum()), pa.int32())
                for start, cells, kind in (
                    (LIKELY, values, pa.string()),
                    (SHARE, shares, pa.float64()),
                ):
                    lists = pa.ListArray.from_arrays(ends, pa.array(cells[is_likely], kind))
                    table = table.append_column(f"{start}{name}", lists)
        return table

    def append(self, block: pa.Table, codes: Sequence[pa.Table], rows: np.ndarray) -> pa.Table:
        """Return a block with its language, if one was given for all rows, and the columns of
        `schema` behind its own.

        `codes` are those of the block's new descriptions, `rows` the indices of all its rows'; see
        `find`. Blocks come in the order in which they were found.
        """
        if self._config.mode == self._coder.mode:
            usual = self._coder.model.config.usual_confidence
            for part in codes:
                conf = part[f"{self._config.columns}conf"]
                if self._known is not None:
                    conf = conf.filter(
                        pc.equal(part[f"{self._config.columns}{SOURCE_COL}"], "model")
                    )
                self._num_usual += int((conf.to_numpy() >= usual).sum())
                self._num_low += int((conf.to_numpy() < usual).sum())
        all_codes = pa.concat_tables([self._remembered, *codes]).combine_chunks()
        if len(self._remembered) < self._room:
            self._remembered = all_codes
        if self._config.language != "unk":
            name = "lang"
            while name in block.column_names:
                name = f"pred_{name}"
            block = block.append_column(
                name, pa.repeat(str(Language(self._config.language)), len(block))
            )
        of_rows = all_codes.take(pa.array(rows, mask=rows < 0))
        for name, column in zip(of_rows.column_names, of_rows.columns, strict=True):
            block = block.append_column(name, column)
        for classes in self.classes:
            block = classes.append(block)
        return block.drop_columns(
            [name for name in block.column_names if name.startswith((LIKELY, SHARE))]
        )

    def unlike(self) -> str | None:
        """Return a sentence if the descriptions of all blocks seem unlike those that the model was
        trained on.
        """
        number = self._num_usual + self._num_low
        if number < _FEWEST or self._num_low <= _UNUSUAL_SHARE * number:
            return None
        low, usual = 100 * self._num_low / number, self._coder.model.config.usual_confidence
        return (
            f"{self._config.input} is unlike the training data: {low:.0f} % of its "
            "descriptions have a confidence "
            f"below {usual:.2f}, as {100 * USUAL_SHARE:.0f} % of the validation data have. "
            "Check the language."
        )


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
