"""Submissions: each partition is one slice of the training run, cut by the clock and taken up by the next."""

from typing import Any

import dagster as dg

from rqwen3_pipeline.assets.common import CODE_VERSION, OWNERS, metadata, pipeline, submission_partitions

EVENT_EVERY_S = 30.0


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
)
def submissions(context: dg.AssetExecutionContext, config: SubmissionOptions) -> dg.MaterializeResult[Any]:
    """One training job: resumes from the newest good checkpoint, saves when the clock or a signal says so.

    A submission that was cut and saved is a success; its stop reason says what ended it.
    """
    from rqwen3_pipeline.training import parse_submission, run_submission

    here = pipeline()
    report = run_submission(
        here.root,
        here.run,
        here.settings.config_path,
        parse_submission(context.partition_key, here.run.name),
        time_limit_s=config.time_limit_s,
        say=context.log.info,
        say_every_s=EVENT_EVERY_S,
    )
    return dg.MaterializeResult(metadata=metadata(report))


@dg.asset(group_name="training", kinds={"pytorch"}, owners=OWNERS, code_version=CODE_VERSION, deps=[submissions])
def final_checkpoint() -> dg.MaterializeResult:
    """`final.pt`, the end of the run, verified against its sidecar's size and SHA-256."""
    from rqwen3_pipeline.training import verify_final

    here = pipeline()
    return dg.MaterializeResult(metadata=metadata(verify_final(here.root, here.run.name)))
