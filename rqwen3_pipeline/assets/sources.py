"""The source lock and the raw files: what comes in, known to the byte."""

from typing import TYPE_CHECKING

import dagster as dg

from rqwen3_pipeline.assets.common import CODE_VERSION, OWNERS, file_partitions, metadata, pipeline
from rqwen3_pipeline.assets.stages import stage_asset
from rqwen3_pipeline.settings import SOURCES

if TYPE_CHECKING:
    from rqwen3_pipeline.corpus.lock import Lock


@dg.asset(
    group_name="sources",
    kinds={"json"},
    owners=OWNERS,
    code_version=CODE_VERSION,
    op_tags={"slurm/kind": "transfer"},
)
def source_lock(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """Which files of the six sources are read: paths, sizes and SHA-256, in reading order."""
    from rqwen3_pipeline.corpus.origin import lock_origin

    here = pipeline()
    lock = lock_origin(here.root, here.corpus, here.run.training, here.settings.sources)
    register_partitions(context.instance, lock)
    files = {source: len(locked) for source, locked in lock.sources.items()}
    size_bytes = sum(file.size_bytes for locked in lock.sources.values() for file in locked)
    return dg.MaterializeResult(
        metadata=metadata(
            {"files": files, "bytes": size_bytes, "lock_sha256": lock.sha256, "path": str(here.root.lock)}
        )
    )


def register_partitions(instance: dg.DagsterInstance, lock: "Lock") -> None:
    """Make each source's dynamic partitions exactly its files in the lock; a source not in use has none."""
    for source, partitions in file_partitions.items():
        wanted = [file.key for file in lock.sources.get(source, ())]
        assert partitions.name is not None
        for stale in set(instance.get_dynamic_partitions(partitions.name)) - set(wanted):
            instance.delete_dynamic_partition(partitions.name, stale)
        instance.add_dynamic_partitions(partitions.name, wanted)


raw_files = [
    stage_asset(
        stage="raw",
        name="raw_files",
        source=source,
        group="raw_files",
        deps=[source_lock],
        kinds={"parquet"},
        description="The source's parquet files as published, verified by size and SHA-256 against the lock.",
    )
    for source in SOURCES
]
