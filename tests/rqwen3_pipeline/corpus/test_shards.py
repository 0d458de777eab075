import hashlib
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.shard_format import DOCS_COLUMNS, docs_path, sidecar_path
from rqwen3_pipeline.corpus.shards import ShardWriter, remove_partition


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


def add(shards, tokens, number):
    ids = np.arange(tokens, dtype=np.uint32) + 1000 * number
    shards.add(ids, row=2 * number, id=f"i{number}", url="u", digest=bytes([number]) * 32, text_bytes=3 * tokens)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 15), max_size=12), st.integers(1, 20))
def test_writer_splits_on_document_borders(tmp_path_factory, lengths, max_tokens):
    path = tmp_path_factory.mktemp("shards")
    with writer(path, max_tokens) as shards:
        for number, tokens in enumerate(lengths):
            add(shards, tokens, number)
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
            add(shards, 8, 0)
            add(shards, 8, 1)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_in_the_second_shard()
    names = sorted(path.name for path in (tmp_path / "tokens").iterdir())
    assert names == ["web-00003-00.bin", "web-00003-00.docs.parquet", "web-00003-00.json"]


def test_sidecar_says_what_the_shard_is(tmp_path):
    with writer(tmp_path, heldout=True) as shards:
        add(shards, 4, 1)
        add(shards, 5, 2)
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
