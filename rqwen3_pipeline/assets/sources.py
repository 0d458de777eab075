"""The source lock and the raw files: what comes in, known to the byte."""

import dagster as dg

from rqwen3_pipeline.assets.common import CODE_VERSION, OWNERS, file_partitions, metadata, pipeline
from rqwen3_pipeline.assets.stages import stage_asset
from rqwen3_pipeline.settings import SOURCES


@dg.asset(group_name="sources", kinds={"json"}, owners=OWNERS, code_version=CODE_VERSION)
def source_lock(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """Which files of the six sources are read: paths, sizes and SHA-256, in reading order."""
    from rqwen3_pipeline.corpus.origin import lock_origin

    here = pipeline()
    lock = lock_origin(here.root, here.corpus, here.settings.sources)
    register_partitions(context.instance, {source: [file.key for file in lock.files(source)] for source in SOURCES})
    files = {source: len(lock.files(source)) for source in SOURCES}
    size_bytes = sum(file.size_bytes for source in SOURCES for file in lock.files(source))
    return dg.MaterializeResult(
        metadata=metadata(
            {"files": files, "bytes": size_bytes, "lock_sha256": lock.sha256, "path": str(here.root.lock)}
        )
    )


def register_partitions(instance: dg.DagsterInstance, keys: dict[str, list[str]]) -> None:
    """Make the dynamic partitions of each source exactly its files in the lock."""
    for source, wanted in keys.items():
        name = file_partitions[source].name
        assert name is not None
        for stale in set(instance.get_dynamic_partitions(name)) - set(wanted):
            instance.delete_dynamic_partition(name, stale)
        instance.add_dynamic_partitions(name, wanted)


raw_files = [
    stage_asset(
        stage="raw",
        name="raw_files",
        source=source,
        group="sources",
        deps=[source_lock],
        kinds={"parquet"},
        description="The source's parquet files as published, verified by size and SHA-256 against the lock.",
    )
    for source in SOURCES
]
