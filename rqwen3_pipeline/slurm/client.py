"""The one way to SLURM: `sbatch`, `squeue`, `scontrol`, `sacct`, `scancel`, as argument lists with time-outs.

What can't be reached is an error of its own (`SlurmUnavailable`, or `SlurmMissing` where the programs are
not there), never an empty answer: whoever asks must not take "I don't know" for "there is none". One
`squeue --me` answers for all jobs of the user and is kept for a few seconds, so that 200 jobs cost as
many commands as one. Only options of SLURM 20.11 and older are used. A command costs
some 10 ms here and a message to the controller.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence

from rqwen3_pipeline.slurm import parsing
from rqwen3_pipeline.slurm.options import JobOptions
from rqwen3_pipeline.slurm.parsing import Job, Partition, SlurmError

__all__ = ["Job", "Slurm", "SlurmError", "SlurmMissing", "SlurmRejected", "SlurmUnavailable", "SlurmUnclear"]


class SlurmUnavailable(SlurmError):
    """SLURM does not answer, or takes nothing now; the same request may succeed later."""


class SlurmMissing(SlurmError):
    """A command of SLURM is not on PATH: no waiting mends that."""


class SlurmRejected(SlurmError):
    """SLURM answered no; the message holds its own words."""


class SlurmUnclear(SlurmError):
    """`sbatch` ended well and named no job: there may be one."""


AWAY = re.compile(
    r"Unable to contact slurm|Socket timed out|Connection (refused|timed out|reset)|communication connection failure"
    r"|Zero Bytes were transmitted|Transport endpoint|controller in standby|temporarily unable to accept"
    r"|Invalid authentication credential|authentication (init )?error|Munge encode failed|munged|No route to host"
    r"|Could not establish a configuration source|Resource temporarily unavailable|Unable to establish control",
    re.IGNORECASE,
)
FULL = re.compile(r"MaxSubmit|job submit limit exceeded", re.IGNORECASE)
NO_SUCH_JOB = re.compile(r"Invalid job id specified|Invalid job_id", re.IGNORECASE)
ALREADY_OVER = re.compile(r"already completing or completed|Job/step already", re.IGNORECASE)
NO_ACCOUNTING = re.compile(r"accounting storage is disabled|not supported by accounting", re.IGNORECASE)

KEPT = frozenset({"SLURM_CONF"})
FOREIGN = re.compile(r"(SLURM|SBATCH|SRUN|SQUEUE|SACCT|SCANCEL|SCONTROL|SALLOC|SLURMD)_")
SUBMIT_PATIENCE = 2.0
"""sbatch itself tries for some 25 s before it gives up, so it gets this many times the others' time."""


def clean_environment(environment: dict[str, str] | None = None) -> dict[str, str]:
    """An environment without what SLURM or its commands would take for options; where SLURM is stays known."""
    given = dict(os.environ) if environment is None else environment
    return {key: value for key, value in given.items() if key in KEPT or FOREIGN.match(key) is None}


class Slurm:
    """SLURM's commands, found on PATH at each call."""

    def __init__(self, timeout_s: float = 30.0, cache_s: float = 5.0) -> None:
        """Make a client.

        Args:
            timeout_s: after which a command is given up, and SLURM counts as unreachable.
            cache_s: how long an answer of `squeue` is used again.
        """
        self.timeout_s, self.cache_s = timeout_s, cache_s
        self._jobs: dict[int, Job] = {}
        self._asked = float("-inf")
        self._accounting = True

    def submit(self, options: JobOptions, script: str) -> int:
        """Send a job; the script goes in on standard input.

        Returns:
            The job's id.

        Raises:
            SlurmRejected: sbatch refused, with its own words.
            SlurmMissing: there is no sbatch here.
            SlurmUnavailable: SLURM does not answer, or the user may have no more jobs now. The job may
                be there all the same: look for its name before sending again.
            SlurmUnclear: sbatch ended well without naming a job. The same holds.
        """
        self._asked = float("-inf")
        answer = self._run(["sbatch", *options.arguments()], stdin=script, timeout_s=SUBMIT_PATIENCE * self.timeout_s)
        if answer.returncode != 0:
            if FULL.search(answer.stderr):
                raise SlurmUnavailable(f"SLURM takes no more jobs of this user now. sbatch says: {_words(answer)}")
            raise SlurmRejected(f"sbatch refused the job {options.job_name!r}: {_words(answer)}")
        job_id = parsing.submitted_id(answer.stdout)
        if job_id is None:
            raise SlurmUnclear(
                f"sbatch ended well for {options.job_name!r} but named no job; it printed {answer.stdout[:500]!r}. "
                f"Look for it: squeue --me --name {options.job_name}"
            )
        return job_id

    def jobs(self, *, fresh: bool = False) -> dict[int, Job]:
        """All jobs of this user that the controller knows, ended ones of the last minutes among them.

        Args:
            fresh: ask again, however young the last answer is.

        Raises:
            SlurmUnavailable: SLURM does not answer.
            SlurmError: it answered with something that is no list of jobs.
        """
        if fresh or time.monotonic() - self._asked > self.cache_s:
            answer = self._run(["squeue", "--me", "-t", "all", "-h", "-o", parsing.SQUEUE_FORMAT])
            if answer.returncode != 0:
                raise SlurmError(f"squeue failed: {_words(answer)}. Try it by hand: squeue --me")
            self._jobs = parsing.squeue_jobs(answer.stdout)
            self._asked = time.monotonic()
        return self._jobs

    def job(self, job_id: int) -> Job | None:
        """What is known of a job: from squeue, else from scontrol, else from the accounting where there is one.

        An ended job is asked of scontrol too, which knows its exit code.

        Returns:
            None when none of them knows it. Right after a submission that proves nothing.

        Raises:
            SlurmUnavailable: SLURM does not answer.
        """
        listed = self.jobs().get(job_id)
        if listed is not None and not listed.phase.ended:
            return listed
        return self._controlled(job_id) or listed or self.accounted([job_id]).get(job_id)

    def queue(self, partitions: Sequence[str]) -> dict[str, list[int]]:
        """The jobs of everybody that wait in these partitions, those that come first first.

        Raises:
            SlurmUnavailable: SLURM does not answer.
        """
        which = ["-p", ",".join(partitions), "-t", "PENDING", "-S", "-p,i", "-h", "-o", "%A %P"]
        answer = self._run(["squeue", *which])
        if answer.returncode != 0:
            raise SlurmError(f"squeue failed: {_words(answer)}. Try it by hand: squeue -p {','.join(partitions)}")
        order: dict[str, list[int]] = {}
        for line in answer.stdout.splitlines():
            job_id, _, partition = line.partition(" ")
            if job_id.isdigit():
                order.setdefault(partition.strip(), []).append(int(job_id))
        return order

    def find(self, name: str) -> list[Job]:
        """Jobs of this user with that name, asked anew; those that the controller forgot from the accounting.

        Returns:
            The newest first.
        """
        found = {job.job_id: job for job in self.jobs(fresh=True).values() if job.name == name}
        if not found:
            found = self.accounted_by_name([name])
        return sorted(found.values(), key=lambda job: job.job_id, reverse=True)

    def accounted(self, job_ids: Sequence[int]) -> dict[int, Job]:
        """What the accounting says of jobs, in one command; empty where there is none or it does not answer.

        Asked by id, since `sacct` else begins at midnight.
        """
        return self._accounting_rows(["-j", ",".join(map(str, job_ids))]) if job_ids else {}

    def accounted_by_name(self, names: Sequence[str]) -> dict[int, Job]:
        """What the accounting says of this user's jobs of these names, of the last two weeks; else as `accounted`."""
        if not names:
            return {}
        found = self._accounting_rows(["--name", ",".join(names), "-S", "now-14days"])
        return {job.job_id: job for job in found.values() if job.name in names}

    def rehearse(self, options: JobOptions) -> str:
        """Ask whether a job with these options would be taken, without sending one; returns sbatch's words.

        Raises:
            SlurmRejected: it would be refused, for the reason in the message.
            SlurmUnavailable: SLURM does not answer.
        """
        answer = self._run(["sbatch", "--test-only", *options.arguments()], stdin="#!/bin/bash\ntrue\n")
        if answer.returncode != 0:
            raise SlurmRejected(f"sbatch would refuse such a job: {_words(answer)}")
        return " ".join((answer.stderr or answer.stdout).split())

    def partitions(self) -> dict[str, Partition]:
        """The site's partitions by name, hidden ones among them.

        Raises:
            SlurmError: SLURM does not answer, or refuses.
        """
        answer = self._run(["scontrol", "show", "partition", "-o", "-a"])
        if answer.returncode != 0:
            raise SlurmError(f"scontrol show partition failed: {_words(answer)}")
        return parsing.scontrol_partitions(answer.stdout)

    def lifts_time_limit(self, qos: str) -> bool:
        """Whether jobs of a QoS may take longer than their partition allows; False where the accounting is silent."""
        try:
            answer = self._run(["sacctmgr", "-n", "-P", "show", "qos", "where", f"name={qos}", "format=flags"])
        except SlurmUnavailable:
            return False
        return answer.returncode == 0 and "PartitionTimeLimit" in answer.stdout

    def version(self) -> str:
        """As SLURM's commands print it: `slurm 22.05.8`."""
        return " ".join(self._run(["sbatch", "--version"]).stdout.split())

    def accounting(self) -> bool:
        """Whether the accounting answers, so that jobs can be looked up when the controller forgot them."""
        answer = self._run(["sacct", "-X", "-n", "-P", "--format=JobIDRaw"])
        return answer.returncode == 0

    def cancel(self, *job_ids: int, signal: str | None = None, batch: bool = False) -> None:
        """Cancel jobs, or send them a signal, in one command. A job that is over already is no error.

        Args:
            job_ids: whom.
            signal: as `USR1`; none cancels.
            batch: send it to the batch script alone, not to all processes.

        Raises:
            SlurmUnavailable: SLURM does not answer; nothing is known of what was done.
            SlurmRejected: SLURM refused.
        """
        self._asked = float("-inf")
        options = [*(["-s", signal] if signal else []), *(["--batch"] if batch else [])]
        answer = self._run(["scancel", *options, *map(str, job_ids)])
        complaints = [line for line in answer.stderr.splitlines() if "error" in line.lower()]
        left = [line for line in complaints if not (NO_SUCH_JOB.search(line) or ALREADY_OVER.search(line))]
        if answer.returncode != 0 and left:
            raise SlurmRejected(f"scancel {' '.join(map(str, job_ids))}: {' '.join(left)}")

    def _controlled(self, job_id: int) -> Job | None:
        answer = self._run(["scontrol", "show", "job", "-o", str(job_id)])
        if answer.returncode != 0:
            if NO_SUCH_JOB.search(answer.stderr + answer.stdout):
                return None
            raise SlurmError(f"scontrol show job {job_id} failed: {_words(answer)}")
        return parsing.scontrol_job(answer.stdout, job_id)

    def _accounting_rows(self, which: list[str]) -> dict[int, Job]:
        if not self._accounting or shutil.which("sacct") is None:
            return {}
        try:
            answer = self._run(["sacct", "-X", "-n", "-P", *which, f"--format={parsing.SACCT_FORMAT}"])
        except SlurmUnavailable:
            return {}  # the database is away; the controller has answered, so the job is gone from there
        if answer.returncode != 0:
            self._accounting = NO_ACCOUNTING.search(answer.stderr + answer.stdout) is None
            return {}
        return parsing.sacct_jobs(answer.stdout)

    def _run(
        self, command: list[str], *, stdin: str = "", timeout_s: float | None = None
    ) -> "subprocess.CompletedProcess[str]":
        limit_s = timeout_s or self.timeout_s
        # Times come in the zone of who asks; sbatch hands its own on to the job.
        zone = {} if command[0] == "sbatch" else {"TZ": "UTC"}
        try:
            answer = subprocess.run(
                command,
                input=stdin,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=limit_s,
                env={**clean_environment(), **zone},
                check=False,
            )
        except FileNotFoundError as error:
            raise SlurmMissing(
                f"{command[0]}: not found on PATH, so SLURM can't be reached from this host. Work on a login node, "
                "load the site's SLURM module, or add its bin folder to PATH; then: rqwen3 doctor"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise SlurmUnavailable(f"{command[0]}: no answer within {limit_s:g} s.") from error
        except OSError as error:
            raise SlurmUnavailable(f"{command[0]}: can't be run ({error}).") from error
        silent = answer.returncode != 0 or not answer.stdout.strip()
        if silent and AWAY.search(answer.stderr + answer.stdout):
            raise SlurmUnavailable(f"{command[0]}: SLURM does not answer: {_words(answer)}")
        return answer


def _words(answer: "subprocess.CompletedProcess[str]") -> str:
    """What a command said, on one line, with its exit code."""
    said = " ".join((answer.stderr or answer.stdout).split())
    return f"{said[:1000] or 'nothing'} (exit code {answer.returncode})"
