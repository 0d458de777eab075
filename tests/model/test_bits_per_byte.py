import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from model.bits_per_byte import HeldoutStream, document_losses, heldout_scores, heldout_streams, score
from model.config import CoreConfig
from model.errors import CorpusError
from model.loss import IGNORE
from model.rqwen3 import RQwen3
from model.shard_format import docs_path

CONFIG = CoreConfig(
    vocab_size=40,
    d_model=16,
    n_layer=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    max_seq_len=64,
)
EOS = 39


def model(config: CoreConfig = CONFIG) -> RQwen3:
    built = RQwen3(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(0, 0.3)
    return built


def stream(lengths: list[int]) -> HeldoutStream:
    draw = np.random.default_rng(len(lengths))
    tokens, document = [EOS], [-1]
    for number, length in enumerate(lengths):
        tokens += [*draw.integers(0, EOS, length).tolist(), EOS]
        document += [number] * length + [-1]
    return HeldoutStream(
        source="a", tokens=np.array(tokens), document=np.array(document), text_bytes=np.array(lengths) * 3
    )


def oracle(built: RQwen3, given: HeldoutStream, seq_len: int) -> np.ndarray:
    """Target by target: the logits of the window that holds it, in float64."""
    losses = np.zeros(len(given.text_bytes))
    for place in range(1, len(given.tokens)):
        if given.document[place] < 0:
            continue
        start = (place - 1) // seq_len * seq_len
        with torch.no_grad():
            logits = built(torch.tensor(given.tokens[None, start:place]))[0, -1].double()
        losses[given.document[place]] -= torch.log_softmax(logits, 0)[given.tokens[place]].item()
    return losses


@pytest.mark.parametrize("lengths", [[1], [7], [8], [9], [3, 1, 20], [15, 16, 17]])
@pytest.mark.parametrize("batch", [1, 3])
def test_document_losses_score_each_token_once(lengths: list[int], batch: int) -> None:
    given, built = stream(lengths), model()
    result = document_losses(built, given, 8, batch)
    assert result is not None
    assert result[1].tolist() == lengths
    assert np.abs(result[0] - oracle(built, given, 8)).max() < 1e-4


def test_uniform_model_has_the_entropy_of_its_vocabulary() -> None:
    built = model()
    with torch.no_grad():
        built.lm_head.weight.zero_()
    scores = heldout_scores(built, [stream([5, 9])], 8, 2)
    assert scores is not None
    for name in ("a", "all"):
        assert scores[name]["loss"] == pytest.approx(math.log(40), abs=1e-6)
        assert scores[name]["bits_per_byte"] == pytest.approx(math.log2(40) / 3, abs=1e-6)
        assert scores[name]["loss_stderr"] == pytest.approx(0, abs=1e-7)
        assert (scores[name]["tokens"], scores[name]["text_bytes"], scores[name]["documents"]) == (14, 42, 2)


def test_score_errors_equal_those_of_resampled_documents() -> None:
    draw = np.random.default_rng(1)
    tokens = draw.integers(20, 200, 400)
    losses = tokens * draw.normal(3.0, 0.4, 400)
    result = score(losses, tokens, tokens * 4)
    picks = draw.integers(0, 400, (4000, 400))
    resampled = losses[picks].sum(1) / tokens[picks].sum(1)
    assert result["loss"] == pytest.approx(losses.sum() / tokens.sum())
    assert result["loss_stderr"] == pytest.approx(resampled.std(), rel=0.1)
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / 4 / math.log(2))
    assert result["bits_per_byte_stderr"] == pytest.approx(result["loss_stderr"] / 4 / math.log(2))


def test_score_of_one_document_has_no_error() -> None:
    assert score(np.array([3.0]), np.array([2]), np.array([8]))["loss_stderr"] is None


def test_scores_leave_mode_and_weights_and_stop_when_told() -> None:
    built = model().train()
    before = [parameter.clone() for parameter in built.parameters()]
    assert heldout_scores(built, [stream([30])], 8, 1, lambda: True) is None
    assert heldout_scores(built, [], 8, 1) == {}
    assert built.training
    assert all(torch.equal(a, b) for a, b in zip(before, built.parameters(), strict=True))


def test_streams_hold_whole_documents_up_to_the_limit(tiny) -> None:
    whole, missing = heldout_streams(tiny.manifest, 10**9)
    assert ([s.source for s in whole], missing) == (["wikipedia", "textbooks"], [])
    for given, entry in zip(whole, tiny.manifest.heldout, strict=True):
        shard = np.fromfile(tiny.root / entry.path, "<u4")
        table = pq.read_table(docs_path(tiny.root / entry.path)).to_pydict()
        assert given.tokens.tolist() == [256, *shard.tolist()]
        assert given.text_bytes.tolist() == table["text_bytes"]
        assert (given.document < 0).sum() == 1 + entry.documents
        assert (given.tokens[given.document < 0] == 256).all()
    first = whole[0].document.tolist().index(1)  # the first document with both its EOS
    second = whole[0].document.tolist().index(2)
    three = [heldout_streams(tiny.manifest, limit)[0][0] for limit in (first - 1, second - 2, second - 1)]
    assert [len(s.text_bytes) for s in three] == [1, 1, 2]
    assert [len(s.tokens) for s in three] == [first, first, second]


def test_longer_first_document_is_cut_at_the_limit_with_the_bytes_of_its_tokens(tiny) -> None:
    whole = heldout_streams(tiny.manifest, 10**9)[0][0]
    length = whole.document.tolist().index(1) - 2  # tokens of the first document; each is a byte
    assert length > 9
    for limit in (1, 2, 9, length - 1, length, length + 1):
        cut = heldout_streams(tiny.manifest, limit)[0][0]
        counted = min(limit, length)
        assert cut.tokens.tolist() == whole.tokens[: 1 + limit].tolist()
        assert cut.document.tolist() == [-1, *[0] * counted, *[-1] * (limit - counted)]
        assert cut.text_bytes.tolist() == [counted]
        result = document_losses(Counting(), cut, 4, 2)  # pyright: ignore[reportArgumentType]
        assert result is not None
        assert (result[0].tolist(), result[1].tolist()) == ([counted], [counted])


def test_source_without_heldout_documents_is_named(tiny) -> None:
    data = json.loads(tiny.manifest_path.read_text())
    data["heldout"] = data["heldout"][:1]
    tiny.manifest_path.write_text(json.dumps(data))
    streams, missing = heldout_streams(tiny.manifest, 1000)
    assert ([s.source for s in streams], missing) == (["wikipedia"], ["textbooks"])


def test_document_table_that_does_not_fit_or_is_missing_is_refused(tiny) -> None:
    path = docs_path(tiny.root / tiny.manifest.heldout[0].path)
    table = pq.read_table(path)
    pq.write_table(table.set_column(0, "end", pq.read_table(path)["end"].take([1, 0, *range(2, len(table))])), path)
    with pytest.raises(CorpusError, match="a document ends at token"):
        heldout_streams(tiny.manifest, 10**9)
    path.unlink()
    with pytest.raises(CorpusError, match="document table of a held-out shard is missing"):
        heldout_streams(tiny.manifest, 10**9)


class Counting(torch.nn.Module):
    """A model whose loss is 1 for every counted target, told by how often it was asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(1, 1)

    def token_losses(self, ids_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        return (targets_BT != IGNORE).float()


@pytest.mark.parametrize("length", [1, 2, 8191, 8192, 8193, 8194, 12289, 20000])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_target_counts_once_at_the_borders_of_a_context(length: int, batch: int) -> None:
    given = stream([length, 3])
    result = document_losses(Counting(), given, 8192, batch)  # pyright: ignore[reportArgumentType]
    assert result is not None
    assert result[0].tolist() == [length, 3]


def test_tokenizer_of_another_vocabulary_than_the_shards_is_refused(tiny) -> None:
    data = json.loads(tiny.manifest_path.read_text())
    data["tokenizer"]["vocab_size"] = 260
    tiny.manifest_path.write_text(json.dumps(data))
    with pytest.raises(CorpusError, match=r"tokenizer\.json: this tokenizer has 257 ids, the shards .* one of 260"):
        heldout_streams(tiny.manifest, 1000)
