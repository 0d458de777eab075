import json
import os
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from model.errors import ConfigError, CorpusError, SourceError
from model.files import read_json, sha256_file
from model.shard_format import docs_path
from rqwen3_pipeline.corpus import tokenization
from rqwen3_pipeline.corpus.build import items_of, run_stage
from rqwen3_pipeline.corpus.dedup import digest_text, heldout_mask
from rqwen3_pipeline.corpus.stamps import tokens_stamp_path
from rqwen3_pipeline.corpus.tokenization import difference, make_tokenizer, oracle_sample, tokenize_file
from rqwen3_pipeline.corpus.tokenizer import Encoder, load_encoder

from .made import prose


@pytest.fixture
def tokenized(root, one_source, pinned, tokenizer_file):
    """Take one source's files through all stages; returns (config, lock)."""

    def run(source, *files, **data):
        config, lock = one_source(source, *files, **(pinned | data))
        for stage in ("raw", "filtered", "digests", "survivors"):
            outcomes = run_stage(stage, root, config, lock, items_of(stage, config, lock))
            assert [o.error for o in outcomes if o.error] == []
        make_tokenizer(root, config, lock, tokenizer_file)
        return config, lock

    return run


def test_shards_hold_each_survivor_once_with_its_end_of_text(root, tokenized, tokenizer_file):
    rows = [{"text": prose(i % 50) + " e\u0301"} for i in range(60)]
    config, lock = tokenized("textbooks", rows)
    report = tokenize_file(root, config, lock, "textbooks", "00000")
    oracle = Tokenizer.from_file(str(tokenizer_file))
    eos = oracle.token_to_id("<|endoftext|>")
    found = {}
    for name in (*report["shards"], *report["heldout_shards"]):
        ids = np.fromfile(root.path / name, dtype="<u4")
        assert ids.max() < oracle.get_vocab_size()
        for record in pq.read_table(docs_path(root.path / name)).to_pylist():
            piece = ids[record["end"] - record["tokens"] : record["end"]]
            held = int.from_bytes(record["digest"][:8], "big") % config.heldout_one_in == 0
            assert name.startswith("tokens/heldout/") == held
            assert record["id"] == f"textbooks__0.parquet#{record['row']}"
            found[record["row"]] = (piece.tolist(), record["text_bytes"])
    texts = [prose(i) + " é" for i in range(50)]
    assert found == {i: ([*oracle.encode(text).ids, eos], len(text.encode())) for i, text in enumerate(texts)}
    assert report["documents"] + report["heldout_documents"] == 50
    assert report["heldout_documents"] > 0
    assert report["tokens"] + report["heldout_tokens"] == sum(len(ids) for ids, _ in found.values())
    assert len(report["shards"]) > 1
    assert report["engine"] == "fastokens"


MARKERS = ["<|endoftext|>", "a<|endoftext|>b", "<|im_start|>user", "<think>so</think>", " <|endoftext|> "]


def test_markup_in_a_document_stays_text(root, tokenized, tokenizer_file):
    rows = [{"text": marker + prose(i)} for i, marker in enumerate(MARKERS)]
    config, lock = tokenized("textbooks", rows, heldout_one_in=10**9)
    tokenize_file(root, config, lock, "textbooks", "00000")
    ids = np.fromfile(root.tokens / "textbooks-00000-00.bin", dtype="<u4")
    added = {token["content"]: token["id"] for token in read_json(tokenizer_file)["added_tokens"]}
    ends = pq.read_table(root.tokens / "textbooks-00000-00.docs.parquet").column("end").to_numpy()
    assert np.flatnonzero(ids == added["<|endoftext|>"]).tolist() == (ends - 1).astype(int).tolist()
    assert len(ends) == len(MARKERS)
    assert not np.isin(ids, [added["<|im_start|>"], added["<think>"]]).any()


def test_markup_is_counted_by_document_and_by_token(root, tokenized):
    rows = [{"text": marker + prose(i)} for i, marker in enumerate(MARKERS)]
    config, lock = tokenized("textbooks", rows, heldout_one_in=2)
    report = tokenize_file(root, config, lock, "textbooks", "00000")
    assert report["markup"] == {"<think>": 1, "<|endoftext|>": 3, "<|im_start|>": 1}
    assert report["documents"] > 0
    assert report["heldout_documents"] > 0
    sidecars = [read_json((root.path / name).with_suffix(".json")) for name in report["shards"]]
    sidecars += [read_json((root.path / name).with_suffix(".json")) for name in report["heldout_shards"]]
    assert sum(sidecar["markup"] for sidecar in sidecars) == 5


@pytest.fixture
def crooked(monkeypatch):
    """An engine that changes the given token of each text of more than 100 tokens."""

    def install(position):
        honest = Encoder._encode_fast

        def encode(self, texts):
            ids, ends = honest(self, texts)
            ids, start = ids.copy(), 0
            for end in ends.tolist():
                if end - start > 100:
                    ids[start + position] ^= 1
                start = end
            return ids, ends

        monkeypatch.setattr(Encoder, "_encode_fast", encode)

    return install


@pytest.mark.parametrize("position", [0, 7])
def test_a_difference_to_the_oracle_fails_the_partition_and_leaves_nothing(root, tokenized, crooked, position):
    rows = [{"text": prose(i, words=3)} for i in range(300)] + [{"text": prose(900, words=200)}]
    config, lock = tokenized("textbooks", rows, limits={"min_chars": 1}, shard_max_tokens=500, oracle_documents=400)
    crooked(position)
    message = (
        r"filtered/textbooks/00000\.parquet: fastokens and tokenizers give document textbooks__0\.parquet#300 "
        rf"\(row 300\) different ids from token {position} on"
    )
    with pytest.raises(CorpusError, match=message):
        tokenize_file(root, config, lock, "textbooks", "00000")
    assert not tokens_stamp_path(root, "textbooks", "00000").exists()
    assert [path for path in root.tokens.rglob("*") if path.is_file()] == []  # the shards that were closed went too


def test_difference_in_length_is_at_the_end_of_the_shorter_one(tokenizer_file):
    encoder = Encoder(tokenizer_file.read_bytes())
    (ids,) = encoder.encode_by_oracle([prose(1)])
    assert difference(encoder, prose(1), ids) is None
    assert difference(encoder, prose(1), ids[:-1]) == len(ids) - 1
    assert difference(encoder, prose(1), np.append(ids, ids[:1])) == len(ids)


def test_difference_in_a_long_document_is_looked_for_in_its_beginning(tokenizer_file, monkeypatch):
    monkeypatch.setattr(tokenization, "ORACLE_CHARS", 900)
    encoder, text = Encoder(tokenizer_file.read_bytes()), " ".join(prose(i) for i in range(40))
    (ids,) = encoder.encode_by_oracle([text])
    assert difference(encoder, text, ids) is None
    wrong = ids.copy()
    wrong[50] ^= 1
    assert difference(encoder, text, wrong) == 50
    assert difference(encoder, text, ids[:30]) == 30


def test_batches_do_not_shape_the_shards(root, tokenized, monkeypatch):
    rows = [{"text": prose(i, words=5 + i % 90)} for i in range(200)]
    config, lock = tokenized("textbooks", rows, limits={"min_chars": 1}, shard_max_tokens=3000)

    def files():
        tokens_stamp_path(root, "textbooks", "00000").unlink(missing_ok=True)
        tokenize_file(root, config, lock, "textbooks", "00000")
        return {path.name: path.read_bytes() for path in root.tokens.rglob("*") if path.is_file()}

    whole = files()
    assert len(whole) > 9
    for rows_ in (1, 7, 64):
        monkeypatch.setattr("rqwen3_pipeline.corpus.filtered_file.GROUP_ROWS", rows_)
        assert files() == whole


def test_without_fastokens_the_fallback_gives_the_same_bytes(root, tokenized, monkeypatch):
    config, lock = tokenized("textbooks", [{"text": prose(i)} for i in range(10)])
    first = tokenize_file(root, config, lock, "textbooks", "00000")
    before = [(root.path / name).read_bytes() for name in first["shards"]]
    tokens_stamp_path(root, "textbooks", "00000").unlink()
    encoder = load_encoder(root)
    monkeypatch.setattr(encoder, "_engine", None)
    monkeypatch.setattr(tokenization, "load_encoder", lambda _: encoder)
    report = tokenize_file(root, config, lock, "textbooks", "00000")
    assert report["engine"] == "tokenizers"
    assert [(root.path / name).read_bytes() for name in report["shards"]] == before


def test_a_partition_without_documents_is_a_success_without_a_shard(root, tokenized):
    config, lock = tokenized("textbooks", [{"text": None}], [{"text": prose(i)} for i in range(9)])
    reports = [tokenize_file(root, config, lock, "textbooks", file.key) for file in lock.files("textbooks")]
    assert sorted(report["documents"] + report["heldout_documents"] for report in reports) == [0, 9]
    (empty,) = [report for report in reports if not report["documents"]]
    assert (empty["shards"], empty["heldout_shards"]) == ([], [])


@pytest.mark.parametrize(("documents", "least", "expected"), [(0, 20, 0), (5, 20, 5), (100, 20, 20), (50_000, 20, 50)])
def test_oracle_sample_is_the_larger_of_a_number_and_a_thousandth(documents, least, expected):
    sample = oracle_sample(documents, least)
    assert len(sample) == expected
    assert sample <= set(range(documents))
    assert {0, documents - 1} <= sample or not documents


def test_oracle_looks_at_every_shard_the_held_out_ones_too(root, tokenized, monkeypatch):
    rows = [{"text": prose(i)} for i in range(60)]
    config, lock = tokenized("textbooks", rows, shard_max_tokens=10**6, oracle_documents=4)
    compared: list[str] = []
    monkeypatch.setattr(tokenization, "difference", lambda encoder, text, found_: compared.append(text))
    report = tokenize_file(root, config, lock, "textbooks", "00000")
    assert report["heldout_documents"] > 4
    assert report["oracle_documents"] == len(compared) == 8
    digest_ = np.array([list(digest_text(text)) for text in compared], dtype=np.uint8)
    assert heldout_mask(digest_, config.heldout_one_in).sum() == 4


def test_changed_settings_refuse_and_rebuild_leaves_no_old_shard(root, tokenized, make_config):
    config, lock = tokenized("textbooks", [{"text": prose(i)} for i in range(40)], shard_max_tokens=300)
    many = tokenize_file(root, config, lock, "textbooks", "00000")["shards"]
    other, _ = tokenized("textbooks", [{"text": prose(i)} for i in range(40)], shard_max_tokens=10**6)
    with pytest.raises(CorpusError, match=r"shard_max_tokens = 300, now shard_max_tokens = 1000000"):
        tokenize_file(root, other, lock, "textbooks", "00000")
    one = tokenize_file(root, other, lock, "textbooks", "00000", rebuild=True)["shards"]
    assert len(many) > len(one) == 1
    assert [path.name for path in sorted(root.tokens.glob("*.bin"))] == ["textbooks-00000-00.bin"]


def test_pinned_tokenizer_with_another_hash_is_refused(root, make_config, tokenizer_file, tmp_path):
    other = tmp_path / "tokenizer.json"
    other.write_bytes(tokenizer_file.read_bytes() + b" ")
    config = make_config(tokenizer={"kind": "pinned", "sha256": sha256_file(tokenizer_file)})
    with pytest.raises(SourceError, match=r"tokenizer\.json: SHA-256 is .* pins"):
        make_tokenizer(root, config, None, other)
    with pytest.raises(SourceError, match="--tokenizer FILE"):
        make_tokenizer(root, config, None, None)
    report = make_tokenizer(root, config, None, tokenizer_file)
    assert (report["vocab_size"], report["eos_id"]) == (383, 380)
    assert root.tokenizer.read_bytes() == tokenizer_file.read_bytes()
    assert make_tokenizer(root, config, None, None) == report


def test_tokenizer_with_more_ids_than_embedding_rows_is_refused(root, make_config, tokenizer_file, monkeypatch):
    config = make_config(tokenizer={"kind": "pinned", "sha256": sha256_file(tokenizer_file)})
    object.__setattr__(config, "embedding_rows", 382)
    with pytest.raises(ConfigError, match=r"383 ids, model\.vocab_size = 382"):
        make_tokenizer(root, config, None, tokenizer_file)
    assert not root.tokenizer.exists()


TRAIN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from made import run_config
from rqwen3_pipeline.corpus.build import items_of, run_stage
from rqwen3_pipeline.corpus.lock import lock_folder
from rqwen3_pipeline.corpus.sources import corpus_config
from rqwen3_pipeline.corpus.tokenization import train_tokenizer
from rqwen3_pipeline.settings import RunRoot
root, config = RunRoot(Path(sys.argv[2])), corpus_config(run_config())
lock = lock_folder(root, config, Path(sys.argv[3]))
for stage in ("raw", "filtered"):
    run_stage(stage, root, config, lock, items_of(stage, config, lock))
train_tokenizer(root, config, lock)
"""


def test_training_a_tokenizer_gives_the_same_bytes_on_any_number_of_threads(tmp_path, folder):
    made = []
    for threads in ("1", "4"):
        target = tmp_path / threads
        command = [sys.executable, "-c", TRAIN, os.path.dirname(__file__), str(target), str(folder)]  # noqa: PTH120
        subprocess.run(command, check=True, env=os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads})
        made.append((target / "tokenizer.json").read_bytes())
    assert made[0] == made[1]
    content = json.loads(made[0])
    assert [token["content"] for token in content["added_tokens"]] == ["<|endoftext|>"]
    assert content["normalizer"] == {"type": "NFC"}
    encoder = Encoder(made[0])
    assert (encoder.vocab_size, encoder.eos_id, encoder.engine) == (400, 399, "fastokens")
