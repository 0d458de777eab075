"""Preflight: what would fail after hours in the queue fails here in a minute."""

import dagster as dg

from rqwen3_pipeline.assets.common import CODE_VERSION, OWNERS, metadata, pipeline


@dg.asset(group_name="training", kinds={"python"}, owners=OWNERS, code_version=CODE_VERSION, deps=["manifest"])
def preflight() -> dg.MaterializeResult:
    """Shards against the manifest, free space against the checkpoints to come, and a dry step at full shape."""
    from rqwen3_pipeline.training import run_preflight

    here = pipeline()
    return dg.MaterializeResult(metadata=metadata(run_preflight(here.root, here.run, here.settings.config_path)))
