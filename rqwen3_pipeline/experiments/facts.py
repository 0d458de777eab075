"""What ledger, lock, checkpoints, runs and jobs say of an experiment, brought into one list of attempts.

None of them is enough alone: good slices have ended FAILED, broken ones COMPLETED, and a killed
trainer wrote nothing. The ledger's record comes first; where it is missing, the lock that the trainer
left tells whether it had begun, and the scheduler's state what ended it. Reads some small files; asks
nobody anything.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from model.files import read_jsonl
from rqwen3_pipeline.experiment_files import lock_holder, saved_step
from rqwen3_pipeline.experiments.policy import Attempt, Outcome
from rqwen3_pipeline.settings import RunRoot
from rqwen3_pipeline.slurm.states import WORTH_ANOTHER_TRY, State
from rqwen3_pipeline.training import EXIT_CONTINUE, EXIT_FINISHED, ledger

EXIT_LOCK_HELD = 73
GOOD = (EXIT_FINISHED, EXIT_CONTINUE)
KILLED = (-9, 137)
"""Exit codes of a trainer, or of its worker, that was killed without a chance to say so, perhaps before it took the
lock."""
STOP_REASONS = {
    "non_finite": Outcome.NOT_FINITE,
    "out_of_memory": Outcome.OUT_OF_MEMORY,
    "disk_full": Outcome.DISK_FULL,
    "error": Outcome.ERROR,
}
"""How the ledger calls a failure."""
JOB_STATES = {
    State.OUT_OF_MEMORY: Outcome.OUT_OF_MEMORY,
    State.TIMEOUT: Outcome.TIMED_OUT,
    State.DEADLINE: Outcome.TIMED_OUT,
    **dict.fromkeys(WORTH_ANOTHER_TRY, Outcome.LOST),
}
"""How the scheduler does; the other states say nothing for certain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSeen:
    """A run of the instance that was launched for a submission."""

    run_id: str
    submission: int
    attempt: int
    live: bool
    """Queued, starting, started or being cancelled."""
    cancelled: bool = False
    job_id: int | None = None
    state: State | None = None
    """The job's last state, where somebody saw it."""
    cannot_start: bool = False
    """The scheduler said that its job can never start."""
    vanished: bool = False
    """SLURM knows its job no more, and nobody saw it end."""
    exit_code: int | None = None
    """The trainer's, where the run failed by it; else the job's."""
    ended_s: float = 0.0
    detail: str = ""
    """The failure's message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """All that was found about one attempt."""

    record: Mapping[str, Any] | None = None
    run: RunSeen | None = None
    lock: Mapping[str, Any] | None = None
    """The lock it left behind."""


def attempts_of(root: RunRoot, name: str, runs: Iterable[RunSeen] = ()) -> tuple[Attempt, ...]:
    """All ended attempts, in order.

    Args:
        root: the run root.
        name: the experiment.
        runs: its runs, live ones too; of several for one attempt the last counts.
    """
    places: dict[tuple[int, int], Place] = {}
    live = {(run.submission, run.attempt) for run in runs if run.live}
    for run in runs:
        places[run.submission, run.attempt] = Place(run=run)
    for record in ledger(root, name):
        key = int(record["submission"]), int(record["attempt"])
        places[key] = Place(record=record, run=places.get(key, Place()).run)
    lock = lock_holder(root.experiment(name))
    if lock is not None and lock.get("submission") is not None:
        key = int(lock["submission"]), int(lock.get("attempt") or 1)
        if lock["alive"] is not True and places.get(key, Place()).record is None:
            places[key] = Place(run=places.get(key, Place()).run, lock=lock)
    folder_saved = saved_step(root.experiment(name)) or 0
    trained = _last_steps(root, name)
    done = {key[0] for key, place in places.items() if place.record and place.record.get("exit_code") in GOOD}
    return tuple(
        _attempt(key, place, trained.get(key), folder_saved)
        for key, place in sorted(places.items())
        if key not in live and not (key[0] in done and _found_it_done(place))
    )


def _found_it_done(place: Place) -> bool:
    """Whether a run of a submission that ended well left no trace: it found it taken, or done, and says nothing."""
    return place.record is None and place.lock is None and place.run is not None and not place.run.cancelled


def next_attempt(root: RunRoot, name: str, submission: int) -> int:
    """Number of the next attempt at a submission, by what the trainers left: ledger, metrics and lock."""
    made = {0}
    made |= {int(r["attempt"]) for r in ledger(root, name) if r["submission"] == submission}
    made |= {attempt for number, attempt in _last_steps(root, name) if number == submission}
    lock = lock_holder(root.experiment(name))
    if lock is not None and lock.get("submission") == submission:
        made.add(int(lock.get("attempt") or 1))
    return 1 + max(made)


def _attempt(key: tuple[int, int], place: Place, trained: int | None, folder_saved: int) -> Attempt:
    record, run, lock = place.record, place.run, place.lock
    outcome = outcome_of(place)
    common: dict[str, Any] = {"submission": key[0], "attempt": key[1], "outcome": outcome}
    if record is not None:
        return Attempt(
            **common,
            from_step=int(record.get("from_step") or 0),
            reached_step=int(record["to_step"]) if record.get("to_step") is not None else None,
            saved_step=int(record.get("saved_step") or 0),
            ended_s=seconds(record.get("ended")) or (run.ended_s if run else 0.0),
            detail=telling_line(record.get("error") or (run.detail if run else "") or str(record.get("stop_reason"))),
        )
    begun = int((lock or {}).get("from_step") or 0)
    return Attempt(
        **common,
        from_step=begun,
        reached_step=trained,
        saved_step=folder_saved if lock is not None else begun,
        ended_s=run.ended_s if run else 0.0,
        detail=telling_line(run.detail if run and run.detail else "the trainer vanished without a word"),
    )


def outcome_of(place: Place) -> Outcome:
    """How an attempt ended, by all that is known of it."""
    record, run = place.record, place.run
    state = run.state if run else None
    code = record.get("exit_code") if record else None
    if code == EXIT_FINISHED:
        return Outcome.FINISHED
    if record is None and run is not None and run.cannot_start:  # its job is then cancelled by the reconciler
        return Outcome.CANNOT_START
    if (run is not None and run.cancelled) or state is State.CANCELLED:
        return Outcome.CANCELLED
    if code == EXIT_CONTINUE:
        return Outcome.SAVED
    if record is not None and record.get("stop_reason") in STOP_REASONS:
        return STOP_REASONS[str(record["stop_reason"])]
    if state in JOB_STATES:
        return JOB_STATES[state]
    begun = record is not None or place.lock is not None
    if begun or (run is not None and (run.vanished or run.exit_code in (EXIT_LOCK_HELD, *KILLED))):
        return Outcome.LOST
    return Outcome.ERROR


def seconds(time: Any) -> float:
    """An ISO 8601 time as seconds since the epoch; 0 where there is none."""
    try:
        return datetime.fromisoformat(str(time)).timestamp()
    except ValueError:
        return 0.0


def telling_line(text: Any, characters: int = 300) -> str:
    """The line of a message that says most, cut: the first, or a traceback's last."""
    lines = [line.strip() for line in str(text or "").splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[-1 if lines[0].startswith("Traceback") else 0][:characters]


def _last_steps(root: RunRoot, name: str) -> dict[tuple[int, int], int]:
    """Last step that each attempt logged."""
    steps: dict[tuple[int, int], int] = {}
    for point in read_jsonl(root.experiment(name) / "metrics.jsonl"):
        if point.get("kind") == "train" and point.get("submission") is not None:
            steps[int(point["submission"]), int(point.get("attempt") or 1)] = int(point["step"])
    return steps
