"""Checks that can fail and block what is downstream."""

import dagster as dg

from rqwen3_pipeline.assets.common import pipeline
from rqwen3_pipeline.assets.manifest import manifest
from rqwen3_pipeline.assets.submissions import final_checkpoint


@dg.asset_check(
    asset=manifest, blocking=True, description="Every shard has the bytes and the SHA-256 that the manifest lists."
)
def shards_match_manifest() -> dg.AssetCheckResult:
    """Recompute each shard's size and SHA-256."""
    from rqwen3_pipeline.corpus.verify import verify_shards

    here = pipeline()
    problems = verify_shards(here.root)
    return dg.AssetCheckResult(
        passed=not problems, description="; ".join(problems), metadata={"problems": dg.MetadataValue.json(problems)}
    )


@dg.asset_check(
    asset=manifest, description="Each source fills its token budget; if not, the run will repeat some of it."
)
def budget_met() -> dg.AssetCheckResult:
    """Compare the tokens used with the budget, per source."""
    from model.files import read_json

    sources = read_json(pipeline().root.manifest)["sources"]
    missing = {
        name: s["budget_tokens"] - s["tokens_used"]
        for name, s in sources.items()
        if s["tokens_used"] < s["budget_tokens"]
    }
    return dg.AssetCheckResult(
        passed=not missing,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={"missing_tokens": dg.MetadataValue.json(missing)},
    )


@dg.asset_check(
    asset=final_checkpoint,
    blocking=True,
    description="The submissions together took every step once, none was lost or repeated.",
)
def every_step_once() -> dg.AssetCheckResult:
    """Follow the ledger from step 0 to the last one."""
    from rqwen3_pipeline.training import ledger, steps_by_submission

    here = pipeline()
    steps, problems = steps_by_submission(ledger(here.root, here.run.name), here.run.training.max_steps)
    return dg.AssetCheckResult(
        passed=not problems,
        description="; ".join(problems),
        metadata={"steps": dg.MetadataValue.json(steps), "problems": dg.MetadataValue.json(problems)},
    )


checks = [shards_match_manifest, budget_met, every_step_once]
