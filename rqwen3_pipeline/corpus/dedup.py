"""Exact deduplication in two passes: digests per file on disk, then one comparison per group.

A digest is the SHA-256 of a kept document's NFC text. Of equal digests in a group of sources the
first by (precedence of the source, file in the lock, row) survives; so the outcome depends on the
files alone, not on workers, order or restarts. The comparison goes by buckets, see `buckets`: some
350 MB at most, one byte for every document besides, and some seconds per twenty million.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (pyarrow ships no types)

import hashlib
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from model.files import atomic_path, temporary_path
from rqwen3_pipeline.corpus.buckets import (
    DIGEST_BYTES,
    Digests,
    PairFile,
    shadow_pairs,
    stored_digests,
)
from rqwen3_pipeline.corpus.documents import views
from rqwen3_pipeline.corpus.filtered_file import filtered_batches
from rqwen3_pipeline.corpus.funnel import require_source_kept
from rqwen3_pipeline.corpus.lock import Lock
from rqwen3_pipeline.corpus.sources import GROUPS, CorpusConfig
from rqwen3_pipeline.corpus.stamps import (
    AGAIN,
    Stamp,
    begin,
    current,
    input_of,
    required_stamp,
    stamp_path,
    survivors_stamp_path,
    verify_inputs,
    write_stamp,
)
from rqwen3_pipeline.settings import RunRoot

__all__ = [
    "GROUPS",
    "decide",
    "digest_file",
    "digest_text",
    "find_survivors",
    "heldout_mask",
    "repeated",
    "shadowed_path",
]

TABLE_ROWS = 1 << 20
"""Documents whose shadows are written to the table at a time."""
_PLACE = (("source", pa.string()), ("key", pa.string()), ("row", pa.uint32()))
SHADOWED_SCHEMA = pa.schema([(prefix + name, kind) for prefix in ("", "by_") for name, kind in _PLACE])
"""Rows count within the filtered files `filtered/<source>/<key>.parquet`."""


def digest_text(text: str) -> bytes:
    """A document's digest: SHA-256 of its UTF-8 bytes."""
    return hashlib.sha256(text.encode("utf-8")).digest()


def heldout_mask(digest_: Digests, one_in: int) -> npt.NDArray[np.bool_]:
    """Which documents are held out: the first eight bytes, big-endian, are a multiple of `one_in`.

    Args:
        digest_: uint8, shape (documents, 32).
        one_in: one of so many, on average.

    Returns:
        bool, shape (documents,).
    """
    head_ = np.ascontiguousarray(digest_[:, :8]).view(">u8").reshape(-1)
    return head_.astype(np.uint64) % np.uint64(one_in) == 0


def digest_file(root: RunRoot, config: CorpusConfig, source: str, key: str, rebuild: bool = False) -> dict[str, Any]:
    """Write the digest of each document of a filtered file: uint8, shape (documents, 32).

    Returns:
        The report: `documents`.

    Raises:
        CorpusError: the filtered file is not there or damaged.
    """
    filtered, target = root.filtered(source, key), root.digests(source, key)
    before = required_stamp(stamp_path(filtered), str(filtered))
    inputs, settings = input_of(root, before, filtered), config.settings_for("digests")
    stamp = current(root, stamp_path(target), settings, inputs, rebuild)
    if stamp is None:
        begin(stamp_path(target), target)
        verify_inputs(root, inputs)
        digest_ = np.empty((before.report["kept"], DIGEST_BYTES), dtype=np.uint8)
        row = 0
        for batch in filtered_batches(filtered, ["text"]):
            found = b"".join(hashlib.sha256(text or b"").digest() for text in views(batch.column("text")))
            digest_[row : row + batch.num_rows] = np.frombuffer(found, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
            row += batch.num_rows
        _save(target, digest_)
        stamp = write_stamp(
            root,
            stamp_path(target),
            stage="digests",
            settings=settings,
            inputs=inputs,
            outputs=[target],
            report={"documents": row},
        )
    return stamp.report


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    source: str
    key: str
    start: int
    documents: int


def survivor_inputs(root: RunRoot, config: CorpusConfig, lock: Lock, group: str) -> dict[str, str]:
    """The digests of all files of a group.

    Raises:
        CorpusError: some are not there yet.
    """
    inputs: dict[str, str] = {}
    for source in config.groups()[group]:
        for file in lock.files(source):
            path = root.digests(source, file.key)
            inputs |= input_of(root, required_stamp(stamp_path(path), str(path)), path)
    return inputs


def shadowed_path(root: RunRoot, group: str) -> Path:
    """The table of who shadowed whom in a group."""
    return root.path / "survivors" / f"{group}.shadowed.parquet"


def find_survivors(
    root: RunRoot, config: CorpusConfig, lock: Lock, group: str, rebuild: bool = False
) -> dict[str, Any]:
    """Decide which documents of a group of sources stay.

    Writes `survivors/<source>/<key>.npy` for every file (uint32, ascending rows of the filtered file),
    `survivors/<group>.shadowed.parquet`, and the group's stamp.

    Returns:
        The report: by source `documents`, `survivors`, `shadowed`, `shadowed_by` (counts by source).

    Raises:
        CorpusError: digests are missing or damaged.
        SourceError: one of the sources keeps too little of all its rows.
    """
    members, settings = config.groups()[group], config.settings_for("survivors")
    inputs = survivor_inputs(root, config, lock, group)
    path = survivors_stamp_path(root, group)
    for source in members:
        require_source_kept(root, config, lock, source)
    stamp = current(root, path, settings, inputs, rebuild)
    if stamp is None:
        arrays = [root.survivors(source, file.key) for source in members for file in lock.files(source)]
        begin(path, shadowed_path(root, group), *arrays)
        verify_inputs(root, inputs)
        stamp = _decide(root, lock, group, members, settings, inputs)
    return stamp.report


def _decide(
    root: RunRoot, lock: Lock, group: str, members: tuple[str, ...], settings: dict[str, Any], inputs: dict[str, str]
) -> Stamp:
    places = [(source, file.key) for source in members for file in lock.files(source)]
    outputs, report = decide(root, group, places)
    return write_stamp(
        root,
        survivors_stamp_path(root, group),
        stage="survivors",
        settings=settings,
        inputs=inputs,
        outputs=outputs,
        report=report,
    )


def decide(root: RunRoot, group: str, places: Sequence[tuple[str, str]]) -> tuple[list[Path], dict[str, Any]]:
    """Compare the digests of files, and write who survives and who shadowed whom.

    Args:
        root: the run root.
        group: names the table.
        places: (source, key) of the files whose digests are there, in order of precedence.

    Returns:
        The files that were written, and the report by source, see `find_survivors`.
    """
    parts: list[_Part] = []
    start = 0
    for source, key in places:
        documents = len(np.load(root.digests(source, key), mmap_mode="r", allow_pickle=False))
        parts.append(_Part(source=source, key=key, start=start, documents=documents))
        start += documents

    def read() -> Iterator[Digests]:
        return (chunk_ for source, key in places for chunk_ in stored_digests(root.digests(source, key)))

    stays_ = np.ones(start, dtype=np.bool_)
    table = shadowed_path(root, group)
    with PairFile(temporary_path(table).with_suffix(".pairs.tmp")) as pairs:
        for later_, first_ in shadow_pairs(read, start):
            stays_[later_] = False
            pairs.add(later_, first_)
        outputs: list[Path] = []
        for part in parts:
            outputs.append(root.survivors(part.source, part.key))
            _save(outputs[-1], np.flatnonzero(stays_[part.start : part.start + part.documents]).astype(np.uint32))
        report = _write_shadowed(table, parts, pairs)
    return [*outputs, table], report


def _write_shadowed(path: Path, parts: list[_Part], pairs: PairFile) -> dict[str, Any]:
    """Write the table of who shadowed whom, some at a time; returns the report by source."""
    members = tuple(dict.fromkeys(part.source for part in parts))
    starts_ = np.array([part.start for part in parts], dtype=np.int64)
    member_ = np.array([members.index(part.source) for part in parts], dtype=np.int64)
    names = {name: pa.array([getattr(part, name) for part in parts], pa.string()) for name in ("source", "key")}
    counts_ = np.zeros((len(members), len(members)), dtype=np.int64)
    documents = sum(part.documents for part in parts)
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, SHADOWED_SCHEMA, compression="zstd") as writer:
        for begin in range(0, documents, TABLE_ROWS):
            both = pairs.between(begin, begin + TABLE_ROWS)
            # of parts that begin at the same place all but the last are empty, and "right" finds the last
            part_ = [np.searchsorted(starts_, place_, side="right") - 1 for place_ in both]
            np.add.at(counts_, (member_[part_[0]], member_[part_[1]]), 1)
            columns: list[Any] = []
            for place_, index_ in zip(both, part_, strict=True):
                columns += [names[name].take(pa.array(index_)) for name in ("source", "key")]
                columns.append(pa.array((place_ - starts_[index_]).astype(np.uint32)))
            if len(both[0]):
                writer.write_batch(pa.record_batch(columns, schema=SHADOWED_SCHEMA))
    report: dict[str, Any] = {}
    for number, source in enumerate(members):
        by = dict(zip(members, counts_[number].tolist(), strict=True))
        whole = sum(part.documents for part in parts if part.source == source)
        report[source] = {
            "documents": whole,
            "survivors": whole - sum(by.values()),
            "shadowed": sum(by.values()),
            "shadowed_by": {other: count for other, count in by.items() if count},
        }
    return report


def repeated(root: RunRoot, config: CorpusConfig, lock: Lock, group: str) -> list[str]:
    """Compare the digests of a group's survivors, as they lie on the disk, once more.

    Returns:
        One sentence for each file whose survivors and shadowed documents are not all its documents, and one
        if a digest is there twice; none is good news.
    """
    places = [(source, file.key) for source in config.groups()[group] for file in lock.files(source)]
    kept_ = {place: np.load(root.survivors(*place), allow_pickle=False) for place in places}
    table = pq.read_table(shadowed_path(root, group), columns=["source", "key"])
    counted = table.group_by(["source", "key"]).aggregate([([], "count_all")]).to_pylist()
    lost = Counter({(row["source"], row["key"]): row["count_all"] for row in counted})
    problems: list[str] = []
    for place in places:
        documents = len(np.load(root.digests(*place), mmap_mode="r", allow_pickle=False))
        if len(kept_[place]) + lost[place] != documents:
            problems.append(
                f"{root.survivors(*place)}: {len(kept_[place]):,} survivors and {lost[place]:,} shadowed documents, of "
                f"{documents:,}. Decide again: rm -f {shlex.quote(str(survivors_stamp_path(root, group)))} && {AGAIN}"
            )

    def read() -> Iterator[Digests]:
        for place in places:
            start = 0
            for chunk_ in stored_digests(root.digests(*place)):
                low, high = np.searchsorted(kept_[place], (start, start + len(chunk_)))
                yield chunk_[kept_[place][low:high] - np.uint32(start)]
                start += len(chunk_)

    twice = sum(len(later_) for later_, _ in shadow_pairs(read, sum(map(len, kept_.values()))))
    if twice:
        problems.append(
            f"{group}: {twice:,} survivors equal another one. Decide again: "
            f"rm -f {shlex.quote(str(survivors_stamp_path(root, group)))} && {AGAIN}"
        )
    return problems


def _save(path: Path, array: npt.NDArray[Any]) -> None:
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.save(file, array, allow_pickle=False)
