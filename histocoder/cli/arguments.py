"""Flags from settings, and settings from flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, TypeVar, get_args, get_origin

from histocoder.cli.parser import Parser
from histocoder.config import Settings, settings_of
from histocoder.config.settings import Setting
from histocoder.data.languages import HELP

_Config = TypeVar("_Config", bound=Settings)


def parse(kind: type[_Config], argv: Sequence[str] | None = None, *, prog: str | None = None) -> _Config:
    """Read the settings of a run from flags, and from the file that `--config` names."""
    return config_of(kind, build_parser(kind, prog=prog).parse(argv))


def config_of(kind: type[_Config], args: object) -> _Config:
    """Return the settings from parsed flags, or from an instance of a class that has more."""
    return kind(**{s.name: getattr(args, s.name) for s in settings_of(kind)})


def build_parser(kind: type[Settings], *, prog: str | None = None) -> Parser:
    """Return a parser with a flag for each setting; `prog` is the name of the program in errors."""
    short = [s.flag for s in settings_of(kind) if s.options.is_short]
    parser = Parser(str(kind.__doc__), main=(*short, "--config", "--help-all"), epilog=HELP, prog=prog)
    add_flags(parser, kind)
    return parser


def add_flags(parser: argparse.ArgumentParser, kind: type[Settings]) -> None:
    """Add a flag for each setting, in its group."""
    groups: dict[str, Any] = {"": parser}
    for setting in settings_of(kind):
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        flags = setting.options.flags or (setting.flag,)
        default = setting.default or None if isinstance(setting.default, tuple) else setting.default
        groups[setting.group].add_argument(*flags, help=setting.help, default=default, **_form(setting))


def _form(setting: Setting) -> dict[str, Any]:
    """Return the arguments with which argparse reads a setting."""
    if setting.options.is_negatable:
        return {"action": argparse.BooleanOptionalAction}
    if setting.type is bool:
        return {"action": "store_true"}
    metavar = setting.options.metavar or ("N" if setting.type is int else None)
    form: dict[str, Any] = {"metavar": metavar, "choices": setting.options.choices}
    if setting.options.is_required:
        form["required"] = True
    if get_origin(setting.type) is tuple:
        return {**form, "nargs": "+" if setting.default is None else "*", "type": get_args(setting.type)[0]}
    return {**form, "type": setting.options.parse or setting.type}
