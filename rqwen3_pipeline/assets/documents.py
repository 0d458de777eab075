"""Filtered documents and their digests."""

import dagster as dg

from rqwen3_pipeline.assets.stages import stage_asset
from rqwen3_pipeline.settings import SOURCES

filtered_documents = [
    stage_asset(
        stage="filtered",
        name="filtered_documents",
        source=source,
        group="filtered_documents",
        deps=[dg.AssetKey(["raw_files", source])],
        kinds={"python", "parquet"},
        description="Documents that passed the source's rule, NFC-normalised; the funnel counts each reason.",
    )
    for source in SOURCES
]

digests = [
    stage_asset(
        stage="digests",
        name="digests",
        source=source,
        group="digests",
        deps=[dg.AssetKey(["filtered_documents", source])],
        kinds={"numpy"},
        description="SHA-256 of every kept document's NFC text, 32 bytes each, in row order.",
    )
    for source in SOURCES
]
