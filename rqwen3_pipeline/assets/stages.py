"""One factory for the stages that work file by file: sources × (raw, filtered, digests, tokens).

A run may hold one partition or a range of them; each partition gets its own metadata. A bad file
fails its partition by name: the others are materialized, and the run is red.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import dagster as dg

from rqwen3_pipeline.assets.common import CODE_VERSION, OWNERS, file_partitions, metadata, pipeline

if TYPE_CHECKING:
    from rqwen3_pipeline.corpus.build import Outcome

PARTITIONS_PER_RUN = 16
FETCHES_PER_RUN = 8
"""Of raw files. Another number, since a back-fill puts assets of the same policy into one run, which is one job:
fetching belongs where the internet is, the rest where the CPUs are."""
WORKER_BYTES = 32 * 1024 * 1024
"""Raw bytes that make a further process worth its start of a few seconds."""


def stage_asset(
    *, stage: str, name: str, source: str, group: str, deps: list[Any], kinds: set[str], description: str
) -> dg.AssetsDefinition:
    """The asset `<name>/<source>`, partitioned by the source's files.

    Args:
        stage: name of the stage in `corpus.build`.
        name: first part of the asset's key.
        source: second part of the key.
        group: the asset group.
        deps: what it is made from.
        kinds: shown as badges in the UI.
        description: one sentence for the catalogue.
    """
    key = dg.AssetKey([name, source])

    @dg.asset(
        key=key,
        group_name=group,
        deps=deps,
        kinds=kinds,
        description=description,
        owners=OWNERS,
        code_version=CODE_VERSION,
        partitions_def=file_partitions[source],
        backfill_policy=dg.BackfillPolicy.multi_run(FETCHES_PER_RUN if stage == "raw" else PARTITIONS_PER_RUN),
        op_tags={"rqwen3/stage": stage, "slurm/kind": "transfer" if stage == "raw" else "cpu"},
        check_specs=check_specs(stage, key),
    )
    def files_of_a_source(context: dg.AssetExecutionContext) -> Iterator[Any]:
        outcomes = run_partitions(stage, source, list(context.partition_keys))
        failed = [outcome for outcome in outcomes if outcome.error]
        for outcome in outcomes:
            if outcome.report is None:
                continue
            facts = metadata({**outcome.report, **_pace(outcome)})
            if failed:
                yield dg.AssetMaterialization(asset_key=key, partition=outcome.key, metadata=facts)
            else:
                context.add_asset_metadata(facts, asset_key=key, partition_key=outcome.key)
        if failed:
            raise dg.Failure(
                "\n".join(f"{source}/{outcome.key}: {outcome.error}" for outcome in failed), allow_retries=False
            )
        yield dg.MaterializeResult(asset_key=key)
        yield from run_checks(stage, source, key, [outcome.key for outcome in outcomes])

    return files_of_a_source


BLOCKING = {
    "hashes": "Every file of the run has the SHA-256 that was promised.",
    "columns": "Every file of the run has its columns and its number of rows.",
    "share_kept": "The source keeps at least data.min_share_kept of its rows, over all its files so far.",
}
"""The checks of a stage by file, each of which stops what is downstream; not every stage has all."""

STAGE_CHECKS = {"raw": ("hashes", "columns"), "filtered": ("hashes", "columns", "share_kept")}


def check_specs(stage: str, key: dg.AssetKey) -> list[dg.AssetCheckSpec]:
    """The blocking checks that an asset runs on the partitions it has just made."""
    return [
        dg.AssetCheckSpec(name, asset=key, blocking=True, description=BLOCKING[name])
        for name in STAGE_CHECKS.get(stage, ())
    ]


def run_checks(stage: str, source: str, key: dg.AssetKey, keys: list[str]) -> Iterator[dg.AssetCheckResult]:
    """Look at the files as they lie on the disk now, one result a check."""
    from rqwen3_pipeline.corpus.file_checks import CHECKS

    here = pipeline()
    for name in STAGE_CHECKS.get(stage, ()):
        problems = CHECKS[stage][name](here.root, here.corpus, here.lock, source, keys)
        yield dg.AssetCheckResult(
            asset_key=key,
            check_name=name,
            passed=not problems,
            description="\n".join(problems),
            metadata={"files": len(keys), "problems": dg.MetadataValue.json(problems)},
        )


def _pace(outcome: "Outcome") -> dict[str, Any]:
    """How long a piece took; its rows per second if it was made in this run."""
    pace = {"seconds": round(outcome.seconds, 3), "reused": outcome.skipped}
    rows = (outcome.report or {}).get("rows")
    if rows is not None and not outcome.skipped and outcome.seconds > 0:
        pace["rows_per_s"] = round(rows / outcome.seconds, 1)
    return pace


def run_partitions(stage: str, source: str, keys: list[str]) -> list["Outcome"]:
    """Run one stage over some of a source's files, with progress on standard error."""
    from rqwen3_pipeline.corpus.build import run_stage
    from rqwen3_pipeline.progress import Progress

    here = pipeline()
    size_bytes = sum(here.lock.file(source, key).size_bytes for key in keys)
    with Progress(f"{stage} {source}", len(keys), "files") as progress:
        return run_stage(
            stage,
            here.root,
            here.corpus,
            here.lock,
            [(source, key) for key in keys],
            workers=min(here.settings.workers, 1 + size_bytes // WORKER_BYTES),
            progress=lambda outcome: progress.advance(outcome.key),
        )
