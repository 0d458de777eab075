"""Scores of the final model, and of what each submission left."""

from typing import Any

import dagster as dg

from rqwen3_pipeline.assets.common import CODE_VERSION, OWNERS, metadata, pipeline, submission_partitions


@dg.asset(
    group_name="results",
    kinds={"python"},
    owners=OWNERS,
    code_version=CODE_VERSION,
    deps=["export", "manifest"],
    op_tags={"slurm/kind": "gpu"},
)
def eval_scores() -> dg.MaterializeResult:
    """The configured benchmarks, cloze questions and held-out bits per byte, each with its standard error.

    Benchmarks that are scored already are not asked again, so a killed evaluation goes on.
    """
    from rqwen3_pipeline.results import evaluate_model

    here = pipeline()
    report = evaluate_model(here.root, here.run, here.root.benchmarks)
    return dg.MaterializeResult(metadata=metadata(report))


@dg.asset(
    group_name="results",
    kinds={"python"},
    owners=OWNERS,
    code_version=CODE_VERSION,
    deps=["submissions"],
    partitions_def=submission_partitions,
    op_tags={"slurm/kind": "gpu"},
)
def submission_scores(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
    """The configured benchmarks over the checkpoint that a submission left; each task is asked once."""
    from rqwen3_pipeline.results import score_submission
    from rqwen3_pipeline.training import parse_submission

    here = pipeline()
    number = parse_submission(context.partition_key, here.run.name)
    report = score_submission(here.root, here.run, number, here.root.benchmarks)
    return dg.MaterializeResult(metadata=metadata(report))
