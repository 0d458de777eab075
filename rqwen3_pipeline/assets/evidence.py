"""The evidence report: every figure backed by a file of the run root."""

import dagster as dg

from rqwen3_pipeline.assets.common import CODE_VERSION, OWNERS, metadata, pipeline


@dg.asset(
    group_name="results",
    kinds={"html"},
    owners=OWNERS,
    code_version=CODE_VERSION,
    deps=["eval_scores", "export"],
    op_tags={"slurm/kind": "gpu"},  # as the scores, so that one job makes export, scores and report
)
def evidence_report() -> dg.MaterializeResult:
    """One page with the loss curve, the funnel, the scores and the receipts, and the same as JSON."""
    from rqwen3_pipeline.evidence.report import write_report

    here = pipeline()
    return dg.MaterializeResult(metadata=metadata(write_report(here.root, here.run)))


@dg.asset(group_name="results", kinds={"html"}, owners=OWNERS, code_version=CODE_VERSION, deps=["submissions"])
def comparison() -> dg.MaterializeResult:
    """All experiments of this run root and their variations: curves, held-out scores and what differs, on one page."""
    from rqwen3_pipeline.evidence.comparison import write_comparison

    here = pipeline()
    report = write_comparison(here.root, here.run.name)
    shown = ("name", "steps", "loss", "heldout_loss")
    table = [
        dg.TableRecord({**{key: row[key] for key in shown}, "differs": "; ".join(row["differs"])})
        for row in report.pop("experiments")
    ]
    return dg.MaterializeResult(metadata={**metadata(report), "experiments": dg.MetadataValue.table(table)})
