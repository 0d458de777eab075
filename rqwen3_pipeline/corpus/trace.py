"""From a step and a sequence of the training back to the documents that were read there.

The order of training is a pure function of the seed and the position, and the tables beside the
shards say where each document ends; so the way back needs no log. Costs one column of one table.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (pyarrow ships no types)

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from model.config import TrainConfig
from model.errors import ConfigError, CorpusError
from model.order import Piece, WindowLayout, window_numbers
from model.shard_format import Manifest, docs_path
from rqwen3_pipeline.settings import RunRoot


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedDocument:
    """A document, or the part of it, that lies in a window."""

    source: str
    """Name of the source."""
    shard: str
    """Path of the shard, below the run root."""
    document: int
    """Its number within the shard, from 0."""
    row: int
    """Its row in the raw file."""
    id: str
    """Its id."""
    url: str
    """Its address."""
    digest: str
    """SHA-256 of its text, in hexadecimal."""
    start: int
    """Where its first token in the window stands there, 0 to `seq_len`."""
    tokens: int
    """How many of its tokens are in the window, its end-of-text id included."""
    first_token: int
    """Which of the document's tokens that first one is."""
    document_tokens: int
    """Tokens of the whole document, its end-of-text id included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentLoss:
    """A traced document with its loss in the window."""

    sequence: int
    """Which sequence of the step it lies in, from 0."""
    document: TracedDocument
    """The document, or the part of it."""
    targets: int
    """How many of its tokens the loss is of: the first token of a window is predicted by nothing."""
    loss: float
    """Their mean loss, nats; maybe not finite."""


def document_losses(
    root: RunRoot, manifest: Manifest, training: TrainConfig, step: int, losses: npt.NDArray[np.float32]
) -> list[DocumentLoss]:
    """The documents of a step with their losses, those not finite first, then the highest.

    Args:
        root: the run root, which holds the shards.
        manifest: the manifest of the run.
        training: the run's training section.
        step: from 1.
        losses: of each target, shape (sequences of the step, seq_len): place t is that of token t + 1.

    Raises:
        ConfigError: there is no such step.
        CorpusError: a table is missing.
    """
    found: list[DocumentLoss] = []
    for sequence in range(training.sequences_per_step):
        for document in trace(root, manifest, training, step, sequence):
            first, end = max(document.start, 1) - 1, document.start + document.tokens - 1
            if end > first:
                loss = float(losses[sequence, first:end].mean(dtype=np.float64))
                found.append(DocumentLoss(sequence=sequence, document=document, targets=end - first, loss=loss))
    return sorted(found, key=lambda one: (np.isfinite(one.loss), -one.loss if np.isfinite(one.loss) else 0.0))


def trace(root: RunRoot, manifest: Manifest, training: TrainConfig, step: int, sequence: int) -> list[TracedDocument]:
    """The documents of one sequence of one step, in the order in which they were read.

    Args:
        root: the run root, which holds the shards.
        manifest: the manifest of the run.
        training: the run's training section.
        step: from 1.
        sequence: within the step, from 0 to `micro_batch_size * accumulation - 1`.

    Raises:
        ConfigError: there is no such step or sequence.
        CorpusError: the manifest holds no window, or a table is missing.
    """
    per_step = training.sequences_per_step
    if not (1 <= step <= training.max_steps and 0 <= sequence < per_step):
        raise ConfigError(
            f"step {step}, sequence {sequence}: the run has steps 1 to {training.max_steps}, "
            f"each with the sequences 0 to {per_step - 1}"
        )
    shards = manifest.shards
    layout = WindowLayout([s.source for s in shards], [s.tokens_used for s in shards], training.seq_len)
    if layout.total < 1:
        raise CorpusError("the manifest holds less than one window of tokens. Build a larger corpus.")
    sample = (step - 1) * per_step + sequence
    window = int(window_numbers(sample, 1, layout.total, training.seed)[0])
    found: list[TracedDocument] = []
    start = 0
    for piece in layout.pieces(window):
        found += _documents(root, manifest, piece, start)
        start += piece.tokens
    return found


def _documents(root: RunRoot, manifest: Manifest, piece: Piece, start: int) -> list[TracedDocument]:
    """The documents that a piece of a shard touches; `start` is the piece's place in the window."""
    entry = manifest.shards[piece.shard]
    path = docs_path(root.path / entry.path)
    if not path.is_file():
        raise CorpusError(f"{path}: the shard's table of documents is not there. Make it again: rqwen3 corpus build")
    with pq.ParquetFile(path) as file:
        end_ = file.read(columns=["end"]).column("end").to_numpy().astype(np.int64)
        first = int(np.searchsorted(end_, piece.start, side="right"))
        last = int(np.searchsorted(end_, piece.start + piece.tokens, side="left"))
        table = file.read(columns=["tokens", "row", "id", "url", "digest"])
    records = table.take(pa.array(range(first, last + 1), type=pa.int64())).to_pylist()
    found: list[TracedDocument] = []
    for number, record in zip(range(first, last + 1), records, strict=True):
        begin = int(end_[number]) - record["tokens"]
        from_, to = max(begin, piece.start), min(int(end_[number]), piece.start + piece.tokens)
        found.append(
            TracedDocument(
                source=entry.source,
                shard=entry.path,
                document=number,
                row=record["row"],
                id=record["id"],
                url=record["url"],
                digest=record["digest"].hex(),
                start=start + from_ - piece.start,
                tokens=to - from_,
                first_token=from_ - begin,
                document_tokens=record["tokens"],
            )
        )
    return found
