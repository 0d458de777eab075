"""What to do about runs and jobs that disagree: a pure function of both, the clock, and what was seen before.

Dagster looks after a run that has started. It never looks at one that is starting, and it forgets a
job whose run has ended: those are decided here. Nothing is read or done; a tick is a list of verdicts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from rqwen3_pipeline.slurm.parsing import Job
from rqwen3_pipeline.slurm.states import Phase, State, never_starts

COMMENT = "dagster:"
ENDED_GRACE_S = 30.0
"""How long the worker of an ended job may take to be heard of."""
FINISHED_GRACE_S = 60.0
"""How long the job of a finished run may take to end by itself."""


class Verdict(Enum):
    """What to do about a run."""

    ADOPT = "adopt"
    """Note the job's id on the run."""
    CANCEL_JOB = "cancel job"
    FAIL = "fail"
    """Report the run as failed."""
    FAIL_AND_CANCEL = "fail and cancel"
    CANCELED = "canceled"
    """Report the run as cancelled."""
    CANCEL = "cancel"
    """Cancel the job, and report the run as cancelled or about to be."""
    SAVE = "save"
    """Ask the trainer to save and stop, and report the run as about to be cancelled."""
    EXPLAIN = "explain"
    """Add SLURM's reason to a run whose worker could only say that it was interrupted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A Dagster run, as far as it matters here."""

    run_id: str
    status: str
    """STARTING, STARTED, CANCELING, or FINISHED for any other that has ended."""
    job_id: int | None
    """As noted on the run."""
    saves: bool
    """It trains: it is given time to save."""
    cancel_requested: float | None
    """When somebody asked for its end, in seconds since 1970."""
    ended: float | None
    """When it finished."""
    unexplained: bool = False
    """It failed, and SLURM's side of it has not been told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One thing to do, and why."""

    run_id: str
    verdict: Verdict
    job_id: int | None
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long to wait for what."""

    missing_s: float = 120.0
    """For a job that SLURM does not list, before it counts as lost."""
    save_s: float = 600.0
    """For a training job to save."""


def run_of(job: Job) -> str | None:
    """The id of the run that a job was submitted for."""
    return job.comment.removeprefix(COMMENT) if job.comment.startswith(COMMENT) else None


def job_name(run_id: str, attempt: int) -> str:
    """The name under which a run's job is found again."""
    return f"dg-{run_id[:8]}-{attempt}"


def belongs(job: Job, run_id: str) -> bool:
    """Whether a job was submitted for the run; a site may have changed its comment, hardly its name."""
    told = run_of(job)
    return told == run_id if told is not None else job.name.rpartition("-")[0] == f"dg-{run_id[:8]}"


def ended_by_slurm(job: Job) -> bool:
    """Whether SLURM ended a job, or a person through it: a time limit, a lost node, a cancellation."""
    return job.phase is Phase.FAILED and job.state is not State.FAILED


def pick(run: Run, jobs: Mapping[int, Job]) -> Job | None:
    """The run's job: the noted one, else the newest of its name that is not over, else the newest."""
    noted = jobs.get(run.job_id) if run.job_id is not None else None
    if noted is not None and belongs(noted, run.run_id):
        return noted
    own = sorted((job for job in jobs.values() if belongs(job, run.run_id)), key=lambda job: job.job_id)
    alive = [job for job in own if not job.phase.ended]
    return (alive or own or [None])[-1]


def decide(
    runs: Sequence[Run],
    jobs: Mapping[int, Job],
    missing_since: Mapping[str, float],
    now: float,
    patience: Patience,
) -> tuple[list[Action], dict[str, float]]:
    """Judge every run.

    Args:
        runs: those that are not finished, and the finished ones whose jobs SLURM lists.
        jobs: what SLURM lists.
        missing_since: since when a run's job is not listed, from the call before.
        now: seconds since 1970.
        patience: how long to wait.

    Returns:
        What to do, and `missing_since` for the next call.
    """
    actions: list[Action] = []
    missing: dict[str, float] = {}
    for run in runs:
        job = pick(run, jobs)
        if job is None and run.status != "FINISHED":
            missing[run.run_id] = missing_since.get(run.run_id, now)
        action = _judge(run, job, now, now - missing.get(run.run_id, now), patience)
        actions += [action] if action is not None else []
        actions += _twins(run, job, jobs)
    return actions, missing


def _judge(run: Run, job: Job | None, now: float, missing_s: float, patience: Patience) -> Action | None:
    judges = {"STARTING": _starting, "STARTED": _started, "CANCELING": _canceling, "FINISHED": _finished}
    verdict, why = judges[run.status](run, job, now, missing_s, patience)
    if verdict is None:
        return None
    return Action(run_id=run.run_id, verdict=verdict, job_id=job.job_id if job is not None else run.job_id, why=why)


Judgement = tuple[Verdict | None, str]
WAIT: Judgement = (None, "")


def _starting(run: Run, job: Job | None, now: float, missing_s: float, patience: Patience) -> Judgement:
    if job is None:
        if missing_s < patience.missing_s:
            return WAIT
        known = f"SLURM no longer knows its job {run.job_id}" if run.job_id else "SLURM has no job of its name"
        return Verdict.FAIL, f"{known}, looked for over {missing_s:.0f} s. Launch it again."
    if run.cancel_requested is not None:
        return Verdict.CANCEL, "its end was asked for while SLURM did not answer"
    if job.phase is Phase.PENDING and never_starts(job.reason):
        return Verdict.FAIL_AND_CANCEL, f"the job can never start: {job.reason} ({job.describe()})"
    if job.phase.ended and (job.ended is None or now - job.ended > ENDED_GRACE_S):
        return Verdict.FAIL, f"the job ended before the run had started. {job.describe()}"
    if run.job_id != job.job_id:
        return Verdict.ADOPT, f"found by its name: {job.describe()}"
    return WAIT


def _started(run: Run, job: Job | None, now: float, missing_s: float, patience: Patience) -> Judgement:
    if run.cancel_requested is not None and job is not None and job.phase.alive:
        verdict = Verdict.SAVE if run.saves and job.phase is Phase.RUNNING else Verdict.CANCEL
        return verdict, "its end was asked for while SLURM did not answer"
    if job is not None and job.phase.alive and run.job_id != job.job_id:
        return Verdict.ADOPT, f"found by its name: {job.describe()}"
    return WAIT


def _canceling(run: Run, job: Job | None, now: float, missing_s: float, patience: Patience) -> Judgement:
    if job is None:
        return (Verdict.CANCELED, "its job is gone") if missing_s >= patience.missing_s else WAIT
    if job.phase.ended:
        late = job.ended is None or now - job.ended > ENDED_GRACE_S
        return (Verdict.CANCELED, f"its job has ended. {job.describe()}") if late else WAIT
    asked_s = now - run.cancel_requested if run.cancel_requested is not None else float("inf")
    if job.phase is Phase.ENDING or (run.saves and job.phase is Phase.RUNNING and asked_s < patience.save_s):
        return WAIT
    return Verdict.CANCEL_JOB, "the run is being cancelled"


def _finished(run: Run, job: Job | None, now: float, missing_s: float, patience: Patience) -> Judgement:
    if job is not None and run.unexplained and ended_by_slurm(job):
        return Verdict.EXPLAIN, job.describe()
    if job is None or job.phase not in (Phase.PENDING, Phase.RUNNING):
        return WAIT
    grace_s = patience.save_s if run.saves else FINISHED_GRACE_S
    if job.phase is Phase.RUNNING and run.ended is not None and now - run.ended < grace_s:
        return WAIT
    return Verdict.CANCEL_JOB, "its run has ended"


def _twins(run: Run, chosen: Job | None, jobs: Mapping[int, Job]) -> list[Action]:
    """Other jobs of the same run that wait: the worker of one would find the run taken."""
    return [
        Action(run_id=run.run_id, verdict=Verdict.CANCEL_JOB, job_id=job.job_id, why="another job has the run")
        for job in jobs.values()
        if chosen is not None
        and chosen.phase.alive
        and job.job_id != chosen.job_id
        and belongs(job, run.run_id)
        and job.phase is Phase.PENDING
    ]
