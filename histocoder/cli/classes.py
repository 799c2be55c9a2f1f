"""`histocoder classes`: give the codes of a table social classes."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from histocoder.cli.flags import ClassesFlags
from histocoder.data.cells import plain
from histocoder.data.crosswalk import CODE_COL, EXACT, NO_CODE, QUALIFIERS, WITHOUT_VALUE, Classes, Crosswalk
from histocoder.data.output import Form, check_kept, check_new_columns, check_output, write_table
from histocoder.data.table import fingerprint, open_table
from histocoder.errors import UserError
from histocoder.files import is_same_file, write_text
from histocoder.log import log


def run_classes(config: ClassesFlags) -> None:
    """Write the table with its classes, and beside it how many rows have which."""
    output = Path(config.output)
    check_output(output)
    if output.exists() and not config.overwrite:
        raise UserError(f"{output} already exists. Add --overwrite to replace it, or choose another --output.")
    crosswalk = Crosswalk(config.table, config.value_cols, none=config.none)
    if is_same_file(config.table, output):
        raise UserError(f"--output {output} is the file of --table itself; choose another.")
    classes = _classes(config, crosswalk)
    file, counts = classes.file, classes.counts
    check_kept(file, output)
    check_new_columns(counts, path=file.path, taken=file.header, prefix=f"class_{config.columns}")
    for notice in (*crosswalk.file.notices, *file.notices):
        log.info(notice)
    for notice in write_table(output, _that_fit(output, classes.blocks()), Form.like(file, raw=config.raw)):
        log.info(notice)
    name, digest = Path(config.table).name, fingerprint(config.table)
    columns = {"table": crosswalk.keys, "codes": classes.code_cols, **classes.qualifier_cols}
    num_rows = next(iter(counts.values())).total()
    used = {"table": name, "sha256": digest, "columns": columns, "rows": num_rows, "counts": counts}
    told = output.with_name(f"{output.name}.classes.json")
    write_text(told, json.dumps(used, indent=2, ensure_ascii=False) + "\n")
    matched = ", ".join([*classes.code_cols, *classes.qualifier_cols.values()])
    log.info(f"Classes of {name} (SHA-256 {digest[:12]}) by {matched}:")
    log.info("\n".join([*(_coverage(*one) for one in counts.items()), f"Wrote {output} and {told}."]))


def _classes(config: ClassesFlags, crosswalk: Crosswalk) -> Classes:
    """Open the input, and return the classes of its columns, which flags name or which have the usual names."""
    settings = {name: f"{name}_col" for name in QUALIFIERS}
    own = {name: getattr(config, setting) for name, setting in settings.items()}
    needed = {own[name]: setting for name, setting in settings.items() if own[name]}
    needed |= dict.fromkeys(config.code_cols or (), "code_cols")
    file = open_table(config.input, needed, optional=(CODE_COL, f"{CODE_COL}_1", *QUALIFIERS), sheet=config.sheet)
    codes = config.code_cols or [name for name in file.header if re.fullmatch(rf"{CODE_COL}(_[1-9])?", plain(name))]
    if not codes:
        raise UserError(f"{config.input} has no column {CODE_COL}_1. Name its columns of codes with --code-cols.")
    found = {name: file.column(column or name) for name, column in own.items() if column or file.has(name)}
    return Classes(crosswalk, file, [*map(file.column, codes)], found, config.columns)


def _that_fit(output: Path, blocks: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yield blocks; raise a UserError once there are more rows than the format of the output has."""
    num_rows = 0
    for block in blocks:
        num_rows += len(block)
        check_output(output, num_rows=num_rows)
        yield block


def _coverage(name: str, counts: Counter[str]) -> str:
    """Return a line: how many rows with a code have a value by an exact match, and with fallbacks; then all counts."""
    coded = counts.total() - counts[NO_CODE]
    found = sum(number for how, number in counts.items() if how not in WITHOUT_VALUE)
    exact, all_ways = (f"{100 * part / max(coded, 1):.1f} %" for part in (counts[EXACT], found))
    order = sorted(counts, key=lambda how: (how != EXACT, how in WITHOUT_VALUE, -counts[how], how))
    each = ", ".join(f"{how} {counts[how]:,}" for how in order if counts[how])
    return f"  {name}: {exact} of {coded:,} rows with a code by exact matches, {all_ways} with fallbacks ({each})"
