"""Read published weights: any Qwen3 folder, dense or with experts, and folders of the Llama kind.

A folder holds `config.json`, `tokenizer.json`, and `model.safetensors` or shards with their index.
What this model cannot compute (biases, other activations, scaled rotations, quantised weights) is
refused by the field that says so; it would otherwise run and be wrong. Names, shapes and file sizes
are checked before a tensor is read, and everything that is wrong is said at once. Costs one reading
of the weights; in memory, the model in fp32 and one tensor more.
"""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from model.checkpoint import tensor_problems
from model.config import CoreConfig
from model.errors import CheckpointError, ConfigError
from model.rqwen3 import RQwen3

KINDS = {"qwen3": True, "qwen3_moe": True, "llama": False, "mistral": False}
"""Model types that can be read, and whether they normalise queries and keys."""
DEFAULT_ROPE_THETA = 10_000.0
"""Where a configuration says nothing, as in transformers."""
ABSENT_OR_OFF = {
    "attention_bias": "its projections have biases",
    "mlp_bias": "its feed-forward has biases",
    "quantization_config": "its weights are quantised",
    "use_sliding_window": "its attention is windowed",
    "mlp_only_layers": "some of its blocks are dense by name",
}
"""Fields that must be missing, null, false or empty, and what they mean otherwise."""
TIED_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
UNUSED_SUFFIX = "rotary_emb.inv_freq"
"""Old Llama files carry the rotary frequencies, which follow from the configuration."""


def load_published(folder: Path, device: torch.device | str = "cpu") -> RQwen3:
    """The model of a published folder, in fp32 and in evaluation mode.

    Raises:
        ConfigError: its configuration describes something else than this model can be.
        CheckpointError: a file is missing or cut, or tensors are missing, surplus or misshapen.
    """
    config = read_config(folder)
    model = RQwen3(config)
    load_tensors(model, folder)
    return model.to(device).eval()


def read_config(folder: Path) -> CoreConfig:
    """The shape that a folder's `config.json` describes.

    Raises:
        ConfigError: the file is missing or no JSON, lacks a field, or asks for something else.
    """
    path = folder / "config.json"
    values = _read_object(path)
    kind = values.get("model_type")
    if kind not in KINDS:
        raise ConfigError(f"{path}: model_type = {kind!r} is not of this architecture. Valid: {', '.join(KINDS)}.")
    for field, meaning in ABSENT_OR_OFF.items():
        if values.get(field):
            raise ConfigError(f"{path}: {field} = {values[field]!r}: {meaning}, which this model has not.")
    if kind == "mistral" and values.get("sliding_window"):
        raise ConfigError(f"{path}: sliding_window = {values['sliding_window']!r}: its attention is windowed.")
    windowed = sorted(set(values.get("layer_types") or ()) - {"full_attention"})
    if windowed:
        raise ConfigError(f"{path}: layer_types names {', '.join(windowed)}, which this model has not.")
    if values.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path}: hidden_act = {values['hidden_act']!r}, this model computes silu.")
    shape = {
        ours: _number(values, theirs, path)
        for ours, theirs in (
            ("vocab_size", "vocab_size"),
            ("d_model", "hidden_size"),
            ("n_layer", "num_hidden_layers"),
            ("num_heads", "num_attention_heads"),
            ("intermediate_size", "intermediate_size"),
            ("max_seq_len", "max_position_embeddings"),
        )
    }
    heads = shape["num_heads"]
    head_dim = int(values.get("head_dim") or _head_dim(shape["d_model"], heads, path, kind))
    theta = rope_theta(values, path)
    experts = _experts(values, path) if kind == "qwen3_moe" else {}
    try:
        return CoreConfig(
            **shape,
            num_kv_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            rope_theta=theta,
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            qk_norm=KINDS[kind],
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
            **experts,
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def rope_theta(values: dict[str, Any], path: Path) -> float:
    """The base of the rotation, from `rope_theta` (old) or `rope_parameters` (new).

    Raises:
        ConfigError: the two differ, or the rotation is scaled.
    """
    found = {}
    if values.get("rope_theta") is not None:
        found["rope_theta"] = float(values["rope_theta"])
    for field in ("rope_parameters", "rope_scaling"):
        inner = values.get(field) or {}
        kind = inner.get("rope_type", inner.get("type", "default"))
        if kind != "default":
            raise ConfigError(f"{path}: {field}.rope_type = {kind!r}: scaled rotations are not computed here.")
        if inner.get("rope_theta") is not None:
            found[f"{field}.rope_theta"] = float(inner["rope_theta"])
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name} = {value:g}" for name, value in found.items())
        raise ConfigError(f"{path}: {told}: which one holds? Delete the wrong one.")
    return next(iter(found.values()), DEFAULT_ROPE_THETA)


def _experts(values: dict[str, Any], path: Path) -> dict[str, Any]:
    if not values.get("norm_topk_prob", False):
        raise ConfigError(f"{path}: norm_topk_prob is not true; this model's experts' weights add up to 1.")
    return {
        "num_experts": _number(values, "num_local_experts" if "num_local_experts" in values else "num_experts", path),
        "num_experts_per_tok": _number(values, "num_experts_per_tok", path),
        "moe_intermediate_size": _number(values, "moe_intermediate_size", path),
        "decoder_sparse_step": int(values.get("decoder_sparse_step", 1)),
        "router_aux_loss_coef": float(values.get("router_aux_loss_coef", 0.001)),
    }


def _head_dim(d_model: int, heads: int, path: Path, kind: str) -> int:
    """The width of a head that a configuration leaves out: by the kind's own convention."""
    if kind.startswith("qwen3"):
        return 128
    if heads < 1 or d_model % heads:
        raise ConfigError(f"{path}: hidden_size = {d_model} is not a multiple of num_attention_heads = {heads}")
    return d_model // heads


def _number(values: dict[str, Any], name: str, path: Path) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{path}: {name} = {value!r} must be a whole number.")
    return value


def end_of_text_ids(folder: Path) -> frozenset[int]:
    """Ids that end a text, from `generation_config.json`, else `config.json`; maybe none."""
    for name in ("generation_config.json", "config.json"):
        if not (folder / name).is_file():
            continue
        found = _read_object(folder / name).get("eos_token_id")
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


def load_tensors(model: RQwen3, folder: Path) -> None:
    """Copy a folder's tensors into the model, cast to its type.

    Raises:
        CheckpointError: what is missing, surplus, misshapen or cut, all of it.
    """
    files = weight_files(folder)
    headers = {path: safetensors_header(path) for path in files}
    where = {name: path for path, header in headers.items() for name in header}
    shapes = {name: tuple(entry["shape"]) for header in headers.values() for name, entry in header.items()}
    shapes = {name: shape for name, shape in shapes.items() if not name.endswith(UNUSED_SUFFIX)}
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_embeddings and TIED_HEAD not in shapes:
        del wanted[TIED_HEAD]
    if problems := tensor_problems(shapes, wanted):
        raise CheckpointError(
            f"{folder}: the tensors are not those that config.json describes: {problems}. "
            "Fetch the folder again, or mend config.json."
        )
    targets = dict(model.named_parameters())
    for path in files:
        try:
            with safe_open(path, framework="pt") as tensors, torch.no_grad():
                for name in (name for name in targets if where.get(name) == path):
                    targets[name].copy_(tensors.get_tensor(name))
        except SafetensorError as error:
            raise CheckpointError(f"{path}: not readable as safetensors ({error}). Fetch it again.") from error
    if model.config.tie_embeddings and TIED_HEAD in where:
        with safe_open(where[TIED_HEAD], framework="pt") as tensors:
            head = tensors.get_tensor(TIED_HEAD).to(targets[EMBEDDING].dtype)
        if not torch.equal(head, targets[EMBEDDING]):
            raise CheckpointError(
                f"{folder}: tie_word_embeddings is true, but {TIED_HEAD} differs from {EMBEDDING}. "
                "Set it to false in config.json if the head is a matrix of its own."
            )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the one, or the shards that the index names.

    Raises:
        CheckpointError: there is none, or a shard of the index is missing; the missing are named.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        named = _read_object(index).get("weight_map")
        if not isinstance(named, dict) or not named:
            raise CheckpointError(f"{index}: has no weight_map. Fetch it again.")
        files = [folder / name for name in sorted(set(named.values()))]
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise CheckpointError(
                f"{folder}: {index.name} names {', '.join(missing)}, not there. Fetch what is missing."
            )
        return files
    if single.is_file():
        return [single]
    others = [path.name for path in sorted(folder.glob("*.bin"))] if folder.is_dir() else []
    hint = f" {', '.join(others)} can't be read: convert to safetensors." if others else ""
    raise CheckpointError(f"{folder}: has neither {single.name} nor {index.name}.{hint} Name a folder with weights.")


def safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Type, shape and place of each tensor of a file, by name.

    Raises:
        CheckpointError: the file is shorter or longer than its header says; both sizes are given.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= size_bytes - 8:
            raise CheckpointError(
                f"{path}: {size_bytes:,} bytes, of which the header alone should be {length:,}; it is cut, or no "
                "safetensors file. Fetch it again."
            )
        try:
            header = json.loads(file.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"{path}: its header is no safetensors header ({error!r}). Fetch it again."
            ) from error
    if 8 + length + end != size_bytes:
        cut = [name for name, entry in tensors.items() if 8 + length + entry["data_offsets"][1] > size_bytes]
        lost = f"; {', '.join(cut)} can't be whole" if cut else ""
        raise CheckpointError(
            f"{path}: {size_bytes:,} bytes, its header describes {8 + length + end:,}{lost}. Fetch it again."
        )
    return tensors


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file. Name the folder of a published model.") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error}). Fetch it again.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds no object. Fetch it again.")
    return values
