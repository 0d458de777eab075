import json
from pathlib import Path

import numpy as np
import pytest

from model.errors import CorpusError
from model.files import sha256_file
from model.shard_format import ShardEntry, docs_path, open_shard, read_manifest, sidecar_path


def entry(tokens: int, used: int | None = None) -> ShardEntry:
    used = tokens if used is None else used
    return ShardEntry(path="a.bin", source="a", tokens=tokens, tokens_used=used, documents=1, sha256="")


def test_open_shard_reads_little_endian_uint32(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes([1, 0, 0, 0, 0, 1, 0, 0, 255, 255, 255, 255]))
    assert open_shard(tmp_path, entry(3)).tolist() == [1, 256, 2**32 - 1]
    assert open_shard(tmp_path, entry(3, 2)).tolist() == [1, 256]


def test_open_shard_of_no_token_is_empty(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    assert open_shard(tmp_path, entry(0)).size == 0


@pytest.mark.parametrize("size_bytes", [0, 11, 13, 16])
def test_open_shard_of_another_size_is_refused_by_name(tmp_path: Path, size_bytes: int) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(size_bytes))
    with pytest.raises(CorpusError, match=r"a\.bin: .* bytes, but 3 uint32 tokens are 12"):
        open_shard(tmp_path, entry(3))


def test_open_shard_that_is_missing_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="is not there"):
        open_shard(tmp_path, entry(3))


def test_open_shard_using_more_than_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(12))
    with pytest.raises(CorpusError, match="the manifest uses 4 of 3 tokens"):
        open_shard(tmp_path, entry(3, 4))


def test_open_shard_beyond_four_gibibytes_reads_its_end(tmp_path: Path) -> None:
    tokens = 2**30 + 5
    with (tmp_path / "a.bin").open("wb") as file:  # sparse: takes no room
        file.seek(4 * (tokens - 1))
        file.write(np.array([7], "<u4").tobytes())
    assert open_shard(tmp_path, entry(tokens))[-2:].tolist() == [0, 7]


MANIFEST = {
    "format_version": 1,
    "tokenizer": {"path": "tokenizer.json", "vocab_size": 10, "eos_id": 9},
    "shards": [{"path": "tokens/a.bin", "source": "a", "tokens": 4, "tokens_used": 3, "documents": 1, "sha256": "x"}],
    "heldout": [{"path": "tokens/heldout/a.bin", "source": "a", "tokens": 2, "documents": 1, "sha256": "y"}],
}


def test_read_manifest_returns_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(MANIFEST))
    manifest = read_manifest(path)
    assert (manifest.root, manifest.vocab_size, manifest.eos_id) == (tmp_path, 10, 9)
    assert manifest.sha256 == sha256_file(path)
    assert (manifest.shards[0].tokens_used, manifest.heldout[0].tokens_used) == (3, 2)


@pytest.mark.parametrize("key", ["tokenizer", "shards", "heldout", "format_version"])
def test_read_manifest_without_a_key_names_it(tmp_path: Path, key: str) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({k: v for k, v in MANIFEST.items() if k != key}))
    with pytest.raises(CorpusError, match=key):
        read_manifest(tmp_path / "manifest.json")


def test_read_manifest_of_another_version_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no manifest"):
        read_manifest(tmp_path / "manifest.json")
    (tmp_path / "manifest.json").write_text(json.dumps({**MANIFEST, "format_version": 99}))
    with pytest.raises(CorpusError, match="format version 99"):
        read_manifest(tmp_path / "manifest.json")


def test_paths_beside_a_shard_carry_its_name() -> None:
    assert sidecar_path(Path("t/a-00000-00.bin")) == Path("t/a-00000-00.json")
    assert docs_path(Path("t/a-00000-00.bin")) == Path("t/a-00000-00.docs.parquet")
