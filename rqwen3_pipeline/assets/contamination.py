"""The check that looks for benchmark questions in the corpus."""

import dagster as dg

from rqwen3_pipeline.assets.common import pipeline
from rqwen3_pipeline.assets.manifest import manifest

MOST_SHOWN = 50


@dg.asset_check(
    asset=manifest,
    description="No kept document shares 13 words in a row with a question of a benchmark that is to be scored.",
)
def free_of_benchmarks() -> dg.AssetCheckResult:
    """Count and name the documents that do; `[data.decontamination]` removes them."""
    from model.errors import CorpusError, SourceError
    from rqwen3_pipeline.corpus.decontamination import scan_corpus
    from rqwen3_pipeline.results import evaluation_config

    here = pipeline()
    cleaning = here.corpus.decontamination
    tasks = cleaning.benchmarks if cleaning.enabled else evaluation_config(here.run).benchmarks
    if not tasks:
        return dg.AssetCheckResult(passed=True, description="No benchmark is to be scored: [evaluation] benchmarks.")
    try:
        found = scan_corpus(here.root, here.lock, list(here.corpus.sources), tasks, here.settings.workers)
    except (CorpusError, SourceError) as error:
        return dg.AssetCheckResult(
            passed=False, severity=dg.AssetCheckSeverity.WARN, description=f"Not checked: {error}"
        )
    return dg.AssetCheckResult(
        passed=found["documents"] == 0,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"{found['documents']:,} of {found['documents_read']:,} documents hold questions of a benchmark.",
        metadata={
            "documents": found["documents"],
            "tasks": dg.MetadataValue.json(found["tasks"]),
            "offending": dg.MetadataValue.json(found["offending"][:MOST_SHOWN]),
        },
    )
