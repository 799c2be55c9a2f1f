"""Write the tables of docs/configuration.md from the programs' own parsers: make docs, or python -m
docs.flags.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from histocoder.cli import main as command
from histocoder.cli.arguments import Parser, build_parser
from histocoder.config import RECIPES, STARTS, FinetuneConfig, MixerConfig
from histocoder.text.languages import NAMES

PAGE = Path(__file__).with_name("configuration.md")
_MADE = re.compile(r"(?<=<!-- make docs writes everything below -->\n).*", re.DOTALL)
_LANGUAGES = """## Languages

Flags and columns name a language by its ISO 639 code or its name, in English, its own or another language. A region
after the code is ignored (en-GB). Prepared data, models and reports use the code, with three exceptions: OccCANINE's
models know Swedish as `se`, German as `ge` and Greek as `gr`, so histocoder's models are trained with these codes
too. `sv` and `se`, `de` and `ge`, `el` and `gr` are synonyms everywhere, and a model receives the one it was trained
with. Northern Sami, whose ISO code is `se`, therefore has no code here. `unk` means unknown; blank cells and NA are
read as unknown. A language that is chosen for all descriptions (`--language`, `lang="…"`) must be one of these, or
one that the model was trained with; the error names the nearest. In a column of languages, training keeps any other
word as a language of its own, and a model treats a language that it was not trained with as unknown. A notice reports
both cases.

{}.
"""
_DEFAULT = re.compile(r",? *\((?:default: (.*)|required)\)$")


class Flag(NamedTuple):
    """A row of a table."""

    name: str
    default: str
    meaning: str


def with_tables(page: str) -> str:
    """Return a page with new tables."""
    return _MADE.sub(lambda _: "\n" + "\n".join(_lines()), page)


def _lines() -> Iterator[str]:
    ours, theirs = _groups(build_parser(FinetuneConfig)), _groups(build_parser(MixerConfig))
    yield "## `finetune.py` and `train_mixer.py`\n"
    yield "A flag without a default is off, or not set.\n"
    for title in ours:
        if title not in theirs:
            yield from _section(f"### {title}: `finetune.py` alone", ours[title])
    for title in theirs:
        if title not in ours:
            yield from _section(f"### {title}: `train_mixer.py` alone", theirs[title])
    for title in ours:
        if title in theirs:
            yield from _section(f"### {title}", _merged(ours[title], theirs[title]))
    yield from _recipes()
    for name, parser in _commands(command.build_parser()).items():
        flags = [flag for group in _groups(parser).values() for flag in group]
        if not flags:  # a script's, whose flags stand above
            continue
        yield from _section(f"## `histocoder {name}`\n\n{parser.description}", flags)
    yield _LANGUAGES.format(", ".join(f"{code} {name}" for code, name in NAMES.items()))


def _recipes() -> Iterator[str]:
    """The defaults that depend on what a run starts from."""
    yield "### Recipes\n"
    yield (
        'Where the tables above say "chosen for you", the default depends on what a run '
        "starts from.\n"
        "A flag that is set overrides the recipe: `--learning-rate` alone applies to all "
        "weights, and with\n"
        "`--num-epochs` or `--max-steps` there is no minimum number of steps. A run that "
        "continues a trained model\n"
        "keeps its flat loss, pooling and text normalization. `train_mixer.py` has its own "
        "batch sizes and numbers\n"
        "of epochs.\n"
    )
    for number, kind in enumerate(RECIPES, 1):
        start = re.sub(r"(--[a-z-]+( (reference|ngram))?)", r"`\1`", STARTS[kind])
        yield f"{number}. {start}"
    yield ""
    yield "| flag | " + " | ".join(map(str, range(1, len(RECIPES) + 1))) + " |"
    yield "| --- |" + " --- |" * len(RECIPES)
    for name in RECIPES["reference"]:
        values = (recipe[name] for recipe in RECIPES.values())
        cells = ["=" if value is None else str(value) for value in values]
        yield f"| `--{name.replace('_', '-')}` | " + " | ".join(cells) + " |"
    yield "\n=: the same as `--learning-rate`\n"


def _groups(parser: argparse.ArgumentParser) -> dict[str, list[Flag]]:
    """A parser's flags, by the titles of their groups."""
    groups = {
        str(group.title).capitalize(): [
            _flag(action)
            for action in group._group_actions
            if action.dest not in ("help", "help_all", "version")
            and action.help != argparse.SUPPRESS
        ]
        for group in parser._action_groups
    }
    return {title: flags for title, flags in groups.items() if flags}


def _commands(parser: Parser) -> dict[str, argparse.ArgumentParser]:
    assert parser._subparsers is not None
    return next(
        action.choices
        for action in parser._subparsers._group_actions
        if isinstance(action.choices, dict)
    )


def _flag(action: argparse.Action) -> Flag:
    """What a parser says of a flag; its default as its help words it, where that says more than the
    value.
    """
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar}`"
    if action.nargs != 0 and action.option_strings:
        value = (
            "|".join(map(str, action.choices))
            if action.choices
            else str(action.metavar or action.dest.upper())
        )
        # no bar: in a table's code, GitHub needs a backslash before it, which the site shows
        names = f"{names[:-1]} {value.replace('|', ' or ')}{' …' if action.nargs == '+' else ''}`"
    text = action.help or ""
    found = _DEFAULT.search(text)
    if found:
        default = found[1] or "required"
    elif action.required and action.option_strings:
        default = "required"
    else:
        default = "" if action.default is None or action.default is False else str(action.default)
    return Flag(names, default, text[: found.start()] if found else text)


def _merged(ours: Iterable[Flag], theirs: Iterable[Flag]) -> Iterator[Flag]:
    """The flags of both scripts; those of one alone say so."""
    others = {flag.name: flag for flag in theirs}
    for flag in ours:
        other = others.pop(flag.name, None)
        if other is None:
            yield flag._replace(meaning=f"{flag.meaning}; `finetune.py` alone")
        elif other.meaning != flag.meaning:
            yield flag._replace(meaning=f"{flag.meaning}; in `train_mixer.py`: {other.meaning}")
        else:
            is_same = other.default == flag.default
            yield (
                flag
                if is_same
                else flag._replace(default=f"{flag.default}<br>`train_mixer.py`: {other.default}")
            )
    for flag in others.values():
        yield flag._replace(meaning=f"{flag.meaning}; `train_mixer.py` alone")


def _section(heading: str, flags: Iterable[Flag]) -> Iterator[str]:
    yield f"{heading}\n"
    yield "| flag | default | meaning |"
    yield "| --- | --- | --- |"
    for flag in flags:
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in flag) + " |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
