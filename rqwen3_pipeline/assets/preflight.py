"""Preflight: what would fail after hours in the queue fails here in a minute."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from model.config import RunConfig
from rqwen3_pipeline.assets.common import CODE_VERSION, OWNERS, Pipeline, metadata, pipeline

if TYPE_CHECKING:
    from rqwen3_pipeline.preflight import Asked


def asked_for(here: Pipeline, run: RunConfig, config_path: Path, instance: dg.DagsterInstance) -> "Asked":
    """What preflight is to check, with the site where this instance's runs are its jobs."""
    from rqwen3_pipeline.preflight import Asked

    launcher = instance.run_launcher
    slurm = getattr(launcher, "slurm", None)
    site = getattr(launcher, "site", None)
    cluster = site() if slurm is not None and site is not None else None
    gpu = cluster.gpu if cluster is not None else ""
    return Asked(root=here.root, run=run, config_path=config_path, gpu=gpu, cluster=cluster, slurm=slurm)


@dg.asset(
    group_name="training",
    kinds={"python"},
    owners=OWNERS,
    code_version=CODE_VERSION,
    deps=["manifest"],
    op_tags={"slurm/kind": "gpu"},
)
def preflight(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
    """Shards, memory plan, free space, SLURM's word and a dry step; the first submission waits until all are green.

    What is expected of the scores is written down here, before there can be any.
    """
    from rqwen3_pipeline.preflight import run_preflight
    from rqwen3_pipeline.results import keep_expectations

    here = pipeline()
    keep_expectations(here.root, here.run)
    report = run_preflight(asked_for(here, here.run, here.settings.config_path, context.instance))
    checks = [dg.TableRecord({**check, "passed": "yes"}) for check in report.pop("checks")]
    return dg.MaterializeResult(metadata={**metadata(report), "checks": dg.MetadataValue.table(checks)})
