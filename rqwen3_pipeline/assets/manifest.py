"""The manifest: the whole corpus in one file, the same bytes whatever the workers did."""

import dagster as dg

from rqwen3_pipeline.assets.common import CODE_VERSION, OWNERS, metadata, pipeline
from rqwen3_pipeline.settings import SOURCES


@dg.asset(
    group_name="manifest",
    kinds={"json"},
    owners=OWNERS,
    code_version=CODE_VERSION,
    deps=[dg.AssetKey(["token_shards", source]) for source in SOURCES],
)
def manifest() -> dg.MaterializeResult:
    """A pure fold over the shards' sidecars, cut to each source's token budget."""
    from rqwen3_pipeline.corpus.manifest import fold_manifest
    from rqwen3_pipeline.corpus.sources import budgets

    here = pipeline()
    report = fold_manifest(here.root, here.corpus, here.lock, budgets(here.corpus, here.run.training))
    return dg.MaterializeResult(metadata=metadata(report))
