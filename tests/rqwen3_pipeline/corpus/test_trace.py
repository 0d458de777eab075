import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from model.errors import ConfigError, CorpusError
from model.order import WindowLayout, window_numbers
from model.shard_format import docs_path, open_shard, read_manifest
from rqwen3_pipeline.corpus.trace import document_losses, trace


@pytest.fixture
def manifest(root, built):
    return read_manifest(root.manifest)


def windows_by_hand(root, manifest, seq_len):
    """Every window of the corpus with, for each token, the (shard, row) of its document."""
    windows = []
    for source in dict.fromkeys(entry.source for entry in manifest.shards):
        tokens, owners = [], []
        for entry in (entry for entry in manifest.shards if entry.source == source):
            rows = []
            for record in pq.read_table(docs_path(root.path / entry.path)).to_pylist():
                rows += [(entry.path, record["row"])] * record["tokens"]
            tokens += open_shard(root.path, entry).tolist()
            owners += rows[: entry.tokens_used]
        for start in range(0, len(tokens) - seq_len, seq_len):
            windows.append((tokens[start : start + seq_len + 1], owners[start : start + seq_len + 1]))
    return windows


def test_trace_of_every_sequence_equals_a_plain_loop_over_all_tokens(root, training, manifest):
    windows = windows_by_hand(root, manifest, training.seq_len)
    layout = WindowLayout(
        [s.source for s in manifest.shards], [s.tokens_used for s in manifest.shards], training.seq_len
    )
    assert layout.total == len(windows)
    order = window_numbers(0, 100, len(windows), training.seed).tolist()
    across = 0
    for sample, window in enumerate(order):
        step, sequence = 1 + sample // training.sequences_per_step, sample % training.sequences_per_step
        found = trace(root, manifest, training, step, sequence)
        owners = [(d.shard, d.row) for d in found for _ in range(d.tokens)]
        assert owners == windows[window][1]
        assert [d.start for d in found] == np.cumsum([0, *(d.tokens for d in found)])[:-1].tolist()
        across += len({d.shard for d in found}) > 1
    assert across > 0


def test_trace_leads_to_the_text_that_was_read(root, training, manifest):
    tokenizer = Tokenizer.from_file(str(root.tokenizer))
    for document in (d for sequence in range(8) for d in trace(root, manifest, training, 3, sequence)):
        key = document.shard.split("-")[1]
        table = pq.read_table(root.filtered(document.source, key)).to_pylist()
        (record,) = [record for record in table if record["row"] == document.row]
        ids = tokenizer.encode(record["text"]).ids
        assert len(ids) + 1 == document.document_tokens
        assert record["id"] == document.id
        wanted = [*ids, manifest.eos_id][document.first_token : document.first_token + document.tokens]
        entry = next(entry for entry in manifest.shards if entry.path == document.shard)
        shard = open_shard(root.path, entry)
        ends = pq.read_table(docs_path(root.path / document.shard)).column("end").to_pylist()
        begin = ends[document.document] - document.document_tokens + document.first_token
        assert shard[begin : begin + document.tokens].tolist() == wanted


@pytest.mark.parametrize(("step", "sequence"), [(0, 0), (21, 0), (1, 8), (1, -1)])
def test_trace_of_a_step_or_sequence_that_is_none_is_refused(root, training, manifest, step, sequence):
    with pytest.raises(ConfigError, match="the run has steps 1 to 20, each with the sequences 0 to 7"):
        trace(root, manifest, training, step, sequence)


def test_trace_without_the_table_says_what_to_do(root, training, manifest):
    for path in root.tokens.glob("*.docs.parquet"):
        path.unlink()
    with pytest.raises(CorpusError, match=r"docs\.parquet: .* rqwen3 corpus build"):
        trace(root, manifest, training, 1, 0)


def test_document_losses_equal_a_plain_loop_over_the_targets(root, training, manifest):
    windows = windows_by_hand(root, manifest, training.seq_len)
    losses = np.random.default_rng(1).normal(3, 1, (training.sequences_per_step, training.seq_len)).astype(np.float32)
    order = window_numbers(training.sequences_per_step, training.sequences_per_step, len(windows), training.seed)
    expected: dict[tuple[int, str, int], list[float]] = {}
    for sequence, window in enumerate(order.tolist()):
        owners = windows[window][1]
        for place in range(training.seq_len):  # the loss at a place is that of the token after it
            expected.setdefault((sequence, *owners[place + 1]), []).append(float(losses[sequence, place]))
    found = document_losses(root, manifest, training, 2, losses)
    assert len(found) == len(expected)
    for one in found:
        values = expected[one.sequence, one.document.shard, one.document.row]
        assert one.targets == len(values)
        assert one.loss == pytest.approx(sum(values) / len(values), abs=1e-5)
    assert [one.loss for one in found] == sorted((one.loss for one in found), reverse=True)
    assert sum(one.targets for one in found) == losses.size


def test_document_losses_put_what_is_not_finite_first(root, training, manifest):
    losses = np.ones((training.sequences_per_step, training.seq_len), np.float32)
    losses[1, -1] = np.nan
    first = document_losses(root, manifest, training, 1, losses)[0]
    assert (first.sequence, np.isnan(first.loss)) == (1, True)
