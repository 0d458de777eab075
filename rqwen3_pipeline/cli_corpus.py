"""`rqwen3 sources …` and `rqwen3 corpus …`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rqwen3_pipeline.cli_common import FILE, FOLDER, settings_of

if TYPE_CHECKING:
    from rqwen3_pipeline.settings import Settings


@click.group()
def sources() -> None:
    """The source files: pin them, fetch them."""


@sources.command("lock")
@click.option("--folder", type=FOLDER, help="A folder with the six sources, instead of what the profile says.")
@click.option("--update", is_flag=True, help="Ask the Hub what is there now, though the files are locked already.")
@click.pass_context
def sources_lock(ctx: click.Context, folder: Path | None, update: bool) -> None:
    """Pin which files are read: data sets, revisions, paths, sizes, SHA-256."""
    from rqwen3_pipeline.source_commands import lock_sources

    settings = settings_of(ctx, sources=folder)
    lock_sources(settings, update)
    _register(settings)


def _register(settings: "Settings") -> None:
    """Tell an instance, if there is one, which files are locked now."""
    if not (settings.root.dagster_home / "dagster.yaml").is_file():
        return
    import warnings

    warnings.filterwarnings("ignore", module="dagster")
    from rqwen3_pipeline.assets.sources import register_partitions
    from rqwen3_pipeline.corpus.lock import read_lock
    from rqwen3_pipeline.instance import existing_instance

    register_partitions(existing_instance(settings), read_lock(settings.root))


@sources.command("fetch")
@click.option("--source", "named", multiple=True, metavar="NAME", help="Only this source; may be given several times.")
@click.option("--files", metavar="N-M", help="Only these files of the lock, from 0: 3, 3-7, or 0,3-7.")
@click.option("--workers", type=click.IntRange(1, 1024), help="Processes. [RQWEN3_WORKERS, 2]")
@click.pass_context
def sources_fetch(ctx: click.Context, named: tuple[str, ...], files: str | None, workers: int | None) -> None:
    """Bring the locked files into the run root, verified by size and SHA-256."""
    from rqwen3_pipeline.source_commands import fetch_sources

    ctx.exit(fetch_sources(settings_of(ctx, workers=workers), named, files))


@click.group()
def corpus() -> None:
    """The corpus, without Dagster."""


@corpus.command("build")
@click.option("--sources", "folder", type=FOLDER, help="A folder with the six sources.")
@click.option("--source", "named", multiple=True, metavar="NAME", help="Only this source; may be given several times.")
@click.option("--files", metavar="N-M", help="Only these files of the lock, from 0: 3, 3-7, or 0,3-7.")
@click.option(
    "--until",
    type=click.Choice(["raw", "filtered", "digests", "survivors", "tokens", "manifest"]),
    default="manifest",
    help="The last stage to do. [all of them; of some files all but the manifest]",
)
@click.option("--wait-s", default=600.0, show_default=True, help="How long others may show nothing new.")
@click.option("--tokenizer", type=FILE, help="The tokenizer.json to pin.")
@click.option("--workers", type=click.IntRange(1, 1024), help="Processes. [RQWEN3_WORKERS, 2]")
@click.option("--rebuild", is_flag=True, help="Replace the pieces that other settings made, instead of refusing.")
@click.pass_context
def corpus_build(
    ctx: click.Context, folder: Path | None, tokenizer: Path | None, workers: int | None, **options: Any
) -> None:
    """Build every piece that is missing, from the lock to the manifest; or some files, side by side with others."""
    from rqwen3_pipeline.build_commands import build

    ctx.exit(build(settings_of(ctx, sources=folder, tokenizer=tokenizer, workers=workers), **options))


@corpus.command("stitch")
@click.argument("roots", nargs=-1, type=FOLDER, metavar="[ROOT]...")
@click.option("--tokenizer", type=FILE, help="The tokenizer.json to pin.")
@click.option("--workers", type=click.IntRange(1, 1024), help="Processes. [RQWEN3_WORKERS, 2]")
@click.pass_context
def corpus_stitch(ctx: click.Context, roots: tuple[Path, ...], tokenizer: Path | None, workers: int | None) -> None:
    """Merge what separate jobs made, in this run root or in ROOTs, into one corpus with its manifest."""
    from rqwen3_pipeline.build_commands import stitch_roots

    stitch_roots(settings_of(ctx, tokenizer=tokenizer, workers=workers), roots)


@corpus.command("verify")
@click.option("--workers", type=click.IntRange(1, 1024), help="Threads. [RQWEN3_WORKERS, 2]")
@click.option("--json", "as_json", is_flag=True, help="For a program: the defects of each promise.")
@click.pass_context
def corpus_verify(ctx: click.Context, workers: int | None, as_json: bool) -> None:
    """Make every hash and count of the corpus again; name each defect, and the command that repairs it."""
    from rqwen3_pipeline.build_commands import verify_corpus

    ctx.exit(verify_corpus(settings_of(ctx, workers=workers), as_json))


@corpus.command("card")
@click.pass_context
def corpus_card(ctx: click.Context) -> None:
    """Print the data card, made from the manifest."""
    from rqwen3_pipeline.build_commands import print_card

    print_card(settings_of(ctx))


@corpus.command("filter")
@click.option("--source", "named", multiple=True, metavar="NAME", help="Only this source; may be given several times.")
@click.option("--files", metavar="N-M", help="Only these files of the lock, from 0: 3, 3-7, or 0,3-7.")
@click.option("--workers", type=click.IntRange(1, 1024), help="Processes. [RQWEN3_WORKERS, 2]")
@click.option("--rebuild", is_flag=True, help="Replace what other settings made, instead of refusing.")
@click.pass_context
def corpus_filter(
    ctx: click.Context, named: tuple[str, ...], files: str | None, workers: int | None, rebuild: bool
) -> None:
    """Filter the fetched files that are not filtered yet, and count why documents go."""
    from rqwen3_pipeline.corpus_commands import filter_files

    ctx.exit(filter_files(settings_of(ctx, workers=workers), named, files, rebuild))


@corpus.command("funnel")
@click.option("--source", "named", multiple=True, metavar="NAME", help="Only this source; may be given several times.")
@click.option("--json", "as_json", is_flag=True, help="For a program.")
@click.pass_context
def corpus_funnel(ctx: click.Context, named: tuple[str, ...], as_json: bool) -> None:
    """How many rows of each source were kept, and why the others were not."""
    from rqwen3_pipeline.corpus_commands import print_funnel

    print_funnel(settings_of(ctx), named, as_json)


@corpus.command("show")
@click.option("--source", required=True, metavar="NAME")
@click.option(
    "--dropped-for", "reason", required=True, metavar="REASON", help="A reason of the funnel; kept is one too."
)
@click.option("-n", "count", default=5, show_default=True, type=click.IntRange(1), help="How many, evenly spread.")
@click.option("--chars", default=1500, show_default=True, type=click.IntRange(1), help="Characters of each to print.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a document, whole.")
@click.pass_context
def corpus_show(ctx: click.Context, source: str, reason: str, count: int, chars: int, as_json: bool) -> None:
    """Print the documents behind a number of the funnel, read again from the raw files."""
    from rqwen3_pipeline.corpus_commands import show_documents

    show_documents(settings_of(ctx), source, reason, count, chars, as_json)
