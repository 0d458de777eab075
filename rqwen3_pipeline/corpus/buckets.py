"""Which of many digests are equal: radix buckets over their leading bits, one held at a time.

The digests are read once for every bucket. A bucket holds its digests (32 bytes), their places (8) and
one word each to sort by (8, twice while it is made): some 60 bytes for each of at most
`BUCKET_DOCUMENTS`, 350 MB, however many digests there are. Equal ones beyond what a bucket has room
for are told and dropped as they come, so that a flood of copies takes no more room. Costs about
0.1 µs of processor time a digest, and one read of all of them for each `BUCKET_DOCUMENTS` that there are.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

BUCKET_DOCUMENTS = 6_000_000
CHUNK_DOCUMENTS = 131_072
DIGEST_BYTES = 32

Digests = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]
Read = Callable[[], Iterator[Digests]]
"""Reads all digests anew, in order of precedence, in arrays of uint8, shape (some, 32)."""


def stored_digests(path: Path, chunk_documents: int = CHUNK_DOCUMENTS) -> Iterator[Digests]:
    """The digests of a `.npy` file, some at a time; none of them stays mapped."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        while len(chunk_ := np.fromfile(file, dtype=np.uint8, count=chunk_documents * DIGEST_BYTES)):
            yield chunk_.reshape(-1, DIGEST_BYTES)


def shadow_pairs(
    read: Read, documents: int, bucket_documents: int = BUCKET_DOCUMENTS
) -> Iterator[tuple[Places, Places]]:
    """Every digest that equals an earlier one, with the first one of its kind.

    Args:
        read: reads the digests.
        documents: how many there are; a wrong figure costs time or room, and changes no answer.
        bucket_documents: how many a bucket should hold.

    Yields:
        The places of later ones, ascending, and of the first ones that they equal, int64 each, some at a
        time. All pairs together, in order of the later place, do not depend on `bucket_documents`.
    """
    buckets = max(1, -(-documents // bucket_documents))
    for number in range(buckets):
        low, high = (-(-(bound << 32) // buckets) for bound in (number, number + 1))
        yield from _Bucket(documents // buckets + documents // buckets // 16 + 1024).pairs(read, low, high)


class _Bucket:
    """The digests whose first four bytes, big-endian, lie in a range."""

    def __init__(self, room: int) -> None:
        self._digest_ = np.empty((room, DIGEST_BYTES), dtype=np.uint8)
        self._place_ = np.empty(room, dtype=np.int64)
        self._filled = 0

    def pairs(self, read: Read, low: int, high: int) -> Iterator[tuple[Places, Places]]:
        start = 0
        for chunk_ in read():
            lead_ = np.ascontiguousarray(chunk_).view(">u4")[:, 0].astype(np.int64)
            inside_ = np.flatnonzero((lead_ >= low) & (lead_ < high))
            if self._filled + len(inside_) > len(self._place_):
                later_, first_ = equal_digests(self._digest_[: self._filled])
                yield self._place_[later_], self._place_[first_]
                self._drop(later_)
                self._make_room(len(inside_))
            end = self._filled + len(inside_)
            np.take(chunk_, inside_, axis=0, out=self._digest_[self._filled : end])
            np.add(inside_, start, out=self._place_[self._filled : end])
            self._filled = end
            start += len(chunk_)
        later_, first_ = equal_digests(self._digest_[: self._filled])
        yield self._place_[later_], self._place_[first_]

    def _drop(self, later_: Places) -> None:
        """Keep what is not among `later_`, moved to the front."""
        stays_ = np.ones(self._filled, dtype=np.bool_)
        stays_[later_] = False
        target = 0
        for begin in range(0, self._filled, CHUNK_DOCUMENTS):
            part = slice(begin, min(begin + CHUNK_DOCUMENTS, self._filled))
            into = slice(target, target + int(np.count_nonzero(stays_[part])))
            self._digest_[into] = self._digest_[part][stays_[part]]
            self._place_[into] = self._place_[part][stays_[part]]
            target = into.stop
        self._filled = target

    def _make_room(self, wanted: int) -> None:
        if self._filled + wanted > len(self._place_):
            room = 2 * (self._filled + wanted)
            for name in ("_digest_", "_place_"):
                old_: npt.NDArray[Any] = getattr(self, name)
                new_ = np.empty((room, *old_.shape[1:]), dtype=old_.dtype)
                new_[: self._filled] = old_[: self._filled]
                setattr(self, name, new_)


def equal_digests(digest_: Digests) -> tuple[Places, Places]:
    """The digests that equal an earlier one of the array, and the first ones that they equal.

    Sorts one word a digest: as many of its bits as the position leaves room for, then the position.
    Neighbours with equal bits are then compared whole; where those differ after all, which SHA-256
    hardly ever does, all 32 bytes are sorted.

    Args:
        digest_: uint8, shape (documents, 32), contiguous.

    Returns:
        Positions of the later ones, ascending, and of the first ones, int64.
    """
    documents = len(digest_)
    bits = np.uint64(max(documents - 1, 1).bit_length())
    word_ = digest_.view(np.uint64)[:, 1].copy()
    word_ <<= bits
    word_ |= np.arange(documents, dtype=np.uint64)
    word_.sort()
    at_ = 1 + np.flatnonzero((word_[1:] ^ word_[:-1]) < (np.uint64(1) << bits))
    if not len(at_):
        return at_, at_
    begins_ = np.concatenate((np.ones(1, dtype=np.bool_), at_[1:] != at_[:-1] + 1))
    run_ = np.cumsum(begins_) - 1
    mask = (np.uint64(1) << bits) - np.uint64(1)
    later_ = (word_[at_] & mask).astype(np.int64)
    heads_ = (word_[at_[begins_] - 1] & mask).astype(np.int64)
    del word_, at_
    first_ = heads_[run_]
    if len(differs_ := _differing(digest_, later_, first_)):
        bad_ = np.zeros(len(heads_), dtype=np.bool_)
        bad_[run_[differs_]] = True
        later_, first_ = _sorted_whole(digest_, later_, first_, bad_[run_])
    order_ = np.argsort(later_)
    return later_[order_], first_[order_]


def _differing(digest_: Digests, later_: Places, first_: Places) -> Places:
    whole_ = digest_.view(np.uint64)
    found = [
        begin + np.flatnonzero((whole_[later_[begin:end]] != whole_[first_[begin:end]]).any(axis=1))
        for begin in range(0, len(later_), CHUNK_DOCUMENTS)
        for end in (begin + CHUNK_DOCUMENTS,)
    ]
    return np.concatenate(found)


def _sorted_whole(digest_: Digests, later_: Places, first_: Places, bad_: npt.NDArray[np.bool_]) -> tuple[Any, Any]:
    """Pair the members of the runs in which something differs by all 32 bytes, and leave the others."""
    member_ = np.unique(np.concatenate((later_[bad_], first_[bad_])))
    winner_ = member_[shadows(digest_[member_])]
    lost_ = winner_ != member_
    return np.concatenate((later_[~bad_], member_[lost_])), np.concatenate((first_[~bad_], winner_[lost_]))


def shadows(digest_: Digests) -> Places:
    """For each digest the first one that equals it in all 32 bytes; itself, if it is that one.

    Args:
        digest_: uint8, shape (documents, 32), in order of precedence. Takes some 100 bytes for each.

    Returns:
        int64, shape (documents,).
    """
    documents = len(digest_)
    word_ = np.ascontiguousarray(digest_).view(np.uint64).reshape(documents, 4)
    order_ = np.lexsort(word_.T)
    starts_ = np.ones(documents, dtype=np.bool_)
    starts_[1:] = (word_[order_[1:]] != word_[order_[:-1]]).any(axis=1)
    first_ = np.maximum.accumulate(np.where(starts_, np.arange(documents), 0))
    winner_ = np.empty(documents, dtype=np.int64)
    winner_[order_] = order_[first_]
    return winner_


class PairFile:
    """Pairs on the disk, in a file that goes with the process; a context manager."""

    def __init__(self, path: Path) -> None:
        """Open a file at `path` and take its name away."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w+b")
        path.unlink()
        self._runs: list[tuple[int, int]] = []

    def __enter__(self) -> "PairFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, later_: Places, first_: Places) -> None:
        """Append pairs whose later places ascend."""
        if len(later_):
            self._runs.append((self._file.tell() // 8, len(later_)))
        for array in (later_, first_):
            self._file.write(array.astype(np.int64).data)

    def between(self, start: int, stop: int) -> tuple[Places, Places]:
        """The pairs whose later place lies from `start` to before `stop`, in its order."""
        self._file.flush()
        found: list[tuple[Places, Places]] = [(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))]
        mapped_ = np.memmap(self._file, dtype=np.int64, mode="r") if self._runs else found[0][0]
        for offset, count in self._runs:
            low, high = np.searchsorted(mapped_[offset : offset + count], (start, stop))
            here_ = mapped_[offset + low : offset + high]
            found.append((np.array(here_), np.array(mapped_[offset + count + low : offset + count + high])))
        later_, first_ = (np.concatenate(column) for column in zip(*found, strict=True))
        order_ = np.argsort(later_)
        return later_[order_], first_[order_]
