"""The whole corpus, stage by stage, on any number of processes, with the same bytes as the outcome.

A stage is a set of independent pieces, each skipped where its stamp is current: looking is all that
a second build costs. A piece that fails never stops the others.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from model.config import TrainConfig
from model.errors import CorpusError
from rqwen3_pipeline.corpus.claims import claimed, sweep_claims
from rqwen3_pipeline.corpus.fetch import require_space
from rqwen3_pipeline.corpus.lock import Lock
from rqwen3_pipeline.corpus.manifest import budgets, fold_manifest
from rqwen3_pipeline.corpus.origin import lock_origin
from rqwen3_pipeline.corpus.pieces import GROUP_KEY, Item, Outcome, Task, is_current, items_of, work
from rqwen3_pipeline.corpus.sources import STAGES, CorpusConfig
from rqwen3_pipeline.corpus.tokenization import make_tokenizer
from rqwen3_pipeline.corpus.workers import Pool
from rqwen3_pipeline.settings import RunRoot

__all__ = ["GROUP_KEY", "STAGES", "Outcome", "build_corpus", "items_of", "pending", "run_stage"]

MOST_NAMED = 5


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
    with claimed(root, task.stage, missing):
        for item in items:
            if item not in parallel:
                done(work(task, item))
        if pool is not None and parallel:
            pool.run(task, missing, done)
    sweep_claims(root, task.stage, items)
    return [outcomes[item] for item in items]


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
    failed: list[Outcome] = []

    def do(stage: str, pool: Pool | None) -> None:
        lost = {(o.source, o.key) for o in failed}
        spoilt = {config.group_of(source) for source, _ in lost if source in config.sources} | {s for s, _ in lost}
        items = items_of(stage, config, lock)
        if stage == "survivors":
            items = [item for item in items if item[0] not in spoilt]
        elif stage == "tokens":
            items = [item for item in items if config.group_of(item[0]) not in spoilt]
        else:
            items = [item for item in items if item not in lost]
        task = Task(stage=stage, root=root.path, config=config, lock=lock, rebuild=rebuild)
        failed.extend(outcome for outcome in _run(task, items, pool, progress) if outcome.error)

    with Pool(workers) as maybe:
        pool = maybe if workers > 1 else None
        for stage in ("raw", "filtered", "digests", "survivors"):
            do(stage, pool)
        if not failed or config.tokenizer.kind == "pinned":
            make_tokenizer(root, config, lock, tokenizer_file, rebuild)
            do("tokens", pool)
    if failed:
        lines = [f"{o.stage} {o.source}/{o.key}: {o.error}" for o in failed[:MOST_NAMED]]
        lines += [f"and {len(failed) - MOST_NAMED} more"] if len(failed) > MOST_NAMED else []
        listed = "\n  ".join(lines)
        raise CorpusError(
            f"{len(failed)} pieces of the corpus failed; the others are made and will not be made again:\n  {listed}"
        )
    return fold_manifest(root, config, lock, budgets(config, training))
