"""Training as the pipeline sees it: programs to run, files to read.

Nothing here imports torch. A submission is one process of `model.pretrain`; what happened in it is
read back from the ledger and the metrics that it wrote, which stay true when this process is gone.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config import RunConfig, naming_the_file
from model.config_build import build
from model.errors import CheckpointError, ConfigError
from model.files import read_json, read_jsonl, sha256_file
from rqwen3_pipeline.programs import ProgramFailedError, run_program
from rqwen3_pipeline.progress import Progress
from rqwen3_pipeline.settings import RunRoot
from rqwen3_pipeline.slurm.script import CANCEL, DEADLINE, STOP_FILE

EXIT_FINISHED, EXIT_CONTINUE = 0, 75
STARTUP_S = 8.0
"""Seconds that a trainer takes on a laptop from its start to its first step, where none were measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmissionsConfig:
    """The `[submissions]` section."""

    time_limit_s: float = 0.0
    """Wall-clock limit of one submission, in seconds; 0 is none."""
    cut_first_at: float = 0.0
    """For demonstrations: the first submission gets so little time that it ends at about this share of the run."""

    first_until_step: int = 0
    """For tests: the first submission stops, saved, after this step, whatever the clock says; 0 is none."""
    retries: int = 3
    """Further attempts at a submission whose job is lost, and attempts in a row that may save nothing new."""
    back_off_s: float = 60.0
    """Seconds before the first retry; doubled at each further one."""
    idle_slices: int = 2
    """Submissions in a row that trained and saved nothing new, after which the chain stops."""

    def __post_init__(self) -> None:
        if not 0 <= self.cut_first_at < 1:
            raise ConfigError(f"submissions.cut_first_at = {self.cut_first_at} must lie in [0, 1)")
        for name in ("time_limit_s", "first_until_step", "retries", "back_off_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"submissions.{name} = {getattr(self, name)} must not be negative")
        if self.idle_slices < 1:
            raise ConfigError(f"submissions.idle_slices = {self.idle_slices} must be at least 1")


@naming_the_file
def submissions_config(run: RunConfig) -> SubmissionsConfig:
    """The `[submissions]` section, parsed."""
    return build(SubmissionsConfig, run.sections.get("submissions", {}), "submissions")


def submission_key(name: str, number: int) -> str:
    """Partition key of an experiment's submission."""
    return f"{name}.{number:02d}"


def submission_log(folder: Path, number: int, attempt: int) -> Path:
    """What the trainer of an attempt says, in an experiment's folder."""
    return folder / "logs" / f"submission-{number:02d}-a{attempt}.log"


def parse_submission(key: str, name: str) -> int:
    """The submission's number in a partition key.

    Raises:
        ConfigError: the key is not one of this experiment's.
    """
    experiment, _, number = key.rpartition(".")
    if experiment != name or not number.isdigit() or int(number) < 1:
        raise ConfigError(f"{key!r} is no submission of experiment {name!r}; its keys are {name}.01, {name}.02, …")
    return int(number)


def ledger(root: RunRoot, name: str) -> list[dict[str, Any]]:
    """The records of all submissions that have ended, in order."""
    return read_jsonl(root.experiment(name) / "ledger.jsonl")


def record_of(root: RunRoot, name: str, number: int) -> dict[str, Any] | None:
    """The newest ledger record of a submission that ended well (finished, or saved), if there is one."""
    good = [
        r for r in ledger(root, name) if r["submission"] == number and r["exit_code"] in (EXIT_FINISHED, EXIT_CONTINUE)
    ]
    return good[-1] if good else None


def next_submission(root: RunRoot, name: str) -> int:
    """Number of the submission to run next; one whose attempts all failed is tried again."""
    number = 1
    while record_of(root, name, number) is not None:
        number += 1
    return number


def finished(root: RunRoot, name: str) -> bool:
    """Whether the run has reached its last step and left `final.pt` with its sidecar."""
    final = root.experiment(name) / "checkpoints" / "final.pt"
    return final.exists() and final.with_suffix(".json").exists()


def first_time_limit_s(root: RunRoot, run: RunConfig) -> float:
    """The limit that cuts the first submission at `submissions.cut_first_at`, from the dry step's measure."""
    share = submissions_config(run).cut_first_at
    if share == 0:
        return submissions_config(run).time_limit_s
    measured, training = read_json(root.experiment(run.name) / "preflight.json"), run.training
    evaluations = 1 + training.max_steps // training.eval_every_steps
    saves = 1 + training.max_steps // training.save_every_steps
    whole_s = training.max_steps * measured["step_s"] + evaluations * measured["eval_s"] + saves * measured["save_s"]
    return STARTUP_S + share * whole_s + training.lead_s


def run_submission(
    root: RunRoot,
    run: RunConfig,
    config_path: Path,
    number: int,
    *,
    attempt: int,
    time_limit_s: float = 0.0,
    say: Callable[[str], None] | None = None,
    say_every_s: float = 30.0,
) -> dict[str, Any]:
    """Train until the run ends or the clock says so, and read back what the trainer recorded.

    A submission that the ledger already calls finished or saved is reported, not run again.

    Args:
        root: the run root.
        run: the configuration.
        config_path: the file it came from, which the trainer reads.
        number: of the submission, from 1.
        attempt: at it, from 1.
        time_limit_s: wall-clock limit; 0 takes the configuration's.
        say: takes a line on the progress, every `say_every_s` seconds.
        say_every_s: seconds between those lines.

    Returns:
        The ledger's record, with the last losses.

    Raises:
        ProgramFailedError: the trainer failed; the message holds the end of its log.
    """
    folder = root.experiment(run.name)
    record = record_of(root, run.name, number)
    if record is None:
        config = submissions_config(run)
        of_job, limit_s = job_arguments(os.environ, time_limit_s or config.time_limit_s)
        arguments = [*pretrain_arguments(root, run, config_path), "--submission", number, "--attempt", attempt, *of_job]
        arguments += ["--time-limit-s", limit_s] if limit_s else []
        arguments += ["--until-step", config.first_until_step] if number == 1 and config.first_until_step else []
        with Progress(f"training {submission_key(run.name, number)}", run.training.max_steps, "steps") as progress:
            watch = _Watch(folder / "metrics.jsonl", progress, say, say_every_s)
            try:
                run_program(
                    "model.pretrain",
                    [str(argument) for argument in (*arguments, "--watch-parent")],
                    submission_log(folder, number, attempt),
                    ok=(EXIT_FINISHED, EXIT_CONTINUE),
                    while_running=watch.look,
                )
            except ProgramFailedError:  # one that died after its record, in its own exit, has done its work
                if record_of(root, run.name, number) is None:
                    raise
            watch.look()
        record = record_of(root, run.name, number)
    if record is None:
        raise CheckpointError(
            f"{folder}/ledger.jsonl: the trainer ended well but left no record of submission {number}."
        )
    gpu_hours = record["seconds"] / 3600 * (record.get("processes") or 1) if record.get("gpu") else None
    return {**record, **last_losses(folder), "gpu_hours": gpu_hours, "path": str(folder)}


def job_arguments(environment: Mapping[str, str], limit_s: float) -> tuple[list[str], float]:
    """What the trainer is told of the job that it runs in, from what the job's script left in the environment.

    Args:
        environment: the worker's.
        limit_s: wall-clock limit that was asked for; 0 is none.

    Returns:
        The stop file and the command that asks for a job's life as arguments, and the limit, which is no
        longer than what is left of the job.
    """
    arguments: list[str] = []
    if stop_file := environment.get(STOP_FILE):
        arguments += ["--stop-file", stop_file]
    if environment.get("SLURM_JOB_ID"):
        arguments += ["--job-alive-command", shlex.join([sys.executable, "-m", "rqwen3_pipeline.slurm.alive"])]
    if (deadline := environment.get(DEADLINE, "")).isdigit():
        left_s = max(1.0, float(deadline) - time.time())
        limit_s = min(limit_s or left_s, left_s)
    return arguments, limit_s


def cancelled(environment: Mapping[str, str]) -> bool:
    """Whether the job was told to stop because its run is cancelled, not because its time is up."""
    stop_file = Path(environment.get(STOP_FILE) or os.devnull)
    return stop_file.exists() and stop_file.read_text(encoding="utf-8").strip() == CANCEL


def pretrain_arguments(root: RunRoot, run: RunConfig, config_path: Path) -> list[Any]:
    """What every call of `model.pretrain` is told."""
    return ["--config", config_path, "--manifest", root.manifest, "--run-dir", root.experiment(run.name)]


class _Watch:
    """Follows `metrics.jsonl` while the trainer writes it, reading only what is new."""

    def __init__(
        self, metrics: Path, progress: Progress, say: Callable[[str], None] | None, say_every_s: float
    ) -> None:
        self._metrics, self._progress, self._say, self._say_every_s = metrics, progress, say, say_every_s
        self._said = 0.0
        self._read_bytes = metrics.stat().st_size if metrics.exists() else 0

    def look(self) -> None:
        """Pass on the newest training point, if there is one."""
        points = [point for point in self._new_records() if point["kind"] == "train"]
        if not points:
            return
        point = points[-1]
        loss = "not finite" if point["loss"] is None else f"{point['loss']:.4f}"
        self._progress.to(point["step"], f"loss {loss}, {point['tokens_per_s']:,.0f} tokens/s")
        if self._say is not None and time.monotonic() - self._said > self._say_every_s:
            self._said = time.monotonic()
            self._say(f"step {point['step']:,}: loss {loss}, {point['tokens_per_s']:,.0f} tokens/s")

    def _new_records(self) -> list[dict[str, Any]]:
        if not self._metrics.exists():
            return []
        with self._metrics.open("rb") as file:
            file.seek(self._read_bytes)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read_bytes += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines() if line.startswith(b"{") and line.endswith(b"}")]


def last_losses(folder: Path) -> dict[str, Any]:
    """The newest training loss, speed and held-out figures of an experiment."""
    points = read_jsonl(folder / "metrics.jsonl")
    train = [point for point in points if point["kind"] == "train"]
    heldout = [point for point in points if point["kind"] == "heldout" and point["source"] == "all"]
    found: dict[str, Any] = {}
    if train:
        found |= {key: train[-1].get(key) for key in ("loss", "tokens_per_s", "mfu")}
    if heldout:
        found |= {"heldout_loss": heldout[-1]["loss"], "bits_per_byte": heldout[-1]["bits_per_byte"]}
    return found


def verify_final(root: RunRoot, name: str) -> dict[str, Any]:
    """Compare `final.pt` with its sidecar.

    Raises:
        CheckpointError: it is not there, or its size or SHA-256 differs.
    """
    final = root.experiment(name) / "checkpoints" / "final.pt"
    if not finished(root, name):
        raise CheckpointError(
            f"{final}: not there yet; the run goes on with submission {next_submission(root, name):02d}."
        )
    sidecar = read_json(final.with_suffix(".json"))
    size_bytes, sha256 = final.stat().st_size, sha256_file(final)
    if (size_bytes, sha256) != (sidecar["bytes"], sidecar["sha256"]):
        raise CheckpointError(
            f"{final}: {size_bytes:,} bytes with SHA-256 {sha256[:12]}…, its sidecar says {sidecar['bytes']:,} and "
            f"{sidecar['sha256'][:12]}…. Delete both and run the last submission again: rqwen3 run"
        )
    return {"path": str(final), "bytes": size_bytes, "sha256": sha256, "step": sidecar["step"]}


def steps_by_submission(records: list[dict[str, Any]], max_steps: int) -> tuple[list[dict[str, int]], list[str]]:
    """Follow the ledger: each submission must begin where the one before it saved.

    Args:
        records: the ledger, in order.
        max_steps: steps of the whole run.

    Returns:
        (submission, from_step, saved_step, lost_steps) of each record, and the problems found, if any.
    """
    steps: list[dict[str, int]] = []
    problems: list[str] = []
    reached = 0
    for record in records:
        if record["from_step"] is None:  # it ended before it had loaded anything
            continue
        names = ("submission", "attempt", "from_step", "saved_step", "lost_steps")
        steps.append({name: int(record[name] or 0) for name in names})
        if record["from_step"] != reached:
            problems.append(f"submission {record['submission']} began at step {record['from_step']}, not at {reached}")
        reached = max(reached, steps[-1]["saved_step"])
    if reached != max_steps:
        problems.append(f"the ledger ends at step {reached} of {max_steps}")
    return steps, problems
