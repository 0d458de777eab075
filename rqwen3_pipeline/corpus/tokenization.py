"""Tokenization: surviving documents to shards of token ids, training and held-out.

The end-of-text id follows each document by id. The library `tokenizers` encodes a sample of every
partition again, 20 documents or 0.1 % of those to train on and as many of those held out; one
difference fails the partition, and nothing of it stays. A document is held out by its digest, before
any budget is cut. All that is done document by document is one string for the engine and one copy of
its tokens: the rest is columns. Memory: a row group of the filtered file, some four megabytes of text,
and the engine's.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
# (pyarrow ships no types)

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from model.errors import CorpusError
from rqwen3_pipeline.corpus.dedup import heldout_mask
from rqwen3_pipeline.corpus.encoder import Encoder, Ends, Ids
from rqwen3_pipeline.corpus.filtered_file import filtered_batches
from rqwen3_pipeline.corpus.lock import Lock
from rqwen3_pipeline.corpus.shards import Batch, ShardWriter, remove_partition
from rqwen3_pipeline.corpus.sources import CorpusConfig
from rqwen3_pipeline.corpus.stamps import (
    begin,
    current,
    input_of,
    required_stamp,
    settings_sha256,
    stamp_path,
    survivors_stamp_path,
    tokenizer_stamp,
    tokens_stamp_path,
    verify_inputs,
    write_stamp,
)
from rqwen3_pipeline.corpus.tokenizer import load_encoder, make_tokenizer, pin_tokenizer, train_tokenizer
from rqwen3_pipeline.settings import RunRoot

__all__ = ["make_tokenizer", "oracle_sample", "pin_tokenizer", "tokenize_file", "tokenize_inputs", "train_tokenizer"]

ORACLE_ONE_IN = 1000
ORACLE_CHARS, ORACLE_TAIL = 1_000_000, 64
"""Of a longer document the oracle encodes the beginning, for it takes a hundred bytes a character; the last tokens of
a beginning may differ from those of the whole, so these are not compared."""


@dataclass(slots=True)
class _Counts:
    """What is counted while a partition is made."""

    oracle_documents: int = 0
    long_runs: int = 0
    markup: Counter[str] = field(default_factory=Counter[str])


def tokenize_inputs(root: RunRoot, config: CorpusConfig, source: str, key: str) -> dict[str, str]:
    """The filtered file, its digests, its survivors and the tokenizer.

    Raises:
        CorpusError: one of them is not made yet.
    """
    group = config.group_of(source)
    places = [
        (root.filtered(source, key), stamp_path(root.filtered(source, key))),
        (root.digests(source, key), stamp_path(root.digests(source, key))),
        (root.survivors(source, key), survivors_stamp_path(root, group)),
    ]
    inputs: dict[str, str] = {}
    for path, stamp in places:
        inputs |= input_of(root, required_stamp(stamp, str(path)), path)
    return inputs | input_of(root, tokenizer_stamp(root), root.tokenizer)


def tokenize_file(
    root: RunRoot, config: CorpusConfig, lock: Lock, source: str, key: str, rebuild: bool = False
) -> dict[str, Any]:
    """Turn one file's surviving documents into shards, training and held-out.

    Returns:
        The report: `documents`, `tokens`, `text_bytes`, `heldout_documents`, `heldout_tokens`, `shards`,
        `heldout_shards` (sidecars), `engine`, `oracle_documents`, `long_run_documents` (which the oracle encoded,
        being no slower there), `markup` (how often the documents spell out each added token).

    Raises:
        CorpusError: an input is missing or damaged, or engine and oracle differ on a document.
    """
    lock.file(source, key)
    settings, inputs = config.settings_for("tokens"), tokenize_inputs(root, config, source, key)
    path = tokens_stamp_path(root, source, key)
    stamp = current(root, path, settings, inputs, rebuild)
    if stamp is None:
        begin(path)
        verify_inputs(root, inputs)
        encoder = load_encoder(root)
        for folder in (root.tokens, root.heldout):
            remove_partition(folder, source, key)
        facts: dict[str, Any] = {"source": source, "key": key, "max_tokens": config.shard_max_tokens}
        facts |= {"settings_sha256": settings_sha256(settings), "tokenizer_sha256": encoder.sha256}
        try:
            with (
                ShardWriter(root.path, root.tokens, heldout=False, **facts) as training,
                ShardWriter(root.path, root.heldout, heldout=True, **facts) as heldout,
            ):
                counts = _encode_all(root, config, source, key, encoder, (training, heldout))
        except BaseException:
            for folder in (root.tokens, root.heldout):
                remove_partition(folder, source, key)
            raise
        report = _report(training, heldout, encoder, counts)
        outputs = training.files + heldout.files
        hashes = {root.path / sidecar.path: sidecar.sha256 for sidecar in training.sidecars + heldout.sidecars}
        facts = {"stage": "tokens", "settings": settings, "inputs": inputs, "outputs": outputs, "hashes": hashes}
        stamp = write_stamp(root, path, report=report, **facts)
    return stamp.report


def _report(training: ShardWriter, heldout: ShardWriter, encoder: Encoder, counts: _Counts) -> dict[str, Any]:
    report: dict[str, Any] = {"engine": encoder.engine, "oracle_documents": counts.oracle_documents}
    report |= {"long_run_documents": counts.long_runs, "markup": dict(sorted(counts.markup.items()))}
    for prefix, writer in (("", training), ("heldout_", heldout)):
        for name in ("documents", "tokens", "text_bytes"):
            report[prefix + name] = sum(getattr(sidecar, name) for sidecar in writer.sidecars)
        report[f"{prefix}shards"] = [sidecar.path for sidecar in writer.sidecars]
    return report


def _encode_all(
    root: RunRoot,
    config: CorpusConfig,
    source: str,
    key: str,
    encoder: Encoder,
    writers: tuple[ShardWriter, ShardWriter],
) -> _Counts:
    """Encode batch by batch, and count."""
    counts, long_runs_before = _Counts(), encoder.long_runs
    survivors_ = np.load(root.survivors(source, key), allow_pickle=False)
    if not len(survivors_):
        return counts
    digest_ = np.load(root.digests(source, key), allow_pickle=False)
    heldout_ = heldout_mask(digest_, config.heldout_one_in)
    sample: set[int] = set()
    if encoder.engine != "tokenizers":
        for apart in (False, True):
            part_ = np.flatnonzero(heldout_[survivors_] == apart)
            sample |= {int(part_[i]) for i in oracle_sample(len(part_), config.oracle_documents)}
    for index, position_, records in _batches(root.filtered(source, key), survivors_):
        texts: list[str] = records.column("text").to_pylist()
        ids_, ends_ = encoder.encode(texts)
        for i in (i for i in range(len(texts)) if index + i in sample):
            found_ = ids_[int(ends_[i - 1]) if i else 0 : int(ends_[i])]
            if (first := difference(encoder, texts[i], found_)) is not None:
                raise CorpusError(
                    f"filtered/{source}/{key}.parquet: {encoder.engine} and tokenizers give document "
                    f"{records.column('id')[i]} (row {records.column('row')[i]}) different ids from token {first} on. "
                    "Nothing of this partition was kept; report the document."
                )
        batch = _with_ends(records, texts, ids_, ends_, digest_[position_], encoder, counts)
        apart_ = heldout_[position_]
        writers[0].add(_those(batch, ~apart_) if apart_.any() else batch)
        if apart_.any():
            writers[1].add(_those(batch, apart_))
    counts.oracle_documents, counts.long_runs = len(sample), encoder.long_runs - long_runs_before
    return counts


def difference(encoder: Encoder, text: str, found_: Ids) -> int | None:
    """Where the oracle's ids of a text first differ from those found; None if nowhere.

    Of a text of more than `ORACLE_CHARS` characters the beginning is compared.
    """
    whole = len(text) <= ORACLE_CHARS
    (expected_,) = encoder.encode_by_oracle([text if whole else text[:ORACLE_CHARS]])
    if not whole:
        expected_ = expected_[: max(len(expected_) - ORACLE_TAIL, 0)]
        found_ = found_[: len(expected_)]
    shared = min(len(found_), len(expected_))
    different_ = np.flatnonzero(found_[:shared] != expected_[:shared])
    if len(different_):
        return int(different_[0])
    return None if len(found_) == len(expected_) else shared


def _with_ends(
    records: Any,
    texts: list[str],
    ids_: Ids,
    ends_: Ends,
    digest_: npt.NDArray[np.uint8],
    encoder: Encoder,
    counts: _Counts,
) -> Batch:
    """The documents as the writers take them: an end-of-text id after each, markup counted."""
    out_ = np.empty(len(ids_) + len(ends_), dtype=np.uint32)
    start = 0
    for i, end in enumerate(ends_.tolist()):
        out_[start + i : end + i] = ids_[start:end]
        start = end
    new_ends_ = ends_ + np.arange(1, len(ends_) + 1)
    out_[new_ends_ - 1] = encoder.eos_id
    text = records.column("text")
    return Batch(
        ids_=out_,
        ends_=new_ends_,
        text_bytes_=pc.binary_length(text).to_numpy(zero_copy_only=False).astype(np.uint64),
        markup_=_count_markup(text, texts, encoder.markers, counts.markup),
        row=records.column("row"),
        id=records.column("id"),
        url=records.column("url"),
        digest=pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(digest_.shape[1]), len(digest_), [None, pa.py_buffer(np.ascontiguousarray(digest_))]
        ),
    )


def _count_markup(
    column: Any, texts: list[str], markers: tuple[str, ...], totals: Counter[str]
) -> npt.NDArray[np.int64]:
    """How often each text spells out an added token; `totals` gets the counts by token."""
    pattern = "|".join(re.escape(marker) for marker in markers)
    count_ = pc.count_substring_regex(column, pattern=pattern).to_numpy(zero_copy_only=False).astype(np.int64)
    for i in np.flatnonzero(count_).tolist():
        totals.update(re.findall(pattern, texts[i]))
    return count_


def _those(batch: Batch, mask_: npt.NDArray[np.bool_]) -> Batch:
    """The documents of a batch that a mask picks."""
    lengths_, wanted = np.diff(batch.ends_, prepend=0), pa.array(mask_)
    return Batch(
        ids_=batch.ids_[np.repeat(mask_, lengths_)],
        ends_=np.cumsum(lengths_[mask_]),
        text_bytes_=batch.text_bytes_[mask_],
        markup_=batch.markup_[mask_],
        row=batch.row.filter(wanted),
        id=batch.id.filter(wanted),
        url=batch.url.filter(wanted),
        digest=batch.digest.filter(wanted),
    )


def oracle_sample(documents: int, least: int) -> set[int]:
    """Which documents are encoded twice: evenly spread from first to last, `least` or 0.1 %, whichever is more."""
    count = min(documents, max(least, math.ceil(documents / ORACLE_ONE_IN)))
    return {i * (documents - 1) // max(count - 1, 1) for i in range(count)}


def _batches(path: Path, survivors_: npt.NDArray[np.uint32]) -> Iterator[tuple[int, npt.NDArray[np.int64], Any]]:
    """The surviving documents of a filtered file, a row group at a time.

    Yields:
        The first one's number among the survivors, their rows in the file, and their records.
    """
    first, index = 0, 0
    for read in filtered_batches(path):
        last = int(np.searchsorted(survivors_, first + read.num_rows))
        position_ = survivors_[index:last].astype(np.int64)
        if len(position_):
            yield index, position_, read if len(position_) == read.num_rows else read.take(pa.array(position_ - first))
        first, index = first + read.num_rows, last
