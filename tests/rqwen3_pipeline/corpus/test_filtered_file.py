"""Filtered files: what was written comes back, a row group at a time."""

import pyarrow.parquet as pq
import pytest

from rqwen3_pipeline.corpus.documents import Document
from rqwen3_pipeline.corpus.filtered_file import (
    FILTERED_SCHEMA,
    GROUP_BYTES,
    GROUP_ROWS,
    FilteredWriter,
    filtered_batches,
)


def document(row, size):
    text = f"{row}é" + "x" * size
    return Document(
        row=row, id=f"id{row}", url=f"http://x/{row}" if row % 2 else "", data=text.encode(), chars=len(text)
    )


def written(path, sizes):
    documents = [document(row, size) for row, size in enumerate(sizes)]
    with FilteredWriter(path) as writer:
        for each in documents:
            writer.add(each)
    return documents


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([10], [1]),
        ([10] * (2 * GROUP_ROWS + 1), [GROUP_ROWS, GROUP_ROWS, 1]),
        ([GROUP_BYTES, 10, 3 * GROUP_BYTES, 10], [1, 2, 1]),
    ],
)
def test_documents_come_back_in_groups_that_fit_into_memory(tmp_path, sizes, groups):
    path = tmp_path / "00000.parquet"
    documents = written(path, sizes)
    batches = list(filtered_batches(path))
    assert [len(batch) for batch in batches] == groups
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert rows == [{"row": d.row, "id": d.id, "url": d.url, "text": d.text} for d in documents]
    assert pq.read_schema(path).equals(FILTERED_SCHEMA)
    texts = [text for batch in filtered_batches(path, ["text"]) for text in batch.column("text").to_pylist()]
    assert texts == [d.text for d in documents]


def test_writer_that_failed_writes_no_more(tmp_path):
    def fail(path):
        with FilteredWriter(path) as writer:
            writer.add(document(0, 10))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail(tmp_path / "00000.parquet")
    assert pq.read_metadata(tmp_path / "00000.parquet").num_rows == 0
