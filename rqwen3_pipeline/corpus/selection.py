"""Which pieces a command means: sources by name, files by their numbers in the lock."""

import re
from collections.abc import Sequence

from model.errors import ConfigError
from rqwen3_pipeline.corpus.lock import Lock
from rqwen3_pipeline.corpus.sources import CorpusConfig
from rqwen3_pipeline.settings import SOURCES

_PART = re.compile(r"(\d+)(?:-(\d+))?")


def select_sources(config: CorpusConfig, named: Sequence[str]) -> list[str]:
    """The sources that are meant, in the manifest's order; all in use if none is named.

    Raises:
        ConfigError: one is unknown, or the profile does not use it; the message lists the valid ones.
    """
    for name in named:
        if name not in config.sources:
            why = "the profile does not use it" if name in SOURCES else "there is no such source"
            raise ConfigError(f"--source {name}: {why}. Valid: {', '.join(config.sources)}.")
    return [source for source in config.sources if not named or source in named]


def file_numbers(text: str, option: str = "--files") -> list[int]:
    """Numbers out of `3`, `3-7` or `0,3-7`, ascending; `option` is what errors call it.

    Raises:
        ConfigError: it is nothing of the kind.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ConfigError(f"{option} {text}: {part.strip()!r} is no number and no range. Write it like 3 or 0,3-7.")
        numbers.update(range(first, last + 1))
    return sorted(numbers)


def select_files(
    config: CorpusConfig, lock: Lock, named: Sequence[str], files: str | None, option: str = "--files"
) -> list[tuple[str, str]]:
    """The pieces that are meant, as (source, key).

    Args:
        config: what the corpus is made of.
        lock: its files.
        named: sources; none for all.
        files: numbers of files in the lock, from 0; None for all. A source that is named must have them
            all; without names each source gives those that it has.
        option: what errors call the numbers.

    Raises:
        ConfigError: a source is unknown, or has no such files.
    """
    sources = select_sources(config, named)
    if files is None:
        return [(source, file.key) for source in sources for file in lock.files(source)]
    wanted = file_numbers(files, option)
    found: list[tuple[str, str]] = []
    for source in sources:
        have = lock.files(source)
        beyond = [number for number in wanted if number >= len(have)]
        if named and beyond:
            raise ConfigError(
                f"{option} {files}: {source} has {len(have)} files, 0 to {len(have) - 1}, no {beyond[0]}."
            )
        found += [(source, have[number].key) for number in wanted if number < len(have)]
    if not found:
        raise ConfigError(f"{option} {files}: no source has such a file.")
    return found
