"""Stitching: pieces made in other run roots become pieces of this one, as if they had been made here.

Taken is what is whole and what this configuration would make of this lock; a piece made with other
settings, of another lock or with another tokenizer is refused by name, and so is one that two builds
made differently. Pieces get a second name here (a hard link, which takes no space), or are copied from
another file system. Costs one small read for each piece and root.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from model.errors import CorpusError
from model.files import atomic_path, read_json, require_free_bytes, sha256_file
from rqwen3_pipeline.corpus.build import STAGES
from rqwen3_pipeline.corpus.lock import Lock, origin_path, read_lock
from rqwen3_pipeline.corpus.manifest import manifest_settings
from rqwen3_pipeline.corpus.pieces import Item, facts_of, items_of
from rqwen3_pipeline.corpus.sources import CorpusConfig
from rqwen3_pipeline.corpus.stamps import Stamp, begin, difference, matches, read_stamp, stamp_path
from rqwen3_pipeline.settings import RunRoot

APART = "Pieces of different corpora are never mixed"


def stitch(
    root: RunRoot,
    config: CorpusConfig,
    others: Sequence[RunRoot],
    progress: Callable[[str, int], None] | None = None,
) -> dict[str, int]:
    """Take over what other run roots have made.

    Args:
        root: the run root that gets it; it takes the lock of the first other one if it has none.
        config: what the corpus is made of.
        others: the run roots.
        progress: called with each stage and how many of its pieces were taken.

    Returns:
        How many pieces were taken, by stage.

    Raises:
        CorpusError: a run root does not belong to this corpus, or files are in none of them; the message
            names the difference, or the command that makes them.
    """
    others = [other for other in others if other.path != root.path]
    if not root.lock.exists() and others:
        read_lock(others[0])
        _take(root, others[0], [path for path in (origin_path(others[0]), others[0].lock) if path.exists()])
    lock = read_lock(root)
    for other in others:
        _require_same_lock(root, lock, other)
    _require_one_tokenizer([root, *others])
    for other in others:
        _require_same_settings(config, other)
    taken: dict[str, int] = {}
    for stage in ("raw", "filtered", "digests", "survivors", "tokenizer", "tokens"):
        items = [("tokenizer", "all")] if stage == "tokenizer" else items_of(stage, config, lock)
        taken[stage] = sum(_take_piece(stage, root, config, lock, item, others) for item in items)
        if progress is not None:
            progress(stage, taken[stage])
    _require_digests(root, config, lock, others)
    return taken


def _require_same_lock(root: RunRoot, lock: Lock, other: RunRoot) -> None:
    theirs = read_lock(other)
    if theirs.sha256 != lock.sha256:
        name, before, after = difference(_files_of(theirs), _files_of(lock))
        raise CorpusError(
            f"{other.path}: made from another lock than {root.path}: {name or 'the seed or the origin'} is {before!r} "
            f"there and {after!r} here. {APART}; build the files again from one lock."
        )


def _require_same_settings(config: CorpusConfig, other: RunRoot) -> None:
    """Refuse a run root whose manifest was made with other settings; of pieces each is looked at later."""
    if other.manifest.exists():
        settings: Any = read_json(other.manifest).get("settings", {})
        stages = ("filtered", "digests", "survivors", "tokenizer", "tokens")
        old, new = ({s: values.get(s) for s in stages} for values in (settings, manifest_settings(config)))
        if old != new:
            name, before, after = difference(old, new)
            raise CorpusError(
                f"{other.manifest}: made with {name} = {before!r}, now {name} = {after!r}. {APART}; name the profile "
                "that made it (--profile), or build those files again."
            )


def _files_of(lock: Lock) -> dict[str, dict[str, str]]:
    return {
        source: {f"file {number}": f"{file.path} {file.sha256[:12]}" for number, file in enumerate(files)}
        for source, files in lock.sources.items()
    }


def _require_one_tokenizer(roots: Sequence[RunRoot]) -> None:
    seen = {root.path: sha256_file(root.tokenizer) for root in roots if root.tokenizer.is_file()}
    for path, sha256 in seen.items():
        first = next(iter(seen))
        if sha256 != seen[first]:
            raise CorpusError(
                f"{path}: its tokenizer.json has SHA-256 {sha256[:12]}…, that of {first} {seen[first][:12]}…. {APART}; "
                "build the one with the tokenizer of the other again."
            )


def _facts(stage: str, root: RunRoot, config: CorpusConfig, lock: Lock, item: Item) -> tuple[Path, dict[str, Any], Any]:
    if stage == "tokenizer":  # of which documents it was made is looked at when it is used
        stamp = read_stamp(stamp_path(root.tokenizer))
        return stamp_path(root.tokenizer), config.settings_for("tokenizer"), stamp.inputs if stamp else {}
    return facts_of(stage, root, config, lock, item)


def _whole(stage: str, root: RunRoot, config: CorpusConfig, lock: Lock, item: Item) -> tuple[Path, Stamp] | None:
    """The stamp of a piece that is there, whole and of these inputs.

    Raises:
        CorpusError: it was made with other settings.
    """
    try:
        path, settings, inputs = _facts(stage, root, config, lock, item)
        stamp = read_stamp(path)
    except CorpusError:
        return None  # an earlier stage is not made there, or a stamp is damaged
    if stamp is None:
        return None
    if stamp.settings != settings:
        name, before, after = difference(stamp.settings, settings)
        raise CorpusError(f"{path}: made with {name} = {before!r}, now {name} = {after!r}. {APART}.")
    return (path, stamp) if matches(root, stamp, settings, inputs) else None


def _take_piece(
    stage: str, root: RunRoot, config: CorpusConfig, lock: Lock, item: Item, others: Sequence[RunRoot]
) -> int:
    """Take a piece from the first that has it; returns how many were taken. All that have it must agree."""
    here = _whole(stage, root, config, lock, item)
    taken = 0
    for other in others:
        there = _whole(stage, other, config, lock, item)
        if there is None:
            continue
        path, stamp = there
        if here is not None:
            _require_equal(here, there)
            continue
        target = root.path / path.relative_to(other.path)
        begin(target, *(root.path / name for name in stamp.outputs))
        _take(root, other, [*(other.path / name for name in stamp.outputs), path])
        here, taken = (target, stamp), 1
    return taken


def _require_equal(here: tuple[Path, Stamp], there: tuple[Path, Stamp]) -> None:
    for name, facts in here[1].outputs.items():
        other = there[1].outputs.get(name, {})
        if other != facts:
            raise CorpusError(
                f"{name}: of {there[0]} it has SHA-256 {str(other.get('sha256'))[:12]}…, of {here[0]} "
                f"{facts['sha256'][:12]}…, made from the same with the same settings: by different versions of the "
                f"program or its libraries. {APART}; delete the stamp of the one that is to go, and build it again."
            )


def _take(root: RunRoot, other: RunRoot, paths: Sequence[Path]) -> None:
    """Give files of another run root the same names here, in the order given."""
    for path in paths:
        target = root.path / path.relative_to(other.path)
        if target.exists() and target.samefile(path):
            continue
        with atomic_path(target) as temporary:
            try:
                os.link(path.resolve(), temporary)
            except OSError:  # another file system, or one without hard links
                require_free_bytes(target.parent, path.stat().st_size, f"copying {path}")
                shutil.copyfile(path, temporary)


def _require_digests(root: RunRoot, config: CorpusConfig, lock: Lock, others: Sequence[RunRoot]) -> None:
    missing = list(_missing(root, config, lock))
    if missing:
        source, key, stage = missing[0]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        where = " or ".join(str(each.path) for each in (root, *others))
        number = [file.key for file in lock.files(source)].index(key)
        raise CorpusError(
            f"{source}/{key}{more}: its {stage} are not made in {where}. Make it in one of them: "
            f"rqwen3 corpus build --source {source} --files {number}"
        )


def _missing(root: RunRoot, config: CorpusConfig, lock: Lock) -> Iterator[tuple[str, str, str]]:
    for item in items_of("digests", config, lock):
        for stage in STAGES[:3]:
            if _whole(stage, root, config, lock, item) is None:
                yield *item, {"raw": "raw files", "filtered": "documents"}.get(stage, stage)
                break
