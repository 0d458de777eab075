"""What instance and scheduler say of an experiment now, gathered into the facts that a decision needs.

One question to the instance for the experiment's runs, and one `squeue` where runs are SLURM jobs; a
scheduler that does not answer is a fact too. The last state seen of a job is noted on its run, since
SLURM forgets it within minutes, and so is why the run failed: an event log is opened once for each
failure, so that the tenth attempt is told as it was when it was the newest.
"""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
from dagster import DagsterEventType, DagsterInstance, DagsterRunStatus, RunsFilter

from model.config import RunConfig
from rqwen3_pipeline.experiment_files import lock_holder
from rqwen3_pipeline.experiments import control
from rqwen3_pipeline.experiments.facts import RunSeen, attempts_of, telling_line
from rqwen3_pipeline.experiments.policy import Facts, Policy
from rqwen3_pipeline.preflight import first_submission_problem
from rqwen3_pipeline.settings import RunRoot
from rqwen3_pipeline.slurm import reconcile
from rqwen3_pipeline.slurm.client import Job, Slurm, SlurmError
from rqwen3_pipeline.slurm.job_log import memory_kill
from rqwen3_pipeline.slurm.states import State, parse_state
from rqwen3_pipeline.training import finished, submissions_config

PARTITION_SET, PARTITION_TAG = "submissions", "dagster/partition"
EXPERIMENT_TAG, ATTEMPT_TAG, EXIT_CODE_TAG = "rqwen3/experiment", "rqwen3/attempt", "rqwen3/exit_code"
"""By which the chain tells one attempt from the next."""
JOB_TAG, CANCEL_TAG = "slurm/job_id", "slurm/cancel_requested"
STATE_TAG, EXIT_TAG, NEVER_STARTS_TAG = "slurm/state", "slurm/exit_code", "slurm/never_starts"
FAILURE_TAG, MEMORY_TAG = "slurm/failure", "slurm/memory_kill"
INTERRUPTED = "DagsterExecutionInterruptedError"
"""What Dagster raises in a run whose process is told to end."""
VANISHED = "VANISHED"
"""In place of a state: SLURM answers, and knows the job no more."""
_OWN = re.compile(r"^(rqwen3_pipeline|model)(\.\w+)+: ")
"""How Dagster begins the message of the project's own errors, which need no class to be understood."""
LIVE = frozenset(
    {
        DagsterRunStatus.QUEUED,
        DagsterRunStatus.NOT_STARTED,
        DagsterRunStatus.MANAGED,
        DagsterRunStatus.STARTING,
        DagsterRunStatus.STARTED,
        DagsterRunStatus.CANCELING,
    }
)


def policy_of(run: RunConfig) -> Policy:
    """The limits that the configuration sets."""
    config = submissions_config(run)
    return Policy(retries=config.retries, back_off_s=config.back_off_s, idle_slices=config.idle_slices)


def facts_now(
    root: RunRoot, run: RunConfig, instance: DagsterInstance | None, slurm: Slurm | None, *, needs_preflight: bool
) -> Facts:
    """Everything that is known of an experiment at this moment.

    Args:
        root: the run root.
        run: the experiment's configuration.
        instance: where its runs are; None asks the files alone.
        slurm: asked for the jobs; None where runs are no jobs.
        needs_preflight: whether the first submission waits for the corpus and a green preflight.
    """
    name, jobs, problem = run.name, dict[int, Job](), None
    if slurm is not None:
        try:
            jobs = slurm.jobs(fresh=True)
        except SlurmError as error:
            problem = str(error)
    runs = runs_seen(instance, name, jobs, slurm if problem is None else None) if instance is not None else []
    act = control.standing(root, name)
    return Facts(
        experiment=name,
        finished=finished(root, name),
        attempts=attempts_of(root, name, runs),
        live=(*_live_runs(runs, name), *_live_jobs(runs, jobs), *_live_lock(root, name, jobs, slurm)),
        scheduler_problem=problem,
        first_problem=first_submission_problem(root, name) if needs_preflight else None,
        stopped=act.stopped,
        forgiven=act.forgiven,
        now_s=time.time(),
    )


def runs_seen(
    instance: DagsterInstance, name: str, jobs: Mapping[int, Job], slurm: Slurm | None = None
) -> list[RunSeen]:
    """The experiment's runs, oldest first; notes the state of ended ones' jobs while SLURM still knows it.

    Args:
        instance: where the runs are.
        name: the experiment.
        jobs: what squeue lists.
        slurm: asked how the newest run's job ended, which squeue does not tell in full and soon forgets.
    """
    keys = [key for key in instance.get_dynamic_partitions(PARTITION_SET) if key.rpartition(".")[0] == name]
    if not keys:
        return []
    records = instance.get_run_records(RunsFilter(tags={PARTITION_TAG: keys}), ascending=True)
    files = getattr(instance.run_launcher, "files", None)  # where runs are jobs
    found: list[RunSeen] = []
    counted: dict[int, int] = {}
    for record in records:
        run = record.dagster_run
        submission = int(run.tags[PARTITION_TAG].rpartition(".")[2])
        counted[submission] = attempt = int(run.tags.get(ATTEMPT_TAG, counted.get(submission, 0) + 1))
        tags = dict(run.tags)
        if not tags.get(STATE_TAG):
            tags |= note_state(instance, run, jobs.get(_number(tags.get(JOB_TAG)) or -1))
        if slurm is not None and record is records[-1]:
            tags |= _ask(instance, run, slurm)
        state = tags.get(STATE_TAG)
        log = files(run).log if files is not None else None
        tags |= _note_failure(instance, run, log)
        found.append(
            RunSeen(
                run_id=run.run_id,
                submission=submission,
                attempt=attempt,
                live=run.status in LIVE,
                cancelled=run.status is DagsterRunStatus.CANCELED or bool(run.tags.get(CANCEL_TAG)),
                job_id=_number(run.tags.get(JOB_TAG)),
                state=parse_state(state) if state else None,
                vanished=state == VANISHED,
                cannot_start=bool(run.tags.get(NEVER_STARTS_TAG)),
                exit_code=exit_code_of(tags),
                ended_s=record.end_time or 0.0,
                detail=tags.get(FAILURE_TAG, ""),
                log=str(log or ""),
                memory_kill=tags.get(MEMORY_TAG, ""),
            )
        )
    return found


def _ask(instance: DagsterInstance, run: dg.DagsterRun, slurm: Slurm) -> dict[str, str]:
    """Note how the job of an ended run ended, by scontrol or the accounting, unless that is known; returns the tags."""
    job_id, state = _number(run.tags.get(JOB_TAG)), run.tags.get(STATE_TAG)
    if job_id is None or not run.is_finished or run.tags.get(EXIT_TAG) or (state and state != State.FAILED.value):
        return {}
    try:
        job = slurm.job(job_id)
    except SlurmError:
        return {}
    if job is not None and reconcile.belongs(job, run.run_id):
        return note_state(instance, run, job)
    if state:
        return {}
    instance.add_run_tags(run.run_id, {STATE_TAG: VANISHED})
    return {STATE_TAG: VANISHED}


def note_state(instance: DagsterInstance, run: dg.DagsterRun, job: Job | None) -> dict[str, str]:
    """Tag a run with how its job ended, as long as SLURM knows it; returns the tags."""
    if job is None or not job.phase.ended:
        return {}
    noted = {STATE_TAG: job.state.value, **({EXIT_TAG: job.exit_code} if job.exit_code else {})}
    if any(run.tags.get(tag) != value for tag, value in noted.items()):
        instance.add_run_tags(run.run_id, noted)
    return noted


def _note_failure(instance: DagsterInstance, run: dg.DagsterRun, log: Path | None) -> dict[str, str]:
    """Why a run failed and whether its job was killed for its memory; tagged where the run is a job; returns the tags.

    SLURM's line may come late, so that a log without it is read again. A run that was copied from another has the
    other's tags, which don't count.
    """
    if run.status is not DagsterRunStatus.FAILURE:
        return {FAILURE_TAG: "", MEMORY_TAG: ""}
    own = bool(run.tags.get(JOB_TAG)) and run.parent_run_id is None
    known = {tag: run.tags.get(tag, "") if own else "" for tag in (FAILURE_TAG, MEMORY_TAG)}
    found = {
        FAILURE_TAG: known[FAILURE_TAG] or failure_of(instance, run.run_id),
        MEMORY_TAG: known[MEMORY_TAG] or (memory_kill(log) if log is not None else ""),
    }
    if own and found != known:
        instance.add_run_tags(run.run_id, {tag: said for tag, said in found.items() if said})
    return found


def exit_code_of(tags: Mapping[str, str]) -> int | None:
    """The trainer's exit code, else the job's: a program that a signal ended has 128 and its number, or less than 0."""
    own = _number(tags.get(EXIT_CODE_TAG))
    if own is not None or not tags.get(EXIT_TAG):
        return own
    code, _, signal = tags[EXIT_TAG].partition(":")
    return -int(signal) if signal.isdigit() and int(signal) else _number(code)


def failure_of(instance: DagsterInstance, run_id: str) -> str:
    """What a failed run's event log says, on one line: the step's own error, else the run's."""
    for kind in (DagsterEventType.STEP_FAILURE, DagsterEventType.RUN_FAILURE):
        events = instance.get_records_for_run(run_id, of_type=kind, limit=1, ascending=False).records
        for event in events:
            entry = event.event_log_entry.dagster_event
            data: Any = entry.event_specific_data if entry is not None else None
            error = getattr(data, "error", None)
            while error is not None and error.cause is not None:
                error = error.cause
            if error is not None and error.cls_name == INTERRUPTED:
                return "its run was interrupted (Ctrl-C or SIGTERM)"
            said = telling_line(_OWN.sub("", error.message) if error is not None else (entry.message if entry else ""))
            if said:
                return said
    return ""


def _live_runs(runs: list[RunSeen], name: str) -> list[str]:
    return [f"run {run.run_id[:8]} ({name}.{run.submission:02d})" for run in runs if run.live]


def _live_jobs(runs: list[RunSeen], jobs: Mapping[int, Job]) -> list[str]:
    """Jobs of runs that have ended: COMPLETING ones, mostly."""
    ended = {run.run_id for run in runs if not run.live}
    noted = {run.job_id for run in runs if not run.live}
    mine = (job for job in jobs.values() if job.job_id in noted or job.comment.removeprefix("dagster:") in ended)
    return [f"job {job.job_id} ({job.state.value})" for job in mine if job.phase.alive]


def _live_lock(root: RunRoot, name: str, jobs: Mapping[int, Job], slurm: Slurm | None) -> list[str]:
    """The holder of the lock, unless it is known to be gone."""
    holder = lock_holder(root.experiment(name))
    if holder is None or holder["alive"] is False:
        return []
    where = f"process {holder.get('pid')} on {holder.get('host')}"
    job_id = _number(holder.get("job_id"))
    if holder["alive"] is None and slurm is not None and job_id is not None:
        job = jobs.get(job_id)
        return [f"job {job_id} ({job.state.value})"] if job is not None and not job.phase.ended else []
    sure = "" if holder["alive"] else ", which can't be asked from here (if it is gone, delete the file LOCK),"
    return [f"the lock's holder, {where}{sure}"]


def _number(text: Any) -> int | None:
    return int(text) if text is not None and str(text).lstrip("-").isdigit() else None
