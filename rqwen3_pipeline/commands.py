"""The commands that a person types next, in one place: the status view and the report name the same ones."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from model.config import RunConfig
from rqwen3_pipeline.settings import DEFAULT_PROFILE, profiles


@dataclass(frozen=True, kw_only=True, slots=True)
class Commands:
    """What to type for one profile."""

    program: str
    """`rqwen3` on this run root, with this profile; a command follows."""

    @property
    def corpus_build(self) -> str:
        """Lock, fetch, filter, deduplicate, tokenize and fold the manifest; goes on where it was stopped."""
        return f"{self.program} corpus build"

    @property
    def run(self) -> str:
        """Every stage that is not done yet: the corpus, the training, export, evaluation and the report."""
        return f"{self.program} run"


def commands(run: RunConfig, home: Path | None = None, config_path: Path | None = None) -> Commands:
    """The commands for a run's profile.

    Args:
        run: the configuration.
        home: the run root, which is named where it is not the profile's own; None names none.
        config_path: the file it came from; where it is None and no shipped one has the run's name, `FILE.toml`
            stands for it.
    """
    known = profiles()
    own = run.name if config_path is None else config_path.stem
    if config_path is None:
        profile = own if own in known else "FILE.toml"
    else:
        profile = own if known.get(own) == config_path else str(config_path)
    words = ["rqwen3"]
    if home is not None and home != (Path("var") / own).resolve():
        words += ["--home", shlex.quote(str(home))]
    if profile != DEFAULT_PROFILE:
        words += ["--profile", shlex.quote(profile)]
    return Commands(program=" ".join(words))
