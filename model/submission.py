"""What one call of the trainer is asked to do."""

from dataclasses import dataclass
from pathlib import Path

from model.metrics import Attempt


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What one call of the trainer is asked to do."""

    config: Path
    """The run's TOML file."""
    manifest: Path
    """The corpus' manifest."""
    run_dir: Path
    """Folder of the experiment."""
    attempt: Attempt
    """Which slice of the run this is."""
    until_step: int | None = None
    """Stop after this step, saved, as if a deadline had come."""
    job_alive_command: str | None = None
    """Answers whether the job of a lock's holder lives."""
    verify_data: bool = False
    """Hash every shard before the first step, however large the corpus."""
    accept_other_data: bool = False
    """Go on although the checkpoint was trained on another manifest."""
