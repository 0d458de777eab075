"""The status as a person reads it: one screen of aligned plain text.

Where standard output can't print the lines and marks, ASCII takes their place.
"""

import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rqwen3_pipeline.evidence.words import between, quantity, size
from rqwen3_pipeline.services import render_services

SHOWN_SUBMISSIONS = 6
BAR_CHARS = 24
SCREEN_COLUMNS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class _Marks:
    rule: str
    full: str
    empty: str
    done: str
    open: str
    dash: str


_FINE = _Marks(rule="─", full="█", empty="░", done="✓", open="·", dash="–")
_PLAIN = _Marks(rule="-", full="#", empty=".", done="yes", open="no", dash="-")


def render(status: dict[str, Any], encoding: str | None = None, tell: Callable[[str], str] = str) -> str:
    """Draw what `status` returned.

    Args:
        status: the state.
        encoding: of the stream it will be printed to; standard output's by default.
        tell: what becomes of the text before that, as flags in the commands that it names.
    """
    marks = _marks(encoding or sys.stdout.encoding)
    home = _as_typed(status["home"])
    parts = [
        f"{status['experiment']}  {home}  {size(status['disk_free_bytes'])} free",
        _corpus(status, marks),
        *(_experiment(name, item, marks) for name, item in status["experiments"].items()),
        _results(status, marks),
        *(["\n".join(render_services(status["services"]))] if status.get("services", {}).get("daemon") else []),
        _next(status["next"]),
    ]
    text = tell("\n\n".join(parts))
    return text if marks is _FINE else text.encode("ascii", "backslashreplace").decode("ascii")


def _marks(encoding: str | None) -> _Marks:
    try:
        "".join((_FINE.rule, _FINE.full, _FINE.empty, _FINE.done, _FINE.open, _FINE.dash)).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _PLAIN
    return _FINE


def _as_typed(path: str) -> str:
    """A path as one would type it: relative where it lies below the current folder."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], marks: _Marks) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join((first.strip().ljust(widths[0]), *others)).rstrip()

    return "\n".join((line(head), marks.rule * (sum(widths) + 2 * len(widths) - 2), *map(line, rows)))


def _corpus(status: dict[str, Any], marks: _Marks) -> str:
    stages = status["stages"]
    if not stages:
        return f"Corpus: {status['lock']['problem'] or 'the source files are not locked yet'}"
    plain = [stage for stage in stages if stage != "survivors"]
    sources = list(stages[plain[0]])
    rows: list[list[str]] = []
    for source in sources:
        counts = status["sources"].get(source, {})
        cells = [_pieces(stages[stage].get(source), marks) for stage in plain]
        numbers = [quantity(counts.get(name)) for name in ("documents", "tokens")]
        rows.append([source, *cells, *numbers, size(counts.get("text_bytes"))])
    table = _table(["source", *plain, "documents", "tokens", "text"], rows, marks)
    groups = [f"{name} {_pieces(item, marks)}" for name, item in stages["survivors"].items()]
    return f"{table}\ndeduplicated: {', '.join(groups)}\n{_manifest(status['manifest'])}"


def _pieces(row: dict[str, Any] | None, marks: _Marks) -> str:
    if row is None or "problem" in row:
        return "?"
    return marks.done if row["wanted"] == 1 and row["done"] == 1 else f"{row['done']:,}/{row['wanted']:,}"


def _manifest(manifest: dict[str, Any]) -> str:
    if not manifest["present"]:
        return "manifest: not made yet"
    if "problem" in manifest:
        return f"manifest: damaged ({manifest['problem']})"
    short = f", {manifest['missing_tokens']:,} short of the budget" if manifest["missing_tokens"] else ""
    return (
        f"manifest: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens, "
        f"{manifest['tokens_used']:,} of them used{short}; {manifest['shards']:,} shards"
    )


def _experiment(name: str, item: dict[str, Any], marks: _Marks) -> str:
    wanted, saved = item["max_steps"], item["steps_saved"]
    if not item["present"]:
        return f"experiment {name}: not begun"
    lines = [f"experiment {name}: step {saved:,} saved, {item['steps_logged']:,} logged"]
    if wanted:
        full = min(BAR_CHARS, BAR_CHARS * saved // wanted)
        bar = marks.full * full + marks.empty * (BAR_CHARS - full)
        lines[0] = f"experiment {name}: {bar} {saved:,} of {wanted:,} steps saved, {item['steps_logged']:,} logged"
    if item["steps_logged"]:
        loss = "not finite" if item["loss"] is None else quantity(item["loss"])
        speed = f", {item['tokens_per_s']:,.0f} tokens/s" if isinstance(item["tokens_per_s"], int | float) else ""
        lines.append(f"loss {loss}{speed}")
    shown = item["submissions"][-SHOWN_SUBMISSIONS:]
    if shown:
        head = ["submission", "from", "to", "saved", "lost", "exit", "stopped by"]
        keys = ("submission", "from_step", "to_step", "saved_step", "lost", "exit_code", "stop_reason")
        rows = [[_cell({**record, "lost": _lost(record)}.get(key), marks) for key in keys] for record in shown]
        lines.append(_table(head, rows, marks))
    lines.append(f"{_checkpoints(item)}; {_lock(item['lock'])}")
    return "\n".join(lines)


def _lost(record: dict[str, Any]) -> str | None:
    least = record["lost_steps"]
    return None if least is None else between(least, record["lost_steps_at_most"])


def _cell(value: Any, marks: _Marks) -> str:
    return marks.dash if value is None else quantity(value)


def _checkpoints(item: dict[str, Any]) -> str:
    good = [str(c["step"]) for c in item["checkpoints"] if c["whole"]]
    bad = [c["file"] for c in item["checkpoints"] if not c["whole"]]
    shown = good if len(good) <= 6 else [*good[:2], "…", *good[-3:]]
    text = f"checkpoints: {', '.join([*shown, *(['final'] if item['finished'] else [])]) or 'none'}"
    return f"{text}; damaged or unfinished: {', '.join(bad)}" if bad else text


def _lock(holder: dict[str, Any] | None) -> str:
    if holder is None:
        return "lock: free"
    where = f"process {holder.get('pid')} on {holder.get('host')}"
    state = {
        True: "alive",
        False: "dead; the next submission takes it over",
        None: "alive or not can't be told from here",
    }
    return f"lock: {where}, {state[holder['alive']]}"


def _results(status: dict[str, Any], marks: _Marks) -> str:
    name = status["experiment"]
    rows = (("export", "exports"), ("evaluation", "evaluations"), ("report", "evidence"))
    return "\n".join(f"{label:<11} {status[key].get(name, marks.open)}" for label, key in rows)


def _next(step: dict[str, Any]) -> str:
    in_ui = step.get("in_ui")
    command = step["command"] or (f"in the UI, {in_ui}" if in_ui else "nothing to type")
    why = textwrap.wrap(step["why"], SCREEN_COLUMNS - 6, break_long_words=False, break_on_hyphens=False)
    return "\n      ".join((f"next: {command}", *why))
