"""The pieces of a stage, what each is made from, and how one is made.

A piece is a file of a source, or a group of sources for `survivors`. Whether it is current is
decided by stamps alone; making one never raises: what goes wrong is part of its outcome.
"""

import contextlib
import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from model.errors import CorpusError, RQwen3Error
from model.files import why_not_written
from rqwen3_pipeline.corpus.dedup import digest_file, find_survivors, survivor_inputs
from rqwen3_pipeline.corpus.fetch import fetch_file, raw_inputs
from rqwen3_pipeline.corpus.filters import filter_file, filter_inputs
from rqwen3_pipeline.corpus.lock import Lock
from rqwen3_pipeline.corpus.sources import STAGES, CorpusConfig
from rqwen3_pipeline.corpus.stamps import (
    input_of,
    matches,
    read_stamp,
    required_stamp,
    stamp_path,
    survivors_stamp_path,
    tokens_stamp_path,
)
from rqwen3_pipeline.corpus.tokenization import tokenize_file, tokenize_inputs
from rqwen3_pipeline.settings import RunRoot

GROUP_KEY = "all"
"""The key of a `survivors` piece, whose source is the group's name."""

KEPT_BYTES, MAPPED_BYTES = 128 * 1024 * 1024, 32 * 1024 * 1024
"""A worker may hold as much as the first beyond what its batch takes; see `_keep_freed_memory`."""

Item = tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one piece of a stage."""

    stage: str
    """Name of the stage."""
    source: str
    """Name of the source; for `survivors`, of the group."""
    key: str
    """Key of the file; for `survivors`, `GROUP_KEY`."""
    report: dict[str, Any] | None
    """The stage's report; None if it failed."""
    error: str | None
    """What went wrong; None if nothing did."""
    seconds: float
    """How long it took."""
    skipped: bool
    """Whether it was current already."""


def items_of(stage: str, config: CorpusConfig, lock: Lock, source: str | None = None) -> list[Item]:
    """The pieces of a stage: (source, key) for each file, (group, `GROUP_KEY`) for `survivors`.

    Args:
        stage: one of `STAGES` but `manifest`, which is a single fold.
        config: what the corpus is made of.
        lock: its files.
        source: only this source's (for `survivors`, the group that it is in, or that bears the name).
    """
    if stage == "survivors":
        groups = config.groups()
        return [(g, GROUP_KEY) for g, members in groups.items() if source is None or source == g or source in members]
    return [(s, file.key) for s in config.sources if source in (None, s) for file in lock.files(s)]


def facts_of(
    stage: str, root: RunRoot, config: CorpusConfig, lock: Lock, item: Item
) -> tuple[Path, dict[str, Any], dict[str, str]]:
    """Stamp, settings and present inputs of a piece.

    Raises:
        CorpusError: an earlier stage is not made yet.
    """
    source, key = item
    if stage == "raw":
        file = lock.file(source, key)
        return stamp_path(root.raw(source, file.name)), config.settings_for("raw"), raw_inputs(file)
    if stage == "filtered":
        path, inputs = root.filtered(source, key), filter_inputs(root, config, lock, source, key)
        return stamp_path(path), config.settings_for("filtered", source), inputs
    if stage == "digests":
        filtered = root.filtered(source, key)
        inputs = input_of(root, required_stamp(stamp_path(filtered), str(filtered)), filtered)
        return stamp_path(root.digests(source, key)), config.settings_for("digests"), inputs
    if stage == "survivors":
        path = survivors_stamp_path(root, source)
        return path, config.settings_for("survivors"), survivor_inputs(root, config, lock, source)
    if stage == "tokens":
        path = tokens_stamp_path(root, source, key)
        return path, config.settings_for("tokens"), tokenize_inputs(root, config, source, key)
    raise ValueError(f"{stage!r} is no stage of pieces; those are {', '.join(STAGES[:-1])}")


def is_current(stage: str, root: RunRoot, config: CorpusConfig, lock: Lock, item: Item) -> bool:
    """Whether a piece is whole and is what this configuration would make of what is there now."""
    try:
        path, settings, inputs = facts_of(stage, root, config, lock, item)
        stamp = read_stamp(path)
    except CorpusError:
        return False  # an earlier stage is not made yet, or a stamp is damaged
    return stamp is not None and matches(root, stamp, settings, inputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a worker needs to know once."""

    stage: str
    root: Path
    config: CorpusConfig
    lock: Lock
    rebuild: bool


def work(task: Task, item: Item) -> Outcome:
    """Do one piece; whatever goes wrong becomes its error."""
    root, (source, key) = RunRoot(task.root), item
    config, lock, rebuild = task.config, task.lock, task.rebuild
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "raw": lambda: fetch_file(root, lock, source, key, rebuild),
        "filtered": lambda: filter_file(root, config, lock, source, key, rebuild),
        "digests": lambda: digest_file(root, config, source, key, rebuild),
        "survivors": lambda: find_survivors(root, config, lock, source, rebuild),
        "tokens": lambda: tokenize_file(root, config, lock, source, key, rebuild),
    }
    _keep_freed_memory()
    began = time.monotonic()
    report, error, skipped = None, None, False
    try:
        skipped = is_current(task.stage, root, config, lock, item)
        report = makers[task.stage]()
    except RQwen3Error as problem:
        error = str(problem)
    except OSError as problem:
        error = why_not_written(problem, root.path) or f"{type(problem).__name__}: {problem}"
    except Exception as problem:  # one bad piece must not stop the others
        error = f"{type(problem).__name__}: {problem}"
    return Outcome(
        stage=task.stage,
        source=source,
        key=key,
        report=report,
        error=error,
        seconds=time.monotonic() - began,
        skipped=skipped and error is None,
    )


@cache
def _keep_freed_memory() -> None:
    """Let the C library keep up to `KEPT_BYTES` that a batch has freed for the next one.

    By default it gives back what is above a few megabytes, and the kernel zeroes it anew, page by page: some 6 % of a
    build's CPU time. Blocks of `MAPPED_BYTES`, which only long rows take, still go back at once.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(trim_threshold, KEPT_BYTES)
        library.mallopt(mmap_threshold, MAPPED_BYTES)
