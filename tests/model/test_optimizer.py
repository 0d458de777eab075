import dataclasses

import numpy as np
import torch

from model.config import CoreConfig, TrainConfig
from model.optimizer import make_optimizer, parameter_groups
from model.rqwen3 import RQwen3

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
