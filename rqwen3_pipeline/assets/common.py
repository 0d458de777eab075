"""What every asset body begins and ends with: the settings in force, and reports as metadata."""

import contextlib
import json
import math
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import dagster as dg

from model.config import RunConfig, load_run_config
from model.errors import ConfigError
from model.files import sha256_bytes, write_text
from rqwen3_pipeline.assets.plots import histogram_markdown
from rqwen3_pipeline.settings import SOURCES, RunRoot, Settings

if TYPE_CHECKING:
    from rqwen3_pipeline.corpus.lock import Lock
    from rqwen3_pipeline.corpus.sources import CorpusConfig

CODE_VERSION = "1"
LONGEST_CHARACTERS = 50_000
"""Of one piece of metadata: the event store and the asset's page carry all of them."""
OWNERS = ["team:rqwen3"]
STORE_LIMIT_S = 10.0
"""How long a training waits for the event store, whose word it can do without."""
Answer = TypeVar("Answer")

submission_partitions = dg.DynamicPartitionsDefinition(name="submissions")
"""Keys `<experiment>.<nn>`: one slice of a training run, one job."""

file_partitions = {source: dg.DynamicPartitionsDefinition(name=f"{source}_files") for source in SOURCES}
"""One set per source; keys are the files' five-digit numbers in the lock."""


@dataclass
class Pipeline:
    """The profile in force, read when an asset runs, never when the definitions load."""

    settings: Settings

    @cached_property
    def root(self) -> RunRoot:
        """The run root."""
        return self.settings.root

    @cached_property
    def run(self) -> RunConfig:
        """The whole configuration."""
        return self.settings.run_config

    @cached_property
    def corpus(self) -> "CorpusConfig":
        """Its `[data]` section."""
        from rqwen3_pipeline.corpus.sources import corpus_config

        return corpus_config(self.run)

    @cached_property
    def lock(self) -> "Lock":
        """The lock of the run root."""
        from rqwen3_pipeline.corpus.lock import read_lock

        return read_lock(self.root)


class Mirror:
    """Passes lines on to Dagster from a thread: an event store that is away neither fails nor delays the caller.

    Of the lines that come while one is being written only the newest is kept.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._lines: queue.Queue[str] = queue.Queue(maxsize=1)
        threading.Thread(target=self._run, daemon=True, name="mirror").start()

    def __call__(self, line: str) -> None:
        """Take a line; returns at once."""
        with contextlib.suppress(queue.Empty):
            self._lines.get_nowait()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            try:
                self._write(line)
            except Exception as error:
                print(f"the event store did not take {line!r}: {error}", file=sys.stderr, flush=True)


def ask_store(ask: Callable[[], Answer]) -> Answer | None:
    """What the event store answers; None, said aloud, where it fails or is silent for `STORE_LIMIT_S`.

    A database that drops packets answers only when TCP gives up, after minutes. The question is asked
    from a thread and not taken back: what it writes may still arrive.
    """
    answers: list[Answer] = []
    problem = f"no answer in {STORE_LIMIT_S:.0f} s"

    def run() -> None:
        nonlocal problem
        try:
            answers.append(ask())
        except Exception as error:
            problem = str(error)

    thread = threading.Thread(target=run, daemon=True, name="event store")
    thread.start()
    thread.join(STORE_LIMIT_S)
    if answers:
        return answers[0]
    print(f"the event store is away: {problem}; going on without it", file=sys.stderr, flush=True)
    return None


def pipeline() -> Pipeline:
    """The profile and the run root that the environment names."""
    return Pipeline(Settings())


def experiment(here: Pipeline, submission_key: str) -> tuple[RunConfig, Path]:
    """The configuration of a submission's experiment: the profile's, or that in the experiment's own folder.

    Raises:
        ConfigError: there is no such experiment.
    """
    name = submission_key.rpartition(".")[0]
    if name == here.run.name:
        return here.run, here.settings.config_path
    path = here.root.experiment(name) / "config.toml"
    if not path.is_file():
        raise ConfigError(
            f"{submission_key!r}: no experiment {name!r} in {here.root.path}. The profile's is {here.run.name}; "
            f"make another: rqwen3 experiment new {name} --from {here.run.name} --set training.learning_rate=1e-4"
        )
    return load_run_config(path), path


def metadata(report: dict[str, Any]) -> dict[str, Any]:
    """A stage's report as Dagster metadata: numbers plot over partitions, the rest is shown as JSON or text.

    NaN and infinities would break the asset's page, so they become text; what is longer than
    `LONGEST_CHARACTERS` goes into a file of the run root, whose path is shown.
    """
    return {key: _value(key, value) for key, value in report.items() if value is not None}


def _value(key: str, value: Any) -> Any:
    if key == "funnel" and isinstance(value, dict):
        return funnel_table(value)
    if key == "length_histogram" and isinstance(value, dict):
        return dg.MetadataValue.md(
            histogram_markdown(
                value["edges"],
                value["counts"],
                "kept documents by length in characters; each bar begins at the number to its left",
            )
        )
    if isinstance(value, float) and not math.isfinite(value):
        return dg.MetadataValue.text(str(value))
    if isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(_finite(value), default=str)
    if len(text) > LONGEST_CHARACTERS:
        return dg.MetadataValue.path(_kept(text))
    return value if isinstance(value, str) else dg.MetadataValue.json(_finite(value))


def _kept(text: str) -> Path:
    """A file with the text, named after what is in it."""
    path = pipeline().root.dagster_home / "long_texts" / f"{sha256_bytes(text.encode())[:16]}.txt"
    if not path.exists():
        write_text(path, text)
    return path


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def funnel_table(funnel: dict[str, int]) -> dg.TableMetadataValue:
    """Documents per reason, the kept ones first."""
    rows = max(sum(funnel.values()), 1)
    ordered = sorted(funnel.items(), key=lambda item: (item[0] != "kept", -item[1]))
    return dg.MetadataValue.table(
        [
            dg.TableRecord({"reason": reason, "documents": count, "share_percent": round(100 * count / rows, 2)})
            for reason, count in ordered
        ]
    )
