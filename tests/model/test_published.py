"""Folders as Hugging Face publishes them are read, and give transformers' logits; others are refused."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EOS_ID, make_tokenizer
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from model import generate
from model.errors import CheckpointError, ConfigError
from model.published import load_published, read_config

SHAPE: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
    "rope_theta": 50_000.0,
    "eos_token_id": EOS_ID,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
KINDS: dict[str, Any] = {
    "qwen3": lambda **more: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, **more)),
    "llama": lambda **more: LlamaForCausalLM(LlamaConfig(**SHAPE, **more)),
    "qwen3_moe": lambda **more: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, head_dim=16, **EXPERTS, decoder_sparse_step=2, **more)
    ),
}


def publish(folder: Path, kind: str, shard_size: str = "5GB", **more: Any) -> torch.nn.Module:
    """Save a random model, its norms random too, as transformers does, with a tokenizer beside it."""
    torch.manual_seed(1)
    theirs = KINDS[kind](**more).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.1)
    theirs.save_pretrained(folder, max_shard_size=shard_size)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return theirs


def change(folder: Path, **values: Any) -> None:
    """Change keys of config.json; None deletes one."""
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def difference(folder: Path, theirs: torch.nn.Module) -> float:
    ours = load_published(folder)
    ids_BT = torch.randint(0, 272, (2, 90), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return float((ours(ids_BT) - theirs(ids_BT).logits).abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["5GB", "40KB"])
def test_published_folder_gives_the_logits_of_transformers(
    tmp_path: Path, kind: str, tied: bool, shard_size: str
) -> None:
    theirs = publish(tmp_path, kind, shard_size, tie_word_embeddings=tied)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "40KB")
    assert difference(tmp_path, theirs) < 1e-5


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"rope_theta": 7e4, "rope_parameters": None}, 7e4),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, 7e4),
        ({"rope_theta": 7e4, "rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, 7e4),
        ({"rope_theta": 7e4, "rope_parameters": None, "rope_scaling": {"type": "default"}}, 7e4),
        ({"rope_theta": None, "rope_parameters": None}, 1e4),
    ],
)
def test_base_of_the_rotation_is_read_from_the_old_place_and_the_new(
    tmp_path: Path, written: dict, read: float
) -> None:
    publish(tmp_path, "qwen3")
    change(tmp_path, **written)
    assert read_config(tmp_path).rope_theta == read
    assert difference(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)) < 1e-5


def test_old_llama_folder_without_newer_keys_is_read(tmp_path: Path) -> None:
    theirs = publish(tmp_path, "llama")
    change(tmp_path, head_dim=None, attention_bias=None, mlp_bias=None, rope_parameters=None, rope_theta=5e4)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_config(tmp_path).head_dim == 12
    assert difference(tmp_path, theirs) < 1e-5


def test_bf16_weights_are_widened_exactly(tmp_path: Path) -> None:
    publish(tmp_path, "qwen3").bfloat16().save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue]
    assert difference(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)) < 1e-5


def test_tied_folder_that_carries_its_head_too_is_read_and_another_head_refused(tmp_path: Path) -> None:
    theirs = publish(tmp_path, "qwen3", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert difference(tmp_path, theirs) < 1e-5
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model.embed_tokens.weight"):
        load_published(tmp_path)


def test_generate_from_a_folder_prints_the_greedy_text_of_transformers(tmp_path: Path, capsys) -> None:
    theirs, tokenizer = publish(tmp_path, "qwen3"), make_tokenizer()
    ids = tokenizer.encode("the cat").ids
    allowed = [[i] for i in range(257, 272)]  # rows without text
    new = theirs.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, bad_words_ids=allowed)
    assert generate.main(["--weights", str(tmp_path), "--prompt", "the cat", "--new-tokens", "20"]) == 0
    assert capsys.readouterr().out == "the cat" + tokenizer.decode(new[0, len(ids) :].tolist()) + "\n"


def test_generation_stops_at_any_of_several_end_ids(tmp_path: Path, capsys) -> None:
    publish(tmp_path, "qwen3")
    arguments = ["--weights", str(tmp_path), "--prompt", "the cat", "--new-tokens", "6"]
    change(tmp_path, eos_token_id=[EOS_ID])
    (tmp_path / "generation_config.json").unlink()
    assert generate.main(arguments) == 0
    text = capsys.readouterr().out
    ours = load_published(tmp_path)
    with torch.no_grad():
        first = int(ours(torch.tensor([make_tokenizer().encode("the cat").ids]))[0, -1, :257].argmax())
    change(tmp_path, eos_token_id=[EOS_ID, first])
    assert generate.main(arguments) == 0
    assert capsys.readouterr().out == "the cat\n" != text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2' is not of this architecture. Valid: qwen3"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"hidden_size": None}, "hidden_size = None must be a whole number"),
        ({"num_key_value_heads": 3}, "num_heads = 4 is not a multiple of model.num_kv_heads = 3"),
        ({"head_dim": 15}, "head_dim = 15 must be even"),
        ({"quantization_config": {"bits": 4}}, "its weights are quantised"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type = 'yarn'"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_theta = 10000, rope_parameters.rope_theta = 1e",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types names sliding_attention"),
    ],
)
def test_configuration_of_something_else_is_refused_by_field(tmp_path: Path, values: dict, message: str) -> None:
    publish(tmp_path, "qwen3")
    change(tmp_path, **values)
    with pytest.raises(ConfigError) as caught:
        load_published(tmp_path)
    assert message in str(caught.value)
    assert "config.json" in str(caught.value)


def test_vocabulary_smaller_than_the_tokenizers_is_refused_with_both(tmp_path: Path, capsys) -> None:
    publish(tmp_path, "qwen3")
    change(tmp_path, vocab_size=200)
    assert generate.main(["--weights", str(tmp_path), "--prompt", "a"]) == 2
    error = capsys.readouterr().err
    assert "200 rows" in error
    assert "257 ids" in error


def test_missing_surplus_and_misshapen_tensors_are_all_named_at_once(tmp_path: Path) -> None:
    publish(tmp_path, "qwen3")
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(4):
        del tensors[f"model.layers.{layer}.self_attn.q_norm.weight"]
        tensors[f"model.layers.{layer}.self_attn.q_proj.bias"] = torch.zeros(64)
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        tensors[name] = tensors[name][:79].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_published(tmp_path)
    message = str(caught.value)
    assert "4 missing" in message
    assert "4 surplus" in message
    assert "4 misshapen" in message
    for layer in range(4):
        assert f"layers.{layer}.self_attn.q_norm.weight" in message
        assert f"layers.{layer}.self_attn.q_proj.bias" in message
        assert f"layers.{layer}.mlp.up_proj.weight [79, 48] instead of [80, 48]" in message


@pytest.mark.parametrize("keep", [0, 5, 300, -1, -5000])
def test_truncated_file_is_refused_with_both_sizes(tmp_path: Path, keep: int) -> None:
    publish(tmp_path, "qwen3")
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: [\d,]+ bytes") as caught:
        load_published(tmp_path)
    assert f"{len(data[:keep]):,} bytes" in str(caught.value)
    if keep < 0:
        assert f"{len(data):,}" in str(caught.value)
        assert "can't be whole" in str(caught.value)


def test_header_that_is_none_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"[1,2" + bytes(20))
    with pytest.raises(CheckpointError, match="no safetensors header"):
        load_published(tmp_path)


def test_missing_shards_and_missing_weights_are_named(tmp_path: Path) -> None:
    publish(tmp_path, "qwen3", "40KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    for path in shards[1:3]:
        path.unlink()
    with pytest.raises(CheckpointError) as caught:
        load_published(tmp_path)
    assert all(path.name in str(caught.value) for path in shards[1:3])
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin can't be read: convert to safetensors"):
        load_published(tmp_path)


def test_folder_that_is_none_is_refused_by_name(tmp_path: Path, capsys) -> None:
    assert generate.main(["--weights", str(tmp_path / "no"), "--prompt", "a"]) == 1
    assert "tokenizer.json" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load_published(tmp_path / "no")
