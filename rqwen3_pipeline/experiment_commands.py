"""What `rqwen3 experiment …` does: look at a chain of submissions, stop it, let it go on, vary it."""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from typing import Any

import click

from model.config import RunConfig
from rqwen3_pipeline.assets.common import Pipeline, experiment
from rqwen3_pipeline.cli_common import say
from rqwen3_pipeline.experiments import control
from rqwen3_pipeline.experiments.facts import attempts_of
from rqwen3_pipeline.experiments.observed import facts_now, policy_of
from rqwen3_pipeline.experiments.policy import Action, Decision, Facts, decide
from rqwen3_pipeline.experiments.variation import make_variation
from rqwen3_pipeline.settings import Settings
from rqwen3_pipeline.training import submission_key


def _configuration(settings: Settings, name: str | None) -> tuple[Pipeline, RunConfig]:
    here = Pipeline(settings)
    return here, experiment(here, submission_key(name or here.run.name, 1))[0]


def _facts(here: Pipeline, run: RunConfig) -> Facts:
    """All that is known; of instance and scheduler only where there are any."""
    own = run.name == here.run.name
    if not (here.root.dagster_home / "dagster.yaml").is_file():
        return facts_now(here.root, run, None, None, needs_preflight=own)
    from rqwen3_pipeline.instance import existing_instance
    from rqwen3_pipeline.sensors.resubmission import scheduler_of

    instance = existing_instance(here.settings)
    return facts_now(here.root, run, instance, scheduler_of(instance), needs_preflight=own)


def show(settings: Settings, name: str | None, as_json: bool) -> None:
    """Print an experiment's attempts, and what comes next."""
    here, run = _configuration(settings, name)
    facts = _facts(here, run)
    decision = decide(facts, policy_of(run))
    if as_json:
        click.echo(json.dumps(_jsonable(facts, decision), indent=1))
        return
    click.echo(f"{'submission':<28} {'from':>8} {'reached':>8} {'saved':>8}  ended")
    for attempt in facts.attempts:
        key = f"{submission_key(run.name, attempt.submission)} a{attempt.attempt}"
        reached = "-" if attempt.reached_step is None else f"{attempt.reached_step:,}"
        detail = f": {attempt.detail}" if attempt.detail else ""
        click.echo(
            f"{key:<28} {attempt.from_step:>8,} {reached:>8} {attempt.saved_step:>8,}  {attempt.outcome}{detail}"
        )
    say(f"next: {decision.action}: {decision.reason}")


def stop(settings: Settings, name: str | None, why: str) -> None:
    """Let nothing more be submitted; of an experiment that has not begun, nothing at all."""
    here, run = _configuration(settings, name)
    if not here.root.experiment(run.name).is_dir():
        click.echo(f"{run.name}: not begun in {here.root.path} yet; its first job will find the stop.")
    control.stop(here.root, run.name, why)
    say(
        f"{run.name}: nothing more is submitted until: rqwen3 experiment resume {run.name}\n"
        "What waits in the queue will end without training. What runs now goes on; to end it too, terminate its run in "
        "the UI (it saves first)."
    )


def resume(settings: Settings, name: str | None) -> None:
    """Lift a stop, whoever or whatever made it, and say what comes next."""
    here, run = _configuration(settings, name)
    attempts = attempts_of(here.root, run.name)
    known = _facts(here, run).attempts or attempts
    control.resume(here.root, run.name, known[-1].place if known else (0, 0))
    decision = decide(_facts(here, run), policy_of(run))
    say(f"{run.name}: {decision.action}: {decision.reason}")
    if decision.action is Action.SUBMIT:
        click.echo(
            "The resubmission sensor does that at its next tick, if it is on; by hand: materialize the submission."
        )


def may_run(settings: Settings, name: str | None) -> bool:
    """For a chain of job scripts: whether its next job should train. Asks the files alone.

    The asking job is itself alive, so nothing that lives counts against it, and no wait does.
    """
    here, run = _configuration(settings, name)
    facts = facts_now(here.root, run, None, None, needs_preflight=False)
    decision = decide(dataclasses.replace(facts, live=()), policy_of(run))
    say(f"{run.name}: {'no' if decision.action is Action.STOP else 'yes'}: {decision.reason}", err=True)
    return decision.action is not Action.STOP


def new(settings: Settings, name: str, base: str | None, changes: Sequence[str]) -> None:
    """Make a variation of an experiment."""
    here, run = _configuration(settings, base)
    made = make_variation(here.root, run, name, changes, run.name)
    click.echo(f"{made.config}: written.")
    if made.root == here.root.path:
        click.echo(f"It shares this run root's corpus. Submit it: materialize submission {submission_key(name, 1)}, or")
        click.echo("turn on the resubmission sensor.")
        return
    for stage, (shared, wanted) in made.shared.items():
        click.echo(f"  {stage:<10} {shared} of {wanted} pieces are shared")
    click.echo("Its corpus differs, so it has a run root of its own. Go on with:")
    click.echo(f"  rqwen3 --profile {shlex.quote(str(made.config))} --home {shlex.quote(str(made.root))} run")


def _jsonable(facts: Facts, decision: Decision) -> dict[str, Any]:
    return {
        "experiment": facts.experiment,
        "finished": facts.finished,
        "stopped": facts.stopped,
        "live": list(facts.live),
        "attempts": [
            {
                "submission": a.submission,
                "attempt": a.attempt,
                "outcome": str(a.outcome),
                "from_step": a.from_step,
                "reached_step": a.reached_step,
                "saved_step": a.saved_step,
                "detail": a.detail,
            }
            for a in facts.attempts
        ],
        "next": {
            "action": str(decision.action),
            "reason": decision.reason,
            "submission": decision.submission or None,
            "attempt": decision.attempt or None,
        },
    }
