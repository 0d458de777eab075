"""Scores of the final model."""

import dagster as dg

from rqwen3_pipeline.assets.common import CODE_VERSION, OWNERS, metadata, pipeline


@dg.asset(
    group_name="results",
    kinds={"python"},
    owners=OWNERS,
    code_version=CODE_VERSION,
    deps=["export", "manifest"],
    op_tags={"slurm/kind": "gpu"},
)
def eval_scores() -> dg.MaterializeResult:
    """Cloze questions from held-out documents and held-out bits per byte, each with its standard error."""
    from rqwen3_pipeline.training import evaluate_model

    here = pipeline()
    return dg.MaterializeResult(metadata=metadata(evaluate_model(here.root, here.run)))
