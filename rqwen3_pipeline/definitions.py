"""The code location: every asset, job and check, by explicit listing. Loads without torch or numpy."""

from typing import Any

import dagster as dg

from rqwen3_pipeline.assets import (
    dedup,
    documents,
    evaluation,
    evidence,
    export,
    manifest,
    preflight,
    sources,
    submissions,
    tokens,
)
from rqwen3_pipeline.assets.checks import checks, corpus_promises
from rqwen3_pipeline.sensors.notices import failure_notices
from rqwen3_pipeline.sensors.reconciler import slurm_reconciler
from rqwen3_pipeline.sensors.resubmission import resubmission

by_file = [*sources.raw_files, *documents.filtered_documents, *documents.digests, *tokens.token_shards]

assets = [
    sources.source_lock,
    *by_file,
    *dedup.survivors,
    tokens.tokenizer,
    manifest.manifest,
    preflight.preflight,
    submissions.submissions,
    submissions.final_checkpoint,
    export.export,
    evaluation.eval_scores,
    evaluation.submission_scores,
    evidence.evidence_report,
    evidence.comparison,
]


def _step_job(asset: dg.AssetsDefinition) -> Any:
    """A job of one partitioned step, for `dagster job backfill`."""
    name = "_".join(asset.key.path)
    return dg.define_asset_job(name, selection=[asset.key], executor_def=dg.in_process_executor)


jobs = [
    *(_step_job(asset) for asset in by_file),
    dg.define_asset_job("train_submission", selection=[submissions.submissions.key]),
    dg.define_asset_job("score_submission", selection=[evaluation.submission_scores.key]),
    dg.define_asset_job("lock_sources", selection=[sources.source_lock.key]),
    dg.define_asset_job("train_or_pin_tokenizer", selection=[tokens.tokenizer.key]),
    dg.define_asset_job("find_survivors", selection=[asset.key for asset in dedup.survivors]),
    dg.define_asset_job("fold_manifest", selection=[manifest.manifest.key]),
    dg.define_asset_job("verify_corpus", selection=dg.AssetSelection.checks(corpus_promises)),
    dg.define_asset_job("run_preflight", selection=[preflight.preflight.key]),
    dg.define_asset_job("compare_experiments", selection=[evidence.comparison.key]),
    dg.define_asset_job(
        "report_results",
        selection=[
            asset.key
            for asset in (submissions.final_checkpoint, export.export, evaluation.eval_scores, evidence.evidence_report)
        ],
    ),
]

defs = dg.Definitions(
    assets=assets,
    asset_checks=checks,
    jobs=jobs,
    sensors=[resubmission, slurm_reconciler, failure_notices],
    executor=dg.in_process_executor,
)
