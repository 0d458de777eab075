"""Export a checkpoint for the Hugging Face world: safetensors, configuration, tokenizer, model card.

The parameters already carry Hugging Face's names, so the export is a copy, cast if asked. It is read
back before it gets its name: every tensor bit for bit, its logits, its held-out loss. The configuration
holds the rotary base both as `rope_theta` and in `rope_parameters`: transformers 4 silently takes 10,000
where only the latter stands. Costs one writing of the weights and, in memory, three models in fp32.

    python -m model.huggingface --checkpoint FILE --config FILE --tokenizer FILE --out DIR
"""

import argparse
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from model.checkpoint import load_model, verify
from model.config import CoreConfig, RunConfig, load_run_config
from model.errors import CheckpointError, ConfigError, RQwen3Error
from model.files import replace_folder, settle_folder, sha256_file, temporary_path, write_json, write_text
from model.generate import EOS_TOKEN, load_tokenizer
from model.gguf_export import TYPES, find_converter, write_gguf
from model.model_card import CARD, RECORD, file_record, model_card, read_record, scores_of, write_card
from model.read_back import NOT_RUN, read_back
from model.rqwen3 import RQwen3
from model.shard_format import read_manifest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Extras:
    """What else an export may be given."""

    manifest: Path | None = None
    """The corpus: its tokenizer must be the one given, and its held-out loss is compared."""
    scores: Path | None = None
    """A `scores.json`, for the model card; passed over if it is another checkpoint's."""
    gguf: str | None = None
    """A type of `model.gguf_export.TYPES`: write a GGUF file too."""
    force: bool = False
    """Replace what stands there."""


def export(
    checkpoint: Path, run: RunConfig, tokenizer: Path, out: Path, dtype: str = "fp32", extras: Extras | None = None
) -> dict[str, Any]:
    """Write the export folder, read it back and compare.

    Args:
        checkpoint: a verified `.pt` with its sidecar.
        run: the configuration it was trained with.
        tokenizer: the tokenizer.json of the corpus.
        out: the folder; it must not exist, or be this very export, of which only the card may change.
        dtype: `fp32` or `bf16`.
        extras: manifest, scores, GGUF, and whether to replace a folder that exists.

    Returns:
        The record that lies in the folder: source, type, what reading back gave, size and hash of each file.

    Raises:
        CheckpointError: the checkpoint is damaged or has no sidecar, the tokenizer is not its own, the folder
            holds something else, or what was written reads back differently.
        EnvironmentProblem: GGUF is asked for, and no converter is there.
    """
    extras = extras or Extras()
    saved = verify(checkpoint)
    vocabulary = load_tokenizer(tokenizer)
    eos_id = _check_tokenizer(tokenizer, vocabulary, run.model, saved.sidecar, extras.manifest)
    if extras.gguf:
        find_converter()
    origin = {
        "checkpoint_sha256": saved.sidecar["sha256"],
        "step": saved.step,
        "dtype": dtype,
        "tokenizer_sha256": sha256_file(tokenizer),
        "gguf_type": extras.gguf,
    }
    tokenizer_ids = vocabulary.get_vocab_size(with_added_tokens=True)
    card = model_card(run, saved.sidecar, tokenizer_ids, dtype, scores_of(extras.scores, saved.sidecar["sha256"]))
    settle_folder(out)
    if out.exists() and not extras.force:
        return _same_export(out, origin, card)
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = temporary_path(out)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        model = _write_weights(draft / "model.safetensors", checkpoint, run.model, DTYPES[dtype])
        write_json(draft / "config.json", model_config(run.model, eos_id, dtype))
        write_json(draft / "generation_config.json", {"bos_token_id": None, "do_sample": False, "eos_token_id": eos_id})
        shutil.copyfile(tokenizer, draft / "tokenizer.json")
        write_json(draft / "tokenizer_config.json", tokenizer_config(run.model))
        write_text(draft / CARD, card)
        record = {**origin, "parameters": run.model.parameters(), "tokenizer_ids": tokenizer_ids}
        record |= {"embedding_rows": run.model.vocab_size}
        record["read_back"] = read_back(draft, model, checkpoint, run, extras.manifest)
        record["gguf"] = NOT_RUN
        if extras.gguf:
            record["gguf"] = write_gguf(draft, extras.gguf, model, run, extras.manifest)
        record["files"] = {path.name: file_record(path) for path in sorted(draft.iterdir())}
        write_json(draft / RECORD, record)
        replace_folder(draft, out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return record


def _check_tokenizer(
    path: Path, vocabulary: Tokenizer, config: CoreConfig, sidecar: dict[str, Any], manifest_path: Path | None
) -> int:
    """The end-of-text id of a tokenizer that belongs to the checkpoint.

    Raises:
        CheckpointError: it has more ids than the embedding has rows, no end-of-text token, or is not the one
            of the manifest; or the manifest is not the one that the checkpoint was trained on.
    """
    eos_id, ids = vocabulary.token_to_id(EOS_TOKEN), vocabulary.get_vocab_size(with_added_tokens=True)
    if eos_id is None:
        raise CheckpointError(f"{path}: has no token {EOS_TOKEN}. Name the run root's tokenizer.json.")
    if ids > config.vocab_size:
        raise CheckpointError(
            f"{path}: {ids:,} ids, but the embedding has {config.vocab_size:,} rows. It is another model's tokenizer: "
            "name the run root's tokenizer.json."
        )
    if manifest_path is None:
        return eos_id
    manifest = read_manifest(manifest_path)
    trained_on = sidecar.get("data_fingerprint")
    if trained_on is not None and trained_on != manifest.sha256:
        raise CheckpointError(
            f"{manifest_path}: SHA-256 {manifest.sha256[:12]}…, the checkpoint was trained on {str(trained_on)[:12]}…. "
            "Name the run root that it was trained in: rqwen3 --home DIR export"
        )
    own = manifest.root / manifest.tokenizer_path
    if sha256_file(own) != sha256_file(path):
        raise CheckpointError(
            f"{path}: not the tokenizer that made the shards ({own}). The model would be fed ids that mean other text; "
            "leave --tokenizer out."
        )
    return eos_id


def _write_weights(path: Path, checkpoint: Path, config: CoreConfig, dtype: torch.dtype) -> RQwen3:
    """Write the weights, compare what the disk gives back, bit for bit; returns the model they are of, in fp32."""
    model = load_model(checkpoint, config)
    state = model.state_dict()
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
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model


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


def _same_export(out: Path, origin: dict[str, Any], card: str) -> dict[str, Any]:
    """The record of a folder that is this very export already; its card is renewed, anything else is refused."""
    record = read_record(out)
    different = [key for key, value in origin.items() if key not in record or record[key] != value]
    files = record.get("files", {})
    damaged = [name for name in files if not (out / name).is_file() or file_record(out / name) != files[name]]
    if CARD in damaged and (out / CARD).is_file() and (out / CARD).read_text(encoding="utf-8") == card:
        damaged.remove(CARD)  # a killed renewal had not come to the record yet
    if different or damaged or not files:
        what = ", ".join((*different, *damaged)) or "no record of an export"
        raise CheckpointError(
            f"{out}: exists and is not this export ({what}). Name another folder: --out, or replace this one: --force"
        )
    write_card(out, record, card)
    return record


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m model.huggingface", description="Export a checkpoint.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--manifest", type=Path, help="of the corpus, whose held-out loss is compared")
    parser.add_argument("--scores", type=Path, help="a scores.json, for the model card")
    parser.add_argument("--gguf", choices=TYPES, help="write a GGUF file of this type too")
    parser.add_argument("--force", action="store_true", help="replace the folder if it exists")
    options = parser.parse_args(arguments)
    extras = Extras(manifest=options.manifest, scores=options.scores, gguf=options.gguf, force=options.force)
    try:
        run = load_run_config(options.config)
        record = export(options.checkpoint, run, options.tokenizer, options.out.absolute(), options.dtype, extras)
    except RQwen3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    size_bytes = sum(entry["bytes"] for entry in record["files"].values())
    print(f"{options.out}: step {record['step']:,}, {size_bytes / 2**20:,.1f} MiB")
    for what, found in (("read back", record["read_back"]), ("gguf", record.get("gguf", NOT_RUN))):
        if isinstance(found, str):
            print(f"  {what}: {found}")
            continue
        for name, value in found.items():
            print(f"  {what}, {name.replace('_', ' ')}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
