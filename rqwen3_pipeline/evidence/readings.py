"""Figures as the report carries them: a value, and the file of the run root that backs it.

A damaged file must not cost the reader the rest of the report, so reading never raises: what can't
be read is listed as a problem, and counts as not there. Numbers that are not finite become words,
since JSON has none and a chart can't draw them. Costs one read of each small file.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.errors import RQwen3Error
from model.files import read_json, read_jsonl

Figure = dict[str, Any]
"""`{"value": …, "from": [paths relative to the run root]}`, with `"how"` where arithmetic came in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """Reads files of one run root and remembers which could not be read."""

    root: Path
    """The run root."""
    problems: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    """`{"file", "problem"}` for each file that is there and can't be read."""

    def name(self, path: Path) -> str:
        """The path as the report shows it: relative to the run root where it lies below it."""
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else path.name

    def table(self, path: Path) -> dict[str, Any] | None:
        """A JSON object, or None when the file is missing or damaged."""
        if not path.is_file():
            return None
        try:
            value = read_json(path)
        except (RQwen3Error, OSError) as error:
            self.problems.append({"file": self.name(path), "problem": str(error).replace(f"{self.root}/", "")})
            return None
        if isinstance(value, dict):
            return value
        self.problems.append({"file": self.name(path), "problem": "holds no JSON object"})
        return None

    def lines(self, path: Path) -> list[dict[str, Any]]:
        """The records of a log of JSON lines; none when it is missing or can't be read."""
        try:
            return read_jsonl(path)
        except OSError as error:
            self.problems.append({"file": self.name(path), "problem": str(error)})
            return []


def figure(value: Any, *files: str, how: str | None = None) -> Figure:
    """One figure and where it comes from."""
    made: Figure = {"value": value, "from": list(files)}
    if how is not None:
        made["how"] = how
    return made


def number(value: Any) -> float | None:
    """A JSON value as a number; NaN and infinities are numbers, written as such or as text."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return None


def whole(value: Any) -> int | None:
    """A JSON value as an integer, or None where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def table_of(value: Any) -> dict[str, Any]:
    """The value itself if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def finite(value: Any) -> float | None:
    """A JSON value as a finite number, or None."""
    as_float = number(value)
    return as_float if as_float is not None and math.isfinite(as_float) else None


def spelled(value: float) -> str:
    """A number that is not finite, in words."""
    return "not a number" if math.isnan(value) else ("infinite" if value > 0 else "minus infinite")


def jsonable(value: Any) -> Any:
    """The same value with every number that is not finite replaced by its words."""
    if isinstance(value, float) and not math.isfinite(value):
        return spelled(value)
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value
