"""Where a profile's source files come from, and the lock that pins them.

A folder named by RQWEN3_SOURCES comes first; else what the profile says: `python` writes the demo's
prose from this Python installation, `folder` needs the variable, `hub` is the Hugging Face Hub. A
folder that was locked once stays the origin until another one, or `--update`, says otherwise.
"""

from collections.abc import Callable
from pathlib import Path

from model.config import TrainConfig
from model.errors import SourceError
from rqwen3_pipeline.corpus.hub_lock import lock_hub
from rqwen3_pipeline.corpus.lock import Lock, lock_folder, read_lock
from rqwen3_pipeline.corpus.python_prose import write_python_prose
from rqwen3_pipeline.corpus.sources import CorpusConfig
from rqwen3_pipeline.progress import Progress
from rqwen3_pipeline.settings import SOURCES, RunRoot

DEMO_SOURCES = "demo_sources"


def lock_origin(
    root: RunRoot,
    config: CorpusConfig,
    training: TrainConfig,
    folder: Path | None,
    update: bool = False,
    say: Callable[[str], None] | None = None,
) -> Lock:
    """Pin the profile's source files in `sources.lock.json`.

    Args:
        root: the run root.
        config: the `[data]` section.
        training: how many tokens the run takes; decides how many of the Hub's files it needs.
        folder: a folder of sources, instead of what the profile says.
        update: for the Hub, ask what is there now, though the files are locked already.
        say: told of what is done and found, a sentence each.

    Raises:
        SourceError: there is no origin to read from; a source, a file or a column is missing or damaged; or
            the Hub can't be had. The message says what to do.
    """
    found = folder or _known_folder(root, config, update)
    if found is not None:
        return lock_folder(root, config, found)
    if config.origin == "hub":
        return lock_hub(root, config, training, update, say)
    raise SourceError(
        f"{root.path}: the profile's sources come from {config.origin!r}, and no folder of them is known here. Name "
        "one with the six sources as <name>.parquet or <name>/**/*.parquet: rqwen3 sources lock --folder DIR"
    )


def _known_folder(root: RunRoot, config: CorpusConfig, update: bool) -> Path | None:
    if config.origin == "python":
        return write_demo_sources(root)
    if config.origin == "hub" and update:
        return None
    locked = read_lock(root).origin if root.lock.exists() else None
    return locked if locked is not None and locked.is_dir() else None


def write_demo_sources(root: RunRoot) -> Path:
    """The demo's six source folders below the run root, written if they are not there yet."""
    folder = root.path / DEMO_SOURCES
    with Progress("prose of this Python installation", 100, "percent") as bar:
        filled: dict[str, float] = {}

        def look(source: str, so_far: int, wanted: int) -> None:
            filled[source] = min(1.0, so_far / wanted)
            bar.to(int(100 * sum(filled.values()) / len(SOURCES)))

        write_python_prose(folder, progress=look)
    return folder
