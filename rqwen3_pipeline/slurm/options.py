"""What a job may ask SLURM for: a white list, each value checked before anything is sent.

The options reach `sbatch` as arguments, which nothing parses a second time: there is no directive that
a space could cut short, and no shell. What several steps of a run ask for is combined into one job.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from model.errors import ConfigError
from rqwen3_pipeline.slurm.parsing import duration_s

NAME_CHARACTERS = 64
"""Job names are cut to so many; SLURM's tables and file systems take that everywhere."""

_WORD = r"[A-Za-z0-9_.@+][A-Za-z0-9_.@+-]*"
_HOSTS = r"[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]*"
RULES = {
    "partition": (rf"{_WORD}(,{_WORD})*", "a name, or names separated by commas"),
    "time": (r"(\d+-)?\d+(:\d+){0,2}", "minutes, hours:minutes:seconds or days-hours:minutes:seconds"),
    "cpus_per_task": (r"[1-9]\d{0,4}", "a number of CPUs"),
    "mem": (r"\d+[KMGT]?", "a size as 32G"),
    "gres": (r"[a-z_]+(:[A-Za-z0-9_.-]+)*(,[a-z_]+(:[A-Za-z0-9_.-]+)*)*", "as gpu:1 or gpu:l40s:1"),
    "qos": (_WORD, "a name"),
    "account": (_WORD, "a name"),
    "reservation": (_WORD, "a name"),
    "constraint": (r"[A-Za-z0-9_\[(][A-Za-z0-9_.&|,*()\[\]:+-]*", "features joined by & or |"),
    "nodes": (r"[1-9]\d{0,4}(-[1-9]\d{0,4})?", "a number of nodes"),
    "nodelist": (_HOSTS, "host names"),
    "exclude": (_HOSTS, "host names"),
    # Without `B:` it goes to the steps and not to the batch shell, which alone listens here.
    "signal": (r"B:(USR1|TERM)@[1-9]\d{0,4}", "B:USR1@<seconds>: the script's own shell takes the warning"),
    "dependency": (r"[a-z]+(:\d+)*(,[a-z]+(:\d+)*)*", "as singleton or afterany:<job id>"),
}
"""Key, and in words what is valid; the whole value must match."""
TEXTS = ("job_name", "comment", "output", "chdir")
"""Free text of one line, non-ASCII letters and spaces included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """One job's wishes; what is None is left to the site. Keys are sbatch's, with underscores."""

    job_name: str
    partition: str | None = None
    time: str | None = None
    cpus_per_task: str | None = None
    mem: str | None = None
    gres: str | None = None
    qos: str | None = None
    account: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    nodes: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    signal: str | None = "B:USR1@300"
    """The warning before the end; at most a third of the time limit is left then."""
    dependency: str | None = None
    comment: str | None = None
    output: str | None = None
    """Path of the log."""
    chdir: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                check_option(field.name, value)
        object.__setattr__(self, "job_name", legal_name(self.job_name))

    def arguments(self) -> list[str]:
        """The arguments of `sbatch`, apart from the script."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.signal is not None and self.time_limit_s:  # a warning that came at once would leave nothing to train
            mark, _, lead_s = self.signal.partition("@")
            given["signal"] = f"{mark}@{min(int(lead_s), max(1, int(self.time_limit_s) // 3))}"
        if self.output is not None:
            given["output"] = self.output.replace("%", "%%")
        asked = [f"--{key.replace('_', '-')}={value}" for key, value in given.items() if value is not None]
        # A requeued job would begin again a run that Dagster has seen end.
        return ["--parsable", "--no-requeue", "--open-mode=append", *asked]

    @property
    def time_limit_s(self) -> float | None:
        """The limit that is asked for, rounded up to minutes as SLURM does; None leaves it to the partition."""
        seconds = duration_s(self.time) if self.time else None
        return None if seconds is None else 60.0 * -(-seconds // 60)


def check_option(key: str, value: object) -> str:
    """One option's value as text.

    Raises:
        ConfigError: the key is unknown (the valid ones are listed), or the value is not what it may be.
    """
    text = str(value)
    if key in TEXTS:
        if not text or any(not character.isprintable() for character in text):
            raise ConfigError(f"slurm/{key} = {text!r}: must be one line of printable text.")
        if key == "output" and "\\" in text:
            raise ConfigError(f"slurm/output = {text!r}: SLURM treats a backslash in a log's path specially.")
        return text
    if key not in RULES:
        raise ConfigError(f"slurm/{key}: there is no such option. Valid: {', '.join(sorted(RULES))}.")
    pattern, words = RULES[key]
    if re.fullmatch(pattern, text, re.ASCII) is None:
        raise ConfigError(f"slurm/{key} = {text!r}: must be {words}.")
    return text


def legal_name(text: str) -> str:
    """A job name that every command of SLURM passes on unchanged, of at most `NAME_CHARACTERS` characters."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:NAME_CHARACTERS]
    return f"_{name[1:]}" if name.startswith("-") else name


def combine(steps: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """One job for several steps that run one after the other in one process.

    CPUs, memory and each kind of GRES are the maximum, times are summed. Anything else must agree.

    Raises:
        ConfigError: steps ask for different partitions (or other things that can't be had at once), or
            only some of them state a time, so that the sum is not known.
    """
    found: dict[str, str] = {}
    for key in dict.fromkeys(key for step in steps for key in step):
        values = [step[key] for step in steps if key in step]
        for value in values:
            check_option(key, value)
        if key == "cpus_per_task":
            found[key] = str(max(map(int, values)))
        elif key == "mem":
            found[key] = max(values, key=_kib)
        elif key == "gres":
            found[key] = _most_gres(values)
        elif key == "time":
            if len(values) < len(steps):
                raise ConfigError(
                    f"slurm/time: {len(values)} of the run's {len(steps)} steps state one, so the job's time is not "
                    "known. State it for each step, or for the run with the tag slurm/time."
                )
            found[key] = values[0] if len(values) == 1 else clock(sum(duration_s(value) or 0.0 for value in values))
        elif len(set(values)) > 1:
            raise ConfigError(
                f"slurm/{key}: the run's steps ask for {' and '.join(sorted(set(values)))}, but a run is one job. "
                f"Launch them as separate runs, or set the tag slurm/{key} for this run."
            )
        else:
            found[key] = values[0]
    return found


def _kib(size: str) -> int:
    unit = size[-1] if size[-1].isalpha() else "M"
    # 0 asks for all of a node's memory.
    return int(size.rstrip("KMGT")) * 1024 ** "KMGT".index(unit) or 2**63


def _most_gres(values: Sequence[str]) -> str:
    counts: dict[str, int] = {}
    for part in (part for value in values for part in value.split(",")):
        kind, _, last = part.rpartition(":")
        kind, count = (kind, int(last)) if last.isdigit() and kind else (part, 1)
        counts[kind] = max(counts.get(kind, 0), count)
    return ",".join(f"{kind}:{count}" for kind, count in counts.items())


def clock(seconds: float) -> str:
    """Seconds as SLURM writes them: `1-00:00:00`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02d}:{minutes:02d}:{rest:02d}"
