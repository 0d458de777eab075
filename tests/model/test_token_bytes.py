import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from model.bits_per_byte import heldout_streams
from model.errors import CorpusError
from model.shard_format import docs_path
from model.token_bytes import token_byte_lengths

HARD = ["café 🐕 数", "naïve 👩‍👩‍👧‍👦 ", "数学 و رياضيات", "\t\n  \u00a0x", "e\u0301 and é", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "<|endoftext|>"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level BPE that merges across characters, so that many tokens hold parts of characters."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|endoftext|>"]
    )
    made.train_from_iterator(HARD * 20, trainer)
    return made


def nfc_bytes(tokenizer: Tokenizer, text: str) -> int:
    assert tokenizer.normalizer is not None
    return len(tokenizer.normalizer.normalize_str(text).encode())


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_bytes_of_the_tokens_are_those_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    lengths_ = token_byte_lengths(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert lengths_[ids].sum() == nfc_bytes(tokenizer, text)


def test_bytes_of_partial_characters_are_not_those_of_their_decoding(tokenizer: Tokenizer) -> None:
    lengths_ = token_byte_lengths(tokenizer)
    ids = tokenizer.encode("🐖 犬", add_special_tokens=False).ids  # not among the merges: bytes apart
    assert lengths_[ids].sum() == len("🐖 犬".encode())
    assert sum(len(tokenizer.decode([i]).encode()) for i in ids) > len("🐖 犬".encode())
    assert lengths_[tokenizer.token_to_id("<|endoftext|>")] == len("<|endoftext|>")


def test_vocabulary_that_is_not_byte_level_is_refused() -> None:
    words = Tokenizer(models.WordLevel({"naïve": 0, "数": 1}, unk_token="数"))
    with pytest.raises(CorpusError, match="not written in the byte alphabet"):
        token_byte_lengths(words)


def test_heldout_document_whose_bytes_disagree_is_refused_with_both_numbers(tiny) -> None:
    path = docs_path(tiny.root / tiny.manifest.heldout[0].path)
    table = pq.read_table(path)
    sizes = table["text_bytes"].to_pylist()
    sizes[2] += 2
    column = table.schema.get_field_index("text_bytes")
    pq.write_table(table.set_column(column, "text_bytes", pa.array(sizes, pa.uint64())), path)
    with pytest.raises(CorpusError) as caught:
        heldout_streams(tiny.manifest, 10**9)
    assert "held-out document 2 (from 0)" in str(caught.value)
    assert f"{sizes[2] - 2:,} bytes, its text has {sizes[2]:,}" in str(caught.value)


def test_table_has_an_entry_for_every_id(tiny) -> None:
    vocabulary = json.loads((tiny.root / "tokenizer.json").read_text())["model"]["vocab"]
    lengths_ = token_byte_lengths(Tokenizer.from_file(str(Path(tiny.root) / "tokenizer.json")))
    assert len(lengths_) == len(vocabulary) + 1
    assert (lengths_[:256] == 1).all()
    assert lengths_.dtype == np.int64
