"""The commands over the source files: `rqwen3 sources lock | fetch`."""

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Sequence

import click

from model.files import hold_lock
from rqwen3_pipeline.cli_common import say
from rqwen3_pipeline.corpus.build import run_stage
from rqwen3_pipeline.corpus.fetch import arrived_bytes
from rqwen3_pipeline.corpus.lock import Lock, read_lock
from rqwen3_pipeline.corpus.origin import lock_origin
from rqwen3_pipeline.corpus.pieces import Item, Outcome
from rqwen3_pipeline.corpus.selection import select_files
from rqwen3_pipeline.corpus.sources import corpus_config
from rqwen3_pipeline.progress import Progress
from rqwen3_pipeline.settings import RunRoot, Settings

LOOK_EVERY_S = 1.0


def lock_sources(settings: Settings, update: bool) -> None:
    """Lock the sources and print what is locked.

    Raises:
        SourceError: they can't be locked; an earlier lock stays.
        LockHeldError: a run or a build is at work in this run root.
    """
    run = settings.run_config
    config = corpus_config(run)
    with hold_lock(settings.root.path / ".run.lock", "rqwen3 sources lock"):
        lock = lock_origin(
            settings.root,
            config,
            run.training,
            settings.sources,
            update,
            say=lambda sentence: say(f"  {sentence}", err=True),
        )
    for source, files in lock.sources.items():
        pin = lock.pins.get(source)
        where = f"  {pin.dataset} {pin.config} {pin.revision[:12]}" if pin else ""
        click.echo(f"{source:<14} {len(files):>4} files {sum(file.size_bytes for file in files):>16,} bytes{where}")
    say(f"from the folder {lock.origin}" if lock.origin else "from the Hub; next: rqwen3 sources fetch")
    click.echo(str(settings.root.lock))


@contextlib.contextmanager
def _arriving(root: RunRoot, lock: Lock, items: Sequence[Item]) -> Generator[Callable[[Outcome], None], None, None]:
    """Progress by bytes, inside the files too: looks every second at what has arrived."""
    total_bytes = sum(lock.file(*item).size_bytes for item in items)
    ended, guard, left = threading.Event(), threading.Lock(), len(items)
    with Progress("fetch", -(-total_bytes // 2**20), "MiB") as progress:

        def look(note: str) -> None:
            with guard:
                arrived_mib = -(-sum(arrived_bytes(root, lock, *item) for item in items) // 2**20)
                most = progress.total if left == 0 else progress.total - 1  # all is there when all is verified
                progress.to(max(0, min(arrived_mib, most)), note or progress.note)

        def watch() -> None:
            while not ended.wait(LOOK_EVERY_S):
                look("")

        def done(outcome: Outcome) -> None:
            nonlocal left
            left -= 1
            state = "failed" if outcome.error else "current" if outcome.skipped else f"{outcome.seconds:.0f} s"
            look(f"{outcome.source}/{outcome.key} {state}")

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield done
        finally:
            ended.set()
            watcher.join()


def fetch_sources(settings: Settings, named: Sequence[str], files: str | None) -> int:
    """Fetch the files that are meant, with progress.

    Args:
        settings: the settings in force.
        named: sources; none for all.
        files: numbers of files in the lock; None for all.

    Returns:
        0, or 1 if a file failed; it is named, and the others are there.

    Raises:
        ConfigError: a source is unknown, or has no such files.
        LockHeldError: another process is at one of the files.
        DiskSpaceError: they would not fit; nothing was begun.
        CorpusError: nothing is locked yet.
    """
    config, lock = corpus_config(settings.run_config), read_lock(settings.root)
    items = select_files(config, lock, named, files)
    sizes = {item: lock.file(*item).size_bytes for item in items}
    began = time.monotonic()
    with _arriving(settings.root, lock, items) as done:
        outcomes = run_stage("raw", settings.root, config, lock, items, settings.workers, done)
    failed = [outcome for outcome in outcomes if outcome.error]
    made = [outcome for outcome in outcomes if not outcome.error and not outcome.skipped]
    fetched_bytes = sum(sizes[outcome.source, outcome.key] for outcome in made)
    click.echo(
        f"{len(made)} files fetched, {len(items) - len(made) - len(failed)} current, {len(failed)} failed; "
        f"{fetched_bytes:,} bytes in {time.monotonic() - began:.1f} s"
    )
    for outcome in failed:
        say(f"{outcome.source}/{outcome.key}: {outcome.error}", err=True)
    return 1 if failed else 0
