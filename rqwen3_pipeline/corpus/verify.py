"""Verifies a built corpus from the files alone: every hash and count is made again.

Nothing that was written about a piece is believed: shards are read whole (hash, ids, ends of
documents in one go), tables are read, digests compared, the manifest folded again. Costs one read
of every shard and table, on as many threads as workers; memory stays below that of deduplication.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (pyarrow ships no types)

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from model.config import TrainConfig
from model.errors import CorpusError
from model.files import read_json, sha256_file
from model.shard_format import docs_path, read_manifest, sidecar_path
from rqwen3_pipeline.corpus.buckets import Digests, shadow_pairs
from rqwen3_pipeline.corpus.data_card import card_path, data_card
from rqwen3_pipeline.corpus.dedup import heldout_mask
from rqwen3_pipeline.corpus.lock import read_lock
from rqwen3_pipeline.corpus.manifest import budgets, compose_manifest, manifest_bytes, manifest_settings
from rqwen3_pipeline.corpus.promises import PROMISES
from rqwen3_pipeline.corpus.shard_scan import ShardScan, digests_of, scan_shard
from rqwen3_pipeline.corpus.shares import shortfalls
from rqwen3_pipeline.corpus.sources import CorpusConfig
from rqwen3_pipeline.corpus.stamps import AGAIN, read_stamp, tokens_stamp_path
from rqwen3_pipeline.settings import SOURCES, RunRoot

MOST_NAMED = 5
"""Documents that a promise names before it only counts them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """What the promises look at."""

    root: RunRoot
    config: CorpusConfig
    training: TrainConfig
    content: dict[str, Any]
    """Of `manifest.json`."""
    scans: dict[str, ShardScan]
    """What each shard's files hold, by the shard's path; those that are not there are left out."""

    @property
    def entries(self) -> list[dict[str, Any]]:
        """All shards as the manifest lists them, training first."""
        return [*self.content["shards"], *self.content["heldout"]]

    def repair(self, entry: dict[str, Any]) -> str:
        """The command that makes a shard's partition again."""
        stamp = tokens_stamp_path(self.root, entry["source"], entry["partition"])
        return f"Make the partition again: rm -f {shlex.quote(str(stamp))} && {AGAIN}"

    def scanned(self) -> Iterator[tuple[dict[str, Any], ShardScan]]:
        """The shards whose files can be read."""
        return ((entry, self.scans[entry["path"]]) for entry in self.entries if entry["path"] in self.scans)


def verify(
    root: RunRoot,
    config: CorpusConfig,
    training: TrainConfig,
    workers: int = 1,
    progress: Callable[[str], None] | None = None,
) -> dict[str, list[str]]:
    """Check every promise of a built corpus.

    Args:
        root: the run root.
        config: what the corpus is made of.
        training: decides the budgets.
        workers: threads.
        progress: called with each shard's path when it was read.

    Returns:
        For each of `PROMISES` one sentence a defect, which names the command that repairs it.

    Raises:
        CorpusError: there is no manifest, or it can't be read.
    """
    read_manifest(root.manifest)
    content: dict[str, Any] = read_json(root.manifest)
    scans: dict[str, ShardScan] = {}
    entries = [*content["shards"], *content["heldout"]]

    def scan(entry: dict[str, Any]) -> ShardScan | None:
        path, eos_id = root.path / entry["path"], content["tokenizer"]["eos_id"]
        return scan_shard(path, eos_id) if path.is_file() else None

    with ThreadPoolExecutor(workers) as pool:
        for entry, found in zip(entries, pool.map(scan, entries), strict=True):
            if found is not None:
                scans[entry["path"]] = found
            if progress is not None:
                progress(entry["path"])
    corpus = Corpus(root=root, config=config, training=training, content=content, scans=scans)
    return {name: _CHECKS[name](corpus) for name in PROMISES}


def _tokenizer(corpus: Corpus) -> list[str]:
    path, wanted = corpus.root.tokenizer, corpus.content["tokenizer"]["sha256"]
    seen = sha256_file(path) if path.is_file() else ""
    problems: list[str] = []
    if seen != wanted:
        is_ = f"SHA-256 {seen[:12]}…" if seen else "not there"
        problems.append(
            f"{path}: {is_}; the shards were made with {wanted[:12]}…. Bring that one back, or make all "
            f"shards again: rm -f {shlex.quote(str(path.with_suffix('.stamp.json')))} && {AGAIN} --rebuild"
        )
    for entry in corpus.entries:
        made_with = str(_sidecar(corpus, entry).get("tokenizer_sha256", wanted))
        if made_with != wanted:
            problems.append(
                f"{entry['path']}: made with tokenizer {made_with[:12]}…, the manifest names {wanted[:12]}…. "
                f"{corpus.repair(entry)}"
            )
    return problems


def _sidecar(corpus: Corpus, entry: dict[str, Any]) -> dict[str, Any]:
    try:
        found: Any = read_json(sidecar_path(corpus.root.path / entry["path"]))
    except (CorpusError, OSError):
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


def _files(corpus: Corpus) -> list[str]:
    problems: list[str] = []
    listed: set[Path] = set()
    for entry in corpus.entries:
        shard = corpus.root.path / entry["path"]
        for path, what in ((shard, "shard"), (sidecar_path(shard), "sidecar"), (docs_path(shard), "table")):
            listed.add(path)
            if not path.is_file():
                others = "its sidecar" if path == shard and sidecar_path(shard).is_file() else "the manifest"
                others = "its shard" if path != shard and shard.is_file() else others
                problems.append(f"{path}: the {what} is not there, {others} is. {corpus.repair(entry)}")
    unused = set(SOURCES) - set(corpus.config.sources)  # left by a profile that uses them, for its next build
    for folder in (corpus.root.tokens, corpus.root.heldout):
        for path in sorted(folder.glob("*")):
            if path.name.partition("-")[0] in unused:
                continue
            if path.is_file() and path not in listed and not path.name.endswith(".stamp.json"):
                shard = path.with_name(path.name.partition(".")[0] + ".bin")
                alone = "" if shard == path or shard.is_file() else " and has no shard"
                problems.append(f"{path}: not listed in the manifest{alone}. Delete it: rm -f {shlex.quote(str(path))}")
    return problems


def _hashes(corpus: Corpus) -> list[str]:
    problems: list[str] = []
    for entry, scan in corpus.scanned():
        shard = corpus.root.path / entry["path"]
        outputs = _stamped(corpus, entry)
        for path, promised in (
            (shard, entry["sha256"]),
            (sidecar_path(shard), outputs.get(sidecar_path(shard))),
            (docs_path(shard), outputs.get(docs_path(shard))),
        ):
            seen = scan.sha256 if path == shard else sha256_file(path) if path.is_file() else promised
            if seen != promised:
                says = f"{promised[:12]}… was promised" if promised else "its partition's stamp does not name it"
                problems.append(f"{path}: SHA-256 {str(seen)[:12]}…, {says}. {corpus.repair(entry)}")
    return problems


def _stamped(corpus: Corpus, entry: dict[str, Any]) -> dict[Path, str]:
    """The hashes that a shard's partition was stamped with."""
    try:
        stamp = read_stamp(tokens_stamp_path(corpus.root, entry["source"], entry["partition"]))
    except (CorpusError, OSError):
        return {}
    return {corpus.root.path / name: facts["sha256"] for name, facts in stamp.outputs.items()} if stamp else {}


def _counts(corpus: Corpus) -> list[str]:
    problems: list[str] = []
    for entry, scan in corpus.scanned():
        sidecar, wanted = _sidecar(corpus, entry), {key: entry[key] for key in ("tokens", "documents", "text_bytes")}
        says = {"the sidecar": {key: sidecar.get(key) for key in wanted}, "the shard": {"tokens": scan.tokens}}
        if scan.table is None:
            problems.append(f"{entry['path']}: {scan.table_problem}. {corpus.repair(entry)}")
        else:
            table = scan.table
            says["the table"] = {"tokens": table.tokens, "documents": table.documents, "text_bytes": table.text_bytes}
            if not table.ascends:
                problems.append(f"{entry['path']}: the table's ends and lengths disagree. {corpus.repair(entry)}")
        for who, counts in says.items():
            for key, count in counts.items():
                if count != wanted[key]:
                    problems.append(
                        f"{entry['path']}: {who} has {count} {key}, the manifest {wanted[key]}. {corpus.repair(entry)}"
                    )
        if scan.size_bytes % 4:
            problems.append(
                f"{entry['path']}: {scan.size_bytes:,} bytes are not a whole number of uint32 tokens. "
                f"{corpus.repair(entry)}"
            )
    return problems


def _ids(corpus: Corpus) -> list[str]:
    size = corpus.content["tokenizer"]["vocab_size"]
    return [
        f"{entry['path']}: holds the id {scan.largest_id:,}; the tokenizer has {size:,}. {corpus.repair(entry)}"
        for entry, scan in corpus.scanned()
        if scan.largest_id >= size
    ]


def _end_of_text(corpus: Corpus) -> list[str]:
    problems: list[str] = []
    for entry, scan in corpus.scanned():
        if scan.eos_count != entry["documents"]:
            problems.append(
                f"{entry['path']}: {scan.eos_count:,} end-of-text ids, {entry['documents']:,} documents. "
                f"{corpus.repair(entry)}"
            )
        elif scan.eos_misplaced:
            problems.append(f"{entry['path']}: an end-of-text id is not where a document ends. {corpus.repair(entry)}")
    return problems


def _unique(corpus: Corpus) -> list[str]:
    problems: list[str] = []
    for group, members in corpus.config.groups().items():
        entries = [e for e, scan in corpus.scanned() if e["source"] in members and scan.table is not None]
        starts_ = np.cumsum([0, *(corpus.scans[entry["path"]].documents for entry in entries)])

        def read(entries: Sequence[dict[str, Any]] = entries) -> Iterator[Digests]:
            return (part_ for entry in entries for part_ in digests_of(corpus.root.path / entry["path"]))

        def name(place: int, entries: Sequence[dict[str, Any]] = entries, starts_: Any = starts_) -> str:
            index = int(np.searchsorted(starts_, place, side="right")) - 1
            return f"{entries[index]['path']} {place - starts_[index]}"

        found: list[str] = []
        count = 0
        for later_, first_ in shadow_pairs(read, int(starts_[-1])):
            count += len(later_)
            room = MOST_NAMED - len(found)
            pairs = zip(later_[:room].tolist(), first_[:room].tolist(), strict=True)
            found += [f"{name(later)} and {name(first)}" for later, first in pairs]
        if count:
            stamp = corpus.root.path / "survivors" / f"{group}.json"
            problems.append(
                f"{group}: {count:,} documents are there twice, as (shard, document) {'; '.join(found)}. Deduplicate "
                f"and tokenize again: rm -f {shlex.quote(str(stamp))} "
                f"{shlex.quote(str(corpus.root.tokens))}/*.stamp.json && {AGAIN}"
            )
    return problems


def _heldout(corpus: Corpus) -> list[str]:
    one_in, held = corpus.content["settings"]["tokens"]["heldout_one_in"], len(corpus.content["shards"])
    problems: list[str] = []
    for number, entry in enumerate(corpus.entries):
        scan = corpus.scans.get(entry["path"])
        if scan is None or scan.table is None:
            continue
        wrong = sum(
            int((heldout_mask(part_, one_in) != (number >= held)).sum())
            for part_ in digests_of(corpus.root.path / entry["path"])
        )
        if wrong:
            kind = "are to be trained on" if number >= held else "are held out by their digests, but lie in training"
            problems.append(f"{entry['path']}: {wrong:,} documents {kind}. {corpus.repair(entry)}")
    return problems


def _budgets(corpus: Corpus) -> list[str]:
    return [] if corpus.config.data.allow_repeats else list(shortfalls(corpus.content["sources"]).values())


def _manifest(corpus: Corpus) -> list[str]:
    path, card = corpus.root.manifest, card_path(corpus.root)
    try:
        lock = read_lock(corpus.root)
        content = compose_manifest(corpus.root, corpus.config, lock, budgets(corpus.config, corpus.training))
    except (CorpusError, OSError, KeyError) as error:
        return [f"{path}: can't be folded again ({error}). Mend that, then fold it: {AGAIN}"]
    if path.read_bytes() != manifest_bytes(content):
        where, old, new = first_difference(corpus.content, content)
        return [f"{path}: {where} is {old}, the pieces and the configuration give {new}. Fold it again: {AGAIN}"]
    if not card.is_file() or card.read_text(encoding="utf-8") != data_card(content):
        return [f"{card}: not the card of this manifest. Write it again: {AGAIN}"]
    return []


def unmet(root: RunRoot, config: CorpusConfig, training: TrainConfig) -> list[str]:
    """What the manifest alone shows to be missing for a run: made by other settings, for less, or short of tokens.

    A run that wants less of each source than the manifest holds may share it, and one that may read documents again
    any. The pieces behind it need not be there any more.

    Raises:
        CorpusError: there is no manifest, or it can't be read.
    """
    read_manifest(root.manifest)
    content: dict[str, Any] = read_json(root.manifest)
    made, wanted = content["settings"], json.loads(json.dumps(manifest_settings(config)))
    if made != wanted:
        where, old, new = first_difference(made, wanted)
        return [f"{root.manifest}: made with {where} = {old}, the configuration gives {new}. Make it anew: {AGAIN}"]
    if config.data.allow_repeats:
        return []
    short = {name: _short_of(content["sources"][name], tokens) for name, tokens in budgets(config, training).items()}
    return made_for_less(root, config, training) or list(shortfalls(short).values())


def _short_of(facts: dict[str, Any], tokens: int) -> dict[str, Any]:
    """What a manifest says of a source, as if so many tokens of it had been wanted."""
    return facts | {"budget_tokens": tokens, "missing_tokens": tokens - facts["tokens_used"]}


def made_for_less(root: RunRoot, config: CorpusConfig, training: TrainConfig) -> list[str]:
    """Sources of which the manifest was made for fewer tokens than a run wants."""
    sources = read_json(root.manifest)["sources"]
    return [
        f"{root.manifest}: made for {sources[name]['budget_tokens']:,} tokens of {name}, the configuration wants "
        f"{tokens:,}. Make it anew: {AGAIN}"
        for name, tokens in budgets(config, training).items()
        if sources[name]["budget_tokens"] < tokens
    ]


def first_difference(old: Any, new: Any, where: str = "") -> tuple[str, str, str]:
    """Where two JSON values differ first, and what stands there in each, shortened."""
    if isinstance(old, dict) and isinstance(new, dict):
        one, other = cast(dict[str, Any], old), cast(dict[str, Any], new)
        for key in dict.fromkeys([*one, *other]):
            if one.get(key) != other.get(key):
                return first_difference(one.get(key), other.get(key), f"{where}.{key}" if where else key)
    if isinstance(old, list) and isinstance(new, list):
        rows, others = cast(list[Any], old), cast(list[Any], new)
        for index in range(max(len(rows), len(others))):
            pair = [items[index] if index < len(items) else None for items in (rows, others)]
            if pair[0] != pair[1]:
                return first_difference(pair[0], pair[1], f"{where}[{index}]")
    shown = [f"{str(value)[:60]}…" if len(str(value)) > 60 else str(value) for value in (old, new)]
    return where or "the layout", shown[0], shown[1]


_CHECKS: dict[str, Callable[[Corpus], list[str]]] = {
    "tokenizer": _tokenizer,
    "files": _files,
    "hashes": _hashes,
    "counts": _counts,
    "ids": _ids,
    "end_of_text": _end_of_text,
    "unique": _unique,
    "heldout": _heldout,
    "budgets": _budgets,
    "manifest": _manifest,
}
assert list(_CHECKS) == list(PROMISES)
