"""The hand on the chain: a stop by hand holds until somebody lifts it.

Kept in `experiments/<name>/control.jsonl`, one line an act, so that who stopped what and when stays
known, and so that job scripts, runs, sensors and people all read the same. It may come before the first
job; none that it finds in the queue, where a job may wait for days, trains. Lifting a stop also forgives
the attempts so far: what ended them no longer keeps the chain from going on.
"""

import getpass
import socket
from dataclasses import dataclass
from datetime import UTC, datetime

from model.errors import RQwen3Error
from model.files import append_jsonl, read_jsonl
from rqwen3_pipeline.settings import RunRoot

STOP, RESUME = "stop", "resume"


class StoppedByHandError(RQwen3Error):
    """Somebody stopped the experiment; the message says who, and how to lift it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What the newest act of a hand left in force."""

    stopped: str | None = None
    """Who stopped the chain, when and why; None while it may go on."""
    forgiven: tuple[int, int] = (0, 0)
    """Submission and attempt up to which failures no longer count."""


def standing(root: RunRoot, name: str) -> Standing:
    """What is in force; an experiment that nobody touched may go on."""
    stopped, forgiven = None, (0, 0)
    for act in read_jsonl(root.experiment(name) / "control.jsonl"):
        if act.get("act") == STOP:
            stopped = f"{act.get('by')} at {act.get('at')}" + (f": {act['why']}" if act.get("why") else "")
        elif act.get("act") == RESUME:
            stopped, forgiven = None, (int(act["forgiven"][0]), int(act["forgiven"][1]))
    return Standing(stopped=stopped, forgiven=forgiven)


def require_go(root: RunRoot, name: str) -> None:
    """Check that an experiment may train.

    Raises:
        StoppedByHandError: somebody stopped it.
    """
    stopped = standing(root, name).stopped
    if stopped is not None:
        raise StoppedByHandError(f"{name}: stopped by hand ({stopped}); then: rqwen3 experiment resume {name}")


def stop(root: RunRoot, name: str, why: str) -> None:
    """Let nothing more be submitted; what runs is left alone."""
    _append(root, name, {"act": STOP, "why": why})


def resume(root: RunRoot, name: str, through: tuple[int, int]) -> None:
    """Lift a stop, and forgive the attempts up to and with `through`."""
    _append(root, name, {"act": RESUME, "forgiven": list(through)})


def _append(root: RunRoot, name: str, act: dict[str, object]) -> None:
    by = f"{getpass.getuser()}@{socket.gethostname()}"
    append_jsonl(
        root.experiment(name) / "control.jsonl",
        {"at": datetime.now(UTC).isoformat(timespec="seconds"), "by": by, **act},
    )
