"""The corpus on disk, as both halves of the project see it: token shards, sidecars, the manifest.

A shard `tokens/<source>-<nnnnn>-<kk>.bin` is flat little-endian uint32, one token each, no header;
every document is followed by the tokenizer's end-of-text id. Beside it lie `.json`, the sidecar
(counts and SHA-256, written last: a shard without it is unfinished), and `.docs.parquet`, one row a
document. Held-out documents have shards of the same form in `tokens/heldout/`. `manifest.json`
lists the shards in reading order. Opening a shard maps it into memory and costs no read.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from model.errors import CorpusError
from model.files import read_json, sha256_file

FORMAT_VERSION = 1
TOKEN_DTYPE = np.dtype("<u4")
TOKEN_BYTES = 4

DOCS_COLUMNS = ("end", "tokens", "text_bytes", "row", "id", "url", "digest")
"""Columns of `.docs.parquet`: `end` uint64, where the document's EOS ends, in tokens from the start
of the shard; `tokens` uint32, EOS included; `text_bytes` uint64, UTF-8 bytes of its NFC text; `row`
uint32, its row in the raw file; `id` and `url` string; `digest` fixed 32 bytes, SHA-256."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """One shard as the manifest lists it."""

    path: str
    """Relative to the run root."""
    source: str
    """Name of the source."""
    tokens: int
    """Tokens in the file, end-of-text ids included."""
    tokens_used: int
    """How many of them, from the start, belong to the corpus; the budget may cut the last shard."""
    documents: int
    """Documents in the file."""
    sha256: str
    """Of the file's bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What the trainer needs of `manifest.json`."""

    root: Path
    """The run root, which the shards' paths are relative to."""
    sha256: str
    """Of the manifest's own bytes: the fingerprint of the data."""
    tokenizer_path: str
    """The tokenizer's file, relative to the run root."""
    vocab_size: int
    """Number of ids of the tokenizer; every token is below it."""
    eos_id: int
    """The end-of-text id that follows each document."""
    shards: tuple[ShardEntry, ...]
    """Training shards, source by source, in reading order."""
    heldout: tuple[ShardEntry, ...]
    """Held-out shards, in the same order."""


def read_manifest(path: Path) -> Manifest:
    """Read `manifest.json`; its folder is the run root.

    Raises:
        CorpusError: the file is missing, of another format version, or lacks a key.
    """
    if not path.exists():
        raise CorpusError(f"{path}: no manifest. Build the corpus first: rqwen3 corpus build")
    data = read_json(path)
    try:
        if data["format_version"] != FORMAT_VERSION:
            raise CorpusError(
                f"{path}: format version {data['format_version']}, this program reads {FORMAT_VERSION}. "
                "Use the release that wrote it, or build the corpus again."
            )
        return Manifest(
            root=path.parent,
            sha256=sha256_file(path),
            tokenizer_path=data["tokenizer"]["path"],
            vocab_size=data["tokenizer"]["vocab_size"],
            eos_id=data["tokenizer"]["eos_id"],
            shards=tuple(_entry(item) for item in data["shards"]),
            heldout=tuple(_entry(item) for item in data["heldout"]),
        )
    except (KeyError, TypeError) as error:
        raise CorpusError(f"{path}: lacks {error}. Write it again: rqwen3 corpus build") from error


def _entry(item: dict[str, Any]) -> ShardEntry:
    return ShardEntry(
        path=item["path"],
        source=item["source"],
        tokens=item["tokens"],
        tokens_used=item.get("tokens_used", item["tokens"]),
        documents=item["documents"],
        sha256=item["sha256"],
    )


def open_shard(root: Path, entry: ShardEntry) -> npt.NDArray[np.uint32]:
    """Map a shard's used tokens into memory, read-only.

    Returns:
        uint32, shape (tokens_used,). An empty shard is an empty array.

    Raises:
        CorpusError: the file is missing, or its size is not four bytes for each of its tokens.
    """
    path = root / entry.path
    again = "Make it again: rqwen3 corpus build"
    if not path.exists():
        raise CorpusError(f"{path}: the manifest lists this shard, but it is not there. {again}")
    size_bytes = path.stat().st_size
    if size_bytes != entry.tokens * TOKEN_BYTES:
        halved = size_bytes == entry.tokens * TOKEN_BYTES // 2
        why = "it looks like 16-bit tokens" if halved else "the write was cut, or the file is another one"
        raise CorpusError(
            f"{path}: {size_bytes:,} bytes, but {entry.tokens:,} uint32 tokens are {entry.tokens * TOKEN_BYTES:,}; "
            f"{why}. {again}"
        )
    if not 0 <= entry.tokens_used <= entry.tokens:
        raise CorpusError(f"{path}: the manifest uses {entry.tokens_used:,} of {entry.tokens:,} tokens. {again}")
    if entry.tokens == 0:
        return np.empty(0, dtype=TOKEN_DTYPE)
    return np.memmap(path, dtype=TOKEN_DTYPE, mode="r", shape=(entry.tokens,))[: entry.tokens_used]


def sidecar_path(shard: Path) -> Path:
    """The sidecar of a shard."""
    return shard.with_suffix(".json")


def docs_path(shard: Path) -> Path:
    """The document table of a shard."""
    return shard.with_suffix(".docs.parquet")
