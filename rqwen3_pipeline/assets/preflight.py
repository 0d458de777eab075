"""Preflight: what would fail after hours in the queue fails here in a minute."""

from typing import Any

import dagster as dg

from rqwen3_pipeline.assets.common import CODE_VERSION, OWNERS, metadata, pipeline


@dg.asset(
    group_name="training",
    kinds={"python"},
    owners=OWNERS,
    code_version=CODE_VERSION,
    deps=["manifest"],
    op_tags={"slurm/kind": "gpu"},
)
def preflight() -> dg.MaterializeResult[Any]:
    """Shards, memory plan, free space and a dry step; the first submission waits until all are green.

    What is expected of the scores is written down here, before there can be any.
    """
    from rqwen3_pipeline.preflight import Asked, run_preflight
    from rqwen3_pipeline.results import keep_expectations

    here = pipeline()
    keep_expectations(here.root, here.run)
    report = run_preflight(Asked(root=here.root, run=here.run, config_path=here.settings.config_path))
    checks = [dg.TableRecord({**check, "passed": "yes"}) for check in report.pop("checks")]
    return dg.MaterializeResult(metadata={**metadata(report), "checks": dg.MetadataValue.table(checks)})
