"""The order of training: a seeded permutation of all windows in O(1) memory.

Sample i of a run is window `permute(i, n, seed, epoch)`; it depends on nothing else, so any job can
take up at any position without replaying what came before. The permutation is a Feistel network of
eight rounds over the smallest even number of bits that holds n, walked along its cycle until the
value falls below n (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Fewer than
four walks are expected per index, each some forty vectorised integer operations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ROUNDS = 8
_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """One step of splitmix64 (Steele, Lea and Flood 2014): 64 bits to 64 well-mixed bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _round_keys(seed: int, epoch: int) -> list[int]:
    state = _mix(_mix(seed & _MASK) ^ (epoch & _MASK))
    keys: list[int] = []
    for _ in range(ROUNDS):
        state = _mix(state)
        keys.append(state)
    return keys


def _feistel(value_: npt.NDArray[np.uint64], half_bits: int, keys: list[int]) -> npt.NDArray[np.uint64]:
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    left, right = value_ >> shift, value_ & mask
    for key in keys:
        mixed = (right + np.uint64(key)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(32))) & mask)
    return (left << shift) | right


def permute(positions: npt.ArrayLike, n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Map positions in an epoch to window numbers.

    Args:
        positions: integers in [0, n), any shape.
        n: number of windows in an epoch, at least 1.
        seed: the run's seed.
        epoch: 0 for the first pass over the corpus.

    Returns:
        int64 of the same shape; over all positions 0..n-1 each window number occurs exactly once.

    Raises:
        ValueError: n is below 1, or a position lies outside [0, n).
    """
    position_ = np.atleast_1d(np.asarray(positions, dtype=np.int64))
    if n < 1 or (position_.size and (position_.min() < 0 or position_.max() >= n)):
        raise ValueError(f"positions must lie in [0, {n}), n must be at least 1")
    half_bits = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    with np.errstate(over="ignore"):
        value_ = _feistel(position_.astype(np.uint64), half_bits, keys)
        while (outside_ := value_ >= np.uint64(n)).any():
            value_[outside_] = _feistel(value_[outside_], half_bits, keys)
    return value_.astype(np.int64).reshape(np.shape(positions))


def window_numbers(first_sample: int, count: int, n: int, seed: int) -> npt.NDArray[np.int64]:
    """Window numbers of `count` consecutive samples of the run, across epoch borders.

    Args:
        first_sample: position in the run, in windows; sample i is in epoch i // n.
        count: how many.
        n: windows in an epoch.
        seed: the run's seed.

    Returns:
        int64, shape (count,).
    """
    sample_ = np.arange(first_sample, first_sample + count, dtype=np.int64)
    epoch_ = sample_ // n
    window_ = np.empty_like(sample_)
    for epoch in np.unique(epoch_):
        inside_ = epoch_ == epoch
        window_[inside_] = permute(sample_[inside_] - epoch * n, n, seed, int(epoch))
    return window_


def window_count(stream_tokens: int, seq_len: int) -> int:
    """Windows in a stream of tokens: each holds `seq_len + 1`, the next begins `seq_len` later."""
    return max(0, (stream_tokens - 1) // seq_len)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A run of consecutive tokens of one shard."""

    shard: int
    """Which shard, counted as in the manifest."""
    start: int
    """First token, from the start of the shard."""
    tokens: int
    """How many."""


class WindowLayout:
    """Where each window lies: windows of `seq_len + 1` tokens, `seq_len` apart, over each source.

    The used tokens of a source's shards, one after the other, form one stream. Windows are numbered
    source by source in the order in which the sources first occur. What fills no window is `tail`.
    """

    def __init__(self, sources: Sequence[str], tokens_used: Sequence[int], seq_len: int) -> None:
        """Lay out the windows.

        Args:
            sources: the source of each shard, in the manifest's order.
            tokens_used: used tokens of each shard, as many.
            seq_len: tokens of context.
        """
        self.seq_len = seq_len
        self.sources: tuple[str, ...] = tuple(dict.fromkeys(sources))
        self._shards = [[i for i, s in enumerate(sources) if s == source] for source in self.sources]
        self._ends = [np.cumsum([tokens_used[i] for i in shards], dtype=np.int64) for shards in self._shards]
        self.tokens: dict[str, int] = {s: int(e[-1]) for s, e in zip(self.sources, self._ends, strict=True)}
        self.windows: dict[str, int] = {s: window_count(t, seq_len) for s, t in self.tokens.items()}
        self.tail: dict[str, int] = {
            s: t - (self.windows[s] * seq_len + 1 if self.windows[s] else 0) for s, t in self.tokens.items()
        }
        self._window_ends = np.cumsum(list(self.windows.values()), dtype=np.int64)
        self.total: int = int(self._window_ends[-1]) if self.sources else 0

    def locate(self, window: int) -> tuple[str, int]:
        """The source of a window, and its first token in that source's stream.

        Raises:
            ValueError: the number lies outside [0, total).
        """
        if not 0 <= window < self.total:
            raise ValueError(f"window {window} lies outside [0, {self.total})")
        index = int(np.searchsorted(self._window_ends, window, side="right"))
        before = int(self._window_ends[index - 1]) if index else 0
        return self.sources[index], (window - before) * self.seq_len

    def pieces(self, window: int) -> list[Piece]:
        """The shards' parts that make up a window, `seq_len + 1` tokens in all."""
        source, start = self.locate(window)
        index = self.sources.index(source)
        ends_, shards = self._ends[index], self._shards[index]
        wanted, found = self.seq_len + 1, list[Piece]()
        k = int(np.searchsorted(ends_, start, side="right"))
        while wanted:
            before = int(ends_[k - 1]) if k else 0
            tokens = min(wanted, int(ends_[k]) - start)
            if tokens:
                found.append(Piece(shard=shards[k], start=start - before, tokens=tokens))
            wanted, start, k = wanted - tokens, start + tokens, k + 1
        return found
