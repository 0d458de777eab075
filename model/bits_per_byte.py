"""Held-out loss and bits per byte, per source, each document token scored exactly once.

The held-out documents of a source form the stream EOS doc1 EOS doc2 EOS …, cut into windows of
seq_len + 1 tokens, seq_len apart, as in training. A token's loss counts for its document; the EOS
after a document counts for nothing. Bits per byte is the summed loss in bits over the UTF-8 bytes
that these tokens stand for, so models of different tokenizers can be compared. Costs one forward pass over at most
`max_tokens` per source.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch

from model.distributed import Team
from model.errors import CorpusError
from model.generate import load_tokenizer
from model.loss import IGNORE
from model.rqwen3 import RQwen3
from model.shard_format import Manifest, ShardEntry, docs_path, open_shard
from model.token_bytes import token_byte_lengths
from model.windows import require_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldoutStream:
    """The held-out documents of one source that are evaluated."""

    source: str
    """Name of the source."""
    tokens: npt.NDArray[np.int64]
    """EOS doc1 EOS doc2 EOS …, shape (1 + tokens with their EOS,)."""
    document: npt.NDArray[np.int64]
    """For each token of the stream its document's number; -1 where it is not counted (EOS)."""
    text_bytes: npt.NDArray[np.int64]
    """UTF-8 bytes that each document's tokens stand for: all of its text, unless it is cut."""


def heldout_streams(manifest: Manifest, max_tokens: int) -> tuple[list[HeldoutStream], list[str]]:
    """Read the first whole held-out documents of every source, up to `max_tokens`; a longer first one is cut there.

    Returns:
        The streams, and the names of the sources that have no held-out document.

    Raises:
        CorpusError: the tokenizer is not the one of the shards, a held-out shard or its document table is
            missing or inconsistent, or a document's tokens stand for another number of bytes than its text has.
    """
    tokenizer = load_tokenizer(path := manifest.root / manifest.tokenizer_path)
    ids = tokenizer.get_vocab_size(with_added_tokens=True)
    if ids != manifest.vocab_size:
        raise CorpusError(
            f"{path}: this tokenizer has {ids:,} ids, the shards were made with one of {manifest.vocab_size:,} "
            f"({manifest.root / 'manifest.json'}). Put that one back, or make the corpus again: rqwen3 corpus build"
        )
    lengths_ = token_byte_lengths(tokenizer)
    sources = list(dict.fromkeys(entry.source for entry in (*manifest.shards, *manifest.heldout)))
    streams = [_stream(manifest, source, max_tokens, lengths_) for source in sources]
    missing = [source for source, stream in zip(sources, streams, strict=True) if stream is None]
    return [stream for stream in streams if stream is not None], missing


def _stream(manifest: Manifest, source: str, max_tokens: int, lengths_: npt.NDArray[np.int64]) -> HeldoutStream | None:
    tokens_, document_, bytes_ = [np.array([manifest.eos_id], np.int64)], [np.array([-1], np.int64)], list[int]()
    used_tokens = 0
    for entry in (entry for entry in manifest.heldout if entry.source == source):
        shard_ = open_shard(manifest.root, entry)
        require_ids(shard_, manifest, entry, 0)
        for start, end, text_bytes in list(_documents(manifest, entry)):
            if bytes_ and used_tokens + end - start > max_tokens:
                return _finish(source, tokens_, document_, bytes_)
            ids_ = shard_[start:end].astype(np.int64)
            _check_bytes(entry, len(bytes_), int(lengths_[ids_[:-1]].sum()), text_bytes)
            numbers_ = np.full(end - start, len(bytes_), np.int64)
            numbers_[-1] = -1
            tokens_.append(ids_[:max_tokens])
            document_.append(numbers_[:max_tokens])
            bytes_.append(int(lengths_[ids_[:-1][:max_tokens]].sum()))
            used_tokens += end - start
    return _finish(source, tokens_, document_, bytes_) if bytes_ else None


def _check_bytes(entry: ShardEntry, number: int, token_bytes: int, text_bytes: int) -> None:
    if token_bytes != text_bytes:
        raise CorpusError(
            f"{entry.path}: the tokens of held-out document {number} (from 0) stand for {token_bytes:,} bytes, its "
            f"text has {text_bytes:,}; bits per byte would be wrong. Make it again: rqwen3 corpus build --rebuild"
        )


def _finish(source: str, tokens_: list[Any], document_: list[Any], bytes_: list[int]) -> HeldoutStream:
    return HeldoutStream(
        source=source,
        tokens=np.concatenate(tokens_),
        document=np.concatenate(document_),
        text_bytes=np.array(bytes_, dtype=np.int64),
    )


def _documents(manifest: Manifest, entry: ShardEntry) -> Iterator[tuple[int, int, int]]:
    """Start, end and text bytes of each document of a shard; the end is behind its EOS."""
    path = docs_path(manifest.root / entry.path)
    if not path.exists():
        raise CorpusError(
            f"{path}: the document table of a held-out shard is missing. Make it again: rqwen3 corpus build"
        )
    table = pq.read_table(path, columns=["end", "text_bytes"])
    start = 0
    for end, text_bytes in zip(table["end"].to_pylist(), table["text_bytes"].to_pylist(), strict=True):
        if not start < end <= entry.tokens_used:
            raise CorpusError(
                f"{path}: a document ends at token {end:,}, after {start:,} and within {entry.tokens_used:,} was "
                "expected. Make it again: rqwen3 corpus build"
            )
        yield start, end, text_bytes
        start = end


@torch.no_grad()
def document_losses(
    model: RQwen3,
    stream: HeldoutStream,
    seq_len: int,
    batch: int,
    should_stop: Callable[[], bool] = lambda: False,
    team: Team | None = None,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]] | None:
    """Summed loss in nats and number of counted tokens of each document; None if told to stop.

    The ranks of a team take the batches in turn, all of them equally many (the last may be empty), and
    add up what they found.
    """
    team = team or Team()
    device = model.lm_head.weight.device
    losses_ = np.zeros(len(stream.text_bytes))
    targets = len(stream.tokens) - 1
    starts = range(0, targets, seq_len)
    for turn in range(0, len(starts), batch * team.size):
        if should_stop():
            return None
        first = turn + batch * team.rank
        ids_BT = torch.zeros((batch, seq_len), dtype=torch.int64)
        targets_BT = torch.full((batch, seq_len), IGNORE, dtype=torch.int64)
        owner_BT = np.full((batch, seq_len), -1, dtype=np.int64)
        for row, start in enumerate(starts[first : first + batch]):
            end = min(start + seq_len, targets)
            ids_BT[row, : end - start] = torch.from_numpy(stream.tokens[start:end])
            owner_BT[row, : end - start] = stream.document[start + 1 : end + 1]
            counted_ = np.where(owner_BT[row, : end - start] >= 0, stream.tokens[start + 1 : end + 1], IGNORE)
            targets_BT[row, : end - start] = torch.from_numpy(counted_)
        losses_BT = model.token_losses(ids_BT.to(device), targets_BT.to(device)).double().cpu().numpy()
        np.add.at(losses_, owner_BT[owner_BT >= 0], losses_BT[owner_BT >= 0])
    team.sum(torch.from_numpy(losses_))  # in place
    return losses_, np.bincount(stream.document[stream.document >= 0], minlength=len(losses_)).astype(np.int64)


def score(losses_: npt.NDArray[np.float64], tokens_: npt.NDArray[np.int64], bytes_: npt.NDArray[np.int64]) -> dict:
    """Loss per token and bits per byte over documents, with their standard errors.

    The errors are those of a ratio of sums over independent documents (Cochran 1977, §6): with one
    document they are unknown, None.
    """
    loss, loss_stderr = _ratio(losses_, tokens_)
    nats_per_byte, byte_stderr = _ratio(losses_, bytes_)
    return {
        "loss": loss,
        "loss_stderr": loss_stderr,
        "bits_per_byte": nats_per_byte / math.log(2),
        "bits_per_byte_stderr": None if byte_stderr is None else byte_stderr / math.log(2),
        "tokens": int(tokens_.sum()),
        "text_bytes": int(bytes_.sum()),
        "documents": len(losses_),
    }


def _ratio(above_: npt.NDArray[np.float64], below_: npt.NDArray[np.int64]) -> tuple[float, float | None]:
    ratio, n = float(above_.sum() / below_.sum()), len(above_)
    if n < 2:
        return ratio, None
    residual_ = above_ - ratio * below_
    return ratio, float(np.sqrt(n / (n - 1) * np.square(residual_).sum()) / below_.sum())


def heldout_scores(
    model: RQwen3,
    streams: list[HeldoutStream],
    seq_len: int,
    batch: int,
    should_stop: Callable[[], bool] = lambda: False,
    team: Team | None = None,
) -> dict[str, dict] | None:
    """Scores by source, and over all their documents as `all`; None if told to stop. Every rank must ask.

    The model is put into evaluation mode and back; nothing else of it changes.
    """
    training, scores = model.training, dict[str, dict]()
    parts: list[tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    model.eval()
    try:
        for stream in streams:
            result = document_losses(model, stream, seq_len, batch, should_stop, team)
            if result is None:
                return None
            parts.append((*result, stream.text_bytes))
            scores[stream.source] = score(*parts[-1])
    finally:
        model.train(training)
    if parts:
        losses_, tokens_, bytes_ = (np.concatenate(column) for column in zip(*parts, strict=True))
        scores["all"] = score(losses_, tokens_, bytes_)
    return scores
