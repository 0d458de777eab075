"""Locking the Hub's files: only as many as the budget needs, in an order that represents them all.

For each source the configuration is listed once, its files are put into a seeded order (round the
folders; StackExchange's sites by their weights), and the first ones are locked until they yield the
source's budget, with a margin. The yield, tokens per byte of parquet, is measured on the first files,
which are fetched for it and are needed anyway, or taken from the profile. A lock that was made for the
same question stays as it is, without a request: a revision moves only when `--update` asks for it.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

from model.config import TrainConfig
from model.errors import SourceError
from model.files import read_json
from rqwen3_pipeline.corpus.documents import check_file, read_documents
from rqwen3_pipeline.corpus.filters import RULES
from rqwen3_pipeline.corpus.hub import Pin, fetch_pinned
from rqwen3_pipeline.corpus.hub_config import ListedFile, Listing, list_source
from rqwen3_pipeline.corpus.lock import (
    FORMAT_VERSION,
    Lock,
    LockedFile,
    raw_names,
    read_lock,
    save_lock,
    seeded_order,
    weighted_order,
)
from rqwen3_pipeline.corpus.sources import CorpusConfig, budgets
from rqwen3_pipeline.settings import RunRoot

TOKENS_PER_TEXT_BYTE = {
    "fineweb_edu": 0.234,
    "wikipedia": 0.224,
    "openwebmath": 0.353,
    "stackexchange": 0.223,
    "pes2o": 0.241,
    "textbooks": 0.249,
}
"""Qwen3 tokens per UTF-8 byte of kept text, on some 150 real documents of each source."""

MEASURED_FILES, MEASURED_BYTES = 3, 512 * 1024 * 1024
"""The yield is measured on the first file, and on up to so many while they stay below so many bytes together."""
MEASURED_ROWS = 10_000
"""Of each of them, so many of its first rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Yield:
    """What a source's files give."""

    tokens_per_byte: float
    """Tokens after the filter, for each byte of parquet."""
    how: str
    """Where the figure comes from, in words."""


def lock_hub(
    root: RunRoot,
    config: CorpusConfig,
    training: TrainConfig,
    update: bool = False,
    say: Callable[[str], None] | None = None,
) -> Lock:
    """Lock every configured source's files on the Hub.

    Args:
        root: the run root.
        config: what the corpus is made of.
        training: how many tokens the run takes.
        update: ask again, though the lock answers this very question.
        say: told of what is done and found, a sentence each.

    Raises:
        SourceError: a data set can't be listed, or a file for the yield can't be had.
    """
    say = say or (lambda _: None)
    asked = _question(config, training)
    if not update and _answered(root, asked):
        return read_lock(root)
    sources: dict[str, Any] = {}
    for source in config.sources:
        say(f"{source}: listing {config.hub[source].dataset} {config.hub[source].config}".rstrip())
        listing = list_source(source, config.hub[source])
        if listing.missing_sites:
            say(f"{source}: not in the data set, left out: {', '.join(listing.missing_sites)}")
        sources[source] = _entry(config, source, listing, asked["sources"][source]["wanted_tokens"], say)
    content = {
        "format_version": FORMAT_VERSION,
        "origin": "hub",
        "seed": config.lock_seed,
        "asked": asked,
        "sources": sources,
    }
    return save_lock(root, content)


def _question(config: CorpusConfig, training: TrainConfig) -> dict[str, Any]:
    """All that decides which files are locked, apart from what lies on the Hub."""
    margin, budget = config.data.budget_margin, budgets(config, training)
    kept = 1.0 - 1.0 / config.heldout_one_in
    return {
        "seed": config.lock_seed,
        "sources": {
            source: asdict(config.hub[source]) | {"wanted_tokens": int(budget[source] * margin / kept)}
            for source in config.sources
        },
    }


def _answered(root: RunRoot, asked: dict[str, Any]) -> bool:
    content: Any = read_json(root.lock) if root.lock.exists() else None
    if not isinstance(content, dict):
        return False
    found = cast(dict[str, Any], content)
    return found.get("format_version") == FORMAT_VERSION and found.get("asked") == asked


def _entry(
    config: CorpusConfig, source: str, listing: Listing, wanted_tokens: int, say: Callable[[str], None]
) -> dict[str, Any]:
    ordered = _ordered(config, source, listing)
    found = _yield(config, source, listing.pin, ordered, say)
    chosen: list[ListedFile] = []
    tokens = 0.0
    for file in ordered:
        if tokens >= wanted_tokens:
            break
        chosen.append(file)
        tokens += file.size_bytes * found.tokens_per_byte
    size_bytes = sum(file.size_bytes for file in chosen)
    short = "" if tokens >= wanted_tokens else "; that is all there is, and the run will repeat some of it"
    say(
        f"{source}: {len(chosen)} of {len(ordered)} files, {size_bytes:,} bytes, some {tokens:,.0f} tokens for "
        f"{wanted_tokens:,} (yield {found.tokens_per_byte:.4f} tokens a byte, {found.how}){short}"
    )
    names = raw_names([file.path for file in chosen], source, listing.pin.dataset)
    files = [
        LockedFile(
            key=f"{index:05d}",
            path=file.path,
            name=names[file.path],
            size_bytes=file.size_bytes,
            sha256=file.sha256,
            rows=None,
        )
        for index, file in enumerate(chosen)
    ]
    estimate = asdict(found) | {"tokens": int(tokens), "files_listed": len(ordered)}
    return {"hub": asdict(listing.pin), "estimate": estimate, "files": [asdict(file) for file in files]}


def _ordered(config: CorpusConfig, source: str, listing: Listing) -> list[ListedFile]:
    by_path = {file.path: file for file in listing.files}
    if config.hub[source].sites:
        sizes = {file.path: file.size_bytes for file in listing.files}
        order = weighted_order(sizes, config.hub[source].sites, config.lock_seed)
    else:
        order = seeded_order(list(by_path), config.lock_seed)
    return [by_path[path] for path in order]


def _yield(config: CorpusConfig, source: str, pin: Pin, ordered: list[ListedFile], say: Callable[[str], None]) -> Yield:
    given = config.hub[source].tokens_per_byte
    if given:
        return Yield(tokens_per_byte=given, how="as the profile says")
    rates: list[float] = []
    taken = 0
    for file in ordered[:MEASURED_FILES]:
        if rates and taken + file.size_bytes > MEASURED_BYTES:
            break
        taken += file.size_bytes
        say(f"{source}: fetching {file.path} ({file.size_bytes:,} bytes) to measure the yield")
        path = fetch_pinned(pin, file.path, file.size_bytes, file.sha256)
        rates.append(tokens_per_byte(path, file.size_bytes, source, config))
    rate = sum(rates) / len(rates)
    if rate <= 0.0:
        raise SourceError(
            f"{pin.dataset}: the filter keeps nothing of its first {len(rates)} files, so the yield is unknown. "
            f"Look at them; if they are right, name the yield: tokens_per_byte in [data.{source}]"
        )
    return Yield(tokens_per_byte=round(rate, 6), how=f"measured on the first {len(rates)} files")


def tokens_per_byte(path: Path, size_bytes: int, source: str, config: CorpusConfig) -> float:
    """Tokens that a raw file yields after the filter, for each of its bytes: an estimate from its first rows.

    Raises:
        SourceError: the file is damaged, or lacks a column.
    """
    rows = check_file(path, source, config)
    rule, settings = RULES[source], config.sources[source]
    seen = kept_bytes = 0
    for document in islice(read_documents(path, source, config), MEASURED_ROWS):
        seen += 1
        if rule(document, settings)[0]:
            kept_bytes += len(document.data)
    if not seen or not size_bytes:
        return 0.0
    return kept_bytes * (rows / seen) * TOKENS_PER_TEXT_BYTE[source] / size_bytes
