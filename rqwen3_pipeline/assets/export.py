"""The model as the Hugging Face world loads it."""

import dagster as dg

from rqwen3_pipeline.assets.common import CODE_VERSION, OWNERS, metadata, pipeline


@dg.asset(
    group_name="results",
    kinds={"huggingface"},
    owners=OWNERS,
    code_version=CODE_VERSION,
    deps=["final_checkpoint"],
    op_tags={"slurm/kind": "gpu"},  # as the scores, so that one job makes export, scores and report
)
def export() -> dg.MaterializeResult:
    """A folder that `AutoModelForCausalLM` loads without custom code: safetensors, configuration, tokenizer."""
    from rqwen3_pipeline.results import export_model

    here = pipeline()
    return dg.MaterializeResult(metadata=metadata(export_model(here.root, here.run)))
