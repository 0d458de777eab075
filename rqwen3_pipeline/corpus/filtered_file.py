"""Filtered files: what a filter keeps of one raw file, and all later stages read.

Columns: row (uint32, in the raw file), id, url, text. Row groups end at `GROUP_ROWS` rows or
`GROUP_BYTES` of text, and readers take one at a time, so that memory is that of one group, or of one
long text. LZ4, since each byte is written once and read twice or more: a third faster to write than
Zstandard and twice as fast to read, for files some 40 % larger.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (pyarrow ships no types)

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rqwen3_pipeline.corpus.documents import Document

FILTERED_SCHEMA = pa.schema(
    [("row", pa.uint32()), ("id", pa.string()), ("url", pa.string()), ("text", pa.large_string())]
)
GROUP_ROWS, GROUP_BYTES = 1000, 4_000_000


class FilteredWriter:
    """Writes documents to a filtered file; a context manager."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Args:
            path: where it is written, a temporary name.
        """
        self._file = pq.ParquetWriter(
            path, FILTERED_SCHEMA, compression="lz4", write_statistics=False, use_dictionary=False
        )
        self._rows: list[tuple[int, bytes, bytes, bytes]] = []
        self._size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._flush()
        finally:
            self._file.close()

    def add(self, document: Document) -> None:
        """Append a document."""
        self._rows.append((document.row, document.id.encode(), document.url.encode(), document.data))
        self._size_bytes += len(document.data)
        if len(self._rows) >= GROUP_ROWS or self._size_bytes >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._file.write_batch(_take(self._rows))
            self._size_bytes = 0


def _take(rows: list[tuple[int, bytes, bytes, bytes]]) -> Any:
    """The rows as a record batch; the list is emptied, and a single long text is not copied.

    Made from buffers, since Arrow's conversion of lists loads pandas first, 40 MB that no worker needs.
    """
    numbers, ids, urls, texts = zip(*rows, strict=True)
    rows.clear()
    columns = [pa.Array.from_buffers(pa.uint32(), len(numbers), [None, pa.py_buffer(np.array(numbers, np.uint32))])]
    for field_, values in zip(list(FILTERED_SCHEMA)[1:], (ids, urls, texts), strict=True):
        width = np.int64 if pa.types.is_large_string(field_.type) else np.int32
        offsets = np.cumsum([0, *map(len, values)], dtype=width)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
        columns.append(pa.Array.from_buffers(field_.type, len(values), buffers))
    return pa.record_batch(columns, FILTERED_SCHEMA)


def filtered_batches(path: Path, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Read a filtered file, a row group at a time.

    Args:
        path: of the file.
        columns: those to read; None for all.

    Yields:
        Record batches.
    """
    with pq.ParquetFile(path, pre_buffer=False) as file:
        for group in range(file.num_row_groups):
            yield from file.iter_batches(batch_size=GROUP_ROWS, row_groups=[group], columns=columns, use_threads=False)
