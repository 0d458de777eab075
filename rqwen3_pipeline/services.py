"""Whether the daemon lives and what waits in SLURM's queue: the part of the status that other programs know.

Asked only where there is an instance, and each for a few seconds at most: what does not answer is said in
words, and the rest of the status does not depend on it. The daemon's heartbeats are read from the event
store's own table, since importing Dagster for that would take longer than all the rest. Costs a query and,
where runs are SLURM jobs, one squeue, and another one where some wait.
"""

import sqlite3
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rqwen3_pipeline.settings import RunRoot, Settings, postgres_problem
from rqwen3_pipeline.slurm.client import Job, Slurm, SlurmError
from rqwen3_pipeline.slurm.reconcile import run_of
from rqwen3_pipeline.slurm.states import Phase, never_starts

PATIENCE_S = 5
STALE_S = 120.0
"""The daemon's threads give a sign every half a minute."""
HEARTBEATS = "select daemon_type, timestamp from daemon_heartbeats"


def services(root: RunRoot, settings: Settings) -> dict[str, Any]:
    """What daemon and SLURM say.

    Returns:
        `daemon`: None where no instance was made, else {age_s: seconds since its newest heartbeat or None,
        stale: [threads that are silent], problem}; `slurm`: None where runs are no SLURM jobs, else
        {waiting: [{job_id, run_id, name, reason, never_starts, partition, position, of, submitted, waited_s,
        starts}], problem}.
    """
    home = root.dagster_home / "dagster.yaml"
    if not home.is_file():
        return {"daemon": None, "slurm": None}
    text = home.read_text(encoding="utf-8")
    return {
        "daemon": _daemon(root.dagster_home, settings, postgres="postgres_url:" in text),
        "slurm": _queue(Slurm(timeout_s=PATIENCE_S)) if "SlurmRunLauncher" in text else None,
    }


def _daemon(home: Path, settings: Settings, *, postgres: bool) -> dict[str, Any]:
    try:
        beats = _beats_of_postgres(settings) if postgres else _beats_of_sqlite(home / "storage/history/runs.db")
    except _Unreadable as error:
        return {"age_s": None, "stale": [], "problem": str(error)}
    now = datetime.now(UTC)
    ages = {name: (now - beat.replace(tzinfo=UTC)).total_seconds() for name, beat in beats.items()}
    newest = min(ages.values(), default=None)
    stale = sorted(name for name, age_s in ages.items() if newest is not None and age_s > newest + STALE_S)
    return {"age_s": None if newest is None else max(0.0, newest), "stale": stale, "problem": None}


class _Unreadable(Exception):
    """The event store does not answer."""


def _beats_of_sqlite(path: Path) -> dict[str, datetime]:
    if not path.is_file():
        return {}
    try:
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=PATIENCE_S)
        try:
            return {name: datetime.fromisoformat(beat) for name, beat in database.execute(HEARTBEATS)}
        finally:
            database.close()
    except (sqlite3.Error, ValueError) as error:
        raise _Unreadable(f"{path}: {error}") from error


def _beats_of_postgres(settings: Settings) -> dict[str, datetime]:
    if settings.postgres_url is None:
        raise _Unreadable("the event store is a Postgres; set RQWEN3_POSTGRES_URL")
    if (problem := postgres_problem()) is not None:
        raise _Unreadable(problem)
    import psycopg2

    url = settings.postgres_url.get_secret_value().replace("postgresql+psycopg2://", "postgresql://", 1)
    try:
        database = psycopg2.connect(
            url, connect_timeout=PATIENCE_S, options=f"-c statement_timeout={1000 * PATIENCE_S}"
        )
        try:
            with database.cursor() as cursor:
                cursor.execute(HEARTBEATS)
                return dict(cursor.fetchall())
        finally:
            database.close()
    except psycopg2.Error as error:
        raise _Unreadable(f"the event store does not answer: {' '.join(str(error).split())}") from error


def _queue(slurm: Slurm) -> dict[str, Any]:
    try:
        jobs = slurm.jobs(fresh=True)
        waiting = [job for job in jobs.values() if job.phase is Phase.PENDING and run_of(job)]
        order = slurm.queue(sorted({job.partition for job in waiting})) if waiting else {}
    except SlurmError as error:
        return {"waiting": [], "problem": str(error)}
    return {"waiting": [_waiting(job, order.get(job.partition, [])) for job in waiting], "problem": None}


def _waiting(job: Job, order: list[int]) -> dict[str, Any]:
    return {
        "job_id": job.job_id,
        "run_id": run_of(job),
        "name": job.name,
        "reason": job.reason,
        "never_starts": never_starts(job.reason),
        "partition": job.partition,
        "position": order.index(job.job_id) + 1 if job.job_id in order else None,
        "of": len(order),
        "submitted": _iso(job.submitted),
        "waited_s": max(0.0, time.time() - job.submitted) if job.submitted else None,
        "starts": _iso(job.started),
    }


def _iso(seconds: float | None) -> str | None:
    return datetime.fromtimestamp(seconds, UTC).isoformat() if seconds else None


def render_services(found: dict[str, Any]) -> list[str]:
    """The same for a person, a line each; nothing where there is no instance."""
    daemon, slurm = found["daemon"], found["slurm"]
    lines: list[str] = []
    if daemon is not None:
        lines.append(f"daemon: {_daemon_words(daemon)}")
    if slurm is not None:
        if slurm["problem"]:
            lines.append(f"queue: {slurm['problem']}")
        elif not slurm["waiting"]:
            lines.append("queue: no job of this pipeline waits")
        lines += [f"queue: {_job_words(job)}" for job in slurm["waiting"]]
    return lines


def _daemon_words(daemon: dict[str, Any]) -> str:
    if daemon["problem"]:
        return f"whether it lives can't be told: {daemon['problem']}"
    if daemon["age_s"] is None:
        return "never ran here; start it: rqwen3 up"
    if daemon["age_s"] > STALE_S:
        return f"last heard of {_span(daemon['age_s'])} ago: it is down; start it: rqwen3 up"
    silent = f"; silent: {', '.join(daemon['stale'])}" if daemon["stale"] else ""
    return f"alive, heard of {_span(daemon['age_s'])} ago{silent}"


def _job_words(job: dict[str, Any]) -> str:
    place = f"number {job['position']} of {job['of']} in {job['partition']}" if job["position"] else job["partition"]
    starts = f", expected to start at {job['starts']}" if job["starts"] else ""
    since = "" if job["waited_s"] is None else f" for {_span(job['waited_s'])}"
    reason = job["reason"] or "no reason given"
    if job["never_starts"]:
        reason += f", which never clears: scancel {job['job_id']}, mend what it names and launch the run again"
    return f"job {job['job_id']} of run {str(job['run_id'])[:8]} waits{since}, {place}, {reason}{starts}"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.1f} days"
