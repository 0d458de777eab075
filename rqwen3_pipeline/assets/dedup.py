"""Survivors of deduplication, one unpartitioned asset per precedence group."""

from collections.abc import Iterator
from typing import Any

import dagster as dg

from rqwen3_pipeline.assets.common import CODE_VERSION, OWNERS, metadata, pipeline
from rqwen3_pipeline.corpus.sources import GROUPS


def survivors_asset(group: str, sources: tuple[str, ...]) -> dg.AssetsDefinition:
    """The asset `survivors/<group>`, made from all digests of its sources."""
    key = dg.AssetKey(["survivors", group])

    @dg.asset(
        key=key,
        group_name="survivors",
        kinds={"numpy"},
        owners=OWNERS,
        code_version=CODE_VERSION,
        deps=[dg.AssetKey(["digests", source]) for source in sources],
        description=(
            "Rows left when every exact duplicate is gone: the first by (precedence, file, row) stays. "
            f"Precedence: {', then '.join(sources)}."
        ),
        check_specs=[
            dg.AssetCheckSpec(
                "no_digest_twice",
                asset=key,
                blocking=True,
                description="No two survivors are equal, and every document survived or was shadowed by one that did.",
            )
        ],
    )
    def survivors() -> Iterator[Any]:
        from rqwen3_pipeline.corpus.dedup import find_survivors, repeated

        here = pipeline()
        yield dg.MaterializeResult(metadata=metadata(find_survivors(here.root, here.corpus, here.lock, group)))
        problems = repeated(here.root, here.corpus, here.lock, group)
        yield dg.AssetCheckResult(
            asset_key=key,
            check_name="no_digest_twice",
            passed=not problems,
            description="\n".join(problems),
            metadata={"problems": dg.MetadataValue.json(problems)},
        )

    return survivors


survivors = [survivors_asset(group, sources) for group, sources in GROUPS.items()]
