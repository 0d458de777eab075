"""The corpus or some files of it, stage by stage, on any number of processes; the same bytes as the outcome.

A stage is a set of independent pieces, each skipped where its stamp is current: looking is all that
a second build costs. A piece that fails never stops the others. Builds of different files work side by
side in one run root: each makes its files' digests, waits while others are at work on digests that its
deduplication needs, and goes on; whoever comes first does what all of them need.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.config import TrainConfig
from model.errors import CorpusError
from rqwen3_pipeline.corpus.claims import POLL_S, at_work, claimed, claimed_in_turn, sweep_claims
from rqwen3_pipeline.corpus.fetch import require_space
from rqwen3_pipeline.corpus.lock import Lock
from rqwen3_pipeline.corpus.manifest import budgets, fold_manifest
from rqwen3_pipeline.corpus.origin import lock_origin
from rqwen3_pipeline.corpus.pieces import GROUP_KEY, Item, Outcome, Task, is_current, items_of, work
from rqwen3_pipeline.corpus.sources import STAGES, CorpusConfig
from rqwen3_pipeline.corpus.tokenization import make_tokenizer
from rqwen3_pipeline.corpus.workers import Pool
from rqwen3_pipeline.settings import RunRoot

__all__ = [
    "GROUP_KEY",
    "STAGES",
    "BuildOptions",
    "Built",
    "Outcome",
    "build_corpus",
    "build_files",
    "finish",
    "items_of",
    "pending",
    "require_whole",
    "run_stage",
]

MOST_NAMED = 5
TOKENIZER: Item = ("tokenizer", GROUP_KEY)
"""The claim on the tokenizer."""

HTML_COST = 8
"""How much longer a file of HTML takes to filter than one of text of the same size, about."""
GRACE_S = 10.0
"""How long a build waits for files that nobody is at work on: a job beside it may just be starting."""


def pending(stage: str, root: RunRoot, config: CorpusConfig, lock: Lock, source: str) -> list[str]:
    """Keys of a source's pieces that are not there or not current, by their stamps alone.

    For `survivors`, `[GROUP_KEY]` if the source's group (or the group of that name) is to be done.
    """
    items = items_of(stage, config, lock, source)
    return [item[1] for item in items if not is_current(stage, root, config, lock, item)]


def run_stage(
    stage: str,
    root: RunRoot,
    config: CorpusConfig,
    lock: Lock,
    items: Sequence[Item],
    workers: int = 1,
    progress: Callable[[Outcome], None] | None = None,
    rebuild: bool = False,
) -> list[Outcome]:
    """Do pieces of one stage; one that fails never stops the others.

    Args:
        stage: `raw`, `filtered`, `digests`, `survivors` or `tokens`.
        root: the run root.
        config: what the corpus is made of.
        lock: its files.
        items: (source, key) of each piece; for `survivors`, (group, `GROUP_KEY`).
        workers: processes; 1 works in this one.
        progress: called with each outcome as it comes.
        rebuild: replace pieces made with other settings instead of refusing.

    Returns:
        One outcome an item, in the order of the items.

    Raises:
        LockHeldError: another process is making one of the pieces; none was begun here.
        DiskSpaceError: the files to fetch would not fit.
        ValueError: there is no such stage of pieces.
    """
    if stage not in STAGES[:-1]:
        raise ValueError(f"{stage!r} is no stage of pieces; those are {', '.join(STAGES[:-1])}")
    with Pool(workers) as pool:
        task = Task(stage=stage, root=root.path, config=config, lock=lock, rebuild=rebuild)
        return _run(task, items, pool if workers > 1 else None, progress)


def _run(
    task: Task, items: Sequence[Item], pool: Pool | None, progress: Callable[[Outcome], None] | None
) -> list[Outcome]:
    """One stage, over a pool or in this process; what is current is only looked at, and here."""
    root = RunRoot(task.root)
    outcomes: dict[Item, Outcome] = {}

    def done(outcome: Outcome) -> None:
        outcomes[outcome.source, outcome.key] = outcome
        if progress is not None:
            progress(outcome)

    missing = [item for item in items if not is_current(task.stage, root, task.config, task.lock, item)]
    if task.stage == "raw":
        require_space(root, task.lock, missing)
    parallel = set(missing if pool and len(missing) > 1 else [])
    if pool is not None and parallel and task.stage == "tokens":
        pool.load_tokenizer(root)  # nothing to do where it has begun to do so before
        pool.renew()
    with (claimed_in_turn if task.stage == "survivors" else claimed)(root, task.stage, missing):
        for item in items:
            if item not in parallel:
                done(work(task, item))
        if pool is not None and parallel:
            pool.run(task, largest_first(task, missing), done)
    sweep_claims(root, task.stage, items)
    return [outcomes[item] for item in items]


def largest_first(task: Task, items: Sequence[Item]) -> list[Item]:
    """Pieces in the order in which workers take them, so that none begins a long one when the others are done."""
    if task.stage == "survivors":
        return list(items)
    slow = {"stackexchange": HTML_COST} if task.stage == "filtered" else {}
    return sorted(items, key=lambda item: -task.lock.file(*item).size_bytes * slow.get(item[0], 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """What a build of some files came to."""

    failed: tuple[Outcome, ...] = ()
    """Pieces that failed."""
    waits_for: tuple[Item, ...] = ()
    """Files that nobody is at work on, and without whose digests (or documents) it could not go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildOptions:
    """How a build works; nothing here changes a byte."""

    tokenizer_file: Path | None = None
    """The tokenizer.json to pin, where the configuration pins one and the run root has none."""
    workers: int = 1
    """Processes."""
    until: str = "tokens"
    """The last stage to do."""
    wait_s: float = 600.0
    """How long others may be at work without anything new, before this build no longer waits for them."""
    progress: Callable[[Outcome], None] | None = None
    """Called with each outcome as it comes."""
    rebuild: bool = False
    """Replace pieces that other settings made, instead of refusing."""


def build_files(root: RunRoot, config: CorpusConfig, lock: Lock, items: Sequence[Item], options: BuildOptions) -> Built:
    """Do all stages of some files, up to their token shards; what is current is not touched.

    A piece that fails takes out what depends on it and nothing else.

    Args:
        root: the run root.
        config: what the corpus is made of.
        lock: its files.
        items: (source, key) of the files.
        options: how to work.

    Raises:
        DiskSpaceError: the files that are not fetched yet would not fit.
        LockHeldError: another process is making one of the pieces.
        SourceError: the tokenizer can't be had.
    """
    with Pool(options.workers) as pool:
        build = _Build(root, config, lock, options, pool if options.workers > 1 else None)
        stages = STAGES[: STAGES.index(options.until) + 1]
        if "tokens" in stages and config.tokenizer.kind == "pinned":  # first, for a wrong file would show after hours
            if build.pool is not None and not root.tokenizer.exists():  # a corpus that is all to be made
                build.pool.start()
            build.tokenizer(items)
        waits_for: tuple[Item, ...] = ()
        for stage in stages[:3]:
            lost = {(outcome.source, outcome.key) for outcome in build.failed}
            build.do(stage, [item for item in items if item not in lost])
        if "survivors" in stages:
            waits_for = build.survivors(items)
        if "tokens" in stages and not waits_for:
            waits_for = build.tokens(items)
    return Built(failed=tuple(build.failed), waits_for=waits_for)


@dataclass(slots=True)
class _Build:
    """A build of some files, as far as it has come."""

    root: RunRoot
    config: CorpusConfig
    lock: Lock
    options: BuildOptions
    pool: Pool | None
    failed: list[Outcome] = field(default_factory=list[Outcome])

    def do(self, stage: str, items: Sequence[Item]) -> None:
        """Make pieces of a stage."""
        options = self.options
        task = Task(stage=stage, root=self.root.path, config=self.config, lock=self.lock, rebuild=options.rebuild)
        self.failed += [o for o in _run(task, items, self.pool, options.progress) if o.error]

    def _sound(self, items: Sequence[Item]) -> list[Item]:
        """The files in whose groups nothing failed."""
        groups = {o.source if o.key == GROUP_KEY else self.config.group_of(o.source) for o in self.failed}
        return [item for item in items if self.config.group_of(item[0]) not in groups]

    def survivors(self, items: Sequence[Item]) -> tuple[Item, ...]:
        """Deduplicate the files' groups, once all their digests are there; returns those that nobody makes."""
        groups = list(dict.fromkeys(self.config.group_of(source) for source, _ in self._sound(items)))
        members = [item for group in groups for item in self._members(group)]
        waits_for = self._wait("digests", members)
        if not waits_for:
            self.do("survivors", [(group, GROUP_KEY) for group in groups])
        return waits_for

    def _members(self, group: str) -> list[Item]:
        return [(source, file.key) for source in self.config.groups()[group] for file in self.lock.files(source)]

    def tokens(self, items: Sequence[Item]) -> tuple[Item, ...]:
        """Tokenize the files; returns those whose documents a tokenizer must be trained on, and nobody filters."""
        if self.config.tokenizer.kind != "pinned":
            if self.failed:
                return ()
            if waits_for := self._wait("filtered", items_of("filtered", self.config, self.lock)):
                return waits_for
            self.tokenizer(items)
        self.do("tokens", self._sound(items))
        return ()

    def tokenizer(self, items: Sequence[Item]) -> None:
        """Pin or train the tokenizer, unless it is there, and have it loaded for those who tokenize the files."""
        with claimed_in_turn(self.root, "tokenizer", [TOKENIZER]):
            make_tokenizer(self.root, self.config, self.lock, self.options.tokenizer_file, self.options.rebuild)
        missing = [item for item in items if not is_current("tokens", self.root, self.config, self.lock, item)]
        if self.pool is not None and len(missing) > 1:
            self.pool.load_tokenizer(self.root, before=len(missing))

    def _wait(self, stage: str, items: Sequence[Item]) -> tuple[Item, ...]:
        """Wait until pieces are current, as long as others are at work; returns those that are not."""
        changed = time.monotonic()
        left = list(items)
        while True:
            before, left = left, [i for i in left if not is_current(stage, self.root, self.config, self.lock, i)]
            now = time.monotonic()
            changed = now if len(left) < len(before) else changed
            others = any(at_work(self.root, name, item) for item in left for name in ("raw", "filtered", "digests"))
            if not left or now - changed > (self.options.wait_s if others else min(GRACE_S, self.options.wait_s)):
                return tuple(left)
            time.sleep(POLL_S)


def build_corpus(
    root: RunRoot,
    config: CorpusConfig,
    training: TrainConfig,
    folder: Path | None,
    tokenizer_file: Path | None = None,
    workers: int = 1,
    progress: Callable[[Outcome], None] | None = None,
    rebuild: bool = False,
) -> dict[str, Any]:
    """Lock the sources' files and do all stages, up to the manifest; what is current is not touched.

    The files come from `folder`, or from where the profile says.

    A piece that fails takes out what depends on it and nothing else; the error comes at the end.

    Returns:
        The manifest's report, see `fold_manifest`.

    Raises:
        SourceError: the sources can't be locked.
        DiskSpaceError: the files that are not fetched yet would not fit.
        LockHeldError: another process is making one of the pieces.
        CorpusError: pieces failed; the message names the first ones.
    """
    lock = lock_origin(root, config, training, folder)
    options = BuildOptions(tokenizer_file=tokenizer_file, workers=workers, progress=progress, rebuild=rebuild)
    return finish(root, config, lock, training, options)


def finish(
    root: RunRoot, config: CorpusConfig, lock: Lock, training: TrainConfig, options: BuildOptions
) -> dict[str, Any]:
    """Do whatever is left of all files, and fold the manifest.

    Raises:
        CorpusError: pieces failed; the message names the first ones.
    """
    require_whole(build_files(root, config, lock, items_of("raw", config, lock), options))
    return fold_manifest(root, config, lock, budgets(config, training))


def require_whole(built: Built) -> None:
    """Check that no piece failed.

    Raises:
        CorpusError: some did; the message names the first ones.
    """
    failed = built.failed
    if failed:
        lines = [f"{o.stage} {o.source}/{o.key}: {o.error}" for o in failed[:MOST_NAMED]]
        lines += [f"and {len(failed) - MOST_NAMED} more"] if len(failed) > MOST_NAMED else []
        listed, count = "\n  ".join(lines), "1 piece" if len(failed) == 1 else f"{len(failed)} pieces"
        raise CorpusError(f"{count} of the corpus failed; the others are made and will not be made again:\n  {listed}")
