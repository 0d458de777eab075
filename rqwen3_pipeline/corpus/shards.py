"""Token shards: flat uint32 files, with a table of their documents and a sidecar.

A writer takes documents in batches and closes a shard before the document that would take it above
the limit, so shards end on document borders (a single longer document makes a longer shard). Each
file is written under a temporary name, flushed and renamed: `.bin`, `.docs.parquet`, and the sidecar
`.json` last. No document, no shard. Memory: a few thousand table rows; the tokens go straight out,
a batch at a time, and nothing is done document by document.
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
    markup: int
    """How often its documents spell out one of the tokenizer's added tokens; they stayed text."""
    heldout: bool
    """Whether it is held out."""
    settings_sha256: str
    """Hash of the settings of the stage."""
    tokenizer_sha256: str
    """Hash of the tokenizer.json."""
    format_version: int = FORMAT_VERSION
    """Of shard, table and sidecar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Documents with their tokens, as columns: element i of each is document i's."""

    ids_: npt.NDArray[np.uint32]
    """The tokens of all documents one after another, the end-of-text id last in each; uint32."""
    ends_: npt.NDArray[np.int64]
    """Where each document's tokens end in `ids_`; int64, ascending."""
    text_bytes_: npt.NDArray[np.uint64]
    """UTF-8 bytes of the text."""
    markup_: npt.NDArray[np.int64]
    """How often the text spells out an added token."""
    row: Any
    """Arrow array, uint32: its row in the raw file."""
    id: Any
    """Arrow array, string."""
    url: Any
    """Arrow array, string."""
    digest: Any
    """Arrow array, 32 bytes each: SHA-256 of the text."""

    def __len__(self) -> int:
        return len(self.ends_)


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
    markup: int = 0
    rows: list[Any] = field(default_factory=list[Any])
    """Tables that are not written yet, of `waiting` rows."""
    waiting: int = 0


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

    def add(self, batch: Batch) -> None:
        """Append documents, in as many shards as they need."""
        first = 0
        while first < len(batch):
            start = int(batch.ends_[first - 1]) if first else 0
            room = self._max_tokens - (self._open.tokens if self._open else 0)
            last = int(np.searchsorted(batch.ends_, start + room, side="right"))
            if last <= first and self._open is not None:
                self._close()
                continue
            last = max(last, first + 1)  # a document longer than a shard has one to itself
            self._append(batch, first, last)
            first = last

    def _append(self, batch: Batch, first: int, last: int) -> None:
        """Append documents `first` to `last`, the latter excluded, to the open shard."""
        shard = self._open or self._begin()
        part, start = slice(first, last), int(batch.ends_[first - 1]) if first else 0
        data = np.ascontiguousarray(batch.ids_[start : int(batch.ends_[last - 1])], dtype=TOKEN_DTYPE).data
        shard.file.write(data)
        shard.digest.update(data)
        ends_ = batch.ends_[part] - start
        columns = {
            "end": (ends_ + shard.tokens).astype(np.uint64),
            "tokens": np.diff(ends_, prepend=0).astype(np.uint32),
            "text_bytes": batch.text_bytes_[part],
            "row": batch.row[part],
            "id": batch.id[part],
            "url": batch.url[part],
            "digest": batch.digest[part],
        }
        shard.rows.append(pa.table(columns, schema=DOCS_SCHEMA))
        shard.waiting += last - first
        shard.tokens += int(ends_[-1])
        shard.documents += last - first
        shard.text_bytes += int(batch.text_bytes_[part].sum())
        shard.markup += int(batch.markup_[part].sum())
        if shard.waiting >= FLUSH_DOCUMENTS:
            _flush(shard, all_rows=False)

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
        _flush(shard, all_rows=True)
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
            markup=shard.markup,
            sha256=shard.digest.hexdigest(),
            heldout=self._heldout,
            settings_sha256=self._settings_sha256,
            tokenizer_sha256=self._tokenizer_sha256,
        )
        write_json(sidecar_path(shard.path), asdict(sidecar))
        self.sidecars.append(sidecar)


def _flush(shard: _Open, *, all_rows: bool) -> None:
    """Write rows in groups of `FLUSH_DOCUMENTS`, so that the file doesn't depend on the batches."""
    if not shard.rows:
        return
    table = pa.concat_tables(shard.rows).combine_chunks()
    start = 0
    while len(table) - start >= (1 if all_rows else FLUSH_DOCUMENTS):
        shard.table.write_table(table.slice(start, FLUSH_DOCUMENTS))
        start += FLUSH_DOCUMENTS
    rest = table.slice(min(start, len(table)))
    shard.rows, shard.waiting = [rest] if len(rest) else [], len(rest)


def remove_partition(folder: Path, source: str, key: str) -> None:
    """Delete all shards of a partition in a folder, finished or not, before they are made again."""
    if folder.is_dir():
        for pattern in (f"{source}-{key}-*", f".{source}-{key}-*.tmp"):
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)
