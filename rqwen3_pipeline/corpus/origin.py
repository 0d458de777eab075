"""Where a profile's source files come from, and the lock that pins them.

A folder named by RQWEN3_SOURCES comes first; else what the profile says: `python` writes the demo's
prose from this Python installation, `folder` needs the variable, `hub` is the Hugging Face Hub.
"""

from pathlib import Path

from model.errors import SourceError
from rqwen3_pipeline.corpus.lock import Lock, lock_folder, read_lock
from rqwen3_pipeline.corpus.python_prose import write_python_prose
from rqwen3_pipeline.corpus.sources import CorpusConfig
from rqwen3_pipeline.progress import Progress
from rqwen3_pipeline.settings import SOURCES, RunRoot

DEMO_SOURCES = "demo_sources"


def origin_folder(root: RunRoot, config: CorpusConfig, folder: Path | None) -> Path:
    """The folder that the profile's sources are read from; the demo's is written if it is not there yet.

    Args:
        root: the run root.
        config: the `[data]` section.
        folder: a folder of sources, instead of what the profile says.

    Raises:
        SourceError: there is no origin to read from; the message says what to do.
    """
    if folder is not None:
        return folder
    if config.origin == "python":
        return write_demo_sources(root)
    locked = read_lock(root).origin if root.lock.exists() else None
    if locked is not None and locked.is_dir():
        return locked
    raise SourceError(
        f"{root.path}: the profile's sources come from {config.origin!r}, and no folder of them is known here. Name "
        "one with the six sources as <name>.parquet or <name>/**/*.parquet: rqwen3 sources lock --folder DIR"
    )


def lock_origin(root: RunRoot, config: CorpusConfig, folder: Path | None) -> Lock:
    """Pin the profile's source files in `sources.lock.json`.

    Raises:
        SourceError: as `origin_folder`; or a source or a column is missing, or a file is damaged.
    """
    return lock_folder(root, config, origin_folder(root, config, folder))


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
