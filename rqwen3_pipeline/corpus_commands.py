"""The commands over a corpus that is being filtered: `rqwen3 corpus filter | funnel | show`."""

import json
import sys
import time
from collections.abc import Sequence

import click

from rqwen3_pipeline.cli_common import say
from rqwen3_pipeline.corpus.build import run_stage
from rqwen3_pipeline.corpus.funnel import as_json as funnel_json
from rqwen3_pipeline.corpus.funnel import as_table, source_funnel
from rqwen3_pipeline.corpus.lock import Lock, read_lock
from rqwen3_pipeline.corpus.pieces import Outcome
from rqwen3_pipeline.corpus.selection import select_files, select_sources
from rqwen3_pipeline.corpus.show import as_json as document_json
from rqwen3_pipeline.corpus.show import as_text, documents_dropped
from rqwen3_pipeline.corpus.sources import CorpusConfig, corpus_config
from rqwen3_pipeline.progress import Progress
from rqwen3_pipeline.settings import Settings


def _corpus(settings: Settings) -> tuple[CorpusConfig, Lock]:
    config = corpus_config(settings.run_config)
    return config, read_lock(settings.root)


def filter_files(settings: Settings, named: Sequence[str], files: str | None, rebuild: bool) -> int:
    """Filter the files that are meant, with progress, and print their sources' funnels.

    Two calls work side by side on different files; of two that want the same file the second is refused.

    Args:
        settings: the settings in force.
        named: sources; none for all.
        files: numbers of files in the lock; None for all.
        rebuild: replace what other settings made.

    Returns:
        0, or 1 if a file failed; it is named, and the others are done.

    Raises:
        ConfigError: a source is unknown, or has no such files.
        LockHeldError: another process is at one of the files.
        CorpusError: nothing is locked yet.
    """
    config, lock = _corpus(settings)
    items = select_files(config, lock, named, files)
    began, rows = time.monotonic(), 0
    with Progress("filter", len(items), "files") as progress:

        def done(outcome: Outcome) -> None:
            nonlocal rows
            rows += 0 if outcome.skipped or outcome.report is None else int(outcome.report["rows"])
            progress.advance(_note(outcome))

        outcomes = run_stage("filtered", settings.root, config, lock, items, settings.workers, done, rebuild)
    failed = [outcome for outcome in outcomes if outcome.error]
    made = sum(not outcome.skipped for outcome in outcomes) - len(failed)
    seconds = time.monotonic() - began
    sources = dict.fromkeys(source for source, _ in items)
    click.echo(as_table({source: source_funnel(settings.root, config, lock, source) for source in sources}))
    click.echo(
        f"{made} files made, {len(items) - made - len(failed)} current, {len(failed)} failed; {rows:,} rows "
        f"in {seconds:.1f} s"
    )
    for outcome in failed:
        say(f"{outcome.source}/{outcome.key}: {outcome.error}", err=True)
    return 1 if failed else 0


def _note(outcome: Outcome) -> str:
    name = f"{outcome.source}/{outcome.key}"
    if outcome.report is None:
        return f"{name} failed"
    if outcome.skipped:
        return f"{name} current"
    rows, kept = outcome.report["rows"], outcome.report["kept"]
    return f"{name} kept {kept:,} of {rows:,}, {rows / max(outcome.seconds, 1e-9):,.0f} rows/s"


def print_funnel(settings: Settings, named: Sequence[str], as_json: bool) -> None:
    """Print the funnel of each source, as a table or as JSON.

    Raises:
        ConfigError: a source is unknown.
        CorpusError: nothing is locked yet.
    """
    config, lock = _corpus(settings)
    funnels = {s: source_funnel(settings.root, config, lock, s) for s in select_sources(config, named)}
    click.echo(json.dumps(funnel_json(funnels), indent=1) if as_json else as_table(funnels))


def show_documents(settings: Settings, source: str, reason: str, count: int, chars: int, as_json: bool) -> None:
    """Print documents of a source that were dropped for a reason.

    Raises:
        ConfigError: the source or the reason is unknown.
        CorpusError: nothing of it is there yet.
    """
    config, lock = _corpus(settings)
    (name,) = select_sources(config, [source])
    for shown in documents_dropped(settings.root, config, lock, name, reason, count):
        if as_json:
            click.echo(json.dumps(document_json(shown), ensure_ascii=False, default=repr))
        else:
            click.echo(f"{as_text(shown, chars)}\n\n{'-' * 100}")
    sys.stdout.flush()
