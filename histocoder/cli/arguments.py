"""Flags from settings, settings from flags and YAML files, and the parser of all commands."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import yaml

from histocoder._version import __version__
from histocoder.config import RECIPES, STARTS, Settings, settings_of
from histocoder.config.settings import Setting
from histocoder.errors import UserError
from histocoder.text.languages import HELP

_Config = TypeVar("_Config", bound=Settings)
# flags that histocoder no longer has, and `args.yaml` of earlier runs may name
_REMOVED = (
    "base_batch_size",
    "cache_dir",
    "ddp_comm_hook",
    "fsdp_cpu_offload",
    "fsdp_min_num_params",
    "fsdp_reduce_dtype",
    "fsdp_state_dict",
    "profile",
    "wandb_artifact",
)


def parse(
    kind: type[_Config], argv: Sequence[str] | None = None, *, prog: str | None = None
) -> _Config:
    """Read the settings of a run from flags, and from the file that `--config` names."""
    return config_of(kind, build_parser(kind, prog=prog).parse(argv))


def config_of(kind: type[_Config], args: object) -> _Config:
    """Return the settings from parsed flags, or from an instance of a class that has more."""
    return kind(**{setting.name: getattr(args, setting.name) for setting in settings_of(kind)})


def build_parser(kind: type[Settings], *, prog: str | None = None) -> "Parser":
    """Return a parser with a flag for each setting; `prog` is the name of the program in errors."""
    main = [f"--{name.replace('_', '-')}" for name in kind.MAIN]
    main += ["--config", "--help-all"]
    parser = Parser(str(kind.__doc__), main=main, epilog=HELP, prog=prog)
    add_flags(parser, kind)
    return parser


def add_flags(parser: argparse.ArgumentParser, kind: type[Settings]) -> None:
    """Add a flag for each setting of a class."""
    groups: dict[str, Any] = {"": parser}
    for setting in settings_of(kind):
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        flags = setting.flags or (setting.flag,)
        groups[setting.group].add_argument(*flags, **_argument_of(setting))


def _argument_of(setting: Setting) -> dict[str, Any]:
    """Return the parameters of argparse's `add_argument` for a setting."""
    default = setting.default
    if default == ():
        default = None
    argument: dict[str, Any] = {"help": setting.help, "default": default}
    if setting.is_negatable:
        return argument | {"action": argparse.BooleanOptionalAction}
    if setting.type is bool:
        return argument | {"action": "store_true"}

    # a flag with a value, or with several
    argument["metavar"] = setting.metavar
    if setting.metavar is None and setting.type is int:
        argument["metavar"] = "N"
    argument["choices"] = setting.choices
    argument["type"] = setting.parse or setting.type
    if setting.is_required:  # argparse refuses the word for positional arguments
        argument["required"] = True
    if get_origin(setting.type) is tuple:
        argument["nargs"] = "+" if setting.default is None else "*"
        argument["type"] = get_args(setting.type)[0]
    return argument


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UserError` and reads `--config`; with `main` flags, `--help`
    lists only these.
    """

    def __init__(self, description: str, *, main: Sequence[str] = (), **kwargs: Any) -> None:
        def formatter(prog: str) -> argparse.HelpFormatter:
            return argparse.HelpFormatter(prog, max_help_position=34, width=118)

        super().__init__(
            description=description, allow_abbrev=False, formatter_class=formatter, **kwargs
        )
        self._main = main
        if main:
            self.add_argument(
                "--config",
                metavar="YAML",
                help="read flags from a file, such as a run's args.yaml; the command line "
                "overrides them",
            )
            self.add_argument(
                "--help-all",
                action=_HelpAll,
                nargs=0,
                default=argparse.SUPPRESS,
                help="show all flags, in groups, and exit",
            )
        self.add_argument("--version", action="version", version=f"histocoder {__version__}")

    def format_help(self) -> str:
        """Return the help of all flags, or of the main ones."""
        if not self._main:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage("%(prog)s FLAGS", self._actions, [])
        formatter.add_text(self.description)
        formatter.start_section("flags that most runs need")
        formatter.add_arguments([self._option_string_actions[name] for name in self._main])
        formatter.end_section()
        formatter.add_text(self.epilog)
        formatter.add_text(
            "--help-all shows all flags; docs/configuration.md has them with their defaults."
        )
        return formatter.format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse flags as argparse does; the error for an unknown flag suggests the most similar
        one.
        """
        settings, unknown_words = super().parse_known_args(args, namespace)
        for word in unknown_words:
            flag = word.partition("=")[0]
            if not flag.startswith("--"):
                continue
            message = f"there is no flag {flag}."
            if near := difflib.get_close_matches(flag, self._option_string_actions, n=1):
                message += f" Did you mean {near[0]!r}?"
            self.error(message)
        return settings, unknown_words

    def error(self, message: str) -> NoReturn:
        end = "" if message[-1] in ".?" else "."
        raise UserError(f"{message[0].upper()}{message[1:]}{end} See {self.prog} --help.")

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse flags; they override those of the file that `--config` names."""
        words = list(sys.argv[1:] if argv is None else argv)
        args = self.parse_args(words)
        path = getattr(args, "config", None)
        if path is None:
            return args

        # the file alone first, so that an error of it names it
        words_in_file = self._words_of(path)
        try:
            self.parse_args(words_in_file)
        except UserError as error:
            raise UserError(f"--config {path}: {error}") from error
        return self.parse_args(words_in_file + words)

    def _words_of(self, path: str) -> list[str]:
        """Return the flags in a YAML file, with `-` or `_` and under headings or not, as words of a
        command line.

        Those that a recipe has set are left out: the recipe sets them again. So are those without a
        value.
        """
        settings = _read_settings(path)
        names_left_out = {"by_recipe", *_REMOVED, *(settings.get("by_recipe") or ())}
        words: list[str] = []
        for name, value in settings.items():
            if value is not None and name not in names_left_out:
                words.extend(self._words_for(f"--{name.replace('_', '-')}", value, path))
        return words

    def _words_for(self, flag: str, value: Any, path: str) -> list[str]:
        """Return a flag with its value in a YAML file, as words of a command line."""
        action = self._option_string_actions.get(flag)
        is_switch = action is None or action.nargs == 0
        if isinstance(value, bool) and is_switch:
            if value:
                return [flag]
            negation = f"--no-{flag[2:]}"
            return [negation] if negation in self._option_string_actions else []

        # YAML reads yes and no, which may be meant as words, as true and false
        values = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) for item in values):
            raise UserError(
                f"--config {path}: {flag[2:]} can't be {value!r}. Quote words such as no or yes."
            )
        words = [os.path.expanduser(str(item)) for item in values]
        if isinstance(value, list):
            return [flag, *words]
        return [f"{flag}={words[0]}"]


def _read_settings(path: str) -> dict[str, Any]:
    """Return the settings in a YAML file by name, those under headings too."""
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--config {path} can't be read: {reason}") from error
    if not isinstance(content, dict):
        raise UserError(f"--config {path} must hold lines of the form 'batch_size: 64'.")
    settings: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict):
            settings.update({str(further): setting for further, setting in value.items()})
        else:
            settings[str(name)] = value
    return settings


class _HelpAll(argparse.Action):
    """Prints the help of all flags, and the recipes."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.usage = "%(prog)s FLAGS"
        print(argparse.ArgumentParser.format_help(parser))
        print("what is chosen for you where a flag is not given, by what training starts from:")
        for name, recipe in RECIPES.items():
            values = ", ".join(
                f"{setting} {value}" for setting, value in recipe.items() if value is not None
            )
            print(f"  {name} ({STARTS[name]}): {values}")
        parser.exit()
