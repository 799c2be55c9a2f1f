"""Provenance of coded files: a JSON file beside each, with a paragraph for a paper's methods
section.
"""

import json
import platform
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from histocoder._version import __version__
from histocoder.classes.class_columns import covered
from histocoder.config.settings import Settings, recorded, settings_of
from histocoder.errors import counted
from histocoder.files import write_text
from histocoder.tables.table import fingerprint

BIBTEX = (
    Path(__file__).with_name("cite.bib").read_text(encoding="utf-8").replace("VERSION", __version__)
)
"""Entries for histocoder, and for the paper whose model it trains."""


def provenance_file(output: str | Path) -> Path:
    """Return the file beside an output that says where it comes from: of coded.csv.gz
    coded.histocoder.json.

    If that is another output's, such as coded.xlsx's, it is coded.csv.gz.histocoder.json.
    """
    path = Path(output)
    stem = path.stem
    if path.suffix.lower() == ".gz":
        stem = Path(stem).stem
    # Two formats of one table may lie in a folder.
    usual = path.with_name(f"{stem}.histocoder.json")
    if not usual.is_file():
        return usual
    output_name = json.dumps(path.name, ensure_ascii=False)
    if f'"output": {output_name}' in usual.read_text(encoding="utf-8", errors="replace"):
        return usual
    return path.with_name(f"{path.name}.histocoder.json")


def write_provenance(
    command: Sequence[str],
    config: Settings,
    facts: Mapping[str, Any],
    *,
    as_sent: Callable[[str], str] = str,
) -> str:
    """Write where the output of a command comes from, and return a methods paragraph.

    An input that is coded twice in the same way has the same provenance: it has no times, and no
    paths but those that the user gave in the command, whose words are written `as_sent`. `facts`
    are written after these; the paragraph is made of their `system`, `model`, `mode`,
    `min_confidence`, `counts`, `validation`, `expected_accuracy` and `classes`, where they are
    given.
    """
    # A setting that has its default is no part of the command.
    values = recorded(config)
    words = ["histocoder", *command]
    for setting in settings_of(type(config)):
        value = values.get(setting.name, setting.default)
        if value != setting.default:
            words.append(as_sent(setting.flag))
            cells = value if isinstance(value, tuple) else (value,)
            words += [as_sent(str(cell)) for cell in cells if cell is not True]

    record = {
        "output": Path(values["output"]).name,
        "input": {"file": Path(values["input"]).name, "sha256": fingerprint(values["input"])},
        "command": shlex.join(words),
        "versions": {
            "histocoder": __version__,
            "torch": version("torch"),
            "python": platform.python_version(),
        },
        **facts,
    }
    record["methods"] = " ".join(_sentences(record))
    record["bibtex"] = BIBTEX
    text = json.dumps(record, indent=2, ensure_ascii=False)
    write_text(provenance_file(values["output"]), f"{text}\n")
    return str(record["methods"])


def _sentences(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sentences of a methods paragraph."""
    if "model" in facts:
        yield (
            f"Occupational descriptions were coded into {facts['system'].upper()} with histocoder "
            f"{__version__}, in its mode {facts['mode']}, by a model whose weights have the "
            f"SHA-256 {facts['model']['sha256'][:12]}…."
        )
        yield _sentence_of_counts(facts["counts"], facts["min_confidence"])

    # How right the model was, and is expected to be on this file.
    validation = facts.get("validation")
    if validation:
        yield (
            f"On {validation['rows']:,} rows of validation data, "
            f"{_percent(validation['accuracy'])} of the answers of the last model of its training "
            "run are exactly right."
        )
    accuracy = facts.get("expected_accuracy", {})
    if "coded" in accuracy:
        condition = " if the file is like the validation data"
        if facts.get("has_confidence_elsewhere"):
            condition = ", as in tables that were left out of the training of the model"
        yield (
            "The mean confidence in the codes that the model gave is "
            f"{_percent(accuracy['coded'])}, the share that is expected to be right{condition}."
        )

    # A reader judges a class by the share of rows that have one, and by how sure it is.
    for classes in facts.get("classes", ()):
        columns = classes["columns"]
        names = columns["codes"] + [columns[name] for name in columns if name != "codes"]
        parts = []
        for name, counts in classes["counts"].items():
            num_coded, num_with_value = covered(counts)
            if num_coded:
                share = _percent(num_with_value / num_coded)
                part = f"{name} for {share} of {counted(num_coded, 'row', 'rows')} with a code"
                mean = classes["means"].get(f"{name}_prob")
                if mean and mean["rows"]:
                    part = f"{part} ({_percent(mean['mean'])} expected to be right)"
                parts.append(part)
        if parts:
            yield (
                f"By {', '.join(names)}, {classes['table']} (SHA-256 {classes['sha256'][:12]}…) "
                f"gave {', '.join(parts)}."
            )


def _sentence_of_counts(counts: Mapping[str, int], min_confidence: float) -> str:
    """Return the sentence on how many rows are coded, and why the others are not."""
    share = _percent(counts["coded"] / counts["rows"])
    parts = [f"Of {counts['rows']:,} rows, {counts['coded']:,} ({share}) are coded"]
    if "known" in counts:
        known = counted(counts["known"], "row has", "rows have")
        parts.append(f"{known} the codes of the same description coded by hand")
    if counts["unsure"]:
        part = f"the model gives no code to {counted(counts['unsure'], 'row', 'rows')}"
        if min_confidence:
            part = f"{part}, since its confidence is below {min_confidence:g}"
        parts.append(part)
    if counts["without"]:
        number = counted(counts["without"], "row", "rows")
        parts.append(f"the model finds no occupation in {number}")
    if counts["blank"]:
        parts.append(f"{counted(counts['blank'], 'row has', 'rows have')} no description")
    return f"{'; '.join(parts)}."


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
