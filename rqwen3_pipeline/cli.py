"""`rqwen3 …`: every command, each importing what it needs only when it runs."""

from pathlib import Path
from typing import Any

import click

from rqwen3_pipeline.cli_common import FILE, FOLDER, Group, settings_of, with_flags
from rqwen3_pipeline.cli_corpus import corpus, sources
from rqwen3_pipeline.cli_experiment import experiment
from rqwen3_pipeline.cli_model import evaluate, export, generate, trace


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
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


for command in (sources, corpus, experiment, trace, export, evaluate, generate):
    main.add_command(command)


@main.command()
@click.option("--sources", type=FOLDER, help="A folder with the six sources as <name>.parquet or <name>/**/*.parquet.")
@click.option("--tokenizer", type=FILE, help="The tokenizer.json to pin.")
@click.pass_context
def run(ctx: click.Context, sources: Path | None, tokenizer: Path | None) -> None:
    """Run every stage that is not done yet on this machine, through Dagster."""
    import warnings

    settings = settings_of(ctx, sources=sources, tokenizer=tokenizer)
    _ = settings.run_config
    warnings.filterwarnings("ignore", module="dagster")
    from rqwen3_pipeline.local_run import run_all, table

    done = run_all(settings)
    click.echo(table(done))
    click.echo(f"\nSee it all in the UI:  {_ui_command(settings)}")


def _ui_command(settings: Any) -> str:
    from rqwen3_pipeline.commands import commands

    up = f"{commands(settings.run_config, settings.root.path, settings.config_path).program} up"
    short = {"rqwen3 up": "make ui", f"rqwen3 --profile {settings.profile} up": f"make ui PROFILE={settings.profile}"}
    return short.get(up, up)


@main.command()
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Of loopback. [3000; a private socket where runs are SLURM jobs]"
)
@click.option("--public", is_flag=True, help="Take --port where runs are SLURM jobs too: open to all on this host.")
@click.pass_context
def up(ctx: click.Context, port: int | None, public: bool) -> None:
    """Serve the web UI and the daemon until Ctrl-C."""
    import warnings

    warnings.filterwarnings("ignore", module="dagster")
    from rqwen3_pipeline.up import serve

    ctx.exit(serve(settings_of(ctx), port, public))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="For a program.")
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """What is done, what is missing, and the next command."""
    import json

    from rqwen3_pipeline.services import services
    from rqwen3_pipeline.status import render
    from rqwen3_pipeline.status import status as read_status

    settings = settings_of(ctx)
    found = read_status(settings.root, settings.run_config, settings.config_path)
    found["services"] = services(settings.root, settings)
    if settings.launcher == "slurm" or found["services"]["slurm"] is not None:
        from rqwen3_pipeline.cluster_next import next_on_cluster

        found["next"] = next_on_cluster(found, settings)
    click.echo(json.dumps(found, indent=1) if as_json else render(found, tell=with_flags))


@main.command()
@click.argument("assets", nargs=-1, required=True, metavar="ASSET...")
@click.option("--source", "named", multiple=True, metavar="NAME", help="Only this source; may be given several times.")
@click.option("--partitions", metavar="N-M", help="Only these files of the lock, from 0: 3, 3-7, or 0,3-7.")
@click.pass_context
def backfill(ctx: click.Context, assets: tuple[str, ...], named: tuple[str, ...], partitions: str | None) -> None:
    """Make partitions of ASSETs (filtered_documents, or filtered_documents/wikipedia) in the daemon."""
    import warnings

    settings = settings_of(ctx)
    warnings.filterwarnings("ignore", module="dagster")
    from rqwen3_pipeline.backfill import submit

    for one in submit(settings, assets, named, partitions):
        click.echo(f"{one.id}  {', '.join(one.assets)}: {len(one.partitions)} partitions")


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

    run = load_run_config(config) if config else settings_of(ctx).run_config
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

    settings = settings_of(ctx)
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


if __name__ == "__main__":
    main()
