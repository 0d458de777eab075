"""The tokenizer, and the token shards made with it."""

import dagster as dg

from rqwen3_pipeline.assets.common import CODE_VERSION, OWNERS, metadata, pipeline
from rqwen3_pipeline.assets.stages import stage_asset
from rqwen3_pipeline.corpus.sources import GROUPS
from rqwen3_pipeline.settings import SOURCES


@dg.asset(
    group_name="token_shards",
    kinds={"json"},
    owners=OWNERS,
    code_version=CODE_VERSION,
    deps=[dg.AssetKey(["filtered_documents", source]) for source in SOURCES],
    op_tags={"slurm/kind": "transfer"},  # a pinned one comes from the Hub
)
def tokenizer() -> dg.MaterializeResult:
    """Qwen3's tokenizer pinned by SHA-256, or, in the demo, a small byte-level BPE trained on the documents."""
    from rqwen3_pipeline.corpus.tokenization import make_tokenizer

    here = pipeline()
    report = make_tokenizer(here.root, here.corpus, here.lock, here.settings.tokenizer)
    return dg.MaterializeResult(metadata=metadata(report))


def _group_of(source: str) -> str:
    return next(group for group, sources in GROUPS.items() if source in sources)


token_shards = [
    stage_asset(
        stage="tokens",
        name="token_shards",
        source=source,
        group="token_shards",
        deps=[
            dg.AssetKey(["filtered_documents", source]),
            dg.AssetKey(["survivors", _group_of(source)]),
            dg.AssetKey(["tokenizer"]),
        ],
        kinds={"uint32"},
        description="Surviving documents as flat little-endian uint32 tokens, one end-of-text id after each.",
    )
    for source in SOURCES
]
