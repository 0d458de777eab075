"""Exact deduplication in two passes: digests per file on disk, then one sort per group.

A digest is the SHA-256 of a kept document's NFC text. Of equal digests in a group of sources the
first by (precedence of the source, file in the lock, row) survives; so the outcome depends on the
files alone, not on workers, order or restarts. The sort takes about 72 bytes a document of memory
(all 32 bytes of each digest, and the order) and some seconds per ten million.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (pyarrow ships no types)

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from model.files import atomic_path
from rqwen3_pipeline.corpus.funnel import require_source_kept
from rqwen3_pipeline.corpus.lock import Lock
from rqwen3_pipeline.corpus.sources import GROUPS, CorpusConfig
from rqwen3_pipeline.corpus.stamps import (
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

__all__ = ["GROUPS", "digest_file", "digest_text", "find_survivors", "heldout_mask", "shadowed_path", "shadows"]

DIGEST_BYTES = 32
READ_ROWS = 512
_PLACE = (("source", pa.string()), ("key", pa.string()), ("row", pa.uint32()))
SHADOWED_SCHEMA = pa.schema([(prefix + name, kind) for prefix in ("", "by_") for name, kind in _PLACE])
"""Rows count within the filtered files `filtered/<source>/<key>.parquet`."""

Digests = npt.NDArray[np.uint8]


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
        with pq.ParquetFile(filtered, pre_buffer=False) as file:
            for batch in file.iter_batches(batch_size=READ_ROWS, columns=["text"], use_threads=False):
                for text in batch.column("text").to_pylist():
                    digest_[row] = np.frombuffer(digest_text(text), dtype=np.uint8)
                    row += 1
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


def shadows(digest_: Digests) -> npt.NDArray[np.int64]:
    """For each document the first one with the same digest; itself, if it is that one.

    Args:
        digest_: uint8, shape (documents, 32), in order of precedence.

    Returns:
        int64, shape (documents,).
    """
    documents = len(digest_)
    word_ = np.ascontiguousarray(digest_).view(np.uint64).reshape(documents, 4)
    order_ = np.lexsort((word_[:, 3], word_[:, 2], word_[:, 1], word_[:, 0]))
    starts_ = np.ones(documents, dtype=np.bool_)
    for column in range(4):
        sorted_ = word_[order_, column]
        if column == 0:
            starts_[1:] = sorted_[1:] != sorted_[:-1]
        else:
            starts_[1:] |= sorted_[1:] != sorted_[:-1]
    first_ = np.maximum.accumulate(np.where(starts_, np.arange(documents), 0))
    winner_ = np.empty(documents, dtype=np.int64)
    winner_[order_] = order_[first_]
    return winner_


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
    parts: list[_Part] = []
    arrays: list[Digests] = []
    start = 0
    for source in members:
        for file in lock.files(source):
            array = np.load(root.digests(source, file.key), allow_pickle=False)
            parts.append(_Part(source=source, key=file.key, start=start, documents=len(array)))
            arrays.append(array)
            start += len(array)
    digest_ = np.concatenate(arrays)
    arrays.clear()
    winner_ = shadows(digest_)
    del digest_
    own_ = np.arange(len(winner_))
    outputs: list[Path] = []
    for part in parts:
        inside = slice(part.start, part.start + part.documents)
        stays_ = np.flatnonzero(winner_[inside] == own_[inside]).astype(np.uint32)
        outputs.append(root.survivors(part.source, part.key))
        _save(outputs[-1], stays_)
    table, report = _account(parts, winner_, members)
    outputs.append(shadowed_path(root, group))
    with atomic_path(outputs[-1]) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    return write_stamp(
        root,
        survivors_stamp_path(root, group),
        stage="survivors",
        settings=settings,
        inputs=inputs,
        outputs=outputs,
        report=report,
    )


def _account(
    parts: list[_Part], winner_: npt.NDArray[np.int64], members: tuple[str, ...]
) -> tuple[Any, dict[str, Any]]:
    starts_ = np.array([part.start for part in parts], dtype=np.int64)
    lost_ = np.flatnonzero(winner_ != np.arange(len(winner_)))
    columns: dict[str, Any] = {}
    sources_: dict[str, npt.NDArray[np.str_]] = {}
    for prefix, index_ in (("", lost_), ("by_", winner_[lost_])):
        # of parts that begin at the same place all but the last are empty, and "right" finds the last
        part_ = np.searchsorted(starts_, index_, side="right") - 1
        sources_[prefix] = np.array([part.source for part in parts])[part_]
        columns[f"{prefix}source"] = sources_[prefix]
        columns[f"{prefix}key"] = np.array([part.key for part in parts])[part_]
        columns[f"{prefix}row"] = (index_ - starts_[part_]).astype(np.uint32)
    table = pa.table({name: columns[name].tolist() for name in SHADOWED_SCHEMA.names}, schema=SHADOWED_SCHEMA)
    report: dict[str, Any] = {}
    for source in members:
        documents = sum(part.documents for part in parts if part.source == source)
        by = {other: int(((sources_[""] == source) & (sources_["by_"] == other)).sum()) for other in members}
        shadowed = sum(by.values())
        report[source] = {
            "documents": documents,
            "survivors": documents - shadowed,
            "shadowed": shadowed,
            "shadowed_by": {other: count for other, count in by.items() if count},
        }
    return table, report


def _save(path: Path, array: npt.NDArray[Any]) -> None:
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.save(file, array, allow_pickle=False)
