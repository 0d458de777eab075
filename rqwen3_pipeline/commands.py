"""The commands that a person types next, in one place: the status view and the report name the same ones."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from model.config import RunConfig
from rqwen3_pipeline.settings import DEFAULT_PROFILE, profiles


@dataclass(frozen=True, kw_only=True, slots=True)
class Commands:
    """What to type for one profile."""

    corpus_build: str
    """Lock, fetch, filter, deduplicate, tokenize and fold the manifest; goes on where it was stopped."""
    run: str
    """Every stage that is not done yet: the corpus, the training, export, evaluation and the report."""


def commands(run: RunConfig, home: Path | None = None) -> Commands:
    """The commands for a run's profile; a configuration of one's own is named `FILE.toml`.

    Args:
        run: the configuration.
        home: the run root, which is named where it is not the profile's own; None names none.
    """
    profile = run.name if run.name in profiles() else "FILE.toml"
    words = ["rqwen3"]
    if home is not None and home != (Path("var") / run.name).resolve():
        words += ["--home", shlex.quote(str(home))]
    if profile != DEFAULT_PROFILE:
        words += ["--profile", profile]
    program = " ".join(words)
    return Commands(corpus_build=f"{program} corpus build", run=f"{program} run")
