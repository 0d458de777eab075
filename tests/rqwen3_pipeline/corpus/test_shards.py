import hashlib
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.shard_format import DOCS_COLUMNS, docs_path, sidecar_path
from rqwen3_pipeline.corpus.shards import Batch, ShardWriter, remove_partition


def writer(path, max_tokens=10, heldout=False):
    return ShardWriter(
        path,
        path / "tokens",
        source="web",
        key="00003",
        max_tokens=max_tokens,
        heldout=heldout,
        settings_sha256="s",
        tokenizer_sha256="t",
    )


def batch(lengths, first=0):
    """Documents of so many tokens; the ids of document n begin at 1000 n."""
    numbers = range(first, first + len(lengths))
    ids = [np.arange(tokens, dtype=np.uint32) + 1000 * number for number, tokens in zip(numbers, lengths, strict=True)]
    return Batch(
        ids_=np.concatenate([*ids, np.empty(0, np.uint32)]),
        ends_=np.cumsum(lengths, dtype=np.int64),
        text_bytes_=np.array([3 * tokens for tokens in lengths], dtype=np.uint64),
        markup_=np.array([number % 3 for number in numbers], dtype=np.int64),
        row=pa.array([2 * number for number in numbers], pa.uint32()),
        id=pa.array([f"i{number}" for number in numbers], pa.string()),
        url=pa.array(["u"] * len(lengths), pa.string()),
        digest=pa.array([bytes([number]) * 32 for number in numbers], pa.binary(32)),
    )


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 15), max_size=12), st.integers(1, 20), st.integers(1, 12))
def test_writer_splits_on_document_borders(tmp_path_factory, lengths, max_tokens, batch_documents):
    path = tmp_path_factory.mktemp("shards")
    with writer(path, max_tokens) as shards:
        for first in range(0, len(lengths), batch_documents):
            shards.add(batch(lengths[first : first + batch_documents], first))
    groups = []
    for tokens in lengths:
        if groups and sum(groups[-1]) + tokens <= max_tokens:
            groups[-1].append(tokens)
        else:
            groups.append([tokens])
    assert [sidecar.tokens for sidecar in shards.sidecars] == [sum(group) for group in groups]
    number = 0
    for part, (sidecar, group) in enumerate(zip(shards.sidecars, groups, strict=True)):
        shard = path / sidecar.path
        assert sidecar.path == f"tokens/web-00003-{part:02d}.bin"
        assert hashlib.sha256(shard.read_bytes()).hexdigest() == sidecar.sha256
        table = pq.read_table(docs_path(shard))
        assert tuple(table.column_names) == DOCS_COLUMNS
        assert table.column("end").to_pylist() == np.cumsum(group).tolist()
        ids = np.fromfile(shard, dtype="<u4")
        for tokens, end, row in zip(
            group, table.column("end").to_pylist(), table.column("row").to_pylist(), strict=True
        ):
            assert row == 2 * number
            assert ids[end - tokens : end].tolist() == [1000 * number + i for i in range(tokens)]
            number += 1
    assert len(shards.files) == 3 * len(groups)


def test_writer_without_documents_makes_no_file(tmp_path):
    with writer(tmp_path) as shards:
        pass
    assert shards.sidecars == []
    assert list(tmp_path.iterdir()) == []


def test_writer_that_fails_leaves_nothing_of_the_shard_in_progress(tmp_path):
    def fail_in_the_second_shard():
        with writer(tmp_path) as shards:
            shards.add(batch([8, 8]))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_in_the_second_shard()
    names = sorted(path.name for path in (tmp_path / "tokens").iterdir())
    assert names == ["web-00003-00.bin", "web-00003-00.docs.parquet", "web-00003-00.json"]


def test_table_has_groups_of_the_same_size_whatever_the_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("rqwen3_pipeline.corpus.shards.FLUSH_DOCUMENTS", 5)
    made = []
    for size in (1, 3, 5, 17):
        folder = tmp_path / str(size)
        with writer(folder, 10**6) as shards:
            for first in range(0, 17, size):
                shards.add(batch([2] * min(size, 17 - first), first))
        made.append((folder / "tokens" / "web-00003-00.docs.parquet").read_bytes())
        groups = pq.ParquetFile(folder / "tokens" / "web-00003-00.docs.parquet").metadata
        assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [5, 5, 5, 2]
    assert len(set(made)) == 1


def test_sidecar_says_what_the_shard_is(tmp_path):
    with writer(tmp_path, heldout=True) as shards:
        shards.add(batch([4, 5], first=1))
    sidecar = json.loads(sidecar_path(tmp_path / "tokens" / "web-00003-00.bin").read_text())
    sha256 = hashlib.sha256((tmp_path / "tokens" / "web-00003-00.bin").read_bytes()).hexdigest()
    assert sidecar == {
        "format_version": 1,
        "path": "tokens/web-00003-00.bin",
        "source": "web",
        "partition": "00003",
        "part": 0,
        "tokens": 9,
        "documents": 2,
        "text_bytes": 27,
        "markup": 3,
        "sha256": sha256,
        "heldout": True,
        "settings_sha256": "s",
        "tokenizer_sha256": "t",
    }


def test_remove_partition_takes_only_its_own_files(tmp_path):
    mine = ["web-00003-00.bin", "web-00003-01.json", ".web-00003-00.bin.77.tmp"]
    others = ["web-00004-00.bin", "web-00003.stamp.json", "web2-00003-00.bin"]
    for name in mine + others:
        (tmp_path / name).touch()
    remove_partition(tmp_path, "web", "00003")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
