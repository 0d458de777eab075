"""Whether this host and site can run the pipeline, asked step by step; each answer says what to do.

`sbatch --test-only` tells whether partition, QoS, account and GRES go together, without a job. It passes
a time above the partition's limit and a partition that is down: those are held against what scontrol says.
The file system is tried by two processes, since its name alone does not say whether locks hold.
Costs a dozen commands and some seconds.
"""

import fcntl
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from model.errors import ConfigError, DiskSpaceError, RQwen3Error
from model.files import file_system_kind, is_network, require_free_bytes, why_not_written
from model.gpus import gpu_named
from rqwen3_pipeline.settings import postgres_problem
from rqwen3_pipeline.slurm.client import Slurm, SlurmError, SlurmRejected
from rqwen3_pipeline.slurm.cluster import KINDS, LOCAL, WHERE, Cluster, wish
from rqwen3_pipeline.slurm.options import JobOptions, clock
from rqwen3_pipeline.slurm.parsing import Partition

OLDEST = (20, 11)
WRITES = 200
"""Rows that each of two processes writes."""
TRIAL_S = 60.0
ROOM_BYTES = 1 << 30
"""Without so much a run root is of no use; what the checkpoints take is for preflight to say."""

_TRY_LOCK = """
import fcntl, sys
with open(sys.argv[2], "a") as file:
    try:
        getattr(fcntl, sys.argv[1])(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(0)
sys.exit(1)
"""
_WRITE = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], timeout=30, isolation_level=None)
for number in range(int(sys.argv[2])):
    database.execute("insert into rows values (?)", (number,))
"""


class Verdict(Enum):
    """How a check came out."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One check."""

    what: str
    verdict: Verdict
    said: str
    """What was seen, and what to do if it is not good."""


def examine(home: Path, cluster: Cluster, slurm: Slurm, *, wants_slurm: bool, has_postgres: bool) -> list[Finding]:
    """All checks, those of SLURM only where it is wanted.

    Args:
        home: the run root.
        cluster: the site.
        slurm: the way to it.
        wants_slurm: runs are to be SLURM jobs.
        has_postgres: events go to a database, not to SQLite in the run root.
    """
    findings = [*_of_slurm(cluster, slurm), *_of_site(cluster)] if wants_slurm else []
    return [*findings, *_of_files(home, wants_slurm, has_postgres)]


def _of_slurm(cluster: Cluster, slurm: Slurm) -> Iterator[Finding]:
    try:
        version = slurm.version()
        jobs = slurm.jobs(fresh=True)
    except SlurmError as error:
        yield _bad("SLURM", f"{error}")
        return
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers and numbers < OLDEST:
        yield _bad("SLURM", f"{version} is older than {OLDEST[0]}.{OLDEST[1]}, the oldest that is supported.")
    else:
        alive = sum(not job.phase.ended for job in jobs.values())
        yield _good("SLURM", f"{version}; your jobs that wait or run there: {alive}")
    try:
        accounting = slurm.accounting()
    except SlurmError:
        accounting = False
    if accounting:
        yield _good("accounting", "sacct answers")
    else:
        why = "sacct does not answer. How a job ended is known for some minutes only (MinJobAge); keep the daemon up."
        yield Finding(what="accounting", verdict=Verdict.WARNING, said=why)
    try:
        partitions = slurm.partitions()
    except SlurmError as error:
        partitions = {}
        why = f"{error}. So it is not known whether they are up, and how long jobs may take there."
        yield Finding(what="partitions", verdict=Verdict.WARNING, said=why)
    for kinds in _alike(cluster):
        yield _kind(kinds, cluster, slurm, partitions)


def _of_site(cluster: Cluster) -> Iterator[Finding]:
    """What the site's file says that SLURM does not know."""
    if cluster.env_file is not None:
        path = cluster.env_file
        if path.is_file() and os.access(path, os.R_OK):
            yield _good("env_file", f"{path} is there")
        else:
            why = f"{path}: no such file that you may read; every job would end at once, with exit code 78"
            yield _bad("env_file", f"{why}. Mend env_file in [cluster] of {cluster.file}.")
    if cluster.gpu:
        try:
            yield _good("gpu", f"preflight plans for {gpu_named(cluster.gpu).name}")
        except ConfigError as error:
            why = str(error).removeprefix("--gpu ")
            yield _bad("gpu", f"{why} Mend gpu in [cluster] of {cluster.file}.")


def _alike(cluster: Cluster) -> list[list[str]]:
    """The kinds of job, those together that ask for the same from the same tables."""
    groups: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
    for kind in KINDS:
        asked = sorted((key, value, cluster.table(kind, key)) for key, value in cluster.options(kind).items())
        groups.setdefault(tuple(asked), []).append(kind)
    return list(groups.values())


def _kind(kinds: list[str], cluster: Cluster, slurm: Slurm, partitions: Mapping[str, Partition]) -> Finding:
    what, kind = f"jobs of kind {', '.join(kinds)}", kinds[0]
    try:
        said = rehearse(kind, cluster, slurm)
    except RQwen3Error as error:
        return _bad(what, str(error))
    why = _never_starts(kind, cluster, slurm, partitions)
    return _bad(what, why) if why else _good(what, said)


def _never_starts(kind: str, cluster: Cluster, slurm: Slurm, partitions: Mapping[str, Partition]) -> str | None:
    """Why such a job would be taken and never start in any of its partitions; None where one may start it."""
    options = cluster.options(kind)
    if options.get(WHERE) == LOCAL:
        return None
    time, qos = options.get("time"), options.get("qos")
    if qos is not None and slurm.lifts_time_limit(qos):
        time = None
    default = [partition.name for partition in partitions.values() if partition.default]
    named = options["partition"].split(",") if "partition" in options else default
    problems = [_of_partition(partitions[name], time, kind, cluster) for name in named if name in partitions]
    return " ".join(filter(None, problems)) if len(problems) == len(named) and all(problems) else None


def _of_partition(partition: Partition, time: str | None, kind: str, cluster: Cluster) -> str | None:
    """Why a job of that kind would never start in a partition."""
    if partition.state != "UP":
        mend = f"Ask the site, or name another in {cluster.table(kind, 'partition')} of {cluster.file}."
        return f"partition {partition.name} is {partition.state}: no job starts there. {mend}"
    asked_s = JobOptions(job_name="rqwen3-doctor", time=time).time_limit_s
    if asked_s is not None and partition.longest_s is not None and asked_s > partition.longest_s:
        longest = f"MaxTime {clock(partition.longest_s)} of partition {partition.name}"
        mend = f"Mend it in {cluster.table(kind, 'time')} of {cluster.file}."
        return f"time={time} is above {longest}: such a job would wait for ever. {mend}"
    return None


def rehearse(kind: str, cluster: Cluster, slurm: Slurm) -> str:
    """What SLURM says of a job of that kind: partition, GRES, QoS and account together.

    Raises:
        SlurmRejected: it would not be taken; the message says what was asked for, and where that is written.
        SlurmUnavailable: SLURM does not answer.
        ConfigError: the options can't be had together.
    """
    options = cluster.options(kind)
    if options.get(WHERE) == LOCAL:
        return "run on the daemon's host"
    try:
        wanted = wish([{}], {"slurm/kind": kind}, cluster)
        return slurm.rehearse(JobOptions(job_name="rqwen3-doctor", **wanted.options))
    except (SlurmRejected, ConfigError) as error:
        raise type(error)(
            f"{str(error).rstrip('.')}. Asked for: {_asked(kind, cluster)}. Mend it in {cluster.file}."
        ) from error


def _asked(kind: str, cluster: Cluster) -> str:
    """The options of a kind of job, by the table that says them."""
    tables: dict[str, list[str]] = {}
    for key, value in cluster.options(kind).items():
        tables.setdefault(cluster.table(kind, key), []).append(f"{key}={value}")
    return "; ".join(f"{', '.join(said)} in {table}" for table, said in tables.items()) or "the site's defaults"


def _of_files(home: Path, wants_slurm: bool, has_postgres: bool) -> Iterator[Finding]:
    kind = file_system_kind(home)
    network = is_network(kind)
    if has_postgres and (problem := postgres_problem()) is not None:
        yield _bad("event store", problem)
    if network and not has_postgres:
        yield _bad(
            "event store",
            f"{home} lies on {kind}, under which SQLite loses its locks. Set RQWEN3_POSTGRES_URL, or RQWEN3_HOME to a "
            "local disk if every job runs on this host.",
        )
    elif wants_slurm and not network:
        said = f"{home} lies on {kind}. If jobs run on other hosts, they must see that folder: is it shared?"
        yield Finding(what="run root", verdict=Verdict.WARNING, said=said)
    else:
        yield _good("run root", f"{home} lies on {kind}")
    try:
        require_free_bytes(home, ROOM_BYTES, "a run root")
    except DiskSpaceError as error:
        yield _bad("free space", str(error))
        return  # what follows writes
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=home) as folder:
            yield _locks(Path(folder))
            if not has_postgres:
                yield _sqlite(Path(folder))
    except OSError as error:
        words = why_not_written(error, home)
        yield _bad("run root", words or f"{home}: {error.strerror}. Point RQWEN3_HOME at a folder that you may write.")


def _locks(folder: Path) -> Finding:
    """Whether a lock of one process keeps out another: SQLite's kind, and `flock`, by which builds take turns."""
    for take in (fcntl.lockf, fcntl.flock):
        path = folder / take.__name__
        with path.open("a") as file:
            try:
                take(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                seen = f"no {take.__name__} on {file_system_kind(folder)} ({error.strerror})"
                way_out = "Set RQWEN3_HOME to another file system, or ask for the mount option flock."
                return _bad("file locks", f"{folder.parent}: {seen}. {way_out}")
            command = [sys.executable, "-c", _TRY_LOCK, take.__name__, path]
            held = subprocess.run(command, timeout=TRIAL_S, check=False).returncode == 0
        if not held:
            said = f"{folder.parent}: two processes got the same lock ({take.__name__}). Set RQWEN3_HOME elsewhere."
            return _bad("file locks", said)
    return _good("file locks", "a lock keeps a second process out")


def _sqlite(folder: Path) -> Finding:
    """Whether two processes lose nothing that they write to one database at once."""
    path = folder / "trial.db"
    try:
        with sqlite3.connect(path) as database:
            mode = str(database.execute("pragma journal_mode=wal").fetchone()[0])
            database.execute("create table rows (number integer)")
        database.close()
        command = [sys.executable, "-c", _WRITE, str(path), str(WRITES)]
        writers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        complaints = [writer.communicate(timeout=TRIAL_S)[1] for writer in writers]
        database = sqlite3.connect(path)
        rows = int(database.execute("select count(*) from rows").fetchone()[0])
        database.close()
    except (sqlite3.Error, subprocess.TimeoutExpired) as error:
        return _bad("SQLite", f"{folder.parent}: {error}. {_way_out(str(error))}")
    if rows != 2 * WRITES or mode != "wal":
        said = " ".join(" ".join(complaints).split())[-300:]
        why = f"{rows} of {2 * WRITES} rows arrived, journal mode {mode}. {said}"
        return _bad("SQLite", f"{folder.parent}: {why} {_way_out(said)}")
    return _good("SQLite", f"two processes wrote {rows} rows at once, and none was lost")


def _way_out(said: str) -> str:
    """What helps against what SQLite said: a quota shows as a full disk, whatever room there is."""
    full = "disk is full" in said
    return "Free some space, or ask for a larger quota." if full else "Set RQWEN3_POSTGRES_URL."


def render(findings: list[Finding]) -> str:
    """One line for each finding."""
    return "\n".join(f"{finding.verdict.value:<8} {finding.what}: {finding.said}" for finding in findings)


def _good(what: str, said: str) -> Finding:
    return Finding(what=what, verdict=Verdict.GOOD, said=said)


def _bad(what: str, said: str) -> Finding:
    return Finding(what=what, verdict=Verdict.BAD, said=said)
