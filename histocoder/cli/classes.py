"""`histocoder classes`: give the codes of a table social classes."""

import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from histocoder.checkpoints.model_files import read_json
from histocoder.classes.class_columns import NUMBER_SUFFIXES, Classes, classes_of
from histocoder.classes.crosswalk import CODE_COL
from histocoder.classes.groups import system_of
from histocoder.cli.arguments import parse
from histocoder.cli.flags import ClassesFlags, PredictFlags
from histocoder.config.prediction import LEVELS, QUALIFIERS, ClassOptions
from histocoder.errors import UserError
from histocoder.evaluation.review_file import AnswerColumns
from histocoder.inference.provenance import provenance_file, write_provenance
from histocoder.log import log
from histocoder.tables.header import plain
from histocoder.tables.output import Form, check_kept, check_new_columns, check_output, write_table
from histocoder.tables.table import CHUNK_ROWS, TableFile, fingerprint, open_table


def run_classes(config: ClassesFlags) -> None:
    """Write the table with its classes and groups, and beside it where these come from and how many
    rows have which.
    """
    output = Path(config.output)
    check_output(output, inputs=(config.input, config.table), overwrite=config.overwrite)

    # the columns of codes, and of what a class depends on besides
    columns = config.settings_of_qualifiers | dict.fromkeys(config.code_cols or (), "code_cols")
    usual = (CODE_COL, f"{CODE_COL}_1", *QUALIFIERS)
    file = open_table(
        config.input, columns, optional=usual, sheet=config.sheet, encoding=config.file_encoding
    )
    code_cols = list(map(file.column, config.code_cols or _code_columns(file)))

    # what is added to them: values of the table, if there is one, then groups
    sources = classes_of(
        code_cols, config, config.table, codes=None, prefix=config.columns, expect=False
    )
    check_kept(file, output)
    for classes in sources:
        classes.check_header(file.path, file.header)
    new_names = [field.name for classes in sources for field in classes.fields]
    check_new_columns(
        new_names, path=file.path, taken=file.header, prefix=f"class_{config.columns}"
    )
    for notice in (*sources[0].values.notices, *file.notices):
        log.info(notice)

    # a block at a time, so that the file may be larger than memory
    blocks: Iterator[pa.Table] = _checked_size(output, file.chunks(chunk_rows=CHUNK_ROWS))
    for classes in sources:
        blocks = map(classes.append, blocks)
    for notice in write_table(output, blocks, Form.like(file, raw=config.raw)):
        log.info(notice)

    # counts are complete once all blocks are written
    for classes in sources:
        log.info(classes.coverage())
    write_provenance(["classes"], config, {"classes": [classes.record for classes in sources]})
    log.info(f"Wrote {output} and {provenance_file(output)}.")


def _code_columns(file: TableFile) -> list[str]:
    """Return the columns of codes by their usual names: HISCO's, else OCC1950's."""
    for system in (CODE_COL, "occ1950"):
        pattern = re.compile(rf"{system}(_[1-9])?")
        code_cols = [name for name in file.header if pattern.fullmatch(plain(name))]
        if code_cols:
            return code_cols
    raise UserError(
        f"{file.path} has no column {CODE_COL}_1. Name its columns of codes with --code-cols."
    )


def _checked_size(output: Path, blocks: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yield blocks; raise a UserError once there are more rows than the format of the output
    has.
    """
    num_rows = 0
    for block in blocks:
        num_rows += len(block)
        check_output(output, num_rows=num_rows)
        yield block


class CodedClasses(NamedTuple):
    """Columns of classes that a coded file has."""

    known: list[Classes]
    """Classes and groups that can be computed for other codes."""
    unknown_cols: list[str]
    """Columns of others: their table of classes is not known, is missing or has changed."""


def classes_of_coded(
    file: TableFile,
    answers: Sequence[AnswerColumns],
    *,
    codes: Collection[str],
    attributes: Collection[str],
) -> CodedClasses:
    """Return the classes of a coded file, as its provenance and its columns tell.

    `codes` and `attributes` are those of the model that coded it.
    """
    code_cols = [answer.code for answer in answers]
    prefix = answers[0].prob.removesuffix("prob_1")
    new_cols = file.header[file.header.index(code_cols[0]) :]
    recorded = _recorded_classes(file.path)

    # groups are known by their names; people may have deleted some of the columns
    known = []
    other_cols = set(new_cols)
    for classes in (*recorded.known, *_groups_of(code_cols, codes, prefix=prefix)):
        names = {field.name for field in classes.fields}
        if names <= other_cols:
            known.append(classes)
            other_cols -= names

    # other classes have numbers beside them, at least those of the first code
    names_of_others = list(recorded.unknown_cols)
    for name in new_cols:
        has_numbers = any(f"{name}_{suffix}" in new_cols for suffix in NUMBER_SUFFIXES)
        if has_numbers and name.removeprefix(prefix) not in attributes:
            names_of_others.append(name)
            for number in range(2, len(code_cols) + 1):
                names_of_others.append(f"{name.removesuffix('_1')}_{number}")
    unknown_cols = [name for name in dict.fromkeys(names_of_others) if name in other_cols]
    return CodedClasses(known, unknown_cols)


def _groups_of(
    code_cols: Sequence[str], codes: Collection[str], *, prefix: str
) -> Iterator[Classes]:
    """Yield the groups that columns of codes may have, level by level."""
    system = system_of(code_cols[0].removeprefix(prefix), codes)
    levels: tuple[str, ...] = ()
    if system == "hisco":
        levels = LEVELS
    elif system == "occ1950":
        levels = LEVELS[:1]
    for level in levels:
        options = ClassOptions(levels=(level,))
        yield from classes_of(code_cols, options, None, codes=codes, prefix=prefix, expect=False)


def _recorded_classes(coded: Path) -> CodedClasses:
    """Return the classes that the provenance of a coded file tells of."""
    path = provenance_file(coded)
    record = read_json(path) if path.is_file() else {}
    sources = record.get("classes")
    if not sources:
        return CodedClasses([], [])
    names = [name for source in sources for name in source["counts"]]

    # the command has their settings, which another version of histocoder may not know
    _, command, *words = shlex.split(record["command"])
    flags: PredictFlags | ClassesFlags
    try:
        if command == "classes":
            flags = parse(ClassesFlags, words)
            table = flags.table
        else:
            flags = parse(PredictFlags, words)
            table = flags.classes
    except UserError:
        return CodedClasses([], names)

    # a table that is missing or has changed tells nothing
    if table and not (Path(table).is_file() and fingerprint(table) == sources[0]["sha256"]):
        table = None
    code_cols = sources[0]["columns"]["codes"]
    known = classes_of(code_cols, flags, table, codes=None, prefix=flags.columns, expect=False)
    return CodedClasses(known, names)
