"""Checks that can fail and block what is downstream."""

from collections.abc import Iterator

import dagster as dg

from rqwen3_pipeline.assets.common import pipeline
from rqwen3_pipeline.assets.contamination import free_of_benchmarks
from rqwen3_pipeline.assets.manifest import manifest
from rqwen3_pipeline.assets.submissions import final_checkpoint
from rqwen3_pipeline.corpus.promises import PROMISES


@dg.multi_asset_check(
    name="corpus_promises",
    specs=[
        dg.AssetCheckSpec(name, asset=manifest, blocking=True, description=description)
        for name, description in PROMISES.items()
    ],
)
def corpus_promises() -> Iterator[dg.AssetCheckResult]:
    """Make every hash and count again: one read of the shards for all checks."""
    from rqwen3_pipeline.corpus.verify import verify

    here = pipeline()
    for name, defects in verify(here.root, here.corpus, here.run.training, here.settings.workers).items():
        yield dg.AssetCheckResult(
            asset_key=manifest.key,
            check_name=name,
            passed=not defects,
            description="\n".join(defects),
            metadata={"defects": dg.MetadataValue.json(defects)},
        )


@dg.asset_check(
    asset=final_checkpoint,
    blocking=True,
    description="The submissions together took every step once, none was lost or repeated.",
    op_tags={"slurm/kind": "gpu"},  # as the steps of the job that goes on from here to the report
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


checks = [corpus_promises, free_of_benchmarks, every_step_once]
