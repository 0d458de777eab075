import dataclasses

import numpy as np
import pytest
import torch

from model.compiler import compile_blocks
from model.config import CoreConfig, TrainConfig
from model.optimizer import make_optimizer, parameter_groups
from model.rqwen3 import RQwen3
from tests.model.production import PRODUCTION

SMALL = CoreConfig(
    vocab_size=50,
    d_model=16,
    n_layer=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    max_seq_len=16,
)
CONFIG = TrainConfig(max_steps=1000, seq_len=8, micro_batch_size=1)


def test_groups_hold_every_parameter_once_and_decay_matrices_alone() -> None:
    model = RQwen3(SMALL)
    groups = parameter_groups(model)
    assert sorted(groups["decay"] + groups["no_decay"]) == sorted(name for name, _ in model.named_parameters())
    assert all("norm" in name for name in groups["no_decay"])
    assert "model.embed_tokens.weight" in groups["decay"]
    assert "lm_head.weight" in groups["decay"]
    assert not any("norm" in name for name in groups["decay"])


def test_tied_head_is_in_one_group_once() -> None:
    model = RQwen3(dataclasses.replace(SMALL, tie_embeddings=True))
    optimizer = make_optimizer(model, CONFIG)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))


@pytest.mark.parametrize("tied", [False, True])
def test_groups_at_production_shape_hold_what_they_should_and_add_up(tied: bool) -> None:
    config = dataclasses.replace(PRODUCTION, tie_embeddings=tied)
    with torch.device("meta"):
        model = RQwen3(config)
        optimizer = make_optimizer(model, CONFIG)
    groups = parameter_groups(model)
    assert len(groups["no_decay"]) == 28 * 4 + 1
    assert len(groups["decay"]) == 28 * 7 + (1 if tied else 2)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len({id(parameter) for parameter in held}) == len(held)
    assert sum(parameter.numel() for parameter in held) == (596_049_920 if tied else 751_632_384)
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert sum(parameter.numel() for parameter in kept["params"]) == 65_536
    assert all(parameter.dim() >= 2 for parameter in decayed["params"])


def test_compiled_model_has_the_groups_of_the_plain_one() -> None:
    plain, compiled = RQwen3(SMALL), RQwen3(SMALL)
    assert compile_blocks(compiled) is None
    assert parameter_groups(compiled) == parameter_groups(plain)
    wrapped = parameter_groups(torch.compile(RQwen3(SMALL), backend="eager"))  # pyright: ignore[reportArgumentType]
    for name, members in parameter_groups(plain).items():
        assert [member.removeprefix("_orig_mod.") for member in wrapped[name]] == members


def test_update_equals_adamw_in_float64() -> None:
    model = RQwen3(SMALL)
    model.initialise(1)
    optimizer = make_optimizer(model, CONFIG)
    weight = model.lm_head.weight
    expected = weight.detach().double().numpy().copy()
    first, second = np.zeros_like(expected), np.zeros_like(expected)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 4):
        gradient = torch.randn(weight.shape, generator=generator)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        weight.grad = gradient.clone()
        optimizer.step()
        g = gradient.double().numpy()
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
        expected *= 1 - 3e-4 * 0.1
        expected -= 3e-4 * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
    assert np.abs(weight.detach().numpy() - expected).max() < 1e-7
    norm = dict(model.named_parameters())["model.norm.weight"]
    assert torch.equal(norm, torch.ones_like(norm))
