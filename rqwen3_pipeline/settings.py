"""Where things are and which profile runs, from the environment; and the layout of a run root.

Costs one import of pydantic-settings. Nothing is created here: a path is a name, not a folder.
"""

from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from model.config import NAME_PATTERN, RunConfig, load_run_config
from model.errors import ConfigError

SOURCES = ("fineweb_edu", "wikipedia", "openwebmath", "stackexchange", "pes2o", "textbooks")
"""The six sources, in the order in which the manifest lists them."""

DEFAULT_PROFILE = "demo"

_PACKAGE = Path(__file__).resolve().parent


def shipped(name: str) -> Path:
    """A file that the project ships at its root (`configs/…`, `dagster.yaml`), checkout or wheel."""
    checkout = _PACKAGE.parent / name
    return checkout if checkout.exists() else _PACKAGE / "_shipped" / name


def profiles() -> dict[str, Path]:
    """The shipped profiles by name: the TOML files of `configs/`."""
    return {path.stem: path for path in sorted(shipped("configs").glob("*.toml"))}


def postgres_problem() -> str | None:
    """Why the events can't go to Postgres on this machine, with the way out; None if they can."""
    missing = [name for name in ("dagster_postgres", "psycopg2") if find_spec(name) is None]
    if not missing:
        return None
    return f"RQWEN3_POSTGRES_URL is set, but {' and '.join(missing)} can't be imported. Run: make install-cluster"


class Settings(BaseSettings):
    """The environment, each variable with the prefix `RQWEN3_`."""

    model_config = SettingsConfigDict(env_prefix="RQWEN3_", env_ignore_empty=True, extra="ignore")

    profile: str = DEFAULT_PROFILE
    """Name of a file in `configs/`, or the path of a TOML file."""
    home: Path | None = None
    """The run root; `var/<profile>` in the current folder by default."""
    sources: Path | None = None
    """A folder of `<source>.parquet` or `<source>/**/*.parquet` to read instead of the profile's origin."""
    tokenizer: Path | None = None
    """The tokenizer.json to pin, where the profile pins one."""
    workers: int = Field(default=2, ge=1, le=1024)
    """Processes that build the corpus side by side."""
    hub_patience_s: float = Field(default=600.0, ge=0.0)
    """How long one request to the Hugging Face Hub is repeated, waits included, before it counts as failed."""
    notice_command: str = ""
    """Gets a message on standard input when a run has failed."""
    notice_webhook: str = ""
    """Gets the same by POST, as {"text": …}."""
    notice_file: Path | None = None
    """Has the same appended."""
    launcher: Literal["local", "slurm"] = "local"
    """Where the runs of `rqwen3 up` go: processes of this host, or SLURM jobs."""
    cluster: Path | None = None
    """The site's TOML file: partitions, GPUs, limits, what jobs source."""
    max_jobs: int = Field(default=8, ge=1)
    """SLURM jobs at once; runs beyond that wait in Dagster's queue."""
    postgres_url: SecretStr | None = None
    """The event store, where it can't be SQLite: `postgresql://user:password@host:port/name`."""

    @field_validator("home", "sources", "tokenizer", "cluster", "notice_file")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return path.resolve() if path is not None else None

    @cached_property
    def config_path(self) -> Path:
        """The profile's TOML file.

        Raises:
            ConfigError: there is no such profile; the message lists those there are.
        """
        if self.profile.endswith(".toml"):
            return Path(self.profile).resolve()
        known = profiles()
        if self.profile not in known:
            raise ConfigError(
                f"RQWEN3_PROFILE: no profile {self.profile!r}. Valid: {', '.join(known)}, or a .toml file."
            )
        return known[self.profile]

    @cached_property
    def run_config(self) -> RunConfig:
        """The profile's configuration, parsed."""
        return load_run_config(self.config_path)

    @cached_property
    def root(self) -> "RunRoot":
        """The run root, absolute."""
        return RunRoot(self.home or (Path("var") / self.config_path.stem).resolve())


class RunRoot:
    """Every path below a run root. The names are contracts: tools outside the project read them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def lock(self) -> Path:
        """Which files, of which revision, with which hashes."""
        return self.path / "sources.lock.json"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that made the shards."""
        return self.path / "tokenizer.json"

    @property
    def manifest(self) -> Path:
        """The fold over all sidecars."""
        return self.path / "manifest.json"

    @property
    def variations(self) -> Path:
        """Run roots of experiments that were made from one of this root's, by name."""
        return self.path / "variations.json"

    @property
    def benchmarks(self) -> Path:
        """The benchmarks' rows, in the Hub's columns; may be a link to a folder that several run roots share."""
        return self.path / "benchmarks"

    @property
    def dagster_home(self) -> Path:
        """DAGSTER_HOME."""
        return self.path / "dagster"

    def raw(self, source: str, file: str) -> Path:
        """A raw file as fetched; `file` is its name in the lock, with the folders written as `__`."""
        return self.path / "raw" / source / file

    def filtered(self, source: str, key: str) -> Path:
        """Kept documents of the lock's file `key` (five digits)."""
        return self.path / "filtered" / source / f"{key}.parquet"

    def digests(self, source: str, key: str) -> Path:
        """SHA-256 of each kept document: uint8, shape (documents, 32)."""
        return self.path / "digests" / source / f"{key}.npy"

    def survivors(self, source: str, key: str) -> Path:
        """Rows of the filtered file that survived deduplication: uint32, ascending."""
        return self.path / "survivors" / source / f"{key}.npy"

    @property
    def tokens(self) -> Path:
        """Token shards and their sidecars."""
        return self.path / "tokens"

    @property
    def heldout(self) -> Path:
        """Held-out token shards and their sidecars."""
        return self.tokens / "heldout"

    def experiment(self, name: str) -> Path:
        """Folder of one experiment: config, checkpoints, metrics, ledger."""
        return self.path / "experiments" / _checked(name)

    def export(self, name: str) -> Path:
        """Folder of the exported model."""
        return self.path / "exports" / _checked(name)

    def evaluation(self, name: str) -> Path:
        """Folder of the evaluation's scores."""
        return self.path / "evaluations" / _checked(name)

    def evidence(self, name: str) -> Path:
        """Folder of the evidence report."""
        return self.path / "evidence" / _checked(name)


def _checked(name: str) -> str:
    if NAME_PATTERN.fullmatch(name) is None:
        raise ConfigError(f"{name!r} is no experiment name: use a-z, 0-9, - and _, up to 64.")
    return name
