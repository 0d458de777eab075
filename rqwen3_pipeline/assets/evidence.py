"""The evidence report: every figure backed by a file of the run root."""

import dagster as dg

from rqwen3_pipeline.assets.common import CODE_VERSION, OWNERS, metadata, pipeline


@dg.asset(
    group_name="results", kinds={"html"}, owners=OWNERS, code_version=CODE_VERSION, deps=["eval_scores", "export"]
)
def evidence_report() -> dg.MaterializeResult:
    """One page with the loss curve, the funnel, the scores and the receipts, and the same as JSON."""
    from rqwen3_pipeline.evidence.report import write_report

    here = pipeline()
    return dg.MaterializeResult(metadata=metadata(write_report(here.root, here.run)))
