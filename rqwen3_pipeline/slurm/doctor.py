"""Whether this host and site can run the pipeline, asked step by step; each answer says what to do.

`sbatch --test-only` tells whether partition, QoS, account, GRES and time limit go together, without a
job. The file system is tried by two processes, since its name alone does not say whether locks hold.
Costs a dozen commands and some seconds.
"""

import fcntl
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from model.errors import ConfigError, RQwen3Error
from model.files import file_system_kind, is_network
from rqwen3_pipeline.settings import postgres_problem
from rqwen3_pipeline.slurm.client import Slurm, SlurmError, SlurmRejected
from rqwen3_pipeline.slurm.cluster import KINDS, LOCAL, WHERE, Cluster, wish
from rqwen3_pipeline.slurm.options import JobOptions

OLDEST = (20, 11)
WRITES = 200
"""Rows that each of two processes writes."""
TRIAL_S = 60.0

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
    findings = list(_of_slurm(cluster, slurm)) if wants_slurm else []
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
        yield _good("SLURM", f"{version}; you have {len(jobs)} jobs there")
    try:
        accounting = slurm.accounting()
    except SlurmError:
        accounting = False
    if accounting:
        yield _good("accounting", "sacct answers")
    else:
        why = "sacct does not answer. How a job ended is known for some minutes only (MinJobAge); keep the daemon up."
        yield Finding(what="accounting", verdict=Verdict.WARNING, said=why)
    for kind in KINDS:
        yield _kind(kind, cluster, slurm)


def _kind(kind: str, cluster: Cluster, slurm: Slurm) -> Finding:
    what = f"jobs of kind {kind}"
    try:
        return _good(what, rehearse(kind, cluster, slurm))
    except RQwen3Error as error:
        return _bad(what, str(error))


def rehearse(kind: str, cluster: Cluster, slurm: Slurm) -> str:
    """What SLURM says of a job of that kind: partition, GRES, QoS, account and time limit together.

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
        asked = ", ".join(f"{key}={value}" for key, value in options.items()) or "the site's defaults"
        where = f"Mend [options.{kind}] in the file that RQWEN3_CLUSTER names."
        raise type(error)(f"{error} Asked for: {asked}. {where}") from error


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
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=home) as folder:
            yield _locks(Path(folder))
            if not has_postgres:
                yield _sqlite(Path(folder))
    except OSError as error:
        yield _bad("run root", f"{home}: {error.strerror}. Point RQWEN3_HOME at a folder that you may write.")


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
        return _bad("SQLite", f"{folder.parent}: {error}. Set RQWEN3_POSTGRES_URL.")
    if rows != 2 * WRITES or mode != "wal":
        said = " ".join(" ".join(complaints).split())[-300:]
        why = f"{rows} of {2 * WRITES} rows arrived, journal mode {mode}. {said}"
        return _bad("SQLite", f"{folder.parent}: {why} Set RQWEN3_POSTGRES_URL.")
    return _good("SQLite", f"two processes wrote {rows} rows at once, and none was lost")


def render(findings: list[Finding]) -> str:
    """One line for each finding."""
    return "\n".join(f"{finding.verdict.value:<8} {finding.what}: {finding.said}" for finding in findings)


def _good(what: str, said: str) -> Finding:
    return Finding(what=what, verdict=Verdict.GOOD, said=said)


def _bad(what: str, said: str) -> Finding:
    return Finding(what=what, verdict=Verdict.BAD, said=said)
