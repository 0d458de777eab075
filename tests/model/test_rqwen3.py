import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from model.config import CoreConfig
from model.layers.block import BlockParts
from model.layers.rope import RotaryTables, rotate
from model.rqwen3 import RQwen3
from tests.model.production import PRODUCTION

CONFIG = CoreConfig(
    vocab_size=199,
    d_model=48,
    n_layer=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=80,
    max_seq_len=600,
)


def reference(config: CoreConfig) -> nn.Module:
    """Transformers' model with random weights, those of the norms too (ones would hide errors)."""
    shape: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
    }
    torch.manual_seed(0)
    theirs = Qwen3ForCausalLM(Qwen3Config(**shape)) if config.qk_norm else LlamaForCausalLM(LlamaConfig(**shape))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.1)
    return theirs.eval()


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"qk_norm": False}, {"num_kv_heads": 6}])
def test_logits_equal_those_of_transformers(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    theirs, ours = reference(config), RQwen3(config).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    ids_BT = torch.randint(0, config.vocab_size, (2, 512), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = (ours(ids_BT) - theirs(ids_BT).logits).abs().max()
    assert difference < 1e-5


@pytest.mark.parametrize(("batch", "tokens", "start"), [(1, 1, 0), (3, 7, 0), (1, 600, 0), (2, 33, 500)])
def test_logits_equal_at_any_batch_length_and_offset(batch: int, tokens: int, start: int) -> None:
    theirs, ours = reference(CONFIG), RQwen3(CONFIG).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    ids_BT = torch.randint(0, CONFIG.vocab_size, (batch, start + tokens), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        caches = ours.new_caches(batch, start + tokens)
        if start:
            ours(ids_BT[:, :start], caches)
        mine = ours(ids_BT[:, start:], caches)
        assert (mine - theirs(ids_BT).logits[:, start:]).abs().max() < 1e-5


def test_queries_are_normalised_before_they_are_turned() -> None:
    attention = RQwen3(CONFIG).model.layers[0].self_attn
    seen: list[torch.Tensor] = []
    with torch.no_grad():
        attention.q_norm.weight.copy_(torch.linspace(0.5, 1.5, 16))  # uneven: norm and rotation don't commute
    attention.q_norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    attended: list[torch.Tensor] = []
    original = F.scaled_dot_product_attention
    try:
        F.scaled_dot_product_attention = lambda q, *rest, **more: attended.append(q) or original(q, *rest, **more)
        tables = RotaryTables(600, 16, 1e6).get(300, 5, torch.device("cpu"))
        attention(torch.randn(1, 5, 48), *tables)
    finally:
        F.scaled_dot_product_attention = original
    assert (attended[0] - rotate(seen[0].transpose(1, 2), *tables)).abs().max() < 1e-6


def test_rotary_tables_stay_fp32_and_exact_in_a_model_cast_to_bf16() -> None:
    model = RQwen3(CONFIG).bfloat16()
    model(torch.zeros(1, 2, dtype=torch.int64))
    cos_TH, _ = model.model.rotary.get(590, 10, torch.device("cpu"))
    angles = np.outer(np.arange(590, 600), 1e6 ** (-np.arange(0, 16, 2) / 16))
    assert cos_TH.dtype == torch.float32
    assert np.abs(cos_TH.numpy() - np.cos(angles)).max() < 1e-6


def test_recomputing_blocks_changes_no_bit_of_the_gradients() -> None:
    ids_BT = torch.randint(0, 199, (2, 41), generator=torch.Generator().manual_seed(1))
    gradients = []
    for recompute in (False, True):
        model = RQwen3(dataclasses.replace(CONFIG, dropout=0.2))
        model.initialise(1)
        model.model.recompute = recompute
        torch.manual_seed(5)
        model.loss(ids_BT[:, :-1], ids_BT[:, 1:]).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_gradients_equal_those_of_transformers() -> None:
    theirs, ours = reference(CONFIG), RQwen3(CONFIG)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    ids_BT = torch.randint(0, CONFIG.vocab_size, (2, 65), generator=torch.Generator().manual_seed(1))
    loss = ours.loss(ids_BT[:, :-1], ids_BT[:, 1:])
    loss.backward()
    expected = theirs(ids_BT, labels=ids_BT).loss
    expected.backward()
    assert abs(loss.item() - expected.item()) < 1e-5
    others = dict(theirs.named_parameters())
    for name, mine in ours.named_parameters():
        gradient = others[name].grad
        assert mine.grad is not None
        assert gradient is not None
        assert (mine.grad - gradient).abs().max() < 1e-5 * gradient.abs().max(), name


def test_production_model_on_the_meta_device_has_the_published_count_and_names() -> None:
    with torch.device("meta"):
        model = RQwen3(PRODUCTION)
    assert sum(parameter.numel() for parameter in model.parameters()) == 751_632_384 == PRODUCTION.parameters()
    names = set(model.state_dict())
    assert {"model.embed_tokens.weight", "model.layers.27.self_attn.q_norm.weight", "lm_head.weight"} <= names
    assert len(names) == 28 * 11 + 3


@pytest.mark.parametrize("changes", [{"tie_embeddings": True}, {"qk_norm": False}])
def test_config_counts_what_the_model_has(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    assert sum(parameter.numel() for parameter in RQwen3(config).parameters()) == config.parameters()


def test_initialisation_has_the_stated_deviations() -> None:
    model = RQwen3(dataclasses.replace(CONFIG, d_model=256, intermediate_size=512, vocab_size=2048))
    model.initialise(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = 0.02 / math.sqrt(2 * 3) if residual else 0.02
        assert abs(parameter.std().item() / expected - 1) < 0.05, name
        assert abs(parameter.mean().item()) < 0.05 * expected, name


def test_initialisation_depends_on_the_seed_alone() -> None:
    first, second, other = RQwen3(CONFIG), RQwen3(CONFIG), RQwen3(CONFIG)
    first.initialise(1)
    torch.manual_seed(99)
    second.initialise(1)
    other.initialise(2)
    same = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_start_loss_is_that_of_gaussian_logits() -> None:
    config = dataclasses.replace(CONFIG, d_model=128, vocab_size=4096)
    model = RQwen3(config)
    model.initialise(1)
    ids_BT = torch.randint(0, 4096, (4, 257), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss, deviation = float(model.loss(ids_BT[:, :-1], ids_BT[:, 1:])), float(model(ids_BT).std())
    assert abs(loss - (math.log(4096) + deviation**2 / 2)) < 0.05


def test_causality_later_tokens_change_nothing_before() -> None:
    model = RQwen3(CONFIG)
    model.initialise(1)
    ids_BT = torch.randint(0, 199, (1, 40), generator=torch.Generator().manual_seed(1))
    changed = ids_BT.clone()
    changed[0, 30:] = (changed[0, 30:] + 1) % 199
    with torch.no_grad():
        before, after = model(ids_BT), model(changed)
    assert (before[0, :30] - after[0, :30]).abs().max() < 1e-6
    assert (before[0, 30:] - after[0, 30:]).abs().max() > 1e-4


@pytest.mark.parametrize("cuts", [[40], [10, 1, 1, 28], [1] * 40, [5, 35]])
def test_cached_forward_in_parts_equals_the_whole(cuts: list[int]) -> None:
    model = RQwen3(CONFIG).eval()
    model.initialise(1)
    ids_BT = torch.randint(0, 199, (2, 40), generator=torch.Generator().manual_seed(1))
    caches, parts, start = model.new_caches(2, 40), [], 0
    with torch.no_grad():
        for tokens in cuts:
            parts.append(model(ids_BT[:, start : start + tokens], caches))
            start += tokens
        assert (torch.cat(parts, 1) - model(ids_BT)).abs().max() < 1e-5


def test_dropout_changes_training_only() -> None:
    model = RQwen3(dataclasses.replace(CONFIG, dropout=0.5))
    model.initialise(1)
    ids_BT = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        assert not torch.equal(model(ids_BT), model(ids_BT))
        model.eval()
        assert torch.equal(model(ids_BT), model(ids_BT))


def test_block_parts_are_chosen_by_layer() -> None:
    class Doubler(nn.Module):
        def __init__(self, config: CoreConfig) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(config.d_model))

        def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
            return 2 * self.scale * x_BTD

    model = RQwen3(CONFIG, lambda layer: BlockParts(feed_forward=Doubler) if layer == 1 else BlockParts())
    kinds = [type(block.mlp).__name__ for block in model.model.layers]
    assert kinds == ["FeedForward", "Doubler", "FeedForward"]
    model.loss(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64)).backward()


def test_position_beyond_the_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="beyond max_seq_len = 600"):
        RQwen3(CONFIG)(torch.zeros(1, 601, dtype=torch.int64))
