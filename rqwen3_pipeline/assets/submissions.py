"""Submissions: each partition is one slice of the training run, cut by the clock and taken up by the next."""

import os
import shlex
from pathlib import Path
from typing import Any

import dagster as dg

from model.files import read_jsonl
from rqwen3_pipeline.assets.common import (
    CODE_VERSION,
    OWNERS,
    Mirror,
    Pipeline,
    ask_store,
    experiment,
    metadata,
    pipeline,
    submission_partitions,
)
from rqwen3_pipeline.assets.plots import curve_markdown
from rqwen3_pipeline.assets.preflight import asked_for
from rqwen3_pipeline.experiments.observed import ATTEMPT_TAG, EXIT_CODE_TAG, EXPERIMENT_TAG

EVENT_EVERY_S = 30.0
FINITE = "Every loss that the submission logged is a finite number."
PLOT_POINTS = 400


class SubmissionOptions(dg.Config):
    """What may be said of a submission when it is launched."""

    time_limit_s: float = 0.0
    """Wall-clock limit; 0 takes the configuration's."""


@dg.asset(
    group_name="training",
    kinds={"pytorch"},
    owners=OWNERS,
    code_version=CODE_VERSION,
    deps=["preflight"],
    partitions_def=submission_partitions,
    op_tags={"slurm/kind": "gpu", "slurm/stop": "save"},
    check_specs=[dg.AssetCheckSpec("finite_losses", asset="submissions", description=FINITE)],
)
def submissions(context: dg.AssetExecutionContext, config: SubmissionOptions) -> dg.MaterializeResult:
    """One training job: resumes from the newest good checkpoint, saves when the clock or a signal says so.

    A submission that was cut and saved is a success; its stop reason says what ended it. One that comes from the queue
    after somebody stopped the experiment does not train.
    """
    from rqwen3_pipeline.experiments.control import require_go
    from rqwen3_pipeline.preflight import preflight_problem, run_preflight
    from rqwen3_pipeline.programs import failure_code
    from rqwen3_pipeline.training import EXIT_CONTINUE, cancelled, parse_submission, record_of, run_submission

    here = pipeline()
    run, config_path = experiment(here, context.partition_key)
    number = parse_submission(context.partition_key, run.name)
    attempt = _attempt(context, here, run.name, number)
    _tag(context, {EXPERIMENT_TAG: run.name, ATTEMPT_TAG: str(attempt)})
    try:
        if record_of(here.root, run.name, number) is None:
            require_go(here.root, run.name)
        if run.name != here.run.name and preflight_problem(here.root.experiment(run.name)):
            run_preflight(asked_for(here, run, config_path, context.instance))  # the asset does the profile's alone
        report = run_submission(
            here.root,
            run,
            config_path,
            number,
            attempt=attempt,
            time_limit_s=config.time_limit_s,
            say=Mirror(context.log.info),
            say_every_s=EVENT_EVERY_S,
        )
    except Exception as error:
        _tag(context, {EXIT_CODE_TAG: str(failure_code(error))})
        raise
    if report["exit_code"] == EXIT_CONTINUE and cancelled(os.environ):
        raise dg.Failure(f"Cancelled; saved at step {report['saved_step']:,}.", metadata(report), allow_retries=False)
    return dg.MaterializeResult(
        metadata={**metadata(report), **_receipt(context, report)}, check_results=[_finite_losses(report)]
    )


def _finite_losses(report: dict[str, Any]) -> dg.AssetCheckResult:
    """Whether every loss that this submission logged is a number: a skipped step leaves none."""
    of_it = (report["submission"], report["attempt"])
    points = (p for p in read_jsonl(Path(report["path"]) / "metrics.jsonl") if p.get("kind") in ("train", "heldout"))
    bad = [p["step"] for p in points if (p.get("submission"), p.get("attempt")) == of_it and p.get("loss") is None]
    said = ""
    if bad:
        config = shlex.quote(str(Path(report["path"]) / "config.toml"))
        command = f"rqwen3 --profile {config} trace --step {bad[0]} --loss"
        said = f"no finite loss at {len(bad)} steps, the first is {bad[0]}: {command}"
    return dg.AssetCheckResult(
        check_name="finite_losses",
        passed=not bad,
        severity=dg.AssetCheckSeverity.WARN,
        description=said,
        metadata={"steps": dg.MetadataValue.json(bad[:PLOT_POINTS])},
    )


def _attempt(context: dg.AssetExecutionContext, here: Pipeline, name: str, number: int) -> int:
    """Which attempt this is: later than all that left a trace in files or runs, and none before what the run was told.

    A number that was given before would be a run key that was used before, and be passed over.
    """
    from rqwen3_pipeline.experiments.facts import next_attempt

    told = [next_attempt(here.root, name, number), int(context.run.tags.get(ATTEMPT_TAG) or 1)]
    of_it = dg.RunsFilter(tags={"dagster/partition": context.partition_key})
    runs = ask_store(lambda: context.instance.get_runs(of_it)) or []
    others = [run for run in runs if run.run_id != context.run.run_id]
    told += [1 + int(run.tags.get(ATTEMPT_TAG) or 0) for run in others]
    return max(*told, 1 + len(others))  # one that was launched by hand and never began has no number


def _tag(context: dg.AssetExecutionContext, tags: dict[str, str]) -> None:
    """Note on the run what ledger and lock say anyway: an event store that is away must not stop a training."""
    ask_store(lambda: context.instance.add_run_tags(context.run.run_id, tags))


def _receipt(context: dg.AssetExecutionContext, report: dict[str, Any]) -> dict[str, Any]:
    """What the ledger does not know: the wait in the queue, and the loss as a picture."""
    from rqwen3_pipeline.evidence.curves import effective, thin
    from rqwen3_pipeline.experiment_files import went_on_from

    folder = Path(report["path"])
    begun = went_on_from(folder, read_jsonl(folder / "ledger.jsonl"))
    curve = effective(read_jsonl(folder / "metrics.jsonl"), "train", begun)
    plot = curve_markdown(thin(curve.losses(), PLOT_POINTS), "training loss, nats, by step")
    found: dict[str, Any] = {"loss_plot": dg.MetadataValue.md(plot)}
    record = ask_store(lambda: context.instance.get_run_record_by_id(context.run.run_id))
    if record is not None and record.start_time is not None:
        found["queue_wait_s"] = round(record.start_time - record.create_timestamp.timestamp(), 1)
    return found


@dg.asset(
    group_name="training",
    kinds={"pytorch"},
    owners=OWNERS,
    code_version=CODE_VERSION,
    deps=[submissions],
    op_tags={"slurm/kind": "gpu"},  # as the scores, so that one job goes from here to the report
)
def final_checkpoint() -> dg.MaterializeResult:
    """`final.pt`, the end of the run, verified against its sidecar's size and SHA-256."""
    from rqwen3_pipeline.training import verify_final

    here = pipeline()
    return dg.MaterializeResult(metadata=metadata(verify_final(here.root, here.run.name)))
