"""Export a checkpoint for the Hugging Face world: safetensors, configuration, tokenizer, model card.

The parameters already carry Hugging Face's names, so the export is a copy, cast if asked, and it is
read back and compared bit for bit before it gets its name. The configuration holds the rotary base
both as `rope_theta` and in `rope_parameters`: transformers 4 silently takes 10,000 where only the
latter stands. Costs one reading of the checkpoint and one writing of the weights.

    python -m model.huggingface --checkpoint FILE --config FILE --tokenizer FILE --out DIR
"""

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import load_model, verify
from model.config import CoreConfig, RunConfig, load_run_config
from model.errors import CheckpointError, ConfigError, RQwen3Error
from model.files import fsync_folder, read_json, sha256_file, temporary_path, write_json, write_text
from model.generate import EOS_TOKEN, load_tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RECORD = "export.json"


def export(checkpoint: Path, run: RunConfig, tokenizer: Path, out: Path, dtype: str = "fp32") -> dict[str, Any]:
    """Write the export folder.

    Args:
        checkpoint: a verified `.pt` with its sidecar.
        run: the configuration it was trained with.
        tokenizer: the tokenizer.json of the corpus.
        out: the folder; it must not exist, or be this very export.
        dtype: `fp32` or `bf16`.

    Returns:
        The record that lies in the folder: source, type, and size and hash of each file.

    Raises:
        CheckpointError: the checkpoint is damaged, the folder holds something else, or what was
            written reads back differently.
    """
    saved = verify(checkpoint)
    vocabulary = load_tokenizer(tokenizer)
    origin = {
        "checkpoint_sha256": saved.sidecar["sha256"],
        "step": saved.step,
        "dtype": dtype,
        "tokenizer_sha256": sha256_file(tokenizer),
    }
    if out.exists():
        return _same_export(out, origin)
    eos_id = vocabulary.token_to_id(EOS_TOKEN)
    if eos_id is None:
        raise CheckpointError(f"{tokenizer}: has no token {EOS_TOKEN}. Name the run root's tokenizer.json.")
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = temporary_path(out)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        _write_weights(draft / "model.safetensors", checkpoint, run.model, DTYPES[dtype])
        write_json(draft / "config.json", model_config(run.model, eos_id, dtype))
        write_json(draft / "generation_config.json", {"bos_token_id": None, "do_sample": False, "eos_token_id": eos_id})
        shutil.copyfile(tokenizer, draft / "tokenizer.json")
        write_json(draft / "tokenizer_config.json", tokenizer_config(run.model))
        tokenizer_ids = vocabulary.get_vocab_size(with_added_tokens=True)
        write_text(draft / "README.md", model_card(run, saved.sidecar, tokenizer_ids, dtype))
        record = {**origin, "parameters": run.model.parameters(), "tokenizer_ids": tokenizer_ids}
        record["files"] = {path.name: _file_record(path) for path in sorted(draft.iterdir())}
        write_json(draft / RECORD, record)
        draft.rename(out)
        fsync_folder(out.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return record


def _write_weights(path: Path, checkpoint: Path, config: CoreConfig, dtype: torch.dtype) -> None:
    """Write the weights, and compare what the disk gives back, bit for bit."""
    state = load_model(checkpoint, config).state_dict()
    if config.tie_embeddings:
        del state["lm_head.weight"]
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in state.items()}
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    again = load_file(path)
    different = [
        n for n in weights if n not in again or again[n].dtype != dtype or not torch.equal(again[n], weights[n])
    ]
    if different or len(again) != len(weights):
        raise CheckpointError(f"{path}: {', '.join(different[:3]) or 'a tensor'} reads back differently. Try again.")


def model_config(config: CoreConfig, eos_id: int, dtype: str) -> dict[str, Any]:
    """`config.json`: Qwen3, with experts or without, or Llama where there is no norm on queries and keys.

    Raises:
        ConfigError: experts without that norm: transformers has no such model.
    """
    kind = ("Qwen3ForCausalLM", "qwen3") if config.qk_norm else ("LlamaForCausalLM", "llama")
    experts = {}
    if config.num_experts:
        if not config.qk_norm:
            raise ConfigError("model.qk_norm = false with model.num_experts > 0: no published kind is like that.")
        kind = ("Qwen3MoeForCausalLM", "qwen3_moe")
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
        experts = {name: getattr(config, name) for name in (*names, "router_aux_loss_coef")}
        experts |= {"norm_topk_prob": True, "mlp_only_layers": [], "output_router_logits": False}
    return {
        **experts,
        "architectures": [kind[0]],
        "model_type": kind[1],
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": eos_id,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
        "torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.d_model,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_seq_len,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.n_layer,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def tokenizer_config(config: CoreConfig) -> dict[str, Any]:
    """`tokenizer_config.json`: no token is added at the beginning; the end-of-text token also pads."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": EOS_TOKEN,
        "pad_token": EOS_TOKEN,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_seq_len,
    }


def model_card(run: RunConfig, sidecar: dict[str, Any], tokenizer_ids: int, dtype: str) -> str:
    """`README.md` of the export, from the configuration and the checkpoint's sidecar."""
    model, training, step = run.model, run.training, int(sidecar["step"])
    rows = [
        ("parameters", f"{model.parameters():,}"),
        (
            "layers, width, heads",
            f"{model.n_layer}, {model.d_model}, {model.num_heads} ({model.num_kv_heads} key/value)",
        ),
        ("context", f"{model.max_seq_len:,} tokens"),
        ("embedding rows; ids of the tokenizer", f"{model.vocab_size:,}; {tokenizer_ids:,}"),
        ("steps; tokens trained on", f"{step:,}; {step * training.tokens_per_step:,}"),
        ("weights", dtype),
        ("checkpoint", f"SHA-256 `{sidecar['sha256']}`"),
        ("data (SHA-256 of the manifest)", f"`{sidecar.get('data_fingerprint')}`"),
        ("code (commit)", f"`{sidecar.get('commit')}`"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {run.name}

A language model of the Qwen3 architecture, pretrained from scratch. It completes text; it was not
tuned to follow instructions, and what it says may be wrong.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{run.name}")
tokenizer = AutoTokenizer.from_pretrained("{run.name}")
```

Rows of the embedding at or above the tokenizer's number of ids were never trained; do not sample them.
"""


def _same_export(out: Path, origin: dict[str, Any]) -> dict[str, Any]:
    """The record of a folder that is this very export already; anything else is refused."""
    record = read_json(out / RECORD) if (out / RECORD).is_file() else {}
    different = [key for key, value in origin.items() if record.get(key) != value]
    files = record.get("files", {})
    damaged = [name for name in files if not (out / name).is_file() or _file_record(out / name) != files[name]]
    if different or damaged or not files:
        what = ", ".join((*different, *damaged)) or "no record of an export"
        raise CheckpointError(f"{out}: exists and is not this export ({what}). Name another folder, or move it away.")
    return record


def _file_record(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m model.huggingface", description="Export a checkpoint.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    options = parser.parse_args(arguments)
    try:
        run = load_run_config(options.config)
        record = export(options.checkpoint, run, options.tokenizer, options.out.absolute(), options.dtype)
    except RQwen3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    size_bytes = sum(entry["bytes"] for entry in record["files"].values())
    print(f"{options.out}: step {record['step']:,}, {size_bytes / 2**20:,.1f} MiB, read back bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
