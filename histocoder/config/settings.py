"""Settings as fields of frozen dataclasses, which declare all about them.

To add a setting, add one field to the dataclass of its group, in `training` or `run`, by `free` or
by `fixed`. Its flag, its key in YAML files, its row in docs/configuration.md, its line in
args.yaml, its range check and the comparison with the checkpoint that a run resumes from all follow
from the field.
"""

import os
from argparse import SUPPRESS  # help of a flag that no help shows
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import NoneType
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_type_hints

from histocoder.errors import UserError

_Config = TypeVar("_Config", bound="Settings")


def require(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


class Need(NamedTuple):
    """Condition under which a setting has an effect."""

    text: str  # as in "--prefetch-factor has no effect without --num-workers"
    is_met: Callable[[Any, Any], bool]  # by the settings of a run, and the config of its model


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting: what `free` and `fixed` declare, and below that what `settings_of` adds."""

    # help of the flag, to which the default is added unless it names one; None hides it
    text: str | None
    default: Any
    # part that a resumed run must agree on: "value", the named file's "content", or ""
    resume: str = ""
    metavar: str | None = None  # name of a value in the help; N for whole numbers
    choices: tuple[str, ...] | None = None
    parse: Callable[[str], Any] | None = None  # parser of a value, if not the field's type
    at_least: float | None = None
    above: float | None = None  # bound that a value must exceed
    between: tuple[float, float] | None = None  # least and largest value
    is_negatable: bool = False  # whether there is a `--no-` flag
    is_required: bool = False  # whether a command requires the flag
    # whether args.yaml has it: it is the run's, not that of one start of it
    is_recorded: bool = True
    flags: tuple[str, ...] = ()  # spellings of the flag, if the field's name is not the only one
    needs: Need | None = None

    # from the field and its class
    name: str = ""
    type: Any = None  # type without None
    is_optional: bool = False
    group: str = ""

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def help(self) -> str:
        """Help of the flag, with its default."""
        text = self.text or SUPPRESS
        if "(default: " in text or "(required)" in text or text == SUPPRESS:
            return text
        if self.is_required:
            return f"{text} (required)"
        if self.default is None:
            # a recipe has the default of a setting that is not optional
            return text if self.is_optional else f"{text} (default: chosen for you)"
        if self.default == "" or isinstance(self.default, bool | tuple):
            return text
        return f"{text} (default: {shown(self.default)})"

    def check(self, value: Any) -> None:
        """Raise a UserError if a value is not one of the choices, or out of bounds."""
        if value is None:
            return
        start = f"{self.flag} is {shown(value)}; it must"
        if self.choices is not None:
            require(value in self.choices, f"{start} be one of {', '.join(self.choices)}.")
        if self.at_least is not None:
            require(value >= self.at_least, f"{start} be {self.at_least} or more.")
        if self.above is not None:
            require(value > self.above, f"{start} be more than {self.above}.")
        if self.between is not None:
            low, high = self.between
            require(low <= value <= high, f"{start} lie between {low} and {high}.")


def free(default: Any, text: str | None, **options: Any) -> Any:
    """Declare a setting that a resumed run may change, or whose effect is compared by itself (data,
    rows of a step).

    A default of None means that there is none, or that the recipe has it if the field's type does
    not allow None. See `Setting` for `text` and `options`.
    """
    setting = Setting(text=text, default=default, **options)
    return field(default=default, metadata={"setting": setting})


fixed = partial(free, resume="value")
"""Declare a setting that a resumed run must agree on; parameters are those of `free`."""


def changed(kind: "type[Settings]", name: str, default: Any, **options: Any) -> Any:
    """Declare another default or other options for a setting of a base class."""
    declared = {setting.name: setting for setting in settings_of(kind)}
    setting = replace(declared[name], default=default, **options)
    return field(default=default, metadata={"setting": setting})


def shown(value: Any) -> str:
    """Return a value as help and messages show it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """Return tuples and strings for the lists and paths that Python programs pass."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else value


class Settings:
    """Base of all groups of settings: checks the bounds of each field, then calls the `check` of
    each group.
    """

    GROUP: ClassVar[str] = ""  # title of the flags that a class declares
    MAIN: ClassVar[tuple[str, ...]] = ()  # settings that `--help` shows; `--help-all` shows all

    def corrected(self: _Config, error: UserError) -> _Config:
        """Return the settings with those that would fix an error."""
        values = dict(error.settings)
        for name, value in values.items():
            # of columns, the wrong names are given with the right ones
            if not isinstance(value, Mapping):
                continue
            columns = getattr(self, name)
            if isinstance(columns, tuple) and columns:
                values[name] = tuple(value.get(column, column) for column in columns)
            else:
                values[name] = next(iter(value.values()))
        return replace(self, **values)  # type: ignore[type-var]  # it is a dataclass

    def __post_init__(self) -> None:
        for setting in settings_of(type(self)):
            value = _plain(getattr(self, setting.name))
            object.__setattr__(self, setting.name, value)
            setting.check(value)

        # each group's own check, so that none needs to call that of another
        for kind in reversed(type(self).__mro__):
            if "check" in vars(kind):
                vars(kind)["check"](self)


def settings_of(kind: type[Settings]) -> list[Setting]:
    """Return the settings that a class has, in the order of its groups."""
    # a setting is in the group of the class that declares it first
    groups: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        for name in vars(base).get("__annotations__", ()):
            groups.setdefault(name, vars(base).get("GROUP", ""))

    types = get_type_hints(kind)
    settings: list[Setting] = []
    for item in fields(kind):  # type: ignore[arg-type]
        name = item.name
        assert "setting" in item.metadata, f"declare {kind.__name__}.{name} by free() or fixed()"
        value_type = types[name]
        alternatives = get_args(value_type)
        is_optional = NoneType in alternatives
        if is_optional:
            value_type = alternatives[0]
        settings.append(
            replace(
                item.metadata["setting"],
                name=name,
                type=value_type,
                is_optional=is_optional,
                group=groups[name],
            )
        )
    return settings


def without_effect(config: Settings, model: Any) -> list[str]:
    """Return a sentence for each setting of a run that is given, and means nothing for its model, a
    `ModelConfig`.
    """
    sentences = []
    by_recipe = getattr(config, "by_recipe", None) or ()
    for setting in settings_of(type(config)):
        value = getattr(config, setting.name)
        is_given = value not in (None, setting.default) and setting.name not in by_recipe
        if is_given and setting.needs is not None and not setting.needs.is_met(config, model):
            sentences.append(f"{setting.flag} has no effect without {setting.needs.text}.")
    return sentences


def recorded(config: Settings) -> dict[str, Any]:
    """Return the settings that args.yaml has, by name."""
    values: dict[str, Any] = {}
    for setting in settings_of(type(config)):
        if setting.is_recorded:
            values[setting.name] = getattr(config, setting.name)
    return values
