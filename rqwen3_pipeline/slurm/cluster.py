"""What a site is like, in one TOML file: partitions, GPUs, limits; and what a run's job therefore asks for.

    [cluster]
    name = "example"
    gpu = "l40s"                  # what jobs of kind gpu get, as `rqwen3 plan --gpu` names it; preflight plans for it
    env_file = "env.sh"           # sourced by every job, relative to this file; the shipped one by default

    [options]                     # for every job
    partition = "cpu"
    time = "4:00:00"
    mem = "8G"

    [options.gpu]                 # for jobs of that kind, over the ones above
    partition = "gpu"
    gres = "gpu:l40s:1"
    time = "24:00:00"

    [options.transfer]            # the kind that needs the internet
    where = "local"               # runs on the host of the daemon

    [launcher]                    # how long `rqwen3 up` waits, read when it starts; in seconds, these by default
    missing_grace_seconds = 120   # for a job that neither squeue nor sacct knows, before its run is lost
    timeout_seconds = 30          # for an answer of SLURM; twice that for sbatch
    save_budget_seconds = 600     # for a training job to save when it is told to stop

An option comes from the file, the step's tags `slurm/<key>` are stronger, the run's tags strongest. A
step says its kind with the tag `slurm/kind`: `cpu` (the default), `gpu` or `transfer`. The file's time is
that of a job, however many steps it has; times that steps state themselves are summed.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from model.errors import ConfigError
from rqwen3_pipeline.slurm.options import RULES, check_option, combine
from rqwen3_pipeline.slurm.parsing import duration_s

PREFIX = "slurm/"
WHERE, KIND, STOP = "where", "kind", "stop"
LOCAL, SLURM = "local", "slurm"
SAVE = "save"
KINDS = ("cpu", "gpu", "transfer")
CHOICES = {WHERE: (LOCAL, SLURM), KIND: KINDS, STOP: (SAVE, "at_once")}
"""Tags that are no options of SLURM, and what they may say."""
BOOKKEEPING = (
    *("job_id", "attempt", "cancel_requested", "ended", "waited_for"),
    *("state", "exit_code", "never_starts", "failure", "memory_kill"),
)
"""Tags that launcher, reconciler and resubmission write."""
WAITS = {"missing_grace_seconds": 120, "timeout_seconds": 30, "save_budget_seconds": 600}
"""Keys of [launcher], and their defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """One site."""

    name: str = "unnamed"
    gpu: str = ""
    """The GPU of jobs that ask for one, as `rqwen3 plan --gpu` names it; empty where it is not said."""
    env_file: Path | None = None
    """Sourced by every job."""
    common: Mapping[str, str] = field(default_factory=dict[str, str])
    """Options of every job."""
    kinds: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """Options by kind of job."""
    path: Path | None = None
    """The file."""

    waits: Mapping[str, int] = field(default_factory=WAITS.copy)
    """How long the launcher waits for what, by the keys of `WAITS`."""

    def options(self, kind: str) -> dict[str, str]:
        """Options of a kind of job."""
        return {**self.common, **self.kinds.get(kind, {})}

    def table(self, kind: str, key: str) -> str:
        """Where the file says an option of a kind of job, as `[options.gpu]`."""
        return f"[options.{kind}]" if key in self.kinds.get(kind, {}) else "[options]"

    @property
    def file(self) -> str:
        """The file, for messages."""
        return f"{self.path} (RQWEN3_CLUSTER)" if self.path else "the file that RQWEN3_CLUSTER names"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What a run's job is to be."""

    local: bool
    """It runs on the daemon's host, without SLURM."""
    saves: bool
    """It trains: told to stop, it saves first."""
    options: Mapping[str, str]
    """For `JobOptions`."""


def load_cluster(path: Path) -> Cluster:
    """Read a site's file.

    Raises:
        ConfigError: it can't be read, or a key or a value is not valid; the message lists what is.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path}: can't be read as TOML ({error}). Point RQWEN3_CLUSTER at a cluster file."
        ) from error
    _refuse_others(f"{path}", content, ("cluster", "options", "launcher"))
    about = _table(path, content, "cluster")
    _refuse_others(f"{path}, [cluster]", about, ("name", "gpu", "env_file"))
    given = _table(path, content, "options")
    kinds = {key: _table(path, given, key) for key, value in given.items() if isinstance(value, dict)}
    _refuse_others(f"{path}, [options.…]", kinds, KINDS)
    common = {key: value for key, value in given.items() if not isinstance(value, dict)}
    try:
        return Cluster(
            name=str(about.get("name", path.stem)),
            gpu=str(about.get("gpu", "")),
            env_file=(path.parent / str(about["env_file"])).resolve() if "env_file" in about else None,
            common=_checked(common),
            kinds={kind: _checked(options) for kind, options in kinds.items()},
            waits=_waits(_table(path, content, "launcher")),
            path=path,
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def wish(steps: Sequence[Mapping[str, str]], run_tags: Mapping[str, str], cluster: Cluster) -> Wish:
    """What a run's job asks for.

    Args:
        steps: the tags of each step of the run.
        run_tags: the tags of the run.
        cluster: the site.

    Raises:
        ConfigError: a tag is not valid, or the steps can't share a job.
    """
    of_run = _slurm_tags(run_tags)
    asked: list[dict[str, str]] = []
    for tags in steps or [{}]:
        own = {**_slurm_tags(tags)}
        kind = of_run.get(KIND, own.get(KIND, KINDS[0]))
        asked.append({**cluster.options(kind), **own})
    places = {{**one, **of_run}.get(WHERE, SLURM) for one in asked}
    if len(places) > 1:
        raise ConfigError(
            f"{PREFIX}{WHERE}: some of the run's steps belong on the daemon's host and some into a job, but a run is "
            f"at one place. Launch them as separate runs, or set the tag {PREFIX}{WHERE} for this run."
        )
    saves = any({**one, **of_run}.get(STOP) == SAVE for one in asked)
    overridden = {key: value for key, value in of_run.items() if key not in CHOICES}
    options = combine(
        [{key: value for key, value in one.items() if key not in CHOICES and key not in overridden} for one in asked]
    )
    if "time" in options and not any(f"{PREFIX}time" in tags for tags in steps):
        options["time"] = max((one["time"] for one in asked), key=lambda time: duration_s(time) or 0.0)
    return Wish(local=places == {LOCAL}, saves=saves, options={**options, **overridden})


def _slurm_tags(tags: Mapping[str, str]) -> dict[str, str]:
    mine = {key.removeprefix(PREFIX): value for key, value in tags.items() if key.startswith(PREFIX)}
    return _checked({key: value for key, value in mine.items() if key not in BOOKKEEPING})


def _checked(options: Mapping[str, Any]) -> dict[str, str]:
    checked: dict[str, str] = {}
    for key, value in options.items():
        if key in CHOICES:
            if value not in CHOICES[key]:
                raise ConfigError(f"{PREFIX}{key} = {value!r}: must be one of {', '.join(CHOICES[key])}.")
            checked[key] = str(value)
        elif key in RULES:
            checked[key] = check_option(key, value)
        else:
            raise ConfigError(
                f"{PREFIX}{key}: there is no such option. Valid: {', '.join(sorted([*RULES, *CHOICES]))}."
            )
    return checked


def _waits(given: Mapping[str, Any]) -> dict[str, int]:
    _refuse_others("[launcher]", given, tuple(WAITS))
    for key, value in given.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"[launcher] {key} = {value!r}: must be a whole number of seconds, 1 or more.")
    return {**WAITS, **given}


def _table(path: Path, content: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {key} must be a table, [{key}].")
    return cast("dict[str, Any]", value)


def _refuse_others(where: str, table: Mapping[str, Any], valid: Sequence[str]) -> None:
    for key in table:
        if key not in valid:
            raise ConfigError(f"{where}: no key {key!r}. Valid: {', '.join(valid)}.")
