"""One shard as its files say it is: a single read gives hash, largest id, and where documents end.

Memory: the table's ends and lengths (12 bytes a document), and a chunk of 8 MiB.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (pyarrow ships no types)

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from model.files import CHUNK_BYTES
from model.shard_format import TOKEN_BYTES, TOKEN_DTYPE, docs_path
from rqwen3_pipeline.corpus.buckets import CHUNK_DOCUMENTS, DIGEST_BYTES, Digests


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFacts:
    """What a shard's table of documents adds up to."""

    documents: int
    """Rows."""
    tokens: int
    """Sum of the documents' tokens."""
    text_bytes: int
    """Sum of their texts' bytes."""
    ascends: bool
    """Whether each document ends its own length after the one before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardScan:
    """What a shard's files hold."""

    size_bytes: int
    """Of the shard."""
    sha256: str
    """Of its bytes."""
    largest_id: int
    """-1 for none."""
    eos_count: int
    """End-of-text ids in it."""
    eos_misplaced: bool
    """Whether they are not exactly where the table says that documents end; False without a table."""
    table: TableFacts | None
    """None where it is missing or damaged."""
    table_problem: str
    """Why there is no table."""

    @property
    def tokens(self) -> int:
        """Whole tokens in the file."""
        return self.size_bytes // TOKEN_BYTES

    @property
    def documents(self) -> int:
        """Documents of the table."""
        return self.table.documents if self.table is not None else 0


def scan_shard(path: Path, eos_id: int) -> ShardScan:
    """Read a shard and its table, whole.

    Args:
        path: of the shard, which is there.
        eos_id: the end-of-text id.
    """
    table, end_, problem = _table(docs_path(path))
    digest, size_bytes, largest, count, misplaced = hashlib.sha256(), 0, -1, 0, False
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            id_ = np.frombuffer(chunk[: len(chunk) // TOKEN_BYTES * TOKEN_BYTES], dtype=TOKEN_DTYPE)
            first = size_bytes // TOKEN_BYTES
            size_bytes += len(chunk)
            if not len(id_):
                continue
            largest = max(largest, int(id_.max()))
            eos_ = np.flatnonzero(id_ == eos_id)
            count += len(eos_)
            if table is not None:
                low, high = np.searchsorted(end_, (first + 1, first + len(id_) + 1))
                misplaced = misplaced or not np.array_equal(end_[low:high] - 1 - first, eos_)
    return ShardScan(
        size_bytes=size_bytes,
        sha256=digest.hexdigest(),
        largest_id=largest,
        eos_count=count,
        eos_misplaced=misplaced,
        table=table,
        table_problem=problem,
    )


def _table(path: Path) -> tuple[TableFacts | None, npt.NDArray[np.int64], str]:
    nothing = np.empty(0, dtype=np.int64)
    try:
        table = pq.read_table(path, columns=["end", "tokens", "text_bytes", "digest"])
        end_, length_, bytes_ = (
            table.column(name).to_numpy().astype(np.int64) for name in ("end", "tokens", "text_bytes")
        )
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        return None, nothing, f"its table of documents can't be read ({str(error).splitlines()[0]})"
    facts = TableFacts(
        documents=len(end_),
        tokens=int(length_.sum()),
        text_bytes=int(bytes_.sum()),
        ascends=bool(np.array_equal(np.cumsum(length_), end_)),
    )
    return facts, np.sort(end_), ""


def digests_of(shard: Path) -> Iterator[Digests]:
    """The digests of a shard's documents, in order, some at a time: uint8, shape (some, 32)."""
    with pq.ParquetFile(docs_path(shard)) as file:
        for batch in file.iter_batches(batch_size=CHUNK_DOCUMENTS, columns=["digest"], use_threads=False):
            column = batch.column(0)
            data_ = np.frombuffer(column.buffers()[1], dtype=np.uint8)
            data_ = data_[column.offset * DIGEST_BYTES : (column.offset + len(column)) * DIGEST_BYTES]
            yield data_.reshape(-1, DIGEST_BYTES)
