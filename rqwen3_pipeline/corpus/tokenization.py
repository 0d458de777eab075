"""Tokenization: surviving documents to shards of token ids, training and held-out.

The end-of-text id follows each document by id. The library `tokenizers` encodes a sample of every
partition again, 20 documents or 0.1 %; one difference fails the partition. A document is held out by
its digest, before any budget is cut. Memory: one batch of about two million characters.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (pyarrow ships no types)

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from model.errors import CorpusError
from rqwen3_pipeline.corpus.dedup import heldout_mask
from rqwen3_pipeline.corpus.lock import Lock
from rqwen3_pipeline.corpus.shards import ShardWriter, remove_partition
from rqwen3_pipeline.corpus.sources import CorpusConfig
from rqwen3_pipeline.corpus.stamps import (
    begin,
    current,
    input_of,
    required_stamp,
    settings_sha256,
    stamp_path,
    survivors_stamp_path,
    tokens_stamp_path,
    verify_inputs,
    write_stamp,
)
from rqwen3_pipeline.corpus.tokenizer import Encoder, load_encoder, make_tokenizer, pin_tokenizer, train_tokenizer
from rqwen3_pipeline.settings import RunRoot

__all__ = ["make_tokenizer", "oracle_sample", "pin_tokenizer", "tokenize_file", "tokenize_inputs", "train_tokenizer"]

BATCH_CHARS, BATCH_DOCUMENTS, READ_ROWS = 2_000_000, 512, 128
ORACLE_ONE_IN = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class _Survivor:
    index: int
    row: int
    id: str
    url: str
    text: str
    digest: bytes
    heldout: bool


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
        (root.tokenizer, stamp_path(root.tokenizer)),
    ]
    inputs: dict[str, str] = {}
    for path, stamp in places:
        inputs |= input_of(root, required_stamp(stamp, str(path)), path)
    return inputs


def tokenize_file(
    root: RunRoot, config: CorpusConfig, lock: Lock, source: str, key: str, rebuild: bool = False
) -> dict[str, Any]:
    """Turn one file's surviving documents into shards, training and held-out.

    Returns:
        The report: `documents`, `tokens`, `text_bytes`, `heldout_documents`, `heldout_tokens`, `shards`,
        `heldout_shards` (sidecars), `engine`, `oracle_documents`.

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
        with (
            ShardWriter(root.path, root.tokens, heldout=False, **facts) as training,
            ShardWriter(root.path, root.heldout, heldout=True, **facts) as heldout,
        ):
            checked = _encode_all(root, config, source, key, encoder, (training, heldout))
        report = _report(training, heldout, encoder, checked)
        outputs = training.files + heldout.files
        stamp = write_stamp(
            root, path, stage="tokens", settings=settings, inputs=inputs, outputs=outputs, report=report
        )
    return stamp.report


def _report(training: ShardWriter, heldout: ShardWriter, encoder: Encoder, checked: int) -> dict[str, Any]:
    report: dict[str, Any] = {"engine": encoder.engine, "oracle_documents": checked}
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
) -> int:
    """Encode batch by batch; returns how many documents the oracle has encoded again."""
    survivors = np.load(root.survivors(source, key), allow_pickle=False)
    sample = oracle_sample(len(survivors), config.oracle_documents) if encoder.engine != "tokenizers" else set[int]()
    for batch in _batches(_survivors(root, config, source, key, survivors)):
        arrays = encoder.encode([document.text for document in batch])
        chosen = [i for i, document in enumerate(batch) if document.index in sample]
        expected = encoder.encode_by_oracle([batch[i].text for i in chosen])
        for i, ids_ in zip(chosen, expected, strict=True):
            if not np.array_equal(arrays[i], ids_):
                raise CorpusError(
                    f"filtered/{source}/{key}.parquet: {encoder.engine} and tokenizers give document {batch[i].id} "
                    f"(row {batch[i].row}) different ids. Nothing of this partition counts; report the document."
                )
        for document, ids_ in zip(batch, arrays, strict=True):
            writers[document.heldout].add(
                np.append(ids_, np.uint32(encoder.eos_id)),
                row=document.row,
                id=document.id,
                url=document.url,
                digest=document.digest,
                text_bytes=len(document.text.encode("utf-8")),
            )
    return len(sample)


def oracle_sample(documents: int, least: int) -> set[int]:
    """Which documents are encoded twice: evenly spread, `least` or 0.1 %, whichever is more."""
    count = min(documents, max(least, math.ceil(documents / ORACLE_ONE_IN)))
    return {i * documents // count for i in range(count)}


def _survivors(
    root: RunRoot, config: CorpusConfig, source: str, key: str, survivors: npt.NDArray[np.uint32]
) -> Iterator[_Survivor]:
    digest_ = np.load(root.digests(source, key), allow_pickle=False, mmap_mode="r") if len(survivors) else None
    if digest_ is None:
        return
    heldout_ = heldout_mask(np.asarray(digest_), config.heldout_one_in)
    first, index = 0, 0
    with pq.ParquetFile(root.filtered(source, key), pre_buffer=False) as file:
        for batch in file.iter_batches(batch_size=READ_ROWS, use_threads=False):
            inside = survivors[index : index + int(np.searchsorted(survivors[index:], first + batch.num_rows))]
            records = batch.take(pa.array((inside - first).tolist(), type=pa.int64())).to_pylist()
            for position, record in zip(inside.tolist(), records, strict=True):
                yield _Survivor(
                    index=index, digest=digest_[position].tobytes(), heldout=bool(heldout_[position]), **record
                )
                index += 1
            first += batch.num_rows


def _batches(documents: Iterator[_Survivor]) -> Iterator[list[_Survivor]]:
    batch: list[_Survivor] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += len(document.text)
        if chars >= BATCH_CHARS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
