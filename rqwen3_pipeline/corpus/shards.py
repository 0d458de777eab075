"""Token shards: flat uint32 files, with a table of their documents and a sidecar.

A writer takes documents one by one and closes a shard before the document that would take it above
the limit, so shards end on document borders (a single longer document makes a longer shard). Each
file is written under a temporary name, flushed and renamed: `.bin`, `.docs.parquet`, and the sidecar
`.json` last. No document, no shard. Memory: a few thousand table rows; the tokens go straight out.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (pyarrow ships no types)

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from model.files import commit, temporary_path, write_json
from model.shard_format import DOCS_COLUMNS, FORMAT_VERSION, TOKEN_DTYPE, docs_path, sidecar_path

DOCS_SCHEMA = pa.schema(
    [
        ("end", pa.uint64()),
        ("tokens", pa.uint32()),
        ("text_bytes", pa.uint64()),
        ("row", pa.uint32()),
        ("id", pa.string()),
        ("url", pa.string()),
        ("digest", pa.binary(32)),
    ]
)
assert tuple(DOCS_SCHEMA.names) == DOCS_COLUMNS
FLUSH_DOCUMENTS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Sidecar:
    """What `<shard>.json` says."""

    path: str
    """Of the shard, below the run root."""
    source: str
    """Name of the source."""
    partition: str
    """Key of the raw file."""
    part: int
    """Number of the shard within the partition."""
    tokens: int
    """Tokens in the shard, end-of-text ids included."""
    documents: int
    """Documents in it."""
    text_bytes: int
    """UTF-8 bytes of their text."""
    sha256: str
    """Of the shard's bytes."""
    heldout: bool
    """Whether it is held out."""
    settings_sha256: str
    """Hash of the settings of the stage."""
    tokenizer_sha256: str
    """Hash of the tokenizer.json."""
    format_version: int = FORMAT_VERSION
    """Of shard, table and sidecar."""


@dataclass(slots=True)
class _Open:
    """A shard that is being written."""

    path: Path
    file: BinaryIO
    table: Any
    digest: Any
    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    rows: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in DOCS_COLUMNS})


class ShardWriter:
    """Writes the shards of one partition, training or held-out; a context manager.

    When its block fails, the shard in progress vanishes; those already closed stay under their names
    and do not count, as the partition has no stamp.
    """

    def __init__(
        self,
        root: Path,
        folder: Path,
        *,
        source: str,
        key: str,
        max_tokens: int,
        heldout: bool,
        settings_sha256: str,
        tokenizer_sha256: str,
    ) -> None:
        """Prepare; no file is made before the first document.

        Args:
            root: the run root, which paths in sidecars are relative to.
            folder: where the shards go.
            source: the source's name.
            key: the partition's key.
            max_tokens: limit of a shard of more than one document.
            heldout: for the sidecars.
            settings_sha256: for the sidecars.
            tokenizer_sha256: for the sidecars.
        """
        self.sidecars: list[Sidecar] = []
        self._root, self._folder, self._source, self._key = root, folder, source, key
        self._max_tokens, self._heldout = max_tokens, heldout
        self._settings_sha256, self._tokenizer_sha256 = settings_sha256, tokenizer_sha256
        self._open: _Open | None = None

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._close()
        elif self._open is not None:
            self._open.file.close()
            self._open.table.close()
            for path in (self._open.path, docs_path(self._open.path)):
                temporary_path(path).unlink(missing_ok=True)

    @property
    def files(self) -> list[Path]:
        """All files of the closed shards."""
        shards = [self._root / sidecar.path for sidecar in self.sidecars]
        return [path for shard in shards for path in (shard, docs_path(shard), sidecar_path(shard))]

    def add(self, ids_: npt.NDArray[np.uint32], *, row: int, id: str, url: str, digest: bytes, text_bytes: int) -> None:
        """Append one document.

        Args:
            ids_: its tokens, the end-of-text id last; uint32.
            row: its row in the raw file.
            id: its id.
            url: its address.
            digest: SHA-256 of its text.
            text_bytes: UTF-8 bytes of its text.
        """
        if self._open is not None and self._open.tokens + len(ids_) > self._max_tokens:
            self._close()
        shard = self._open or self._begin()
        data = np.ascontiguousarray(ids_, dtype=TOKEN_DTYPE).tobytes()
        shard.file.write(data)
        shard.digest.update(data)
        shard.tokens += len(ids_)
        shard.documents += 1
        shard.text_bytes += text_bytes
        for name, value in zip(DOCS_COLUMNS, (shard.tokens, len(ids_), text_bytes, row, id, url, digest), strict=True):
            shard.rows[name].append(value)
        if len(shard.rows["end"]) >= FLUSH_DOCUMENTS:
            _flush(shard)

    def _begin(self) -> _Open:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._source}-{self._key}-{len(self.sidecars):02d}.bin"
        self._open = _Open(
            path=path,
            file=temporary_path(path).open("wb"),
            table=pq.ParquetWriter(temporary_path(docs_path(path)), DOCS_SCHEMA, compression="zstd"),
            digest=hashlib.sha256(),
        )
        return self._open

    def _close(self) -> None:
        if self._open is None:
            return
        shard, self._open = self._open, None
        _flush(shard)
        shard.file.close()
        shard.table.close()
        commit(temporary_path(shard.path), shard.path)
        commit(temporary_path(docs_path(shard.path)), docs_path(shard.path))
        sidecar = Sidecar(
            path=shard.path.relative_to(self._root).as_posix(),
            source=self._source,
            partition=self._key,
            part=len(self.sidecars),
            tokens=shard.tokens,
            documents=shard.documents,
            text_bytes=shard.text_bytes,
            sha256=shard.digest.hexdigest(),
            heldout=self._heldout,
            settings_sha256=self._settings_sha256,
            tokenizer_sha256=self._tokenizer_sha256,
        )
        write_json(sidecar_path(shard.path), asdict(sidecar))
        self.sidecars.append(sidecar)


def _flush(shard: _Open) -> None:
    if shard.rows["end"]:
        shard.table.write_table(pa.table(shard.rows, schema=DOCS_SCHEMA))
        shard.rows = {name: [] for name in DOCS_COLUMNS}


def remove_partition(folder: Path, source: str, key: str) -> None:
    """Delete all shards of a partition in a folder, finished or not, before they are made again."""
    if folder.is_dir():
        for pattern in (f"{source}-{key}-*", f".{source}-{key}-*.tmp"):
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)
