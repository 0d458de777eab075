"""What to type next where runs are SLURM jobs: never `rqwen3 run`, which would train on the login node.

What is missing comes from the status's own findings, what runs or waits from instance and scheduler, and
what comes next for the training from the same decision as the sensor's. Opens the instance as it lies and
writes no file. Costs the import of Dagster, some seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dagster import DagsterInstance, DagsterRun, RunsFilter
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.execution.backfill import BulkActionStatus
from dagster._core.scheduler.instigation import InstigatorStatus

from rqwen3_pipeline.commands import commands
from rqwen3_pipeline.experiments.observed import JOB_TAG, LIVE, PARTITION_TAG, facts_now, policy_of
from rqwen3_pipeline.experiments.policy import Action, decide
from rqwen3_pipeline.instance import existing_instance
from rqwen3_pipeline.services import PATIENCE_S, STALE_S
from rqwen3_pipeline.settings import Settings
from rqwen3_pipeline.slurm.client import Slurm
from rqwen3_pipeline.training import submission_key

BY_FILE = {"raw": "raw_files", "filtered": "filtered_documents", "digests": "digests"}
SENSOR = "resubmission"
SHOWN_RUNS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What comes next."""

    why: str
    command: str | None = None
    """To type, after the program's name and flags."""
    in_ui: str | None = None
    """To do in the UI, in words."""
    needs_daemon: bool = True
    """Whether nothing comes of it while none runs."""
    beside: bool = False
    """Whether it takes into account, or does not mind, what runs now."""

    def words(self) -> str:
        """What to do, and why, in one line."""
        what = self.command and f"rqwen3 {self.command}"
        return ": ".join(part for part in (what or self.in_ui, self.why) if part)


def next_on_cluster(found: dict[str, Any], settings: Settings) -> dict[str, str | None]:
    """The next step, and why.

    Args:
        found: what `status` returned, with `services`.
        settings: the settings in force.

    Returns:
        `command` to type, or None; else `in_ui`, what to do in the UI, or None where there is nothing to do but
        wait; `why`.
    """
    daemon = found["services"]["daemon"]
    if daemon is not None and daemon["problem"]:
        step = Step(why=f"what runs and what comes next can't be told: {daemon['problem']}")
    elif daemon is None:
        step = _step(found, settings, None)
    else:
        try:
            with existing_instance(settings) as instance:
                step = _step(found, settings, instance)
        except Exception as error:  # the rest of the status does not depend on it
            said = (str(error).splitlines() or [type(error).__name__])[0]
            step = Step(why=f"what runs and what comes next can't be told: {said}")
    program = commands(settings.run_config, settings.root.path, settings.config_path).program
    command = step.command and f"{program} {step.command}"
    return {"command": command, "in_ui": step.in_ui, "why": step.why}


def _step(found: dict[str, Any], settings: Settings, instance: DagsterInstance | None) -> Step:
    step = _corpus(found, settings) or _training(found, settings, instance) or _results(found)
    now = at_work(instance) if instance is not None else ""
    if step.needs_daemon and _is_down(found["services"]["daemon"]):
        return Step(
            command="up", why=f"no daemon runs, which makes jobs of runs. {_also(now)}Then {step.words()}".strip()
        )
    if now and not step.beside:
        return Step(why=f"{now}; nothing to do until then")
    return step


def _also(now: str) -> str:
    return f"Under way: {now}. " if now else ""


def _is_down(daemon: dict[str, Any] | None) -> bool:
    return daemon is None or daemon["age_s"] is None or daemon["age_s"] > STALE_S


def _corpus(found: dict[str, Any], settings: Settings) -> Step | None:
    """The step that the corpus lacks, in the order of the README; None when it is whole."""
    if found["lock"]["problem"] or not found["lock"]["present"]:
        why = found["lock"]["problem"] or "nothing is locked yet: it pins the source files"
        return Step(command="sources lock", why=why, needs_daemon=False)
    for rows in found["stages"].values():
        if problem := next((row["problem"] for row in rows.values() if "problem" in row), None):
            return Step(why=problem, needs_daemon=False)
    missing = {stage: sum(len(row["missing"]) for row in rows.values()) for stage, rows in found["stages"].items()}
    if by_file := [asset for stage, asset in BY_FILE.items() if missing[stage]]:
        count = sum(missing[stage] for stage in BY_FILE)
        return Step(command=f"backfill {' '.join(by_file)}", why=f"{count:,} of these pieces are not made yet")
    wanted = "survivors" if missing["survivors"] else "" if settings.root.tokenizer.is_file() else "tokenizer"
    if wanted:  # one run each: they may belong to different places
        return Step(in_ui=f"materialize {wanted}", why="the token shards are made from that")
    if missing["tokens"]:
        return Step(command="backfill token_shards", why=f"{missing['tokens']:,} token shards are not made yet")
    if not found["manifest"]["present"] or "problem" in found["manifest"]:
        return Step(in_ui="materialize manifest", why="the corpus lacks its manifest")
    return None


def _training(found: dict[str, Any], settings: Settings, instance: DagsterInstance | None) -> Step | None:
    """What the chain of submissions comes to, by the sensor's own decision; None when the run is finished."""
    root, run = settings.root, settings.run_config
    if other := found["experiments"][run.name]["other_manifest"]:
        return Step(why=other, needs_daemon=False, beside=True)
    slurm = Slurm(timeout_s=PATIENCE_S) if found["services"]["slurm"] is not None else None
    facts = facts_now(root, run, instance, slurm, needs_preflight=True)
    decision = decide(facts, policy_of(run))
    if facts.finished:
        return None
    is_on = instance is not None and sensor_is_on(instance)
    if decision.action is Action.WAIT:
        off = "" if is_on else f"; what follows is submitted only once the sensor {SENSOR} is on"
        return Step(why=f"{decision.reason}{off}", beside=True)
    if decision.action is Action.SUBMIT:
        key = submission_key(run.name, decision.submission)
        if is_on:
            return Step(why=f"the sensor {SENSOR} submits {key} at its next tick: {decision.reason}", beside=True)
        return Step(in_ui=f"turn on the sensor {SENSOR}", why=f"it submits {key}: {decision.reason}", beside=True)
    reason, lift, _ = decision.reason.partition("; then: ")
    if not lift:
        return Step(in_ui="materialize preflight", why=reason)
    under_way = f". Under way: {at_work(instance)}" if instance is not None and facts.live else ""
    first = "" if facts.stopped else "; that first, then this command"
    command = f"experiment resume {run.name}"
    return Step(command=command, why=f"{reason}{first}{under_way}", needs_daemon=False, beside=True)


def _results(found: dict[str, Any]) -> Step:
    for what, key in (("the export", "exports"), ("the evaluation", "evaluations"), ("the report", "evidence")):
        if found["experiment"] not in found[key]:
            return Step(in_ui="launch the job report_results", why=f"{what} is not made yet")
    return Step(why=found["next"]["why"], needs_daemon=False, beside=True)


def sensor_is_on(instance: DagsterInstance) -> bool:
    """Whether somebody turned on the sensor that submits."""
    states = instance.all_instigator_state(instigator_type=InstigatorType.SENSOR)
    return any(s.instigator_name == SENSOR and s.status is InstigatorStatus.RUNNING for s in states)


def at_work(instance: DagsterInstance) -> str:
    """The runs that run or wait, and the back-fills whose runs are still to come, in words; empty if none."""
    words = [_run_words(run) for run in instance.get_runs(RunsFilter(statuses=sorted(LIVE, key=str)))]
    if not words:
        words = [f"back-fill {b.backfill_id}" for b in instance.get_backfills(status=BulkActionStatus.REQUESTED)]
    more = len(words) - SHOWN_RUNS
    return ", ".join([*words[:SHOWN_RUNS], *([f"and {more} more"] if more > 0 else [])])


def _run_words(run: DagsterRun) -> str:
    what = _assets(sorted(key.to_user_string() for key in run.asset_selection or ())) or run.job_name
    partition = f" {run.tags[PARTITION_TAG]}" if PARTITION_TAG in run.tags else ""
    job = f", job {run.tags[JOB_TAG]}" if JOB_TAG in run.tags else ""
    return f"{what}{partition} ({run.status.value.lower()}{job})"


def _assets(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= SHOWN_RUNS else f"{names[0]} and {len(names) - 1} other assets"
