"""`rqwen3 experiment …`."""

import click

from rqwen3_pipeline.cli_common import settings_of


@click.group()
def experiment() -> None:
    """Chains of submissions: what comes next and why, stop one, let it go on, make a variation."""


@experiment.command("status")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="For a program.")
@click.pass_context
def experiment_status(ctx: click.Context, name: str | None, as_json: bool) -> None:
    """The attempts so far, and what comes next. NAME is the profile's experiment by default."""
    from rqwen3_pipeline.experiment_commands import show

    show(settings_of(ctx), name, as_json)


@experiment.command("stop")
@click.argument("name", required=False)
@click.option("--why", default="", help="A few words for those who come later.")
@click.pass_context
def experiment_stop(ctx: click.Context, name: str | None, why: str) -> None:
    """Submit nothing more until somebody resumes it."""
    from rqwen3_pipeline.experiment_commands import stop

    stop(settings_of(ctx), name, why)


@experiment.command("resume")
@click.argument("name", required=False)
@click.pass_context
def experiment_resume(ctx: click.Context, name: str | None) -> None:
    """Lift a stop, by hand or by a failure that is mended now."""
    from rqwen3_pipeline.experiment_commands import resume

    resume(settings_of(ctx), name)


@experiment.command("may-run")
@click.argument("name", required=False)
@click.pass_context
def experiment_may_run(ctx: click.Context, name: str | None) -> None:
    """For job scripts: exit code 0 if the chain may train on, 1 if it is finished or stopped."""
    from rqwen3_pipeline.experiment_commands import may_run

    ctx.exit(0 if may_run(settings_of(ctx), name) else 1)


@experiment.command("compare")
@click.pass_context
def experiment_compare(ctx: click.Context) -> None:
    """Lay all experiments of the run root, and their variations, side by side on one page."""
    from rqwen3_pipeline.evidence.comparison import write_comparison

    settings = settings_of(ctx)
    click.echo(settings.root.path / write_comparison(settings.root, settings.run_config.name)["page"])


@experiment.command("new")
@click.argument("name")
@click.option("--from", "base", metavar="NAME", help="The experiment to vary. [the profile's]")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="As data.fineweb_edu.min_score=4.")
@click.pass_context
def experiment_new(ctx: click.Context, name: str, base: str | None, changes: tuple[str, ...]) -> None:
    """Make a variation, which shares every piece of the corpus that it can."""
    from rqwen3_pipeline.experiment_commands import new

    new(settings_of(ctx), name, base, changes)
