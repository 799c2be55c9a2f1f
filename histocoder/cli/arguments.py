"""Flags from settings, settings from flags, and the parser of all commands."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar, get_args, get_origin

from histocoder import __version__
from histocoder.cli.config_file import nearest, read_config
from histocoder.config import RECIPES, STARTS, Settings, settings_of
from histocoder.config.settings import Setting
from histocoder.data.languages import HELP
from histocoder.errors import UserError

_Config = TypeVar("_Config", bound=Settings)
_START = ("recipe", "encoder", "initial_checkpoint", "only_encoder", "freeze_encoder")
_REPLACING = ("max_steps", "tokens_per_batch", "scale_lr")
"""Flags that choose the recipe, or replace values of it, as all flags do that a recipe has set."""


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


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UserError` and reads `--config`; with `main` flags, `--help` lists only these."""

    def __init__(self, description: str, *, config: bool = True, main: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(
            description=description,
            allow_abbrev=False,
            formatter_class=lambda prog: _HelpFormatter(prog, max_help_position=34, width=118),
            **kwargs,
        )
        self._main = main
        if config:
            self.add_argument(
                "--config",
                metavar="YAML",
                help="read flags from a file, such as a run's args.yaml; the command line overrides them",
            )
        if main:
            self.add_argument(
                "--help-all",
                action=_HelpAll,
                nargs=0,
                default=argparse.SUPPRESS,
                help="show all flags, in groups, and exit",
            )
            self.add_version()

    def add_version(self) -> None:
        self.add_argument("--version", action="version", version=f"histocoder {__version__}")

    def format_help(self) -> str:
        """Return the help of all flags, or of the main ones."""
        if not self._main:
            return super().format_help()
        formatter = self._get_formatter()
        shown = [action for name in self._main for action in self._actions if name in action.option_strings]
        formatter.add_usage("%(prog)s FLAGS", self._actions, [])
        formatter.add_text(self.description)
        formatter.start_section("flags that most runs need")
        formatter.add_arguments(shown)
        formatter.end_section()
        formatter.add_text(self.epilog)
        formatter.add_text("--help-all shows all flags; docs/configuration.md has them with their defaults.")
        return formatter.format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse flags as argparse does; the error for an unknown flag suggests the most similar one."""
        words = sys.argv[1:] if args is None else list(args)
        flags = [word.partition("=")[0] for word in words[: words.index("--") if "--" in words else None]]
        for flag in flags if self._subparsers is None else []:
            if flag.startswith("--") and " " not in flag and flag not in self._option_string_actions:
                known = [name.removeprefix("--") for name in self._option_string_actions]
                self.error(f"there is no flag {flag}.{nearest(flag[2:], known, mark='--')}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(
            f"{message[0].upper()}{message[1:]}{'' if message[-1] in '.?' else '.'} See {self.prog} --help."
        )

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse flags; they override the values in `--config`."""
        for text in sys.argv[1:] if argv is None else argv:
            if not text.isprintable() and any("\ud800" <= char <= "\udfff" for char in text):
                raise UserError(
                    f"{text!a} can't be read as {sys.getfilesystemencoding()}. Set PYTHONUTF8=1, or a locale in "
                    "UTF-8; if it is the name of a file, rename the file."
                )
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("--config")
        path = first.parse_known_args(argv)[0].config
        if path is None:
            return self.parse_args(argv)
        values = read_config(path, self)
        by_recipe = values.get("by_recipe") or ()
        given = values | dict.fromkeys(("by_recipe", *by_recipe))
        self.set_defaults(**given)
        args = self.parse_args(argv)
        if not any(name in given and getattr(args, name) != given[name] for name in (*_START, *_REPLACING, *by_recipe)):
            self.set_defaults(**values)
            args = self.parse_args(argv)
        return args


class _HelpFormatter(argparse.HelpFormatter):
    """Marks the flags that must be given."""

    def _get_help_string(self, action: argparse.Action) -> str:
        must_be_given = action.required and action.option_strings
        return f"{action.help or ''}{' (required)' if must_be_given else ''}"


class _HelpAll(argparse.Action):
    """Prints the help of all flags."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.usage = "%(prog)s FLAGS"
        print(argparse.ArgumentParser.format_help(parser))
        print("recipes: defaults of flags that are not given, by what a run starts from")
        for name, recipe in RECIPES.items():
            values = ", ".join(f"{setting} {value}" for setting, value in recipe.items() if value is not None)
            print(
                textwrap.fill(f"{name} ({STARTS[name]}): {values}", 118, initial_indent="  ", subsequent_indent="    ")
            )
        parser.exit()
