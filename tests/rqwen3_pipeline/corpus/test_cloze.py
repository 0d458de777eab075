import hashlib
import json
import random
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from model.errors import ConfigError, CorpusError
from model.files import write_json
from model.shard_format import docs_path
from rqwen3_pipeline.corpus.cloze import write_cloze_items
from rqwen3_pipeline.settings import RunRoot

EOS_ID = 256
VOCABULARY = [f"wörd{number}" for number in range(3000)]


def byte_tokenizer() -> Tokenizer:
    """One id per byte, and the end-of-text token as 256."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def document(seed: int, words: int, sentence_words: int = 9) -> str:
    """Words of a large vocabulary, in sentences, a paragraph after every third."""
    rng = random.Random(seed)
    text = ""
    for number in range(words):
        end = (number + 1) % sentence_words == 0
        text += rng.choice(VOCABULARY) + ("." if end else "")
        text += "\n\n" if end and (number + 1) // sentence_words % 3 == 0 else " "
    return text.strip()


def write_root(folder: Path, heldout: dict[str, list[list[str]]]) -> RunRoot:
    """A run root whose sources have held-out shards of these texts."""
    tokenizer = byte_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    shards, entries = [], []
    for source, files in heldout.items():
        shards.append({"path": f"tokens/{source}-00000-00.bin", "source": source, "tokens": 1, "documents": 1})
        for number, texts in enumerate(files):
            path = f"tokens/heldout/{source}-{number:05d}-00.bin"
            ids = [[*tokenizer.encode(text, add_special_tokens=False).ids, EOS_ID] for text in texts]
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            flat = [token for tokens in ids for token in tokens]
            file.write_bytes(np.array(flat, dtype="<u4").tobytes())
            digests = [hashlib.sha256(text.encode()).digest() for text in texts]
            table = {
                "end": pa.array(np.cumsum([len(tokens) for tokens in ids]), pa.uint64()),
                "digest": pa.array(digests, pa.binary(32)),
            }
            pq.write_table(pa.table(table), docs_path(file))
            entries.append({"path": path, "source": source, "tokens": len(flat), "documents": len(texts)})
    for entry in (*shards, *entries):
        entry["sha256"] = ""
    tokenizer_entry = {"path": "tokenizer.json", "vocab_size": 257, "eos_id": EOS_ID}
    manifest = {"format_version": 1, "tokenizer": tokenizer_entry, "shards": shards, "heldout": entries}
    write_json(folder / "manifest.json", manifest)
    return RunRoot(folder)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.fixture(scope="module")
def texts() -> dict[str, list[list[str]]]:
    return {
        "wikipedia": [[document(i, 150) for i in range(15)], [document(100 + i, 90) for i in range(10)]],
        "textbooks": [[document(200 + i, 300) for i in range(20)] + [document(300 + i, 30) for i in range(10)]],
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory, texts) -> RunRoot:
    return write_root(tmp_path_factory.mktemp("root"), texts)


def test_write_cloze_items_gold_continues_its_document_and_the_others_do_not(root, texts, tmp_path):
    report = write_cloze_items(root, tmp_path / "cloze.jsonl", items=40, choices=4, seed=1)
    items = read(tmp_path / "cloze.jsonl")
    assert len(items) == report["items"] == 40
    assert report["missing"] == 0
    flat = {source: [text for file in files for text in file] for source, files in texts.items()}
    for item in items:
        own = [text for text in flat[item["source"]] if item["context"] in text]
        assert len(own) == 1
        assert item["id"].endswith(hashlib.sha256(own[0].encode()).hexdigest()[:16])
        after = squeezed(own[0].partition(item["context"])[2]).strip()
        assert after.startswith(item["choices"][item["gold"]])
        assert len(set(item["choices"])) == 4
        for index, choice in enumerate(item["choices"]):
            if index != item["gold"]:
                assert choice not in squeezed(own[0])
                assert any(choice in squeezed(text) for text in flat[item["source"]])


def test_write_cloze_items_lengths_lie_in_their_ranges(root, tmp_path):
    write_cloze_items(root, tmp_path / "cloze.jsonl", items=40, choices=4, seed=2)
    for item in read(tmp_path / "cloze.jsonl"):
        lengths = [len(choice.split()) for choice in item["choices"]]
        assert 60 <= len(item["context"].split()) <= 100
        assert 8 <= lengths[item["gold"]] <= 20
        assert max(abs(length - lengths[item["gold"]]) for length in lengths) <= 3
        assert item["context"] == item["context"].strip()
        assert all(choice == choice.strip() for choice in item["choices"])


def test_write_cloze_items_with_sentences_context_and_choices_end_at_one(root, tmp_path):
    write_cloze_items(root, tmp_path / "cloze.jsonl", items=40, choices=2, seed=3)
    items = read(tmp_path / "cloze.jsonl")
    assert all(item["context"].endswith(".") for item in items)
    assert all(item["choices"][item["gold"]].endswith(".") for item in items)


def test_write_cloze_items_same_shards_and_seed_give_the_same_bytes(root, tmp_path):
    reports = [write_cloze_items(root, tmp_path / f"{i}.jsonl", items=30, choices=4, seed=5) for i in range(2)]
    assert (tmp_path / "0.jsonl").read_bytes() == (tmp_path / "1.jsonl").read_bytes()
    assert reports[0] == reports[1]
    assert reports[0]["sha256"] == hashlib.sha256((tmp_path / "0.jsonl").read_bytes()).hexdigest()
    write_cloze_items(root, tmp_path / "other.jsonl", items=30, choices=4, seed=6)
    assert (tmp_path / "other.jsonl").read_bytes() != (tmp_path / "0.jsonl").read_bytes()


def test_write_cloze_items_fewer_asked_are_the_first_of_more(root, tmp_path):
    write_cloze_items(root, tmp_path / "few.jsonl", items=11, choices=4, seed=5)
    write_cloze_items(root, tmp_path / "many.jsonl", items=30, choices=4, seed=5)
    assert read(tmp_path / "few.jsonl") == read(tmp_path / "many.jsonl")[:11]


def test_write_cloze_items_gold_positions_are_spread_and_documents_asked_once(tmp_path):
    root = write_root(tmp_path / "root", {"pes2o": [[document(i, 80) for i in range(200)]]})
    report = write_cloze_items(root, tmp_path / "cloze.jsonl", items=200, choices=4, seed=0)
    items = read(tmp_path / "cloze.jsonl")
    assert len({item["id"] for item in items}) == len(items) == 200
    assert sum(report["gold_positions"]) == 200
    # 50 expected, standard deviation 6.1
    assert all(30 <= count <= 70 for count in report["gold_positions"])


def test_write_cloze_items_too_few_documents_makes_fewer_and_says_so(tmp_path):
    heldout = {
        "wikipedia": [[document(i, 90) for i in range(6)]],
        "pes2o": [[document(50 + i, 90) for i in range(2)]],
        "textbooks": [],
    }
    root = write_root(tmp_path / "root", heldout)
    report = write_cloze_items(root, tmp_path / "cloze.jsonl", items=50, choices=4, seed=0)
    assert (report["items"], report["requested"], report["missing"]) == (6, 50, 44)
    assert len(read(tmp_path / "cloze.jsonl")) == 6
    assert report["sources"]["wikipedia"]["items"] == 6
    assert report["sources"]["pes2o"]["items"] == 0
    assert "a question needs 4 such documents" in report["sources"]["pes2o"]["reason"]
    assert report["sources"]["textbooks"]["reason"] == "no document is held out"


@pytest.mark.parametrize("heldout", [{"wikipedia": []}, {"wikipedia": [[document(1, 20), document(2, 20)]]}])
def test_write_cloze_items_nothing_to_ask_about_raises_and_writes_nothing(heldout, tmp_path):
    root = write_root(tmp_path / "root", heldout)
    with pytest.raises(CorpusError, match="heldout_one_in"):
        write_cloze_items(root, tmp_path / "cloze.jsonl", items=5, choices=2, seed=0)
    assert not (tmp_path / "cloze.jsonl").exists()


def test_write_cloze_items_damaged_document_table_is_named(tmp_path, texts):
    root = write_root(tmp_path / "root", texts)
    shard = root.heldout / "wikipedia-00001-00.bin"
    table = pq.read_table(docs_path(shard))
    ends = table["end"].to_pylist()
    pq.write_table(table.set_column(0, "end", pa.array([*ends[:-1], ends[-1] + 7], pa.uint64())), docs_path(shard))
    with pytest.raises(CorpusError, match=r"wikipedia-00001-00\.docs\.parquet.*rqwen3 corpus build"):
        write_cloze_items(root, tmp_path / "cloze.jsonl", items=5, choices=2, seed=0)
    docs_path(shard).unlink()
    with pytest.raises(CorpusError, match=r"wikipedia-00001-00\.docs\.parquet.*missing"):
        write_cloze_items(root, tmp_path / "cloze.jsonl", items=5, choices=2, seed=0)


@pytest.mark.parametrize(("items", "choices"), [(0, 4), (5, 1)])
def test_write_cloze_items_unusable_numbers_are_refused(root, tmp_path, items, choices):
    with pytest.raises(ConfigError, match="at least"):
        write_cloze_items(root, tmp_path / "cloze.jsonl", items=items, choices=choices, seed=0)


def test_write_cloze_items_equal_continuations_are_never_offered_twice(tmp_path):
    shared = " ".join(VOCABULARY[:70]) + ". " + " ".join(VOCABULARY[70:90]) + "."
    texts = [shared, shared + " One.", shared + " Two.", *(document(i, 80) for i in range(4))]
    root = write_root(tmp_path / "root", {"wikipedia": [texts]})
    write_cloze_items(root, tmp_path / "cloze.jsonl", items=7, choices=3, seed=0)
    items = read(tmp_path / "cloze.jsonl")
    assert items
    assert all(len(set(item["choices"])) == 3 for item in items)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**40),
    joints=st.lists(st.sampled_from([" ", "\n", "\n\n", ". ", ".\n\n", "\t", "  "]), min_size=12, max_size=12),
    words=st.integers(68, 140),
)
def test_write_cloze_items_any_white_space_gives_the_documents_own_words(tmp_path_factory, seed, joints, words):
    rng = random.Random(seed)
    texts = ["".join(f"{rng.choice(VOCABULARY)}{rng.choice(joints)}" for _ in range(words)).strip() for _ in range(5)]
    folder = tmp_path_factory.mktemp("any")
    root = write_root(folder, {"wikipedia": [texts]})
    write_cloze_items(root, folder / "cloze.jsonl", items=5, choices=3, seed=seed)
    for item in read(folder / "cloze.jsonl"):
        joined = item["context"].split() + item["choices"][item["gold"]].split()
        whole = [text.split() for text in texts]
        assert any(joined == text[i : i + len(joined)] for text in whole for i in range(len(text)))
