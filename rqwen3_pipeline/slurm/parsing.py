"""Reads what SLURM's commands print: one record a job, or an error that shows the line.

Fields are separated by the control characters that ASCII has for it, and names come last, so that
nothing a person may call a job breaks a record. Times are UTC, as the commands were asked for them, since
an hour of local time comes twice each autumn; they come out as seconds since 1970.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from model.errors import RQwen3Error
from rqwen3_pipeline.slurm.states import Phase, State, parse_state

FIELD, RECORD = "\x1f", "\x1e"
SQUEUE_FORMAT = FIELD.join(("%A", "%T", "%r", "%N", "%V", "%S", "%e", "%l", "%P", "%k", "%j")) + RECORD
SACCT_FORMAT = "JobIDRaw,State,ExitCode,NodeList,Submit,Start,End,TimelimitRaw,Partition,JobName"
NOTHING = frozenset({"", "n/a", "none", "unknown", "(null)", "none assigned", "null"})


class SlurmError(RQwen3Error):
    """A SLURM command failed or printed something that can't be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One job, as far as the command that was asked knows it."""

    job_id: int
    name: str
    state: State
    state_text: str = ""
    """The state in SLURM's own words, which say who cancelled."""
    reason: str = ""
    """Why it waits, or why it ended; empty when there is none."""
    exit_code: str | None = None
    """`<code>:<signal>`; None where it was not told."""
    node: str = ""
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    """Of a running job: when its time limit ends."""
    time_limit_s: float | None = None
    """None without a limit."""
    partition: str = ""
    comment: str = ""

    @property
    def phase(self) -> Phase:
        """What the state means."""
        return self.state.phase

    def describe(self) -> str:
        """One line for a person."""
        parts = [f"SLURM job {self.job_id} ({self.name}) is {self.state_text or self.state.value}"]
        parts += [f"reason {self.reason}"] if self.reason else []
        parts += [f"exit code {self.exit_code}"] if self.exit_code and self.phase.ended else []
        parts += [f"partition {self.partition}"] if self.partition else []
        parts += [f"on {self.node}"] if self.node else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """One partition of the site."""

    name: str
    state: str
    """`UP`, or why nothing starts there: `DOWN`, `DRAIN`, `INACTIVE`."""
    longest_s: float | None
    """The longest time that a job may ask for; None without a limit."""
    default: bool
    """Jobs go here that name none."""


def submitted_id(text: str) -> int | None:
    """The job id in what sbatch printed, whatever a site prints around it; None when there is none."""
    found: int | None = None
    for line in text.splitlines():
        match = re.fullmatch(r"(\d+)(;\S*)?", line.strip()) or re.search(r"Submitted batch job (\d+)", line)
        found = int(match[1]) if match else found
    return found


def squeue_jobs(text: str) -> dict[int, Job]:
    """The jobs in an answer of `squeue -o SQUEUE_FORMAT`.

    Raises:
        SlurmError: a record is not in that format.
    """
    jobs: dict[int, Job] = {}
    records = text.split(RECORD)
    if records.pop().strip():
        raise _unreadable("squeue", text)
    for record in records:
        fields = record.lstrip("\n").split(FIELD, 10)
        if len(fields) != 11 or not fields[0].isdigit() or not fields[1].strip():
            raise _unreadable("squeue", record)
        job_id, state, reason, node, submitted, started, ended, limit, partition, comment, name = fields
        jobs[int(job_id)] = Job(
            job_id=int(job_id),
            name=name,
            state=parse_state(state),
            state_text=state,
            reason=_text(reason),
            node=_text(node),
            submitted=_time(submitted),
            started=_time(started),
            ended=_time(ended),
            time_limit_s=duration_s(limit),
            partition=partition,
            comment=_text(comment),
        )
    return jobs


def scontrol_partitions(text: str) -> dict[str, Partition]:
    """The partitions in an answer of `scontrol show partition -o`, by name."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        fields: dict[str, str] = dict(re.findall(r"(\w+)=(\S*)", line))
        if name := fields.get("PartitionName"):
            found[name] = Partition(
                name=name,
                state=fields.get("State", ""),
                longest_s=duration_s(fields.get("MaxTime", "")),
                default=fields.get("Default") == "YES",
            )
    return found


def scontrol_job(text: str, job_id: int) -> Job | None:
    """The job in an answer of `scontrol show job -o`; None when it is empty.

    Raises:
        SlurmError: it is no such answer.
    """
    if not text.strip():
        return None
    # Of an array there is one line for each task that differs; the first is the one that was asked for.
    line = text.strip().splitlines()[0]
    head = re.match(r"JobId=(\d+) .*?JobName=(.*?) UserId=\S+ ", line)
    state = re.search(r" JobState=(\S+) Reason=(.*?) Dependency=", line)
    if head is None or state is None:
        raise _unreadable(f"scontrol show job {job_id}", line)
    fields: dict[str, str] = dict(re.findall(r" (\w+)=(\S+)", line[head.end() :]))
    comment = re.search(r" Comment=(.*?) (?:StdErr|WorkDir|StdIn|AdminComment|SystemComment)=", line)
    return Job(
        job_id=job_id,
        name=head[2],
        state=parse_state(state[1]),
        state_text=state[1],
        reason=_text(state[2]),
        exit_code=fields.get("ExitCode"),
        node=_text(fields.get("NodeList", "")),
        submitted=_time(fields.get("SubmitTime", "")),
        started=_time(fields.get("StartTime", "")),
        ended=_time(fields.get("EndTime", "")),
        time_limit_s=duration_s(fields.get("TimeLimit", "")),
        partition=fields.get("Partition", ""),
        comment=_text(comment[1]) if comment else "",
    )


def sacct_jobs(text: str) -> dict[int, Job]:
    """The jobs in an answer of `sacct -X -n -P --format=SACCT_FORMAT`; of a requeued job the last record.

    Raises:
        SlurmError: a line is not in that format.
    """
    jobs: dict[int, Job] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        fields = line.split("|", 9)
        if len(fields) != 10:
            raise _unreadable("sacct", line)
        job_id, state, code, node, submitted, started, ended, limit_minutes, partition, name = fields
        if not job_id.isdigit():
            continue  # a step, or a task of an array
        jobs[int(job_id)] = Job(
            job_id=int(job_id),
            name=name,
            state=parse_state(state),
            state_text=state,
            exit_code=code or None,
            node=_text(node),
            submitted=_time(submitted),
            started=_time(started),
            ended=_time(ended),
            time_limit_s=60.0 * int(limit_minutes) if limit_minutes.isdigit() else None,
            partition=partition,
        )
    return jobs


def duration_s(text: str) -> float | None:
    """Seconds of SLURM's `[days-]hours:minutes:seconds`, `minutes:seconds` or `minutes`; None for anything else."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        return None
    days, *given = match.groups()
    numbers = [int(number) for number in given if number is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def _text(value: str) -> str:
    return "" if value.strip().lower() in NOTHING else value.strip()


def _time(value: str) -> float | None:
    try:
        return datetime.fromisoformat(value.strip()).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _unreadable(command: str, text: str) -> SlurmError:
    return SlurmError(
        f"{command} printed something that is no record of a job: {text.strip()[:300]!r}. Is another program of "
        f"that name first on PATH? See: type -a {command.split()[0]}"
    )
