"""The data card: Markdown with the Hub's YAML header, from the manifest and from nothing else.

So the same manifest gives the same card, on any machine, long after the run root is gone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rqwen3_pipeline.corpus.shares import realised_shares, shortfalls
from rqwen3_pipeline.corpus.sources import GROUPS
from rqwen3_pipeline.settings import RunRoot

LICENCES = {
    "HuggingFaceFW/fineweb-edu": "ODC-BY 1.0; the pages keep their own terms (Common Crawl's terms of use)",
    "wikimedia/wikipedia": "CC BY-SA 3.0 and GFDL",
    "open-web-math/open-web-math": "ODC-BY 1.0; the pages keep their own terms (Common Crawl's terms of use)",
    "HuggingFaceH4/stack-exchange-preferences": "CC BY-SA 4.0; attribution by question address and author",
    "HuggingFaceTB/cosmopedia": "Apache-2.0; written by Mixtral-8x7B-Instruct",
}
"""What the data sets' own cards say."""
UNKNOWN_LICENCE = "not known here: see the data set's own card"
LOCAL_LICENCE = "files of a local folder: their own licence holds"
SIZES = (
    *((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M")),
    *((10**8, "10M<n<100M"), (10**9, "100M<n<1B")),
)
"""The Hub's size categories, by the number of documents that is above each."""
SITES_SHOWN = 40

Facts = Mapping[str, Any]


def card_path(root: RunRoot) -> Path:
    """Beside the manifest."""
    return root.manifest.with_name("DATA_CARD.md")


def data_card(manifest: Facts) -> str:
    """The card of a manifest.

    Args:
        manifest: the content of `manifest.json`.
    """
    parts = (_intro, _sources, _funnels, _dedup, _tokens, _heldout, _files, _again, _limits)
    header = yaml.safe_dump(_header(manifest), sort_keys=False, allow_unicode=True)
    return f"---\n{header}---\n\n" + "\n\n".join(part(manifest) for part in parts) + "\n"


def _header(manifest: Facts) -> dict[str, Any]:
    sources: Mapping[str, Facts] = manifest["sources"]
    documents = sum(facts["documents"] for facts in sources.values())
    datasets = sorted({facts["pin"]["dataset"] for facts in sources.values() if facts["pin"]})
    return {
        "pretty_name": "RQwen3 pretraining corpus",
        "language": ["en"],
        "license": "other",
        "license_name": "several-by-source",
        "task_categories": ["text-generation"],
        "size_categories": [next((name for limit, name in SIZES if documents < limit), "n>1B")],
        "source_datasets": datasets or ["original"],
        "tags": ["pretraining", "tokenized", *sources],
        "viewer": False,
    }


def _intro(manifest: Facts) -> str:
    sources: Mapping[str, Facts] = manifest["sources"]
    used, tokens = (sum(facts[key] for facts in sources.values()) for key in ("tokens_used", "tokens"))
    documents = sum(facts["documents"] for facts in sources.values())
    return (
        "# RQwen3 pretraining corpus\n\n"
        f"{used:,} tokens for training, cut to the token from {tokens:,} tokens of {documents:,} documents of "
        f"{len(sources)} sources. Filtered by rule, deduplicated exactly, tokenized; every document can be traced back "
        "to its row in the source. This card is generated from `manifest.json` alone."
    )


def _sources(manifest: Facts) -> str:
    rows: list[Sequence[Any]] = []
    for name, facts in manifest["sources"].items():
        pin: dict[str, str] | None = facts["pin"]
        if pin is None:
            rows.append((name, "local folder", "–", "–", facts["files"], LOCAL_LICENCE))
        else:
            where = f"[{pin['dataset']}](https://huggingface.co/datasets/{pin['dataset']})"
            licence = LICENCES.get(pin["dataset"], UNKNOWN_LICENCE)
            rows.append((name, where, pin["config"] or "–", f"`{pin['revision']}`", facts["files"], licence))
    return "## Sources and licences\n\n" + _table(
        ("source", "data set", "configuration", "revision", "files", "licence"), rows
    )


def _funnels(manifest: Facts) -> str:
    rows: list[Sequence[Any]] = []
    for name, facts in manifest["sources"].items():
        others = sorted(((r, n) for r, n in facts["funnel"].items() if r != "kept" and n), key=lambda x: (-x[1], x[0]))
        dropped = ", ".join(f"{reason} {count:,}" for reason, count in others) or "none"
        rows.append((name, facts["rows"], facts["kept"], _percent(facts["kept"], facts["rows"]), dropped))
    limits: Mapping[str, Facts] = {name: manifest["settings"]["filtered"][name] for name in manifest["sources"]}
    rules = [
        f"- {name}: " + ", ".join(f"{key} {value}" for key, value in limit.items() if key != "rules" and value)
        for name, limit in limits.items()
    ]
    repaired = sum(facts["repaired"] for facts in manifest["sources"].values())
    return (
        "## Filters\n\n"
        + _table(("source", "rows", "kept", "%", "dropped, by reason"), rows)
        + "\n\nLimits:\n\n"
        + "\n".join(rules)
        + "\n\nTexts are in Unicode's form NFC; lengths count code points. What is no UTF-8 became U+FFFD, in "
        + f"{repaired:,} rows."
    )


def _dedup(manifest: Facts) -> str:
    sources: Mapping[str, Facts] = manifest["sources"]
    rows: list[Sequence[Any]] = []
    for name, facts in sources.items():
        by = ", ".join(f"{other} {count:,}" for other, count in facts["shadowed_by"].items()) or "–"
        rows.append((name, facts["shadowed"], _percent(facts["shadowed"], facts["kept"]), by))
    pairs = [" then ".join(s for s in members if s in sources) for members in GROUPS.values() if len(members) > 1]
    return (
        "## Deduplication\n\nExact, by SHA-256 of the text: within each source over all its files, and across "
        + "; ".join(pairs)
        + " (of equal documents the first source's copy stays).\n\n"
        + _table(("source", "copies dropped", "% of kept", "the copy that stayed is in"), rows)
    )


def _tokens(manifest: Facts) -> str:
    tokenizer = manifest["tokenizer"]
    rows = [
        (r["source"], r["site"] or "all", r["tokens_used"], r["wanted_percent"] or "–", r["realised_percent"])
        for r in _shown(realised_shares(manifest["sources"]))
    ]
    return (
        "## Tokens\n\n"
        + _table(("source", "site", "tokens used", "wanted %", "realised %"), rows)
        + f"\n\nTokenizer: {tokenizer['kind']}, {tokenizer['vocab_size']:,} ids (the embedding has "
        + f"{tokenizer['embedding_rows']:,} rows), SHA-256 `{tokenizer['sha256']}`. Markup in a document is text; "
        + f"`{tokenizer['eos_token']}` ({tokenizer['eos_id']}) follows each document, nothing precedes it."
    )


def _shown(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All sources, and the largest sites; the others as one line."""
    sites = [record for record in records if record["site"]]
    rest = sites[SITES_SHOWN:]
    if not rest:
        return records
    line = {"source": rest[0]["source"], "site": f"{len(rest)} others", "wanted_percent": None}
    line |= {key: round(sum(record[key] for record in rest), 3) for key in ("tokens_used", "realised_percent")}
    index = records.index(sites[-1])
    return [record for record in records[: index + 1] if record not in rest] + [line] + records[index + 1 :]


def _heldout(manifest: Facts) -> str:
    one_in = manifest["settings"]["tokens"]["heldout_one_in"]
    rows = [
        (name, facts["heldout_documents"], facts["heldout_tokens"], facts["heldout_text_bytes"])
        for name, facts in manifest["sources"].items()
    ]
    return (
        f"## Held-out documents\n\nOne document in {one_in:,}, by its digest (its first eight bytes, big-endian, are a "
        f"multiple of {one_in}), before any budget is cut: no held-out document is in training.\n\n"
        + _table(("source", "documents", "tokens", "bytes of text"), rows)
    )


def _files(manifest: Facts) -> str:
    return (
        f"## Files\n\n{len(manifest['shards']):,} shards `tokens/<source>-<file>-<part>.bin`, flat little-endian "
        f"uint32 without a header, and {len(manifest['heldout']):,} held-out ones in `tokens/heldout/`. Beside each a "
        "sidecar `.json` (counts, SHA-256) and a table `.docs.parquet` (end, tokens, bytes, row, id, url and digest of "
        "each document). `manifest.json` lists them in reading order."
    )


def _again(manifest: Facts) -> str:
    return (
        "## How to make it again\n\nWith the same `sources.lock.json`, `tokenizer.json` and configuration:\n\n```\n"
        "rqwen3 sources fetch\nrqwen3 corpus build\nrqwen3 corpus verify\n```\n\n"
        "The bytes do not depend on workers, restarts or the order of the work. Compare:\n\n"
        + _table(
            ("what", "SHA-256"),
            [
                ("`sources.lock.json`", f"`{manifest['lock_sha256']}`"),
                ("`tokenizer.json`", f"`{manifest['tokenizer']['sha256']}`"),
                ("settings", f"`{manifest['settings_sha256']}`"),
            ],
        )
        + "\n\n`rqwen3 trace --step S --sequence I` leads from a training sequence to its documents."
    )


def _limits(manifest: Facts) -> str:
    lines = [
        "Deduplication is exact: near-copies, and copies across sources that are not compared, stay.",
        "Nothing was searched for personal data or the questions of benchmarks beyond what the sources' makers did.",
        "Quality is what the sources' own scores and lengths say; no document was read by a person.",
        "English by the sources' own choice; no language was detected here.",
    ]
    if any(facts["stopped_at"] for facts in manifest["sources"].values()):
        lines.append("The last document that a budget takes may be cut, and then lacks its end-of-text id.")
    lines += shortfalls(manifest["sources"]).values()
    lines += [f"{name}: no held-out document." for name, f in manifest["sources"].items() if not f["heldout_documents"]]
    return "## Known limits\n\n" + "\n".join(f"- {line}" for line in lines)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}" if whole else "–"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *([f"{x:,}" if isinstance(x, int) else str(x) for x in row] for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
