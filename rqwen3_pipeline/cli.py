"""`rqwen3 …`: every command, each importing what it needs only when it runs."""

import sys
from pathlib import Path
from typing import Any

import click

from model.errors import RQwen3Error

FOLDER = click.Path(path_type=Path, file_okay=False)
FILE = click.Path(path_type=Path, dir_okay=False)


class _Group(click.Group):
    """Turns the project's errors into one sentence and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RQwen3Error as error:
            click.echo(f"rqwen3: {error}", err=True)
            ctx.exit(error.exit_code)
        except ModuleNotFoundError as error:
            click.echo(f"rqwen3: the package {error.name} is not installed. Run: make install", err=True)
            ctx.exit(1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--profile", metavar="NAME|FILE", help="A file of configs/ by name, or a TOML file. [RQWEN3_PROFILE, demo]"
)
@click.option("--home", type=FOLDER, help="The run root. [RQWEN3_HOME, var/<profile>]")
@click.option("--workers", type=click.IntRange(1, 1024), help="Processes that build the corpus. [RQWEN3_WORKERS, 2]")
@click.version_option(package_name="rqwen3-pipeline")
@click.pass_context
def main(ctx: click.Context, profile: str | None, home: Path | None, workers: int | None) -> None:
    """Pretrain an RQwen3 model from its corpus to its evidence report."""
    ctx.obj = {
        key: value for key, value in (("profile", profile), ("home", home), ("workers", workers)) if value is not None
    }


def _settings(ctx: click.Context, **more: Any) -> Any:
    """Settings from the environment and the flags; also exported, for the assets and for child processes."""
    import os

    from pydantic import ValidationError

    from model.errors import ConfigError
    from rqwen3_pipeline.settings import Settings

    flags = {**ctx.obj, **{key: value for key, value in more.items() if value is not None}}
    try:
        settings = Settings(**flags)
    except ValidationError as error:
        problem = error.errors()[0]
        name = "_".join(str(part) for part in problem["loc"]).upper()
        raise ConfigError(f"RQWEN3_{name} = {problem['input']!r}: {problem['msg']}") from error
    os.environ["RQWEN3_PROFILE"] = str(settings.config_path)
    os.environ["RQWEN3_HOME"] = str(settings.root.path)
    for key, value in (("WORKERS", settings.workers), ("SOURCES", settings.sources), ("TOKENIZER", settings.tokenizer)):
        if value is not None:
            os.environ[f"RQWEN3_{key}"] = str(value)
    return settings


@main.command()
@click.option("--sources", type=FOLDER, help="A folder with the six sources as <name>.parquet or <name>/**/*.parquet.")
@click.option("--tokenizer", type=FILE, help="The tokenizer.json to pin.")
@click.pass_context
def run(ctx: click.Context, sources: Path | None, tokenizer: Path | None) -> None:
    """Run every stage that is not done yet on this machine, through Dagster."""
    import warnings

    settings = _settings(ctx, sources=sources, tokenizer=tokenizer)
    _ = settings.run_config
    warnings.filterwarnings("ignore", module="dagster")
    from rqwen3_pipeline.local_run import run_all, table

    done = run_all(settings)
    click.echo(table(done))
    click.echo(f"\nSee it all in the UI:  {_ui_command(settings)}")


def _ui_command(settings: Any) -> str:
    name = settings.config_path.stem
    return "make ui" if name == "demo" else f"make ui PROFILE={name}"


@main.command()
@click.option("--port", default=3000, show_default=True, type=click.IntRange(1, 65535))
@click.pass_context
def up(ctx: click.Context, port: int) -> None:
    """Serve the web UI on loopback, and the daemon, until Ctrl-C."""
    from rqwen3_pipeline.up import serve

    ctx.exit(serve(_settings(ctx), port))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="For a program.")
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """What is done, what is missing, and the next command."""
    import json

    from rqwen3_pipeline.status import render
    from rqwen3_pipeline.status import status as read_status

    settings = _settings(ctx)
    found = read_status(settings.root, settings.run_config)
    click.echo(json.dumps(found, indent=1) if as_json else render(found))


@main.group()
def sources() -> None:
    """The source files: pin them, fetch them."""


@sources.command("lock")
@click.option("--folder", type=FOLDER, help="A folder with the six sources.")
@click.pass_context
def sources_lock(ctx: click.Context, folder: Path | None) -> None:
    """Pin which files are read: paths, sizes, SHA-256."""
    from rqwen3_pipeline.corpus.origin import lock_origin
    from rqwen3_pipeline.corpus.sources import corpus_config
    from rqwen3_pipeline.settings import SOURCES

    settings = _settings(ctx, sources=folder)
    lock = lock_origin(settings.root, corpus_config(settings.run_config), settings.sources)
    for source in SOURCES:
        files = lock.files(source)
        click.echo(f"{source:<14} {len(files):>4} files {sum(file.size_bytes for file in files):>16,} bytes")
    click.echo(str(settings.root.lock))


@main.group()
def corpus() -> None:
    """The corpus, without Dagster."""


@corpus.command("build")
@click.option("--sources", "folder", type=FOLDER, help="A folder with the six sources.")
@click.option("--tokenizer", type=FILE, help="The tokenizer.json to pin.")
@click.option("--rebuild", is_flag=True, help="Replace the pieces that other settings made, instead of refusing.")
@click.pass_context
def corpus_build(ctx: click.Context, folder: Path | None, tokenizer: Path | None, rebuild: bool) -> None:
    """Build every piece that is missing, from the lock to the manifest."""
    from model.files import hold_lock
    from rqwen3_pipeline.corpus.build import build_corpus
    from rqwen3_pipeline.corpus.origin import origin_folder
    from rqwen3_pipeline.corpus.sources import corpus_config

    settings = _settings(ctx, sources=folder, tokenizer=tokenizer)
    config = corpus_config(settings.run_config)
    with hold_lock(settings.root.path / ".run.lock", "rqwen3 corpus build"):
        build_corpus(
            settings.root,
            config,
            settings.run_config.training,
            origin_folder(settings.root, config, settings.sources),
            settings.tokenizer,
            workers=settings.workers,
            progress=_report_piece,
            rebuild=rebuild,
        )
    click.echo(str(settings.root.manifest))


def _report_piece(outcome: Any) -> None:
    did = "current" if outcome.skipped else f"{outcome.seconds:.1f} s"
    click.echo(f"{outcome.stage:<10} {outcome.source}/{outcome.key}: {outcome.error or did}", err=True)


@main.command()
@click.option("--step", required=True, type=click.IntRange(1), help="Optimiser step, from 1.")
@click.option("--sequence", required=True, type=click.IntRange(0), help="Sequence within the step, from 0.")
@click.pass_context
def trace(ctx: click.Context, step: int, sequence: int) -> None:
    """The documents that a training sequence was read from."""
    import dataclasses
    import json

    from model.shard_format import read_manifest
    from rqwen3_pipeline.corpus.trace import trace as trace_sequence

    settings = _settings(ctx)
    root = settings.root
    for document in trace_sequence(root, read_manifest(root.manifest), settings.run_config.training, step, sequence):
        click.echo(json.dumps(dataclasses.asdict(document)))


@main.command()
@click.option("--prompt", required=True, help="The text to continue.")
@click.option("--new-tokens", default=60, show_default=True, type=click.IntRange(1))
@click.pass_context
def generate(ctx: click.Context, prompt: str, new_tokens: int) -> None:
    """Continue a prompt with the run's final model."""
    import subprocess

    settings = _settings(ctx)
    folder = settings.root.experiment(settings.run_config.name)
    checkpoint = folder / "checkpoints" / "final.pt"
    command = [sys.executable, "-m", "model.generate", "--checkpoint", str(checkpoint)]
    command += ["--config", str(folder / "config.toml"), "--tokenizer", str(settings.root.tokenizer)]
    ctx.exit(subprocess.run([*command, "--prompt", prompt, "--new-tokens", str(new_tokens)], check=False).returncode)


if __name__ == "__main__":
    main()
