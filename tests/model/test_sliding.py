import math
import unicodedata
from pathlib import Path

import conftest
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_bits_per_byte import model, stream
from transformers import Qwen3Config, Qwen3ForCausalLM

from model.bits_per_byte import heldout_scores, heldout_streams
from model.config import CoreConfig
from model.errors import ConfigError
from model.files import sha256_file, write_json
from model.huggingface import model_config
from model.likelihood import plain_tokenizer
from model.rqwen3 import RQwen3
from model.shard_format import read_manifest
from model.sliding import sliding_losses, sliding_scores, windows

SHARED = Path(__file__).resolve().parents[3] / "shared"
TEXT_COLUMN = {"pes2o": "content", "stackexchange": "question"}
EOS_ID = 151643


@given(length=st.integers(2, 400), context=st.integers(1, 90), data=st.data())
def test_windows_ask_for_each_token_once_with_as_much_context_as_promised(length, context, data) -> None:
    stride = data.draw(st.integers(1, context))
    asked = []
    for start, end, first in windows(length, context, stride):
        assert 0 <= start < first <= end < length
        assert end - start <= context
        assert first - start >= min(first, context - stride + 1)
        asked += range(first, end + 1)
    assert asked == list(range(1, length))


@pytest.mark.parametrize("length", [8191, 8192, 8193, 8194, 12289, 20000])
@pytest.mark.parametrize("stride", [64, 4096, 8192])
def test_windows_of_long_streams_lose_and_repeat_nothing(length: int, stride: int) -> None:
    asked = [token for _, end, first in windows(length, 8192, stride) for token in range(first, end + 1)]
    assert asked == list(range(1, length))


@pytest.mark.parametrize("stride", [0, -1, 9])
def test_windows_with_a_stride_outside_the_context_are_refused(stride: int) -> None:
    with pytest.raises(ConfigError, match=r"must lie in \[1, 8\]"):
        list(windows(20, 8, stride))


@pytest.mark.parametrize("batch", [1, 3, 50])
def test_sliding_losses_equal_a_loop_over_tokens_whatever_the_batch(batch: int) -> None:
    given_, built = stream([3, 1, 20, 9]), model().eval()
    losses_, counted_ = sliding_losses(built, given_, 8, 3, batch)
    assert counted_.tolist() == [3, 1, 20, 9]
    expected = np.zeros(4)
    for place in range(1, len(given_.tokens)):
        if given_.document[place] >= 0:
            start = window_start(place, 8, 3)
            with torch.no_grad():
                logits = built(torch.tensor(given_.tokens[None, start:place]))[0, -1].double()
            expected[given_.document[place]] -= torch.log_softmax(logits, 0)[given_.tokens[place]].item()
    assert losses_ == pytest.approx(expected, abs=1e-4)


def test_sliding_with_the_context_as_stride_is_the_evaluation_of_training() -> None:
    given_, built = [stream([5, 30]), stream([17])], model().train()
    given_[1] = type(given_[1])(source="b", **{k: getattr(given_[1], k) for k in ("tokens", "document", "text_bytes")})
    sliding, plain = sliding_scores(built, given_, 8, 8, 2), heldout_scores(built, given_, 8, 2)
    assert plain is not None
    assert built.training
    assert set(sliding) == set(plain) == {"a", "b", "all"}
    for name, values in plain.items():
        assert sliding[name].keys() == values.keys()
        for key, value in values.items():  # the error of a single document is None
            assert sliding[name][key] == (None if value is None else pytest.approx(value, rel=1e-5)), (name, key)
    assert sliding_scores(built, [], 8, 8, 2) == {}


def window_start(place: int, context: int, stride: int) -> int:
    """Where the window that scores a token begins, by the definition alone."""
    if place <= context:
        return 0
    return -(-(place - context) // stride) * stride


def sample_texts() -> dict[str, list[str]]:
    """A few documents of every source; of the samples where they are, else made up, with emoji and CJK."""
    made = [
        "naïve café 数学 🐕‍🦺 e\u0301tude\n\n",
        "plain words, x_1 = y²; then \\frac{a}{b} <|endoftext|> again 🧪🧪. ",
    ]
    texts = {"made": [made[0] * 4, made[1] * 3]}
    for path in sorted((SHARED / "samples").glob("*.parquet")):
        column = TEXT_COLUMN.get(path.stem, "text")
        rows = [text for text in pq.read_table(path, columns=[column])[column].to_pylist()[:40] if text]
        texts[path.stem.replace("-", "_")] = [text[:90] for text in rows[5:7]]
    return texts


def test_bits_per_byte_of_every_source_equal_a_plain_loop_in_float64(tmp_path: Path, monkeypatch) -> None:
    file = SHARED / "tokenizer" / "tokenizer.json"
    if not file.is_file():
        pytest.skip("needs Qwen3's tokenizer.json beside the checkout")
    monkeypatch.setattr(conftest, "EOS_ID", EOS_ID)
    (tmp_path / "tokenizer.json").write_bytes(file.read_bytes())
    tokenizer = plain_tokenizer(tmp_path / "tokenizer.json")
    texts = {s: [unicodedata.normalize("NFC", text) for text in found] for s, found in sample_texts().items()}
    heldout = [
        conftest.write_shard(tmp_path, f"tokens/heldout/{s}.bin", s, found, tokenizer) for s, found in texts.items()
    ]
    facts = {"path": "tokenizer.json", "vocab_size": 151669, "eos_id": EOS_ID, "sha256": sha256_file(file)}
    write_json(tmp_path / "manifest.json", {"format_version": 1, "tokenizer": facts, "shards": [], "heldout": heldout})
    shape = {"d_model": 32, "n_layer": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48}
    ours = RQwen3(CoreConfig(vocab_size=151_936, max_seq_len=64, **shape))
    ours.initialise(11)
    torch.manual_seed(2)
    with torch.no_grad():
        ours.lm_head.weight.mul_(4)
        for name, parameter in ours.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    oracle = Qwen3ForCausalLM(Qwen3Config(**model_config(ours.config, EOS_ID, "fp32")))
    oracle.load_state_dict(ours.state_dict())
    oracle.double().eval()
    streams, _ = heldout_streams(read_manifest(tmp_path / "manifest.json"), 10**6)
    assert len(streams) == len(texts)
    context, stride = 32, 20
    for width, found in (
        (context, heldout_scores(ours, streams, context, 3)),
        (stride, sliding_scores(ours, streams, context, stride, 3)),
    ):
        assert found is not None
        for source, documents in texts.items():
            nats, count = plain_nats(oracle, tokenizer, documents, context, width)
            size = sum(len(text.encode("utf-8")) for text in documents)
            assert (found[source]["text_bytes"], found[source]["tokens"]) == (size, count)
            assert found[source]["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=5e-7), (source, width)


def plain_nats(oracle, tokenizer, documents: list[str], context: int, stride: int) -> tuple[float, int]:
    """Target by target, in float64, transformers' model: EOS doc EOS doc EOS, no EOS counted."""
    ids, counts = [EOS_ID], [False]
    for text in documents:
        own = tokenizer.encode(text, add_special_tokens=False).ids
        ids += [*own, EOS_ID]
        counts += [True] * len(own) + [False]
    nats = 0.0
    for place in range(1, len(ids)):
        if counts[place]:
            start = window_start(place, context, stride)
            with torch.no_grad():
                logits = oracle(torch.tensor([ids[start:place]]), logits_to_keep=1).logits[0, -1]
            assert logits.dtype == torch.float64
            nats += float(torch.logsumexp(logits, 0) - logits[ids[place]])
    return nats, sum(counts)
