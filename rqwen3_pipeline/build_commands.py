"""The commands that make a corpus and answer for it: `rqwen3 corpus build | stitch | verify | card`."""

import json
from collections.abc import Sequence
from pathlib import Path

import click

from model.errors import ConfigError
from model.files import hold_lock, read_json
from model.shard_format import read_manifest
from rqwen3_pipeline.cli_common import say
from rqwen3_pipeline.corpus.build import BuildOptions, Built, Outcome, build_files, finish, items_of, require_whole
from rqwen3_pipeline.corpus.claims import claimed_in_turn
from rqwen3_pipeline.corpus.data_card import data_card
from rqwen3_pipeline.corpus.lock import Lock, read_lock
from rqwen3_pipeline.corpus.origin import lock_origin
from rqwen3_pipeline.corpus.promises import PROMISES
from rqwen3_pipeline.corpus.selection import select_files
from rqwen3_pipeline.corpus.shares import shortfalls
from rqwen3_pipeline.corpus.sources import CorpusConfig, corpus_config
from rqwen3_pipeline.progress import Progress
from rqwen3_pipeline.settings import RunRoot, Settings

TO_BE_CONTINUED = 75
"""Exit code of a build that has done what it could, and must be called again; as the trainer's."""


class _StageProgress:
    """One bar a stage, out of outcomes as they come."""

    def __init__(self, config: CorpusConfig, lock: Lock, items: Sequence[tuple[str, str]]) -> None:
        groups = {config.group_of(source) for source, _ in items}
        self._totals = {"survivors": len(groups)}
        self._files, self._stage, self._bar = len(items), "", Progress("", 0)

    def __call__(self, outcome: Outcome) -> None:
        if outcome.stage != self._stage:
            self.close()
            self._stage = outcome.stage
            unit = "groups" if outcome.stage == "survivors" else "files"
            self._bar = Progress(outcome.stage, self._totals.get(outcome.stage, self._files), unit)
        state = "failed" if outcome.error else "current" if outcome.skipped else f"{outcome.seconds:.1f} s"
        tokens = (outcome.report or {}).get("tokens")
        pace = f", {tokens / max(outcome.seconds, 1e-9):,.0f} tokens/s" if tokens and not outcome.skipped else ""
        self._bar.advance(f"{outcome.source}/{outcome.key} {state}{pace}")

    def close(self) -> None:
        """End the bar that is shown."""
        self._bar.__exit__(None, None, None)


def build(settings: Settings, named: Sequence[str], files: str | None, until: str, wait_s: float, rebuild: bool) -> int:
    """Build the whole corpus up to its manifest, or some files of it up to a stage.

    Builds of different files work side by side; of two that want the same file the second is refused.

    Args:
        settings: the settings in force.
        named: sources; none for all.
        files: numbers of files in the lock; None for all.
        until: the last stage; `manifest` for everything.
        wait_s: how long other builds may show nothing new while this one waits for their digests.
        rebuild: replace what other settings made.

    Returns:
        0, or 75 if it has to be called again once others have made their files.

    Raises:
        ConfigError: a source is unknown, or has no such files.
        LockHeldError: another process is at one of the files.
        CorpusError: pieces failed; the others are made.
    """
    config, root = corpus_config(settings.run_config), settings.root
    if not named and files is None and until == "manifest":
        with hold_lock(root.path / ".run.lock", "rqwen3 corpus build"):
            _finish(settings, config, _locked(settings, config, anew=True), wait_s, rebuild)
        return 0
    lock = _locked(settings, config, anew=False)
    items = select_files(config, lock, named, files)
    last = "tokens" if until == "manifest" else until
    progress = _StageProgress(config, lock, items)
    built = build_files(root, config, lock, items, _options(settings, progress, wait_s, rebuild, last))
    progress.close()
    require_whole(built)
    return _told(built, items, last)


def _told(built: Built, items: Sequence[tuple[str, str]], last: str) -> int:
    if not built.waits_for:
        say(f"{len(items)} files are made, up to {last}; when all are: rqwen3 corpus stitch")
        return 0
    first = " ".join(f"{source}/{key}" for source, key in built.waits_for[:3])
    click.echo(
        f"{len(items)} files have their digests. Deduplication waits for those of {len(built.waits_for)} other files, "
        f"which nobody is making now ({first}{' …' if len(built.waits_for) > 3 else ''}). Make those, then run the "
        "same command again; or, to be content with digests: --until digests"
    )
    return TO_BE_CONTINUED


def _options(
    settings: Settings, progress: _StageProgress, wait_s: float, rebuild: bool, until: str = "tokens"
) -> BuildOptions:
    return BuildOptions(
        tokenizer_file=settings.tokenizer,
        workers=settings.workers,
        until=until,
        wait_s=wait_s,
        progress=progress,
        rebuild=rebuild,
    )


def _locked(settings: Settings, config: CorpusConfig, anew: bool) -> Lock:
    """The lock; of builds that begin together the first one makes it, and the others take it as it is."""
    root = settings.root
    with claimed_in_turn(root, "lock", [("sources", "all")]):
        if anew or not root.lock.exists():
            return lock_origin(root, config, settings.run_config.training, settings.sources)
    return read_lock(root)


def _finish(settings: Settings, config: CorpusConfig, lock: Lock, wait_s: float, rebuild: bool = False) -> None:
    """Do what is left, fold the manifest, and say what is missing of the budgets."""
    progress = _StageProgress(config, lock, items_of("raw", config, lock))
    options = _options(settings, progress, wait_s, rebuild)
    report = finish(settings.root, config, lock, settings.run_config.training, options)
    progress.close()
    for source, sentence in shortfalls(report["sources"]).items():
        repeats = f"{source}: smaller than its budget; the run reads documents of it again (data.allow_repeats)."
        say(f"  {repeats if config.data.allow_repeats else sentence}", err=True)
    click.echo(f"{report['tokens_used']:,} tokens for training of {report['tokens']:,}, in {report['shards']} shards")
    click.echo(str(settings.root.manifest))


def stitch_roots(settings: Settings, others: Sequence[Path]) -> None:
    """Merge what other run roots made into this one, do what is left, and fold the manifest.

    Raises:
        ConfigError: a folder is no run root.
        CorpusError: they do not belong together, or files are in none of them.
        LockHeldError: another build or run is at work here.
    """
    from rqwen3_pipeline.corpus.stitch import stitch

    config, root = corpus_config(settings.run_config), settings.root
    for path in others:
        if not path.is_dir():
            raise ConfigError(f"{path}: no such folder. Name run roots (their RQWEN3_HOME).")
    with hold_lock(root.path / ".run.lock", "rqwen3 corpus stitch"):
        roots = [RunRoot(path.resolve()) for path in others]
        stitch(root, config, roots, lambda stage, taken: click.echo(f"  {stage}: {taken} pieces taken", err=True))
        _finish(settings, config, read_lock(root), wait_s=0.0)


def verify_corpus(settings: Settings, as_json: bool) -> int:
    """Check every promise of the corpus, and print each defect with the command that repairs it.

    Returns:
        0, or 1 if a promise is broken.

    Raises:
        CorpusError: there is no manifest.
    """
    from rqwen3_pipeline.corpus.verify import verify

    root, run = settings.root, settings.run_config
    manifest = read_manifest(root.manifest)
    with Progress("verify", len(manifest.shards) + len(manifest.heldout), "shards") as progress:
        found = verify(root, corpus_config(run), run.training, settings.workers, progress.advance)
    broken = sum(map(len, found.values()))
    if as_json:
        click.echo(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        for name, defects in found.items():
            click.echo(f"{'broken' if defects else 'kept':<7} {name:<12} {PROMISES[name]}")
            for defect in defects:
                say(f"        {defect}")
        click.echo(f"{broken} defects" if broken else "every promise is kept")
    return 1 if broken else 0


def print_card(settings: Settings) -> None:
    """Print the data card of the manifest.

    Raises:
        CorpusError: there is no manifest.
    """
    read_manifest(settings.root.manifest)
    click.echo(data_card(read_json(settings.root.manifest)), nl=False)
