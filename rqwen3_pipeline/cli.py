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
        except KeyboardInterrupt:
            click.echo("rqwen3: stopped. The same command goes on from here.", err=True)
            ctx.exit(130)
        except RQwen3Error as error:
            click.echo(f"rqwen3: {error}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            from model.files import why_not_written

            words = why_not_written(error, Path(error.filename or "."))
            if words is None:
                raise
            click.echo(f"rqwen3: {words}", err=True)
            ctx.exit(1)
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
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Of loopback. [3000; a private socket where runs are SLURM jobs]"
)
@click.pass_context
def up(ctx: click.Context, port: int | None) -> None:
    """Serve the web UI and the daemon until Ctrl-C."""
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


@main.command()
@click.argument("assets", nargs=-1, required=True, metavar="ASSET...")
@click.option("--source", "named", multiple=True, metavar="NAME", help="Only this source; may be given several times.")
@click.option("--partitions", metavar="N-M", help="Only these files of the lock, from 0: 3, 3-7, or 0,3-7.")
@click.pass_context
def backfill(ctx: click.Context, assets: tuple[str, ...], named: tuple[str, ...], partitions: str | None) -> None:
    """Make partitions of ASSETs (filtered_documents, or filtered_documents/wikipedia) in the daemon."""
    import warnings

    settings = _settings(ctx)
    warnings.filterwarnings("ignore", module="dagster")
    from rqwen3_pipeline.backfill import submit

    for one in submit(settings, assets, named, partitions):
        click.echo(f"{one.id}  {', '.join(one.assets)}: {len(one.partitions)} partitions")


@main.group()
def sources() -> None:
    """The source files: pin them, fetch them."""


@sources.command("lock")
@click.option("--folder", type=FOLDER, help="A folder with the six sources, instead of what the profile says.")
@click.option("--update", is_flag=True, help="Ask the Hub what is there now, though the files are locked already.")
@click.pass_context
def sources_lock(ctx: click.Context, folder: Path | None, update: bool) -> None:
    """Pin which files are read: data sets, revisions, paths, sizes, SHA-256."""
    from rqwen3_pipeline.source_commands import lock_sources

    lock_sources(_settings(ctx, sources=folder), update)


@sources.command("fetch")
@click.option("--source", "named", multiple=True, metavar="NAME", help="Only this source; may be given several times.")
@click.option("--files", metavar="N-M", help="Only these files of the lock, from 0: 3, 3-7, or 0,3-7.")
@click.option("--workers", type=click.IntRange(1, 1024), help="Processes. [RQWEN3_WORKERS, 2]")
@click.pass_context
def sources_fetch(ctx: click.Context, named: tuple[str, ...], files: str | None, workers: int | None) -> None:
    """Bring the locked files into the run root, verified by size and SHA-256."""
    from rqwen3_pipeline.source_commands import fetch_sources

    ctx.exit(fetch_sources(_settings(ctx, workers=workers), named, files))


@main.group()
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

    ctx.exit(build(_settings(ctx, sources=folder, tokenizer=tokenizer, workers=workers), **options))


@corpus.command("stitch")
@click.argument("roots", nargs=-1, type=FOLDER, metavar="[ROOT]...")
@click.option("--tokenizer", type=FILE, help="The tokenizer.json to pin.")
@click.option("--workers", type=click.IntRange(1, 1024), help="Processes. [RQWEN3_WORKERS, 2]")
@click.pass_context
def corpus_stitch(ctx: click.Context, roots: tuple[Path, ...], tokenizer: Path | None, workers: int | None) -> None:
    """Merge what separate jobs made, in this run root or in ROOTs, into one corpus with its manifest."""
    from rqwen3_pipeline.build_commands import stitch_roots

    stitch_roots(_settings(ctx, tokenizer=tokenizer, workers=workers), roots)


@corpus.command("verify")
@click.option("--workers", type=click.IntRange(1, 1024), help="Threads. [RQWEN3_WORKERS, 2]")
@click.option("--json", "as_json", is_flag=True, help="For a program: the defects of each promise.")
@click.pass_context
def corpus_verify(ctx: click.Context, workers: int | None, as_json: bool) -> None:
    """Make every hash and count of the corpus again; name each defect, and the command that repairs it."""
    from rqwen3_pipeline.build_commands import verify_corpus

    ctx.exit(verify_corpus(_settings(ctx, workers=workers), as_json))


@corpus.command("card")
@click.pass_context
def corpus_card(ctx: click.Context) -> None:
    """Print the data card, made from the manifest."""
    from rqwen3_pipeline.build_commands import print_card

    print_card(_settings(ctx))


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

    ctx.exit(filter_files(_settings(ctx, workers=workers), named, files, rebuild))


@corpus.command("funnel")
@click.option("--source", "named", multiple=True, metavar="NAME", help="Only this source; may be given several times.")
@click.option("--json", "as_json", is_flag=True, help="For a program.")
@click.pass_context
def corpus_funnel(ctx: click.Context, named: tuple[str, ...], as_json: bool) -> None:
    """How many rows of each source were kept, and why the others were not."""
    from rqwen3_pipeline.corpus_commands import print_funnel

    print_funnel(_settings(ctx), named, as_json)


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

    show_documents(_settings(ctx), source, reason, count, chars, as_json)


@main.group(cls=_Group)
def experiment() -> None:
    """Chains of submissions: what comes next and why, stop one, let it go on, make a variation."""


@experiment.command("status")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="For a program.")
@click.pass_context
def experiment_status(ctx: click.Context, name: str | None, as_json: bool) -> None:
    """The attempts so far, and what comes next. NAME is the profile's experiment by default."""
    from rqwen3_pipeline.experiment_commands import show

    show(_settings(ctx), name, as_json)


@experiment.command("stop")
@click.argument("name", required=False)
@click.option("--why", default="", help="A few words for those who come later.")
@click.pass_context
def experiment_stop(ctx: click.Context, name: str | None, why: str) -> None:
    """Submit nothing more until somebody resumes it."""
    from rqwen3_pipeline.experiment_commands import stop

    stop(_settings(ctx), name, why)


@experiment.command("resume")
@click.argument("name", required=False)
@click.pass_context
def experiment_resume(ctx: click.Context, name: str | None) -> None:
    """Lift a stop, by hand or by a failure that is mended now."""
    from rqwen3_pipeline.experiment_commands import resume

    resume(_settings(ctx), name)


@experiment.command("may-run")
@click.argument("name", required=False)
@click.pass_context
def experiment_may_run(ctx: click.Context, name: str | None) -> None:
    """For job scripts: exit code 0 if the chain may train on, 1 if it is finished or stopped."""
    from rqwen3_pipeline.experiment_commands import may_run

    ctx.exit(0 if may_run(_settings(ctx), name) else 1)


@experiment.command("compare")
@click.pass_context
def experiment_compare(ctx: click.Context) -> None:
    """Lay all experiments of the run root, and their variations, side by side on one page."""
    from rqwen3_pipeline.evidence.comparison import write_comparison

    settings = _settings(ctx)
    click.echo(settings.root.path / write_comparison(settings.root, settings.run_config.name)["page"])


@experiment.command("new")
@click.argument("name")
@click.option("--from", "base", metavar="NAME", help="The experiment to vary. [the profile's]")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="As data.fineweb_edu.min_score=4.")
@click.pass_context
def experiment_new(ctx: click.Context, name: str, base: str | None, changes: tuple[str, ...]) -> None:
    """Make a variation, which shares every piece of the corpus that it can."""
    from rqwen3_pipeline.experiment_commands import new

    new(_settings(ctx), name, base, changes)


@main.command()
@click.option("--step", required=True, type=click.IntRange(1), help="Optimiser step, from 1.")
@click.option("--sequence", type=click.IntRange(0), help="Sequence within the step, from 0.")
@click.option("--loss", is_flag=True, help="All documents of the step with their losses, the highest first.")
@click.option("--checkpoint", type=FILE, help="Compute the losses with these weights. [the nearest of the run]")
@click.pass_context
def trace(ctx: click.Context, step: int, sequence: int | None, loss: bool, checkpoint: Path | None) -> None:
    """The documents that a training sequence, or with --loss a whole step, was read from."""
    import dataclasses
    import json

    if loss:
        from rqwen3_pipeline.loss_view import documents_by_loss, table

        used, found = documents_by_loss(_settings(ctx), step, checkpoint)
        click.echo(f"step {step:,}, losses under {used}", err=True)
        click.echo(table(found if sequence is None else [one for one in found if one.sequence == sequence]))
        return
    if sequence is None:
        raise click.UsageError("Give --sequence N, or --loss for all sequences of the step.")

    from model.shard_format import read_manifest
    from rqwen3_pipeline.corpus.trace import trace as trace_sequence

    settings = _settings(ctx)
    root = settings.root
    for document in trace_sequence(root, read_manifest(root.manifest), settings.run_config.training, step, sequence):
        click.echo(json.dumps(dataclasses.asdict(document)))


@main.command()
@click.option("--config", type=FILE, help="The run's TOML file. [the profile's]")
@click.option("--gpu", metavar="NAME", help="l40s, a100-40, a100-80, h100, h200 or 4090. [all of them]")
@click.option("--micro-batch-size", type=click.IntRange(1), help="Instead of the configuration's.")
@click.option("--mfu", type=click.FloatRange(0.0, 1.0, min_open=True), help="Share of the peak to compute times for.")
@click.option("--precision", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True)
@click.option("--attention", type=click.Choice(["fused", "scores"]), default="fused", show_default=True)
@click.option("--head", type=click.Choice(["chunked", "full"]), default="chunked", show_default=True)
@click.option("--eager", is_flag=True, help="Blocks that are not compiled.")
@click.option("--dropout", type=click.FloatRange(0.0, 1.0, max_open=True), help="Instead of the configuration's.")
@click.option("--recompute", is_flag=True, help="Make activations again in the backward pass.")
@click.option("--json", "as_json", is_flag=True, help="For a program.")
@click.pass_context
def plan(ctx: click.Context, config: Path | None, gpu: str | None, as_json: bool, **changes: Any) -> None:
    """Memory, time and disk of a run, from its configuration alone; refuses what does not fit the GPU."""
    import json

    from model.config import load_run_config
    from model.errors import ConfigError
    from model.gpus import gpu_named
    from rqwen3_pipeline import plan as planning

    run = load_run_config(config) if config else _settings(ctx).run_config
    device = gpu_named(gpu) if gpu else None
    run, how = planning.changed(run, **{key: value for key, value in changes.items() if key != "mfu"})
    found = planning.make_plan(run, how, device, changes["mfu"])
    click.echo(json.dumps(found, indent=1) if as_json else planning.render(found))
    if device and (why := planning.refusal(run, how, device)):
        raise ConfigError(why)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="For a program.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Try what the pipeline needs of SLURM, of the site and of the run root's file system, and say what to mend."""
    import json

    from rqwen3_pipeline.slurm import doctor as examination
    from rqwen3_pipeline.slurm.client import Slurm
    from rqwen3_pipeline.slurm.cluster import Cluster, load_cluster

    settings = _settings(ctx)
    found = examination.examine(
        settings.root.path,
        load_cluster(settings.cluster) if settings.cluster else Cluster(),
        Slurm(),
        wants_slurm=settings.launcher == "slurm",
        has_postgres=settings.postgres_url is not None,
    )
    lines = [{"what": one.what, "verdict": one.verdict.value, "said": one.said} for one in found]
    click.echo(json.dumps(lines, indent=1) if as_json else examination.render(found))
    ctx.exit(int(any(one.verdict is examination.Verdict.BAD for one in found)))


@main.command()
@click.pass_context
def selfcheck(ctx: click.Context) -> None:
    """Recompute the published arithmetic: parameters, FLOPs, memory, the reference run's crashes."""
    from rqwen3_pipeline.selfcheck import claims, render

    found = claims()
    click.echo(render(found))
    ctx.exit(0 if all(claim.holds for claim in found) else 1)


@main.command()
@click.option("--checkpoint", type=FILE, help="A .pt file with its sidecar. [the run's final, else newest]")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True)
@click.option("--out", type=FOLDER, help="The folder to write. [exports/ in the run root]")
@click.option("--tokenizer", type=FILE, help="The tokenizer.json. [the run root's]")
@click.option("--gguf", type=click.Choice(["f32", "f16", "bf16", "q8_0"]), help="A GGUF file too, of this type.")
@click.option("--force", is_flag=True, help="Replace the folder if it exists.")
@click.pass_context
def export(ctx: click.Context, checkpoint: Path | None, dtype: str, out: Path | None, **more: Any) -> None:
    """Write a checkpoint as a Hugging Face folder, read it back and compare."""
    from rqwen3_pipeline.result_commands import export_checkpoint

    ctx.exit(export_checkpoint(_settings(ctx), checkpoint, dtype, out, more["tokenizer"], more["gguf"], more["force"]))


@main.command("eval")
@click.option("--checkpoint", type=FILE, help="A .pt file with its sidecar. [the run's final, else newest]")
@click.option("--weights", type=FOLDER, help="A published folder or an export, instead of a checkpoint.")
@click.option("--task", "named", multiple=True, metavar="NAME", help="Only this benchmark; may be given several times.")
@click.option("--data", type=FOLDER, help="The benchmarks' folder. [RQWEN3_BENCHMARKS, benchmarks/ in the run root]")
@click.option("--out", type=FOLDER, help="The folder of the scores. [evaluations/ in the run root]")
@click.option("--limit", type=click.IntRange(1), help="Only the first so many questions; the scores say so.")
@click.option("--batch", type=click.IntRange(1), help="Sequences per forward pass. [8]")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="[auto]")
@click.option("--through", type=click.Choice(["own", "transformers"]), help="What computes --weights. [own]")
@click.option("--prefetch", "fetch_only", is_flag=True, help="Only bring the benchmarks here from the Hub.")
@click.pass_context
def evaluate(
    ctx: click.Context,
    checkpoint: Path | None,
    weights: Path | None,
    named: tuple[str, ...],
    data: Path | None,
    out: Path | None,
    fetch_only: bool,
    **options: Any,
) -> None:
    """Score a checkpoint on the benchmarks; what is scored already is not asked again."""
    from rqwen3_pipeline import result_commands

    settings = _settings(ctx)
    if fetch_only:
        ctx.exit(result_commands.prefetch(settings, named, data))
    ctx.exit(result_commands.score(settings, checkpoint, weights, named, data, out, options))


@main.command()
@click.option("--prompt", required=True, help="The text to continue.")
@click.option("--weights", type=FOLDER, help="A published folder (Qwen3 or Llama kind). [the run's final model]")
@click.option("--new-tokens", default=60, show_default=True, type=click.IntRange(1))
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-p", default=1.0, show_default=True, help="Choose among the likeliest with this probability.")
@click.option("--seed", default=0, show_default=True)
@click.pass_context
def generate(ctx: click.Context, prompt: str, weights: Path | None, **sampling: float) -> None:
    """Continue a prompt with the run's final model, or with published weights."""
    import subprocess

    command = [sys.executable, "-m", "model.generate", "--prompt", prompt]
    for key, value in sampling.items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    if weights is not None:
        command += ["--weights", str(weights)]
    else:
        settings = _settings(ctx)
        folder = settings.root.experiment(settings.run_config.name)
        command += ["--checkpoint", str(folder / "checkpoints" / "final.pt")]
        command += ["--config", str(folder / "config.toml"), "--tokenizer", str(settings.root.tokenizer)]
    ctx.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
