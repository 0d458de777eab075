"""Engine against oracle, id by id, with a tokenizer of Qwen3's form and, where it is there, Qwen3's own."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from model.errors import CorpusError
from rqwen3_pipeline.corpus.documents import read_documents
from rqwen3_pipeline.corpus.encoder import RUN_CHARS, Encoder, has_long_run
from rqwen3_pipeline.corpus.sources import QWEN3_SHA256, corpus_config
from rqwen3_pipeline.corpus.text import nfc

from .adversarial import MARKUP, code_points, mixtures, runs
from .made import prose, run_config

SHARED = Path(__file__).resolve().parents[4] / "shared"
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE with Qwen3's normaliser, pattern and kinds of added tokens, trained on awkward text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    texts = itertools.chain((prose(i) for i in range(100)), mixtures(300, seed=5), code_points(step=101), runs(300))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>"])
    return tokenizer


@pytest.fixture(scope="module")
def qwen_like(trained):
    """The same as an encoder."""
    return Encoder(trained.to_str().encode())


@pytest.fixture(scope="module")
def qwen():
    """Qwen3's own."""
    file = SHARED / "tokenizer" / "tokenizer.json"
    if not file.is_file():
        pytest.skip("no ../shared/tokenizer/tokenizer.json here")
    return Encoder(file.read_bytes())


@pytest.fixture(params=["qwen_like", "qwen"])
def encoder(request):
    return request.getfixturevalue(request.param)


def assert_equal(encoder, texts):
    """The engine itself, without the way round it for long runs, gives the oracle's ids."""
    assert encoder.engine == "fastokens"
    texts = list(texts)
    for start in range(0, len(texts), 64):
        part = texts[start : start + 64]
        ids, ends = encoder._encode_fast(part)
        for text, found, expected in zip(part, np.split(ids, ends[:-1]), encoder.encode_by_oracle(part), strict=True):
            assert np.array_equal(found, expected), repr(text[:200])


def test_engine_equals_oracle_on_a_slice_of_the_adversarial_set(encoder):
    assert_equal(encoder, ["", " ", *MARKUP, *code_points(step=149), *runs(400), *mixtures(150)])


@pytest.mark.long
def test_engine_equals_oracle_on_every_code_point(encoder):
    assert_equal(encoder, code_points())


@pytest.mark.long
def test_engine_equals_oracle_on_long_runs_and_mixtures(encoder):
    assert_equal(encoder, [*runs(3 * RUN_CHARS), *runs(5000), *mixtures(5000, seed=2)])


@pytest.mark.long
def test_engine_equals_oracle_on_the_samples(qwen):
    if not (SHARED / "samples").is_dir():
        pytest.skip("no ../shared/samples here")
    config = corpus_config(run_config())
    for source in config.sources:
        path = SHARED / "samples" / f"{source.replace('_', '-')}.parquet"
        assert pq.ParquetFile(path).metadata.num_rows > 0
        assert_equal(qwen, (document.text for document in read_documents(path, source, config)))


def test_qwen3s_own_is_as_the_library_reads_it_which_no_build_asks_again(qwen):
    assert qwen.sha256 == QWEN3_SHA256
    assert (qwen.eos_id, qwen.vocab_size) == (151643, 151669)
    qwen.check_against_library((SHARED / "tokenizer" / "tokenizer.json").read_bytes())


def test_oracle_of_the_stripped_file_gives_what_the_library_makes_of_the_whole_one(encoder, request):
    name = request.node.callspec.params["encoder"]
    file = SHARED / "tokenizer" / "tokenizer.json"
    whole = Tokenizer.from_file(str(file)) if name == "qwen" else request.getfixturevalue("trained")
    marker = re.compile("|".join(map(re.escape, encoder.markers)))  # the whole file makes these one id each
    texts = [marker.sub(" ", text) for text in (*map(prose, range(20)), *code_points(step=211), *mixtures(100, seed=7))]
    assert len(texts) > 100
    for found, expected in zip(encoder.encode_by_oracle(texts), whole.encode_batch_fast(texts), strict=True):
        assert found.tolist() == expected.ids


def test_runs_of_twice_the_window_are_found_and_of_less_than_one_are_not():
    for filler, unit in (("ab ", "x"), ("ab ", "数"), ("x\n", " "), ("x\n", "\t\n")):
        for before in (0, 1, 77, RUN_CHARS - 1, RUN_CHARS + 5):
            lead = filler * (before // len(filler) + 1)
            assert has_long_run(lead + unit * (2 * RUN_CHARS // len(unit)) + filler)
            assert not has_long_run(lead + unit * ((RUN_CHARS - 4) // len(unit)) + filler * 100)
    assert not has_long_run("word " * 100_000)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["short", "a b c", "", "数" * 10, "x" * 40, " " * 40, "y" * 9 + " z"]), max_size=8))
def test_texts_with_long_runs_take_the_slow_way_and_keep_their_place(tokenizer_file, texts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rqwen3_pipeline.corpus.encoder.RUN_CHARS", 16)
        encoder = Encoder(tokenizer_file.read_bytes())
        ids, ends = encoder.encode(texts)
    assert encoder.long_runs == sum(text[:1] in ("x", " ") for text in texts)
    expected = encoder.encode_by_oracle(texts)
    assert ends.tolist() == np.cumsum([len(one) for one in expected]).tolist()
    assert ids.tolist() == [int(token) for one in expected for token in one]


def test_megabytes_without_a_space_do_not_stall_and_equal_the_oracle(encoder):
    text = "x" * 1_000_000
    ids, _ = encoder.encode(["before", text, "after"])
    expected = encoder.encode_by_oracle(["before", text, "after"])
    assert ids.tolist() == np.concatenate(expected).tolist()
    assert encoder.long_runs >= 1


def test_facts_of_the_file_are_those_of_the_library(encoder, tokenizer_file):
    small = Encoder(tokenizer_file.read_bytes())
    small.check_against_library(tokenizer_file.read_bytes())
    assert small.markers == ("<|endoftext|>", "<|im_start|>", "<think>")
    assert encoder.markers[0] in ("<|endoftext|>", "<|vision_start|>", "<|object_ref_start|>", "</tool_response>")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not readable"),
        (b"[]", "not readable"),
        (b'{"added_tokens": [], "model": {"vocab": {"a": 0}}}', "no token <.endoftext"),
        (b'{"added_tokens": [], "model": {"vocab": [["a", 0.5]]}}', "not readable"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(content, words):
    with pytest.raises(CorpusError, match=words):
        Encoder(content)


def test_a_file_whose_ids_the_library_reads_otherwise_is_refused(tokenizer_file):
    content = json.loads(tokenizer_file.read_bytes())
    content["added_tokens"][0]["id"] += 900
    data = json.dumps(content).encode()
    with pytest.raises(CorpusError, match=r"the library tokenizers reads|not readable"):
        Encoder(data).check_against_library(data)


def settled(context):
    """The characters that `nfc` hands on as they are, after a context each."""
    from rqwen3_pipeline.corpus.text import _UNSETTLED

    found = (chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000 and chr(c) != "\n")
    return [context + c for c in found if not _UNSETTLED.match(c)]


@pytest.mark.parametrize(
    "context", ["e", "e\u0301", "\u1100", "\uac00", "\u0928", "\u304b", "\u0f71", "a\u0327", "x\u0345"]
)
def test_characters_that_nfc_passes_over_stay_by_the_librarys_tables(context):
    library = normalizers.NFC()
    texts = settled(context)
    assert len(texts) > 90_000
    first = library.normalize_str(context)
    assert library.normalize_str("\n".join(texts)) == "\n".join(first + text[len(context) :] for text in texts)


@pytest.mark.long
@pytest.mark.parametrize(
    "form", ["e{0}\u0301 ", "{0}\u0301\u0327", "\u0301{0}{0}", "{0}\u093c\u3099\u11a8", "\u1100{0}\u11a8"]
)
def test_nfc_of_every_code_point_in_context_is_the_librarys(form):
    text = "".join(form.format(chr(c)) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
    assert nfc(text) == normalizers.NFC().normalize_str(text)
