"""Flags from a YAML file: `--config`."""

import argparse
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from histocoder.errors import UserError

SECTIONS = ("data", "model", "training", "distributed", "logging")
"""Optional headings of a file; any flag may be under any of them."""
_NOT_IN_FILES = ("help", "help_all", "version", "config")
_REMOVED = {"zero_optimizer": False, "auto_batch_size": False, "fsdp_state_dict": "full"}
"""Flags that histocoder no longer has, and the value with which `args.yaml` of earlier runs may still name them."""


def read_config(path: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Read a parser's flags from a file of lines such as `batch_size: 64`, with `-` or `_`, in sections or not.

    Returns
    -------
    dict
        Value of each flag by its name in the parser's namespace, as the flag itself would have read it.
    """
    actions = {action.dest: action for action in parser._actions if action.dest not in _NOT_IN_FILES}
    values: dict[str, Any] = {}
    for name, value in _flags(_read(path), path):
        if name in _REMOVED and value == _REMOVED[name]:
            continue
        if name not in actions:
            raise UserError(f"--config {path}: no flag {name!r}.{nearest(name, actions)}")
        if name in values:
            raise UserError(f"--config {path}: {name!r} is specified twice.")
        values[name] = _checked(actions[name], value, path, parser)
    return values


class _Loader(yaml.SafeLoader):
    """Rejects a key that is specified twice; PyYAML would use the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [str(key.value) for key, _ in node.value]
        for i, (key, _) in enumerate(node.value):
            if names[i] in names[:i]:
                raise yaml.constructor.ConstructorError(
                    problem=f"{names[i]!r} is specified twice", problem_mark=key.start_mark
                )
        return super().construct_mapping(node, deep)


def _read(path: str) -> dict[Any, Any]:
    try:
        with Path(path).open(encoding="utf-8") as file:
            values = yaml.load(file, _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} can't be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path} must hold lines of the form 'batch_size: 64'.")
    return values


def _flags(values: dict[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield each flag's name and value, in sections or on their own."""
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name in SECTIONS and (value is None or isinstance(value, dict)):  # 'distributed: true' is a flag
            yield from ((str(inner).replace("-", "_"), content) for inner, content in (value or {}).items())
        elif isinstance(value, dict):
            raise UserError(
                f"--config {path}: no section {name!r}.{nearest(name, SECTIONS)} There are: {', '.join(SECTIONS)}."
            )
        else:
            yield name, value


def nearest(name: str, known: Iterable[str], *, mark: str = "") -> str:
    """Return a question whether the most similar name is meant; an empty text if none is similar."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {mark + near[0]!r}?" if near else ""


def _checked(action: argparse.Action, value: Any, path: str, parser: argparse.ArgumentParser) -> Any:
    """Return a value from a file, as the flag itself would read it."""
    if value is None and action.default is None:
        return None
    if value is None or (isinstance(value, list) and None in value):
        raise UserError(f"--config {path}: {action.dest} has no value; give it one, or omit the line.")
    is_flag = isinstance(action, (argparse._StoreTrueAction, argparse.BooleanOptionalAction))
    items = value if isinstance(value, list) and action.nargs else [value]
    is_word = any(isinstance(item, bool) for item in items)
    if is_word != is_flag or any(isinstance(item, (dict, list)) for item in items):
        quotes = " Put a word such as no or yes in quotation marks." if is_word else ""
        raise UserError(f"--config {path}: {action.dest} can't be {value!r}.{quotes}")
    if is_flag:
        return value
    try:
        items = [parser._get_value(action, str(item)) for item in items]
    except argparse.ArgumentError as error:
        raise UserError(f"--config {path}: {action.dest} can't be {value!r}.") from error
    if action.choices is not None and not set(items) <= set(action.choices):
        raise UserError(f"--config {path}: {action.dest} is {value!r}; it must be one of {', '.join(action.choices)}.")
    return items if action.nargs else items[0]
