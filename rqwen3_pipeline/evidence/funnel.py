"""The corpus funnel: how many rows each source had, where they went, and how many the run may read.

Three kinds of file are read, each written by another stage, so that they can be held against each
other: the filter's stamps (rows, reasons), the survivors' arrays (whose headers give their lengths)
and the manifest (documents, held-out, tokens, budget, and where it ended). Costs two small reads per
file of the lock.
"""

import itertools
from typing import Any

import numpy as np

from model.config import RunConfig
from model.shard_format import TOKEN_BYTES
from rqwen3_pipeline.corpus.sources import corpus_config
from rqwen3_pipeline.evidence.readings import Reader, figure, table_of, whole
from rqwen3_pipeline.settings import RunRoot


def corpus_evidence(reader: Reader, root: RunRoot, run: RunConfig, manifest: dict[str, Any] | None) -> dict[str, Any]:
    """The funnel per source, the shards' state, and the sum of all sources.

    Returns:
        `sources` [row per source], `totals`, `tokenizer_ids`; `shards` {count, bytes, bad: [...]} and `manifest_file`,
        both None while there is no manifest.
    """
    rows = [
        _source_row(reader, root, manifest, source, settings.share)
        for source, settings in corpus_config(run).sources.items()
    ]
    used = sum(row["tokens_used"] or 0 for row in rows)
    wanted = sum(row["share"] for row in rows)
    for row in rows:
        row["share_wanted"] = row["share"] / wanted
        row["share_realised"] = row["tokens_used"] / used if row["tokens_used"] is not None and used else None
    sums = ("rows", "kept", "duplicates", "heldout_documents", "documents", "documents_used", "tokens", "tokens_used")
    return {
        "manifest_file": reader.name(root.manifest) if manifest else None,
        "tokenizer_ids": figure(
            table_of((manifest or {}).get("tokenizer")).get("vocab_size"), reader.name(root.manifest)
        ),
        "sources": rows,
        "totals": {key: _sum(row[key] for row in rows) for key in sums},
        "shards": shards_state(root, manifest) if manifest else None,
    }


def _sum(values: Any) -> int | None:
    """Sum of the known values; None when none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _source_row(
    reader: Reader, root: RunRoot, manifest: dict[str, Any] | None, source: str, share: float
) -> dict[str, Any]:
    listed = table_of(table_of((manifest or {}).get("sources")).get(source))
    filtered = filter_counts(reader, root, source)
    survivors = survivor_count(root, source)
    dropped = {reason: count for reason, count in filtered["funnel"].items() if reason != "kept"}
    shards = [s for s in (manifest or {}).get("shards", []) if isinstance(s, dict) and s.get("source") == source]
    whole_documents, cut = used_documents(listed, shards)
    return {
        "source": source,
        "rows": filtered["rows"],
        "kept": filtered["kept"],
        "dropped": dropped,
        "survivors": survivors,
        "duplicates": filtered["kept"] - survivors if filtered["kept"] is not None and survivors is not None else None,
        "heldout_documents": whole(listed.get("heldout_documents")),
        "heldout_tokens": whole(listed.get("heldout_tokens")),
        "documents": whole(listed.get("documents")),
        "documents_used": whole_documents,
        "document_cut": cut,
        "tokens": whole(listed.get("tokens")),
        "tokens_used": whole(
            listed.get("tokens_used", sum(s.get("tokens_used", 0) for s in shards) if listed else None)
        ),
        "budget_tokens": whole(listed.get("budget_tokens")),
        "text_bytes": whole(listed.get("text_bytes")),
        "share": share,
        "from": [f"filtered/{source}/", f"survivors/{source}/", *([reader.name(root.manifest)] if listed else [])],
    }


def filter_counts(reader: Reader, root: RunRoot, source: str) -> dict[str, Any]:
    """Rows, kept rows and reasons of a source, summed over the stamps of its filtered files."""
    rows, kept, funnel = 0, 0, dict[str, int]()
    reports = [
        table_of(stamp.get("report"))
        for path in sorted((root.path / "filtered" / source).glob("*.stamp.json"))
        if (stamp := reader.table(path)) is not None
    ]
    for report in reports:
        rows += whole(report.get("rows")) or 0
        kept += whole(report.get("kept")) or 0
        for reason, count in table_of(report.get("funnel")).items():
            funnel[reason] = funnel.get(reason, 0) + (whole(count) or 0)
    if not reports:
        return {"rows": None, "kept": None, "funnel": {}}
    return {"rows": rows, "kept": kept, "funnel": funnel}


def survivor_count(root: RunRoot, source: str) -> int | None:
    """Documents of a source that survived deduplication, by the lengths of the survivors' arrays."""
    paths = sorted((root.path / "survivors" / source).glob("*.npy"))
    if not paths:
        return None
    try:
        return sum(int(np.load(path, mmap_mode="r", allow_pickle=False).shape[0]) for path in paths)
    except (ValueError, OSError, IndexError):
        return None


def used_documents(listed: dict[str, Any], shards: list[dict[str, Any]]) -> tuple[int | None, bool | None]:
    """How many whole documents a source's used part holds, and whether one more is cut.

    Args:
        listed: the source as the manifest lists it; `stopped_at` says where the budget ended.
        shards: its shards.

    Returns:
        (whole documents, whether one more is cut); (None, None) without a manifest.
    """
    if not listed:
        return None, None
    stop = table_of(listed.get("stopped_at"))
    if not stop:
        return sum(shard["documents"] for shard in shards if shard.get("tokens_used")), False
    before = itertools.takewhile(lambda shard: shard["path"] != stop["shard"], shards)
    cut = stop["cut_tokens"] > 0
    return sum(shard["documents"] for shard in before) + stop["document"] + (0 if cut else 1), cut


def shards_state(root: RunRoot, manifest: dict[str, Any]) -> dict[str, Any]:
    """Whether every shard that the manifest lists lies there with four bytes for each of its tokens."""
    listed = [s for key in ("shards", "heldout") for s in manifest.get(key, []) if isinstance(s, dict)]
    bad: list[str] = []
    size_bytes = 0
    for shard in listed:
        path, expected = root.path / str(shard.get("path")), (whole(shard.get("tokens")) or 0) * TOKEN_BYTES
        if not path.is_file():
            bad.append(f"{shard.get('path')}: not there")
        elif (actual := path.stat().st_size) != expected:
            bad.append(f"{shard.get('path')}: {actual:,} bytes instead of {expected:,}")
        else:
            size_bytes += actual
    return {"count": len(listed), "bytes": size_bytes, "bad": bad}
