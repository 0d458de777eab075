"""What ledger, lock, checkpoints, runs and jobs say of an experiment, brought into one list of attempts.

None of them is enough alone: good slices have ended FAILED, broken ones COMPLETED, and a killed
trainer wrote nothing. The ledger's record comes first; where it is missing, the lock that the trainer
left tells whether it had begun, and the scheduler's state what ended it. Reads some small files; asks
nobody anything.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from model.errors import EXIT_CODES
from model.files import read_jsonl
from rqwen3_pipeline.experiment_files import lock_holder, saved_step
from rqwen3_pipeline.experiments.policy import Attempt, Outcome
from rqwen3_pipeline.settings import RunRoot
from rqwen3_pipeline.slurm.states import WORTH_ANOTHER_TRY, State
from rqwen3_pipeline.training import EXIT_CONTINUE, EXIT_FINISHED, ledger, submission_log

EXIT_LOCK_HELD = 73
GOOD = (EXIT_FINISHED, EXIT_CONTINUE)
KILLED = (-9, 137)
"""Exit codes of a trainer, or of its worker, that was killed without a chance to say so, perhaps before it took the
lock."""
KILLED_REASON = "killed"
"""How the ledger calls a trainer that wrote nothing: its record's error is a guess of the trainer that came after."""
STOP_REASONS = {
    "non_finite": Outcome.NOT_FINITE,
    "out_of_memory": Outcome.OUT_OF_MEMORY,
    "disk_full": Outcome.DISK_FULL,
    "error": Outcome.ERROR,
}
"""How the ledger calls a failure."""
EXIT_OUTCOMES = {EXIT_CODES[word]: outcome for word, outcome in STOP_REASONS.items() if word in EXIT_CODES}
"""How an exit code does, where nothing could be written, as on a full disk, or it was not yet time to."""
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
    log: str = ""
    """Where its job's output is."""
    memory_kill: str = ""
    """What the scheduler wrote there, if it killed the job for its memory, which the state may not tell."""


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
    for lock in _locks(root, name):
        key = int(lock["submission"]), int(lock.get("attempt") or 1)
        if lock.get("alive") is not True and places.get(key, Place()).record is None:
            places[key] = Place(run=places.get(key, Place()).run, lock=lock)
    folder, folder_saved = root.experiment(name), saved_step(root.experiment(name)) or 0
    trained = _steps(root, name)
    done = {key for key, place in places.items() if place.record and place.record.get("exit_code") in GOOD}
    return tuple(
        _attempt(key, place, trained.get(key), folder_saved, _log_of(folder, key, place.run))
        for key, place in sorted(places.items())
        if key not in live and not _found_it_done(key, place, done)
    )


def _found_it_done(key: tuple[int, int], place: Place, done: Iterable[tuple[int, int]]) -> bool:
    """Whether a run without a trace found its submission taken by the attempt that ended well, or done.

    What failed before that attempt is none of those: it stays on the list.
    """
    if place.record is not None or place.lock is not None or place.run is None or place.run.cancelled:
        return False
    ended_well = [attempt for submission, attempt in done if submission == key[0]]
    return bool(ended_well) and (place.run.exit_code == EXIT_LOCK_HELD or key[1] > min(ended_well))


def next_attempt(root: RunRoot, name: str, submission: int) -> int:
    """Number of the next attempt at a submission, by what the trainers left: ledger, metrics and lock."""
    made = {0}
    made |= {int(r["attempt"]) for r in ledger(root, name) if r["submission"] == submission}
    made |= {attempt for number, attempt in _steps(root, name) if number == submission}
    made |= {int(lock.get("attempt") or 1) for lock in _locks(root, name) if lock["submission"] == submission}
    return 1 + max(made)


def _locks(root: RunRoot, name: str) -> list[dict[str, Any]]:
    """What the lock says of its holder, and of the dead ones before it whose records are still to be written."""
    holder = lock_holder(root.experiment(name)) or {}
    return [lock for lock in (*holder.get("predecessors", ()), holder) if lock.get("submission") is not None]


def _log_of(folder: Path, key: tuple[int, int], run: RunSeen | None) -> str:
    """The log of the attempt's trainer; its job's, where the trainer said nothing; neither where both are mute."""
    logs = (submission_log(folder, *key), Path(run.log) if run is not None and run.log else None)
    return next((str(log) for log in logs if log is not None and log.is_file() and log.stat().st_size), "")


def _attempt(
    key: tuple[int, int], place: Place, trained: tuple[int, int] | None, folder_saved: int, log: str
) -> Attempt:
    record, run, lock = place.record, place.run, place.lock
    outcome = outcome_of(place)
    common: dict[str, Any] = {"submission": key[0], "attempt": key[1], "outcome": outcome, "log": log}
    if record is not None:
        begun, reached, saved = (record.get(name) for name in ("from_step", "to_step", "saved_step"))
        return Attempt(
            **common,
            from_step=int((saved if begun is None else begun) or 0),  # null: it ended before it had loaded anything
            reached_step=None if begun is None or reached is None else int(reached),
            saved_step=int(saved or 0),
            ended_s=seconds(record.get("ended")) or (run.ended_s if run else 0.0),
            detail=_cancelled_by(run, record) if outcome is Outcome.CANCELLED else _said(place),
        )
    first, last = trained or (1, None)
    begun = first - 1
    if lock is not None:
        begun = folder_saved if lock.get("from_step") is None else int(lock["from_step"])
    return Attempt(
        **common,
        from_step=begun,
        reached_step=last,
        saved_step=folder_saved if lock is not None or trained else begun,
        ended_s=run.ended_s if run else 0.0,
        detail=_said(place),
    )


def _said(place: Place) -> str:
    """Why it ended: in its own words, else its run's and the scheduler's, else a guess."""
    left = place.record or place.lock or {}
    if left.get("exit_code") is not None:
        words = (left.get("error"), place.run and place.run.detail, left.get("stop_reason"))
    else:
        own = "" if left.get("stop_reason") == KILLED_REASON else left.get("error")
        words = (own, place.run and _how_it_was_ended(place.run), left.get("error"), left.get("stop_reason"))
    return telling_line(
        next(filter(None, words), f"{'the trainer vanished' if left else 'its run ended'} without a word")
    )


def _how_it_was_ended(run: RunSeen) -> str:
    """What run and scheduler say of an attempt that could not speak for itself."""
    if run.memory_kill:
        return run.memory_kill
    ended = run.state is State.CANCELLED or run.state in JOB_STATES
    if run.state is not None and ended and run.state.value not in run.detail:
        job = f"SLURM job {run.job_id}" if run.job_id is not None else "its job"
        return f"{job} is {run.state.value}" + (f": {run.detail}" if run.detail else "")
    return run.detail or ("its run was terminated" if run.cancelled else "")


def _cancelled_by(run: RunSeen | None, record: Mapping[str, Any]) -> str:
    """Which hand it was, and what the trainer made of it."""
    what = "its run was terminated" if run is not None and run.cancelled else "its job was cancelled"
    saved = record.get("exit_code") == EXIT_CONTINUE
    return what + (f", and it saved step {int(record.get('saved_step') or 0):,}" if saved else "")


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
    told = (record or place.lock or {}).get("stop_reason")
    if told in STOP_REASONS:
        return STOP_REASONS[str(told)]
    if code is None and run is not None and run.exit_code in EXIT_OUTCOMES:
        return EXIT_OUTCOMES[run.exit_code]
    if state in JOB_STATES:
        return JOB_STATES[state]
    if code is None and run is not None and run.memory_kill:
        return Outcome.OUT_OF_MEMORY
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


def telling_line(text: Any, characters: int = 600) -> str:
    """The line of a message that says most, cut: the first, or a traceback's last."""
    lines = [line.strip() for line in str(text or "").splitlines() if line.strip()]
    if not lines:
        return ""
    line = lines[-1 if lines[0].startswith("Traceback") else 0]
    return line if len(line) <= characters else line[: characters - 1] + "…"


def _steps(root: RunRoot, name: str) -> dict[tuple[int, int], tuple[int, int]]:
    """First and last step that each attempt logged."""
    steps: dict[tuple[int, int], tuple[int, int]] = {}
    for point in read_jsonl(root.experiment(name) / "metrics.jsonl"):
        if point.get("kind") == "train" and point.get("submission") is not None:
            key, step = (int(point["submission"]), int(point.get("attempt") or 1)), int(point["step"])
            steps[key] = (steps.get(key, (step, step))[0], step)
    return steps
