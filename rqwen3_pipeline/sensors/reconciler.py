"""The reconciler: runs and jobs that disagree are put right, every half a minute.

On by default, and silent where runs are not SLURM jobs. It also notes on each run why its job waits, and
how it ended, since SLURM forgets that within minutes. `slurm.reconcile` decides, this module asks and
carries out. A tick costs one squeue; one scancel more where jobs are to end, and a sacct where a run is
about to be ended for want of its job: only what neither knows is lost.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import dagster as dg
from dagster import DagsterRunStatus, RunRecord, RunsFilter

from rqwen3_pipeline.experiments.observed import NEVER_STARTS_TAG, STATE_TAG, note_state
from rqwen3_pipeline.slurm import reconcile
from rqwen3_pipeline.slurm.client import Job, SlurmError
from rqwen3_pipeline.slurm.cluster import PREFIX
from rqwen3_pipeline.slurm.reconcile import Action, Verdict, belongs
from rqwen3_pipeline.slurm.states import Phase, State, never_starts

if TYPE_CHECKING:
    from rqwen3_pipeline.launcher import SlurmRunLauncher

INTERVAL_S = 30
LIVE = [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]
UNLISTED = "squeue does not list it, sacct does; terminate the run if scontrol show job does not know it either"
"""Reason of a job that only the accounting knows."""
WAITED_TAG = f"{PREFIX}waited_for"
"""Tag with the last reason for which a run's job waited."""
ENDS_JOB = (Verdict.CANCEL_JOB, Verdict.FAIL_AND_CANCEL, Verdict.CANCEL)


@dg.sensor(
    name="slurm_reconciler",
    minimum_interval_seconds=INTERVAL_S,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Fails runs whose job can never start or has ended unheard, cancels jobs whose run has ended, "
    "and tells failed runs how SLURM ended them.",
)
def slurm_reconciler(context: dg.SensorEvaluationContext) -> dg.SkipReason:
    """One tick."""
    from rqwen3_pipeline.launcher import SlurmRunLauncher

    launcher = context.instance.run_launcher
    if not isinstance(launcher, SlurmRunLauncher):
        return dg.SkipReason("Runs are not SLURM jobs here.")
    missing_since = json.loads(context.cursor) if context.cursor else {}
    try:
        jobs = launcher.slurm.jobs(fresh=True)
    except SlurmError as error:
        return dg.SkipReason(f"Nothing is judged while SLURM does not answer. {error}")
    actions, missing, told = judge(context.instance, launcher, jobs, missing_since, time.time())
    done = carry_out(context.instance, launcher, actions, told)
    context.update_cursor(json.dumps(missing))
    return dg.SkipReason("\n".join(done) or f"{len(jobs)} jobs, all as they should be.")


def judge(
    instance: dg.DagsterInstance,
    launcher: "SlurmRunLauncher",
    jobs: Mapping[int, Job],
    missing_since: Mapping[str, float],
    now: float,
) -> tuple[list[Action], dict[str, float], dict[int, Job]]:
    """Read the runs that matter, and decide; gives also what the accounting said of jobs, where it was asked."""
    live = instance.get_run_records(RunsFilter(statuses=LIVE))
    known = {record.dagster_run.run_id for record in live}
    others = {run_id for job in jobs.values() if (run_id := reconcile.run_of(job))} - known
    ended = instance.get_run_records(RunsFilter(run_ids=sorted(others))) if others else []
    records = [
        record
        for record in (*live, *(record for record in ended if record.dagster_run.is_finished))
        if not launcher.is_local(record.dagster_run)
    ]
    runs = [facts(launcher, record) for record in records]
    for run, record in zip(runs, records, strict=True):
        if not record.dagster_run.tags.get(STATE_TAG):
            note_state(instance, record.dagster_run, reconcile.pick(run, jobs))
    actions, missing = reconcile.decide(runs, jobs, missing_since, now, launcher.patience)
    told = ask_accounting(launcher, actions, jobs, [record.dagster_run for record in records])
    unlisted = {job_id: replace(job, reason=UNLISTED) for job_id, job in told.items() if not job.phase.ended}
    if unlisted:
        jobs = {**unlisted, **jobs}
        actions, missing = reconcile.decide(runs, jobs, missing_since, now, launcher.patience)
    for run, record in zip(runs, records, strict=True):
        note_waiting(instance, record.dagster_run, reconcile.pick(run, jobs))
    return actions, missing, told


def ask_accounting(
    launcher: "SlurmRunLauncher", actions: Sequence[Action], jobs: Mapping[int, Job], runs: Sequence[dg.DagsterRun]
) -> dict[int, Job]:
    """What the accounting says of the jobs of runs that are about to be ended; it is asked for no others."""
    doubted = [
        action
        for action in actions
        if action.verdict is Verdict.FAIL or (action.verdict is Verdict.CANCELED and action.job_id not in jobs)
    ]
    nameless = {action.run_id for action in doubted if action.job_id is None}
    names = [reconcile.job_name(run.run_id, launcher.files(run).attempt) for run in runs if run.run_id in nameless]
    by_id = launcher.slurm.accounted([action.job_id for action in doubted if action.job_id is not None])
    return {**by_id, **launcher.slurm.accounted_by_name(names)}


def note_waiting(instance: dg.DagsterInstance, run: dg.DagsterRun, job: Job | None) -> None:
    """Tell a run why its job waits, when that is another reason than before; of a list of nodes the head counts."""
    if run.status != DagsterRunStatus.STARTING or job is None or not job.reason:
        return
    if job.phase not in (Phase.PENDING, Phase.RUNNING) or never_starts(job.reason):
        return
    if _head(job.reason) == _head(run.tags.get(WAITED_TAG, "")):
        return
    since = f"; submitted at {datetime.fromtimestamp(job.submitted, UTC).isoformat()}" if job.submitted else ""
    instance.report_engine_event(f"The run waits for its job: {job.describe()}{since}.", run)
    instance.add_run_tags(run.run_id, {WAITED_TAG: job.reason})


def _head(reason: str) -> str:
    return reason.partition(",")[0]


def facts(launcher: "SlurmRunLauncher", record: RunRecord) -> reconcile.Run:
    """What matters of a run."""
    from rqwen3_pipeline.launcher import CANCEL_REQUESTED, ENDED, JOB_ID

    run = record.dagster_run
    job_id, asked = run.tags.get(JOB_ID, ""), run.tags.get(CANCEL_REQUESTED, "")
    return reconcile.Run(
        run_id=run.run_id,
        status="FINISHED" if run.is_finished else run.status.value,
        job_id=int(job_id) if job_id.isdigit() else None,
        saves=launcher.saves(run),
        cancel_requested=float(asked) if asked.isdigit() else None,
        ended=record.end_time,
        unexplained=run.status == DagsterRunStatus.FAILURE and not run.tags.get(ENDED),
    )


def carry_out(
    instance: dg.DagsterInstance, launcher: "SlurmRunLauncher", actions: Sequence[Action], told: Mapping[int, Job]
) -> list[str]:
    """Do what was decided; returns one line for each deed. All jobs to cancel go into one command.

    Runs are told first: a worker that is ended must find its run cancelled, not merely interrupted.
    """
    doomed = sorted({action.job_id for action in actions if action.verdict in ENDS_JOB and action.job_id is not None})
    said: list[str] = []
    for action in actions:
        own = [f" The accounting says: {job.describe()}" for job in told.values() if belongs(job, action.run_id)]
        tell(instance, launcher, action, own[-1] if own and action.verdict in (Verdict.FAIL, Verdict.CANCELED) else "")
        said.append(f"run {action.run_id[:8]}, job {action.job_id}: {action.verdict.value}, since {action.why}")
    if doomed:
        try:
            launcher.slurm.cancel(*doomed)
        except SlurmError as error:
            said.append(f"scancel will be tried again in the next tick. {error}")
    return said


def tell(instance: dg.DagsterInstance, launcher: "SlurmRunLauncher", action: Action, more: str) -> None:
    """Write a verdict to the run, unless the run has moved on since it was read."""
    from rqwen3_pipeline.launcher import ENDED, JOB_ID

    run = instance.get_run_by_id(action.run_id)
    if run is not None and action.verdict is Verdict.EXPLAIN:
        instance.report_engine_event(f"How SLURM ended it: {action.why}\n{launcher.log_tail(run)}", run)
        instance.add_run_tags(run.run_id, {ENDED: "told"})
    if run is not None and action.verdict is Verdict.CANCEL_JOB and run.is_finished and not run.tags.get(STATE_TAG):
        instance.add_run_tags(run.run_id, {STATE_TAG: State.UNKNOWN.value})  # else it read as cancelled by a person
    if run is None or run.is_finished:
        return
    why = f"{action.why}.{more}".replace("..", ".")
    starting = run.status == DagsterRunStatus.STARTING
    match action.verdict:
        case Verdict.ADOPT:
            instance.add_run_tags(run.run_id, {JOB_ID: str(action.job_id)})
        case Verdict.FAIL | Verdict.FAIL_AND_CANCEL if starting:
            if action.verdict is Verdict.FAIL_AND_CANCEL:
                instance.add_run_tags(run.run_id, {NEVER_STARTS_TAG: action.why})
            instance.report_run_failed(run, f"SLURM: {why}\n{launcher.log_tail(run)}")
        case Verdict.CANCEL if starting:
            instance.report_run_canceled(run, f"SLURM: {why}")
        case Verdict.CANCEL if run.status == DagsterRunStatus.STARTED:
            instance.report_run_canceling(run, f"SLURM: {why}")
        case Verdict.SAVE if run.status == DagsterRunStatus.STARTED:
            launcher.ask_to_save(run, why)
        case Verdict.CANCELED if run.status == DagsterRunStatus.CANCELING:
            instance.report_run_canceled(run, f"SLURM: {why}")
        case _:
            pass
