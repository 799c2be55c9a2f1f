"""`histocoder classes`: give the codes of a table social classes."""

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from histocoder.classes.class_columns import classes_of
from histocoder.classes.crosswalk import CODE_COL
from histocoder.cli.flags import ClassesFlags
from histocoder.config.prediction import QUALIFIERS
from histocoder.errors import UserError
from histocoder.inference.provenance import provenance_file, write_provenance
from histocoder.log import log
from histocoder.tables.header import plain
from histocoder.tables.output import Form, check_kept, check_new_columns, check_output, write_table
from histocoder.tables.table import CHUNK_ROWS, TableFile, open_table


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
