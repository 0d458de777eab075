"""A Dagster run as a job: its files, its options, and its script with the sources it was submitted with."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rqwen3_pipeline.slurm import reconcile
from rqwen3_pipeline.slurm.cluster import Wish
from rqwen3_pipeline.slurm.options import JobOptions
from rqwen3_pipeline.slurm.script import render
from rqwen3_pipeline.slurm.snapshot import take_snapshot

SOURCES = Path(__file__).resolve().parents[2]
"""The folder of the packages: a checkout, or site-packages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFiles:
    """Where one attempt of a run keeps its files."""

    folder: Path
    attempt: int

    @property
    def script(self) -> Path:
        """The batch script, as it was sent."""
        return self.folder / f"attempt-{self.attempt}.sh"

    @property
    def log(self) -> Path:
        """What the job printed."""
        return self.folder / f"attempt-{self.attempt}.log"

    @property
    def stop(self) -> Path:
        """Tells a trainer to save and stop."""
        return self.folder / f"attempt-{self.attempt}.stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What the jobs of a run root share."""

    home: Path
    """The run root."""
    profile: Path | None
    """The run's TOML file; a job reads the copy that was taken when it was submitted."""
    env_file: Path
    """Sourced by every job."""
    save_budget_s: int
    """How long a trainer that outlives its worker may take to save."""


def job_options(run_id: str, wanted: Wish, files: JobFiles) -> JobOptions:
    """What the run's job asks for."""
    return JobOptions(
        **wanted.options,
        job_name=reconcile.job_name(run_id, files.attempt),
        comment=f"{reconcile.COMMENT}{run_id}",
        output=str(files.log),
        chdir=str(files.folder),
    )


def job_script(worker: Sequence[str], options: JobOptions, files: JobFiles, place: Place) -> str:
    """The script of the run's job; takes the snapshot that it runs.

    Args:
        worker: the command that executes the run.
        options: of the job.
        files: of the run.
        place: where the jobs live.
    """
    profile = f"profile/{place.profile.name}" if place.profile is not None else None
    kept = {profile: place.profile} if profile is not None and place.profile is not None else {}
    code = take_snapshot(SOURCES, place.home / "dagster" / "code", kept)
    environment = {
        "DAGSTER_HOME": str(place.home / "dagster"),
        "RQWEN3_HOME": str(place.home),
        "RQWEN3_PROJECT": str(code),
        "RQWEN3_VENV": os.environ.get("RQWEN3_VENV", sys.prefix),
    }
    if profile is not None:
        environment["RQWEN3_PROFILE"] = str(code / profile)
    if options.cpus_per_task:
        environment["RQWEN3_WORKERS"] = options.cpus_per_task
    return render(
        worker,
        options,
        stop_file=files.stop,
        env_file=place.env_file,
        folder=files.folder,
        code=code,
        environment=environment,
        save_budget_s=place.save_budget_s,
    )
