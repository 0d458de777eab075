"""What happens next to an experiment: submit, wait, or stop, and the sentence that says why.

`decide` is a pure function of what ledger, checkpoints, scheduler and instance say, so that every
history can be tried. It never asks for a submission beside one that may still live, never after a
stop that nobody lifted, and always comes to an end: attempts that save nothing new are counted,
whatever ended them.
"""

from dataclasses import dataclass
from enum import StrEnum

from rqwen3_pipeline.training import submission_key


class Outcome(StrEnum):
    """How an attempt at a submission ended."""

    FINISHED = "finished"
    SAVED = "saved"
    """Cut by the clock or a signal, and saved."""
    LOST = "lost"
    """Node failure, preemption, boot failure, or a trainer that was killed without a word."""
    TIMED_OUT = "timed out"
    """The time limit came before the save."""
    OUT_OF_MEMORY = "out of memory"
    DISK_FULL = "disk full"
    NOT_FINITE = "not finite"
    ERROR = "error"
    CANCELLED = "cancelled"
    """By a person."""
    CANNOT_START = "cannot start"
    """The scheduler said that this job can never start."""


RETRIED = frozenset({Outcome.LOST, Outcome.TIMED_OUT})
ADVICE = {
    Outcome.OUT_OF_MEMORY: "Lower training.micro_batch_size (rqwen3 plan says what fits) or ask for more memory "
    "(mem in the cluster's file)",
    Outcome.DISK_FULL: "Free space, or move the run root",
    Outcome.NOT_FINITE: "Look at the documents of those steps (rqwen3 trace). A lower learning rate is another "
    "experiment: rqwen3 experiment new NAME --from {experiment} --set training.learning_rate=VALUE. Only where a fault "
    "of the machine made them will the same steps end otherwise; mend that",
    Outcome.ERROR: "Mend what the log names",
    Outcome.CANCELLED: "If that was not meant",
    Outcome.CANNOT_START: "Ask for what the partition can give",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Limits of the chain; the `[submissions]` section sets them."""

    retries: int = 3
    """Attempts after the first that a submission gets when its job is lost."""
    back_off_s: float = 60.0
    """Wait before the first retry; doubled at each further one."""
    idle_slices: int = 2
    """Slices in a row that trained and saved nothing new, after which the chain stops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One attempt at a submission, ended."""

    submission: int
    attempt: int
    outcome: Outcome
    from_step: int = 0
    """Step it resumed from."""
    reached_step: int | None = None
    """Last step it trained; None where it came to none."""
    saved_step: int = 0
    """Newest checkpoint when it ended."""
    ended_s: float = 0.0
    """Seconds since the epoch, by the clock of the machine it ran on."""
    detail: str = ""
    """What the scheduler, the ledger or the run's event log said."""
    log: str = ""
    """Where to read more."""

    @property
    def place(self) -> tuple[int, int]:
        """Submission and attempt: the order of attempts."""
        return self.submission, self.attempt

    @property
    def advanced(self) -> bool:
        """Whether it left a newer checkpoint than it found."""
        return self.saved_step > self.from_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything a decision rests on."""

    experiment: str
    finished: bool
    """`final.pt` is there and agrees with its sidecar."""
    attempts: tuple[Attempt, ...] = ()
    """All that ended, in order."""
    live: tuple[str, ...] = ()
    """What may still be running, each as a few words: a run, a job, the holder of the lock."""
    scheduler_problem: str | None = None
    """Why the scheduler could not be asked."""
    first_problem: str | None = None
    """Why the first submission must not start; mending it is all it takes, no hand need lift it."""
    stopped: str | None = None
    """Who stopped the chain by hand and why, as long as nobody lifted it."""
    forgiven: tuple[int, int] = (0, 0)
    """The last attempt when a person resumed the chain: what came up to it no longer stops it."""
    now_s: float = 0.0
    """Seconds since the epoch, here."""


class Action(StrEnum):
    """What to do."""

    SUBMIT = "submit"
    WAIT = "wait"
    STOP = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What to do, and why."""

    action: Action
    reason: str
    submission: int = 0
    """With SUBMIT: its number."""
    attempt: int = 0
    """With SUBMIT: which attempt at it."""


def decide(facts: Facts, policy: Policy) -> Decision:
    """Say what happens next; see the module."""
    if facts.finished:
        return _stop("finished: the run has reached its last step")
    if facts.stopped is not None:
        return _stop(f"stopped by hand ({facts.stopped})", facts)
    if facts.live:
        return _wait(f"{' and '.join(facts.live)} may still be running")
    if facts.scheduler_problem is not None:
        return _wait(f"the scheduler does not answer, and nothing is submitted blind: {facts.scheduler_problem}")
    if not facts.attempts:
        if facts.first_problem is not None:
            return _stop(facts.first_problem)
        return _submit(1, 1, "the first submission")
    last = facts.attempts[-1]
    counted = tuple(attempt for attempt in facts.attempts if attempt.place > facts.forgiven)
    if not counted:
        return _after(last, "resumed by hand")
    return _stop_after(last, counted, facts, policy) or _retry_later(last, counted, facts, policy) or _after(last, "")


def _stop_after(last: Attempt, counted: tuple[Attempt, ...], facts: Facts, policy: Policy) -> Decision | None:
    """The stop that the attempts demand, if they do."""
    name = submission_key(facts.experiment, last.submission)
    if last.outcome in ADVICE:
        advice = ADVICE[last.outcome].format(experiment=facts.experiment)
        return _stop(f"{name} ended {_how(last)}. {advice}", facts)
    if last.outcome is Outcome.FINISHED:
        return _stop(f"{name} says it finished, but there is no whole final.pt; restore it", facts)
    fruitless = _trailing(counted)
    slices = [a for a in fruitless if a.reached_step is not None and a.reached_step > a.from_step]
    if len(slices) >= policy.idle_slices:
        return _stop(
            f"no progress: {len(slices)} slices in a row trained and saved nothing beyond step {last.saved_step:,}. "
            "Give them more time, or save more often",
            facts,
        )
    if len(fruitless) > policy.retries:
        return _stop(
            f"{len(fruitless)} attempts in a row saved nothing new; the last, {name}, ended {_how(last)}",
            facts,
        )
    return None


def _how(last: Attempt) -> str:
    """How an attempt ended, what was said of it, and where there is more."""
    said = f": {last.detail.rstrip('.')}" if last.detail else ""
    return f"{last.outcome}{said}" + (f" (log: {last.log})" if last.log else "")


def _retry_later(last: Attempt, counted: tuple[Attempt, ...], facts: Facts, policy: Policy) -> Decision | None:
    """The wait before a retry, while it lasts. A time in the future is another clock's, and says nothing."""
    if last.outcome not in RETRIED:
        return None
    failures = sum(1 for a in counted if a.submission == last.submission and a.outcome in RETRIED)
    back_off_s = policy.back_off_s * 2 ** (failures - 1)
    left_s = last.ended_s + back_off_s - facts.now_s
    if 0 < left_s <= back_off_s:
        name = submission_key(facts.experiment, last.submission)
        return _wait(f"{name} was {last.outcome} ({last.detail}); its next attempt is in {left_s:.0f} s")
    return None


def _after(last: Attempt, why: str) -> Decision:
    """The submission that follows an attempt: the next one, or another attempt at the same."""
    begun = last.reached_step is not None  # a cancelled one may have a record that says it ended well
    if last.outcome is Outcome.SAVED or (last.outcome is Outcome.CANCELLED and begun):
        return _submit(last.submission + 1, 1, why or f"the last one was cut and saved step {last.saved_step:,}")
    return _submit(last.submission, last.attempt + 1, why or f"the last attempt was {last.outcome}: {last.detail}")


def _trailing(attempts: tuple[Attempt, ...]) -> list[Attempt]:
    """The attempts since the last one that advanced."""
    found: list[Attempt] = []
    for attempt in reversed(attempts):
        if attempt.advanced:
            break
        found.append(attempt)
    return found


def _submit(submission: int, attempt: int, reason: str) -> Decision:
    return Decision(action=Action.SUBMIT, reason=reason, submission=submission, attempt=attempt)


def _wait(reason: str) -> Decision:
    return Decision(action=Action.WAIT, reason=reason)


def _stop(reason: str, facts: Facts | None = None) -> Decision:
    """With `facts`: something a person can lift, and the command that does."""
    lift = "" if facts is None else f"; then: rqwen3 experiment resume {facts.experiment}"
    return Decision(action=Action.STOP, reason=reason + lift)
