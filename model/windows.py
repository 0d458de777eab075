"""Reading windows of tokens from the shards that a manifest lists.

`model.order.WindowLayout` says where a window lies; here are the mapped files behind it, the check
of the data before the first step, and a thread that reads some steps ahead. A window costs one copy
of 4 · (seq_len + 1) bytes; opening costs no read; the check reads at most `SAMPLE_TOKENS` of a shard.
"""

import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from model.errors import CorpusError
from model.files import sha256_file
from model.order import WindowLayout, window_numbers
from model.shard_format import Manifest, ShardEntry, open_shard

SAMPLE_BLOCKS, BLOCK_TOKENS = 64, 16_384
SAMPLE_TOKENS = SAMPLE_BLOCKS * BLOCK_TOKENS
HASHED_BYTES = 256 * 2**20
"""A corpus up to this size is hashed whole before the first step; a larger one when asked for."""
STEPS_AHEAD = 2
"""Steps whose tokens may wait in memory, 8 bytes a token, beside the one at work and the one being read."""
POLL_S = 0.2
AGAIN = "Make it again: rqwen3 corpus build"


class TokenWindows:
    """All windows of a corpus, by number."""

    def __init__(self, manifest: Manifest, seq_len: int) -> None:
        """Map the shards.

        Raises:
            CorpusError: a shard is missing or of another size, or there is no window at all.
        """
        self.manifest = manifest
        self.layout = WindowLayout(
            [entry.source for entry in manifest.shards], [entry.tokens_used for entry in manifest.shards], seq_len
        )
        if self.layout.total == 0:
            tokens = sum(entry.tokens_used for entry in manifest.shards)
            raise CorpusError(
                f"{manifest.root}/manifest.json: {tokens:,} tokens hold no window of {seq_len + 1}. "
                "Lower training.seq_len, or build a larger corpus: rqwen3 corpus build"
            )
        self._shards = [open_shard(manifest.root, entry) for entry in manifest.shards]

    def __len__(self) -> int:
        """Windows of one epoch."""
        return self.layout.total

    def read(
        self, windows: Sequence[int] | npt.NDArray[np.int64], into_: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[np.int64]:
        """The tokens of some windows: int64, shape (len(windows), seq_len + 1), in `into_` if that is given.

        Raises:
            CorpusError: a token is no id of the tokenizer; the message names shard and place.
        """
        shape = (len(windows), self.layout.seq_len + 1)
        tokens_ = np.empty(shape, dtype=np.int64) if into_ is None else into_
        for row_, window in zip(tokens_, windows, strict=True):
            filled = 0
            for piece in self.layout.pieces(int(window)):
                part_ = self._shards[piece.shard][piece.start : piece.start + piece.tokens]
                require_ids(part_, self.manifest, self.manifest.shards[piece.shard], piece.start)
                row_[filled : filled + piece.tokens] = part_
                filled += piece.tokens
        return tokens_

    def check(self, *, hash_all: bool = False) -> None:
        """Refuse damaged shards before the first step.

        Lengths were compared with the manifest when the shards were opened. Every id of a small
        shard, or of 64 blocks spread over a large one, must belong to the tokenizer, and a whole
        shard must end with the end-of-text id. Hashes are compared if the corpus is small or
        `hash_all` is set.

        Raises:
            CorpusError: the message names the shard, what was seen, and the way out.
        """
        size_bytes = 4 * sum(entry.tokens for entry in self.manifest.shards)
        for entry, shard_ in zip(self.manifest.shards, self._shards, strict=True):
            for start in _sampled_starts(len(shard_)):
                require_ids(shard_[start : start + BLOCK_TOKENS], self.manifest, entry, start)
            if entry.tokens and entry.tokens_used == entry.tokens and shard_[-1] != self.manifest.eos_id:
                raise CorpusError(
                    f"{self.manifest.root / entry.path}: ends with id {shard_[-1]}, not with the end-of-text id "
                    f"{self.manifest.eos_id}; its tail was probably never written. {AGAIN}"
                )
            if hash_all or size_bytes <= HASHED_BYTES:
                _require_hash(self.manifest, entry)


def _sampled_starts(tokens: int) -> list[int]:
    if tokens <= SAMPLE_TOKENS:
        return list(range(0, tokens, BLOCK_TOKENS))
    return [int(start) for start in np.linspace(0, tokens - BLOCK_TOKENS, SAMPLE_BLOCKS)]


def require_ids(part_: npt.NDArray[np.uint32], manifest: Manifest, entry: ShardEntry, start: int) -> None:
    """Refuse tokens that are no ids of the tokenizer.

    Args:
        part_: tokens of a shard, from token `start` on.
        manifest: says how many ids there are.
        entry: the shard, for the message.
        start: place of the first token.

    Raises:
        CorpusError: the message names the shard, the place and the id.
    """
    if part_.size and int(part_.max()) >= manifest.vocab_size:
        first = int(np.argmax(part_ >= manifest.vocab_size))
        swapped = int(part_.byteswap().max()) < manifest.vocab_size
        why = "its bytes are in the other (big-endian) order" if swapped else "damaged, or of another tokenizer"
        raise CorpusError(
            f"{manifest.root / entry.path}: token {start + first:,} is {int(part_[first]):,}, but the tokenizer has "
            f"{manifest.vocab_size:,} ids: {why}. {AGAIN}"
        )


def _require_hash(manifest: Manifest, entry: ShardEntry) -> None:
    seen = sha256_file(manifest.root / entry.path)
    if seen != entry.sha256:
        raise CorpusError(
            f"{manifest.root / entry.path}: SHA-256 {seen[:12]}…, the manifest says {entry.sha256[:12]}…; "
            f"the file was changed after the manifest was written. {AGAIN}"
        )


class StepReader:
    """The tokens of one optimiser step after another, read ahead by a thread into a bounded queue.

    Its whole state is the position that it began at and how often `next` was called. A window is
    copied once, from the mapped shard into the tensor that goes to the device.
    """

    def __init__(
        self,
        windows: TokenWindows,
        first_sample: int,
        sequences_per_step: int,
        seed: int,
        *,
        share: tuple[int, int] = (0, 1),
        pinned: bool = False,
    ) -> None:
        """Begin at sample `first_sample` of the run.

        Args:
            windows: the data.
            first_sample: position in the run, in windows.
            sequences_per_step: windows of a step.
            seed: of the order.
            share: (rank, ranks): this process reads that consecutive part of each step's windows.
            pinned: into page-locked memory, from which a GPU copies without waiting.
        """
        rank, ranks = share
        self._windows, self._seed, self._pinned = windows, seed, pinned
        self._stride, self._sequences = sequences_per_step, sequences_per_step // ranks
        self._queue: queue.Queue[torch.Tensor | BaseException] = queue.Queue(maxsize=STEPS_AHEAD)
        self._closed = threading.Event()
        begin = first_sample + rank * self._sequences
        self._thread = threading.Thread(target=self._work, args=(begin,), name="windows", daemon=True)
        self._thread.start()

    def next(self, should_stop: Callable[[], bool] = lambda: False) -> torch.Tensor | None:
        """The next step's tokens: int64, shape (sequences_per_step / ranks, seq_len + 1).

        Args:
            should_stop: asked while there is nothing yet; None is returned if it says so, and the
                next call has the same tokens.

        Raises:
            CorpusError: a token is no id of the tokenizer, or the shards can't be read any more.
        """
        while True:
            try:
                read = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                if should_stop():
                    return None
                continue
            if isinstance(read, BaseException):
                self._queue.put(read)  # whoever asks again is told again
                raise read
            return read

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()

    def _work(self, sample: int) -> None:
        try:
            while not self._closed.is_set():
                numbers = window_numbers(sample, self._sequences, len(self._windows), self._seed)
                tokens = torch.empty(
                    (self._sequences, self._windows.layout.seq_len + 1), dtype=torch.int64, pin_memory=self._pinned
                )
                self._windows.read(numbers, tokens.numpy())
                self._put(tokens)
                sample += self._stride
        except BaseException as error:
            self._put(error)

    def _put(self, read: torch.Tensor | BaseException) -> None:
        while not self._closed.is_set():
            try:
                return self._queue.put(read, timeout=POLL_S)
            except queue.Full:
                continue
