"""Survivors of deduplication, one unpartitioned asset per precedence group."""

from typing import Any

import dagster as dg

from rqwen3_pipeline.assets.common import CODE_VERSION, OWNERS, metadata, pipeline
from rqwen3_pipeline.corpus.sources import GROUPS


def survivors_asset(group: str, sources: tuple[str, ...]) -> dg.AssetsDefinition:
    """The asset `survivors/<group>`, made from all digests of its sources."""

    @dg.asset(
        key=dg.AssetKey(["survivors", group]),
        group_name="survivors",
        kinds={"numpy"},
        owners=OWNERS,
        code_version=CODE_VERSION,
        deps=[dg.AssetKey(["digests", source]) for source in sources],
        description=(
            "Rows left when every exact duplicate is gone: the first by (precedence, file, row) stays. "
            f"Precedence: {', then '.join(sources)}."
        ),
    )
    def survivors() -> dg.MaterializeResult[Any]:
        from rqwen3_pipeline.corpus.dedup import find_survivors

        here = pipeline()
        return dg.MaterializeResult(metadata=metadata(find_survivors(here.root, here.corpus, here.lock, group)))

    return survivors


survivors = [survivors_asset(group, sources) for group, sources in GROUPS.items()]
