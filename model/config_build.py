"""A section of a TOML file into the dataclass that describes it; every misspelt or missing key is named at once.

Free of torch. The parts that a message lists stand one to a line.
"""

import dataclasses
import datetime
import difflib
import math
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

from model.errors import ConfigError

LINE = "\n  "
INSTEAD_OF_INFINITY = {
    "training.grad_clip": "0 switches clipping off",
    "training.save_every_minutes": "0 is never",
    "submissions.time_limit_s": "0 is none",
}
"""What says "no limit", by key."""
T = typing.TypeVar("T")


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ConfigError: it is missing, or no TOML; the message gives the line and column.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file. Name one of configs/*.toml, or a copy of it.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}. Mend that place and run again.") from error


def build(cls: type[T], values: Any, where: str) -> T:
    """Make a config dataclass from a TOML table, strictly.

    Args:
        cls: a dataclass whose fields are bool, int, float, str or tuples of them, or None with one.
        values: the table.
        where: its dotted name, for messages.

    Raises:
        ConfigError: unknown keys (the valid ones are listed), missing ones, wrong types, numbers that are not
            finite: all of them are named; or the first value that is not possible.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"[{where}] must be a table, not {values!r}")
    table = typing.cast(dict[str, Any], values)
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType] T is a dataclass
    problems: list[str] = []
    if unknown := [key for key in table if key not in fields]:
        problems.append(f"[{where}] {unknown_names('key', unknown, fields)}")
    required = [name for name, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in required if name not in table]:
        problems.append(f"[{where}] lacks {', '.join(missing)}")
    arguments: dict[str, Any] = {}
    for key in table.keys() & fields.keys():
        try:
            arguments[key] = _coerce(table[key], hints[key], f"{where}.{key}")
            problems += unwritable(arguments[key], f"{where}.{key}")
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(LINE.join(sorted(problems)))
    return cls(**arguments)


def unwritable(value: Any, where: str) -> list[str]:
    """What is said of values, at any depth, that JSON can't hold: each copy of a configuration is saved as JSON.

    Args:
        value: as read from TOML.
        where: its dotted name, for messages.
    """
    if isinstance(value, dict):
        entries = typing.cast(dict[str, Any], value).items()
        return [told for key, entry in entries for told in unwritable(entry, f"{where}.{key}" if where else key)]
    if isinstance(value, list | tuple):
        return [told for entry in typing.cast(list[Any], value) for told in unwritable(entry, where)]
    if isinstance(value, float) and not math.isfinite(value):
        instead = INSTEAD_OF_INFINITY.get(where)
        return [f"{where} = {value} must be a finite number{f'; {instead}' if instead else ''}"]
    if isinstance(value, datetime.date | datetime.time):
        return [f'{where} = {value} must be text: write "{value}"']
    return []


def _coerce(value: Any, hint: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next(option for option in typing.get_args(hint) if option is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        if isinstance(value, list | tuple):
            return tuple(_coerce(entry, item, where) for entry in typing.cast(list[Any], value))
        raise ConfigError(f"{where} = {value!r} must be a list of {item.__name__}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where} = {value!r} must be of type {hint.__name__}, not {type(value).__name__}")
    return value


def unknown_names(kind: str, names: list[str], valid: typing.Iterable[str]) -> str:
    """What is said of names that are not valid, each with the valid one that it resembles."""
    known, told = sorted(valid), list[str]()
    for name in names:
        near = difflib.get_close_matches(name, known, n=1)
        told.append(f"has no {kind} {name!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
    return f"{' It '.join(told)} Valid: {', '.join(known)}."
