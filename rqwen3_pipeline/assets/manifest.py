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
    """A pure fold over the shards' sidecars, cut to each source's token budget; the data card beside it."""
    from model.files import read_json
    from rqwen3_pipeline.corpus.data_card import data_card
    from rqwen3_pipeline.corpus.manifest import fold_manifest
    from rqwen3_pipeline.corpus.shares import realised_shares
    from rqwen3_pipeline.corpus.sources import budgets

    here = pipeline()
    path = here.root.manifest
    report = fold_manifest(here.root, here.corpus, here.lock, budgets(here.corpus, here.run.training))
    shares = [dg.TableRecord(record) for record in realised_shares(report["sources"])]
    shown = {"shares": dg.MetadataValue.table(shares), "data_card": dg.MetadataValue.md(data_card(read_json(path)))}
    return dg.MaterializeResult(metadata=metadata(report) | shown)
