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
    stem = path.stem if path.suffix.lower() != ".gz" else Path(path.stem).stem
    usual, own = (
        path.with_name(f"{stem}.histocoder.json"),
        json.dumps(path.name, ensure_ascii=False),
    )
    is_own = not usual.is_file() or f'"output": {own}' in usual.read_text(
        encoding="utf-8", errors="replace"
    )
    return usual if is_own else path.with_name(f"{path.name}.histocoder.json")


def write_provenance(
    command: Sequence[str],
    config: Settings,
    told: Mapping[str, Any],
    *,
    as_sent: Callable[[str], str] = str,
) -> str:
    """Write where the output of a command comes from, and return a methods paragraph.

    An input that is coded twice in the same way has the same provenance: it has no times, and no
    paths but those that the user gave in the command, whose words are written `as_sent`. `told` is
    written after these; the paragraph is made of its `system`, `model`, `mode`, `min_confidence`,
    `counts`, `validation`, `expected_accuracy` and `classes`, where they are given.
    """
    values = recorded(config)
    versions = {
        "histocoder": __version__,
        "torch": version("torch"),
        "python": platform.python_version(),
    }
    source = {"file": Path(values["input"]).name, "sha256": fingerprint(values["input"])}
    words = list[str]()  # the flags that give settings which are not the default
    for setting in settings_of(type(config)):
        value = values.get(setting.name, setting.default)
        if value != setting.default:
            several = value if isinstance(value, tuple) else [value]
            words += [setting.flag, *(str(one) for one in several if one is not True)]
    line = shlex.join(["histocoder", *command, *map(as_sent, words)])
    files = {"output": Path(values["output"]).name, "input": source}
    whole = {**files, "command": line, "versions": versions, **told}
    whole |= {"methods": " ".join(_sentences(whole)), "bibtex": BIBTEX}
    write_text(
        provenance_file(values["output"]), json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
    )
    return str(whole["methods"])


def _sentences(told: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sentences of a methods paragraph."""
    if "model" in told:
        counts, least, sha256 = told["counts"], told["min_confidence"], told["model"]["sha256"]
        yield (
            f"Occupational descriptions were coded into {told['system'].upper()} with "
            f"histocoder {__version__}, in its "
            f"mode {told['mode']}, by a model whose weights have the SHA-256 {sha256[:12]}…."
        )
        share = _percent(counts["coded"] / counts["rows"])
        parts = [f"Of {counts['rows']:,} rows, {counts['coded']:,} ({share}) are coded"]
        if "known" in counts:
            known = counted(counts["known"], "row has", "rows have")
            parts.append(f"{known} the codes of the same description coded by hand")
        why = f", since its confidence is below {least:g}" if least else ""
        unsure, blank = counts["unsure"], counts["blank"]
        parts += (
            [f"the model gives no code to {counted(unsure, 'row', 'rows')}{why}"] if unsure else []
        )
        parts += [f"{counted(blank, 'row has', 'rows have')} no description"] if blank else []
        yield f"{'; '.join(parts)}."
    if found := told.get("validation"):
        yield (
            f"On {found['rows']:,} rows of validation data, {_percent(found['accuracy'])} "
            "of the answers of the last "
            "model of its training run are exactly right."
        )
    if "coded" in (conf := told.get("expected_accuracy", {})):
        yield (
            "The mean confidence in the codes that the model gave is "
            f"{_percent(conf['coded'])}, the share that is "
            "expected to be right if the file is like the validation data."
        )
    for classes in told.get("classes", ()):
        columns, parts = classes["columns"], list[str]()
        by = ", ".join(
            [*columns["codes"], *(name for kind, name in columns.items() if kind != "codes")]
        )
        for name, counts in classes["counts"].items():
            coded, with_value = covered(counts)
            prob = classes["means"].get(f"{name}_prob", {"rows": 0})
            mean = f" ({_percent(prob['mean'])} expected to be right)" if prob["rows"] else ""
            of = counted(coded, "row", "rows")
            parts += (
                [f"{name} for {_percent(with_value / coded)} of {of} with a code{mean}"]
                if coded
                else []
            )
        if parts:
            yield (
                f"By {by}, {classes['table']} (SHA-256 {classes['sha256'][:12]}…) gave "
                f"{', '.join(parts)}."
            )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
