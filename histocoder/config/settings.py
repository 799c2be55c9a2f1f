"""What a setting is: a field of a frozen dataclass that says all there is to say about it, once.

To add a setting, add one field to the dataclass of its group in `config.run`, by `free` or by `fixed`. Its flag, its
key in YAML files, its row in docs/configuration.md, its line in args.yaml, its range check and the comparison with the
checkpoint that a run resumes from all follow from the field.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, ClassVar, get_args, get_type_hints

from histocoder.errors import UserError


def require(ok: bool, message: str) -> None:
    """Raise a UserError with a message unless all is well."""
    if not ok:
        raise UserError(message)


def free(default: Any, text: str | None, **options: Any) -> Any:
    """Declare a setting that a resumed run may change, or whose effect is compared by itself (data, rows of a step).

    Parameters
    ----------
    default : object
        None where there is none, or where the recipe has it (then the type of the field does not allow None).
    text : str, optional
        The help of the flag, to which the default is added unless it names one. Hidden without a text.
    metavar, choices, parse : optional
        As of argparse; `parse` is its `type` where the field's own is not enough.
    at_least, above, between : optional
        Bounds: the least value, one that it must exceed, or a pair of both ends.
    short : bool
        Whether `--help` shows the flag as well as `--help-all`.
    negatable : bool
        Whether there is a `--no-` flag.
    names : tuple of str
        Spellings of the flag, where it is not the field's name.
    recorded : bool
        Whether args.yaml has it; False for what belongs to a start of the run instead of to the run.
    """
    return field(default=default, metadata={"text": text, "resume": "", **options})


def fixed(default: Any, text: str, *, resume: str = "value", **options: Any) -> Any:
    """Declare a setting that a resumed run must agree on: by its value, or by the "content" of the file it names."""
    return field(default=default, metadata={"text": text, "resume": resume, **options})


def changed(kind: type[Settings], name: str, default: Any, **options: Any) -> Any:
    """Declare another default, or other options, for a setting of a base class."""
    metadata = next(f for f in fields(kind) if f.name == name).metadata  # type: ignore[arg-type]
    return field(default=default, metadata={**metadata, **options})


@dataclass(frozen=True)
class Setting:
    """A setting as declared."""

    name: str
    type: Any
    """Without None."""
    is_optional: bool
    default: Any
    group: str
    options: dict[str, Any]
    """See `free`."""

    @property
    def flag(self) -> str:
        """The flag's name."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_recorded(self) -> bool:
        """Whether the setting is the run's, and in its args.yaml; others are of one start of it."""
        return self.options.get("recorded", True)

    @property
    def help(self) -> str:
        """The flag's help, with its default."""
        text = self.options["text"] or argparse.SUPPRESS
        if "(default: " in text or "(required)" in text or isinstance(self.default, bool) or text is argparse.SUPPRESS:
            return text
        if self.default is None:
            return text if self.is_optional else f"{text} (default: by the recipe)"
        return f"{text} (default: {shown(self.default)})"

    def check(self, value: Any) -> None:
        """Raise a UserError where a value is out of the setting's bounds."""
        if value is None:
            return
        least, above, between = (self.options.get(name) for name in ("at_least", "above", "between"))
        said = f"{self.flag} is {shown(value)}; it must"
        require(least is None or value >= least, f"{said} be {least} or more.")
        require(above is None or value > above, f"{said} be more than {above}.")
        low, high = between or (value, value)
        require(low <= value <= high, f"{said} lie between {low} and {high}.")


def shown(value: Any) -> str:
    """A default or a value as a person would write it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


class Settings:
    """Base of all groups of settings: checks the bounds of each field, then calls the `check` of each group."""

    GROUP: ClassVar[str] = ""
    """Title of the flags that a class declares."""

    def __post_init__(self) -> None:
        for setting in settings_of(type(self)):
            setting.check(getattr(self, setting.name))
        for kind in reversed(type(self).__mro__):
            if "check" in vars(kind):
                vars(kind)["check"](self)


def settings_of(kind: type[Settings]) -> Iterator[Setting]:
    """The settings that a class has, in the order of its groups."""
    types = get_type_hints(kind)
    groups: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        for name in vars(base).get("__annotations__", ()):
            groups.setdefault(name, vars(base).get("GROUP", ""))
    for one in fields(kind):  # type: ignore[arg-type]
        assert "resume" in one.metadata, f"declare {kind.__name__}.{one.name} by free() or fixed()"
        options = get_args(types[one.name])
        is_optional = NoneType in options
        yield Setting(
            name=one.name,
            type=options[0] if is_optional else types[one.name],
            is_optional=is_optional,
            default=one.default,
            group=groups[one.name],
            options=dict(one.metadata),
        )


def recorded(config: Settings) -> dict[str, Any]:
    """The settings that args.yaml repeats, by name."""
    return {one.name: getattr(config, one.name) for one in settings_of(type(config)) if one.is_recorded}


def whole_number(text: str) -> int:
    """Read a whole number, of a form such as 1e6, too."""
    value = float(text)
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text} is no whole number")
    return int(value)
