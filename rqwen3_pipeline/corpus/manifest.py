"""The manifest: one file that says what the corpus is, a pure fold over sidecars and stamps.

Documents are taken in (source, lock order, row) until a source's budget is full, to the token. The
same inputs and settings give the same bytes, whatever the workers and restarts: no times, no
absolute paths, no host. The data card is written from it, beside it. Costs one small read per partition
and shard, and some columns of the table of the shard in which the budget ends and of StackExchange's.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (pyarrow ships no types)

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from model.errors import CorpusError
from model.files import read_json, sha256_bytes, sha256_file, sweep_dead, write_bytes
from model.shard_format import FORMAT_VERSION, docs_path, sidecar_path
from rqwen3_pipeline.corpus.data_card import card_path, data_card
from rqwen3_pipeline.corpus.lock import Lock
from rqwen3_pipeline.corpus.shares import site_tokens
from rqwen3_pipeline.corpus.sources import CorpusConfig, budgets
from rqwen3_pipeline.corpus.stamps import (
    AGAIN,
    Stamp,
    matches,
    relative,
    required_stamp,
    settings_sha256,
    stamp_path,
    survivors_stamp_path,
    tokens_stamp_path,
)
from rqwen3_pipeline.corpus.tokenization import tokenize_inputs
from rqwen3_pipeline.corpus.tokenizer import EOS_TOKEN
from rqwen3_pipeline.settings import RunRoot

__all__ = ["budgets", "compose_manifest", "fold_manifest", "manifest_bytes", "manifest_settings"]

_SHARD_KEYS = ("path", "source", "partition", "part", "tokens", "documents", "text_bytes", "sha256")


def manifest_settings(config: CorpusConfig) -> dict[str, Any]:
    """All settings that shape the corpus, by stage, as the manifest carries and hashes them."""
    stages = ("filtered", "digests", "survivors", "tokenizer", "tokens", "manifest")
    return {stage: config.settings_for(stage) for stage in stages}


def fold_manifest(root: RunRoot, config: CorpusConfig, lock: Lock, budget: Mapping[str, int]) -> dict[str, Any]:
    """Write `manifest.json` and its data card; equal ones are left alone.

    Args:
        root: the run root.
        config: what the corpus is made of.
        lock: its files.
        budget: tokens wanted of each source, from `budgets`.

    Returns:
        The report: `sha256`, `settings_sha256`, `documents`, `tokens`, `tokens_used`, `heldout_documents`,
        `heldout_tokens`, `missing_tokens`, `shards`, and `sources` as in the manifest.

    Raises:
        CorpusError: a partition is missing, or not made from what is there now.
    """
    content = compose_manifest(root, config, lock, budget)
    data, sources = manifest_bytes(content), content["sources"]
    for path, wanted in ((root.manifest, data), (card_path(root), data_card(content).encode("utf-8"))):
        sweep_dead(path)
        if not path.exists() or path.read_bytes() != wanted:
            write_bytes(path, wanted)
    sums = {
        name: sum(item[name] for item in sources.values())
        for name in ("documents", "tokens", "tokens_used", "heldout_documents", "heldout_tokens", "missing_tokens")
    }
    hashes = {"sha256": sha256_bytes(data), "settings_sha256": content["settings_sha256"]}
    return hashes | sums | {"shards": len(content["shards"]), "sources": sources}


def compose_manifest(root: RunRoot, config: CorpusConfig, lock: Lock, budget: Mapping[str, int]) -> dict[str, Any]:
    """The manifest's content, from sidecars and stamps; writes nothing.

    Raises:
        CorpusError: a partition is missing, or not made from what is there now.
    """
    sources: dict[str, Any] = {}
    shards: list[dict[str, Any]] = []
    heldout: list[dict[str, Any]] = []
    for source in config.sources:
        stamps = [_tokens_stamp(root, config, source, file.key) for file in lock.files(source)]
        used, stopped_at = _cut(root, _sidecars(root, stamps, "shards"), budget[source])
        held = _sidecars(root, stamps, "heldout_shards")
        sources[source] = _account(root, config, lock, source, used, held, budget[source], stopped_at)
        shards += used
        heldout += held
    settings = manifest_settings(config)
    return {
        "format_version": FORMAT_VERSION,
        "tokenizer": _tokenizer(root, config),
        "settings": settings,
        "settings_sha256": settings_sha256(settings),
        "lock_sha256": lock.sha256,
        "sources": sources,
        "shards": shards,
        "heldout": heldout,
    }


def manifest_bytes(content: dict[str, Any]) -> bytes:
    """The manifest as it is written."""
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


def _tokens_stamp(root: RunRoot, config: CorpusConfig, source: str, key: str) -> Stamp:
    path = tokens_stamp_path(root, source, key)
    stamp = required_stamp(path, f"the partition {source}/{key}")
    if not matches(root, stamp, config.settings_for("tokens"), tokenize_inputs(root, config, source, key)):
        raise CorpusError(
            f"{path}: this partition was made with other settings or from other inputs than are there now, or a "
            f"shard of it is gone or cut. Make it again: {AGAIN}"
        )
    return stamp


def _sidecars(root: RunRoot, stamps: list[Stamp], which: str) -> list[dict[str, Any]]:
    """The entries of all shards, in (lock order, part), each checked against its partition's stamp."""
    entries: list[dict[str, Any]] = []
    for stamp in stamps:
        for name in stamp.report[which]:
            path = sidecar_path(root.path / name)
            if sha256_file(path) != stamp.outputs[relative(root, path)]["sha256"]:
                raise CorpusError(f"{path}: changed after it was written. Delete it and run again: {AGAIN}")
            sidecar = read_json(path)
            if sidecar["sha256"] != stamp.outputs[name]["sha256"]:
                raise CorpusError(f"{path}: its SHA-256 is not the shard's. Delete it and run again: {AGAIN}")
            entries.append({key: sidecar[key] for key in _SHARD_KEYS} | {"tokens_used": sidecar["tokens"]})
    return entries


def _cut(
    root: RunRoot, entries: list[dict[str, Any]], budget_tokens: int
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Use shards until the budget is full; where it ends within the tokens there are, say where."""
    left = budget_tokens
    stopped_at: dict[str, Any] | None = None
    used: list[dict[str, Any]] = []
    total = sum(entry["tokens"] for entry in entries)
    for entry in entries:
        take = min(left, entry["tokens"])
        left -= take
        used.append(entry | {"tokens_used": take})
        if take and not left and budget_tokens < total:
            stopped_at = _place(root, entry, take)
    return used, stopped_at


def _place(root: RunRoot, entry: dict[str, Any], tokens_used: int) -> dict[str, Any]:
    table = pq.read_table(docs_path(root.path / entry["path"]), columns=["end", "row"])
    end_ = table.column("end").to_numpy()
    index = int(np.searchsorted(end_, tokens_used))
    return {
        "shard": entry["path"],
        "document": index,
        "row": int(table.column("row")[index].as_py()),
        "tokens_used": tokens_used,
        "cut_tokens": int(end_[index]) - tokens_used,
    }


def _account(
    root: RunRoot,
    config: CorpusConfig,
    lock: Lock,
    source: str,
    shards: list[dict[str, Any]],
    heldout: list[dict[str, Any]],
    budget_tokens: int,
    stopped_at: dict[str, Any] | None,
) -> dict[str, Any]:
    funnel: dict[str, int] = {}
    counts = {"rows": 0, "kept": 0, "kept_chars": 0, "repaired": 0}
    for file in lock.files(source):
        path = root.filtered(source, file.key)
        report = required_stamp(stamp_path(path), str(path)).report
        for name in counts:
            counts[name] += report[name]
        for reason, count in report["funnel"].items():
            funnel[reason] = funnel.get(reason, 0) + count
    group = config.group_of(source)
    survivors = required_stamp(survivors_stamp_path(root, group), f"the deduplication of {group}").report[source]
    tokens_used = sum(entry["tokens_used"] for entry in shards)
    pin = lock.pins.get(source)
    return {
        "pin": asdict(pin) if pin else None,
        "files": len(lock.files(source)),
        **counts,
        "share_kept": round(counts["kept"] / counts["rows"], 6) if counts["rows"] else None,
        "funnel": dict(sorted(funnel.items())),
        "shadowed": survivors["shadowed"],
        "shadowed_by": survivors["shadowed_by"],
        "documents": sum(entry["documents"] for entry in shards),
        "tokens": sum(entry["tokens"] for entry in shards),
        "text_bytes": sum(entry["text_bytes"] for entry in shards),
        "heldout_documents": sum(entry["documents"] for entry in heldout),
        "heldout_tokens": sum(entry["tokens"] for entry in heldout),
        "heldout_text_bytes": sum(entry["text_bytes"] for entry in heldout),
        "share": config.sources[source].share,
        "budget_tokens": budget_tokens,
        "tokens_used": tokens_used,
        "met": tokens_used == budget_tokens,
        "missing_tokens": budget_tokens - tokens_used,
        "stopped_at": stopped_at,
    } | ({"sites": site_tokens(root, shards)} if source == "stackexchange" else {})


def _tokenizer(root: RunRoot, config: CorpusConfig) -> dict[str, Any]:
    report = required_stamp(stamp_path(root.tokenizer), str(root.tokenizer)).report
    return {
        "path": relative(root, root.tokenizer),
        "kind": report["kind"],
        "sha256": report["sha256"],
        "vocab_size": report["vocab_size"],
        "embedding_rows": config.embedding_rows,
        "eos_id": report["eos_id"],
        "eos_token": EOS_TOKEN,
    }
