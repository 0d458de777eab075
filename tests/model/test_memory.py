import dataclasses
import subprocess
import sys

import pytest

from model.config import TrainConfig
from model.errors import ConfigError
from model.gpus import gpu_named, gpu_of_device
from model.memory import GIB, Execution, block_token_bytes, checkpoint_bytes, head_bytes, plan_memory
from tests.model.production import PRODUCTION

TRAINING = TrainConfig(max_steps=1000, seq_len=2048, micro_batch_size=4)


def test_checkpoint_bytes_at_production_shape_are_those_of_the_published_files() -> None:
    assert checkpoint_bytes(PRODUCTION) == 12 * 751_632_384 == 9_019_588_608


@pytest.mark.parametrize(("micro_batch_size", "published_gib"), [(2, 19), (4, 24), (8, 35)])
def test_peak_at_production_shape_is_near_the_published_estimates(micro_batch_size: int, published_gib: float) -> None:
    training = dataclasses.replace(TRAINING, micro_batch_size=micro_batch_size)
    assert abs(plan_memory(PRODUCTION, training).peak_gib / published_gib - 1) < 0.05


def test_block_activations_are_near_those_measured() -> None:
    eager = dataclasses.replace(Execution(), compiled=False)
    assert abs(block_token_bytes(PRODUCTION, 2048, Execution(), 0) / 1024 / 46.7 - 1) < 0.03
    assert abs(block_token_bytes(PRODUCTION, 2048, eager, 0) / 1024 / 75.1 - 1) < 0.01


def test_block_activations_on_a_cpu_are_what_the_block_saves() -> None:
    import torch

    from model.layers.block import Block, BlockParts
    from model.layers.rope import RotaryTables

    config, tokens = dataclasses.replace(PRODUCTION, d_model=256, num_heads=4, num_kv_heads=2, head_dim=64), 64
    block = Block(config, BlockParts())
    cos_TH, sin_TH = RotaryTables(tokens, 64, 1e6).get(0, tokens, torch.device("cpu"))
    apart = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), cos_TH, sin_TH)}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in apart:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(torch.randn(1, tokens, 256, requires_grad=True), cos_TH, sin_TH)
    measured_bytes = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    planned_bytes = tokens * block_token_bytes(config, tokens, Execution.of(TRAINING, cuda=False), 0)
    assert abs(measured_bytes / planned_bytes - 1) < 0.03


def test_parts_add_up_and_recomputing_keeps_inputs_alone() -> None:
    plan = plan_memory(PRODUCTION, TRAINING)
    again = plan_memory(PRODUCTION, dataclasses.replace(TRAINING, recompute=True))
    assert plan.weights_bytes + plan.gradients_bytes + plan.moments_bytes == 16 * 751_632_384
    assert plan.casts_bytes == 2 * (751_632_384 - 155_582_464)
    assert again.activations_bytes == 28 * 4 * 2048 * 1024 * 4 + plan.layer_bytes
    assert again.peak_gib < plan.peak_gib
    on_cpu = plan_memory(PRODUCTION, TRAINING, cuda=False)
    assert (on_cpu.casts_bytes, on_cpu.context_bytes) == (0, 0)


def test_head_of_a_chunk_is_less_than_a_quarter_of_the_full_one() -> None:
    for tokens in (4096, 8192, 65_536):
        full = head_bytes(PRODUCTION, tokens, dataclasses.replace(Execution(), chunked_head=False))
        assert full >= 3 * tokens * 151_936 * 4
        chunked = head_bytes(PRODUCTION, tokens, Execution()) - 4 * 151_936 * 1024  # beyond the weight's gradient
        assert chunked <= full / 4


def test_sparse_blocks_keep_their_experts_activations() -> None:
    sparse = dataclasses.replace(PRODUCTION, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=3072)
    assert block_token_bytes(sparse, 2048, Execution(), 0) == block_token_bytes(PRODUCTION, 2048, Execution(), 0)
    assert block_token_bytes(sparse, 2048, Execution(), 1) - block_token_bytes(sparse, 2048, Execution(), 0) == 18_432
    assert plan_memory(sparse, TRAINING).parameters == sparse.parameters()


def test_plan_and_walk_are_free_of_torch() -> None:
    code = "import sys, model.memory_walk, model.gpus; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


@pytest.mark.parametrize(
    ("device", "peak_tflops"),
    [  # NVIDIA's data sheets, dense bf16 (half of what they give for sparse matrices)
        *(("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989)),
        *(("NVIDIA H200 NVL", 835), ("NVIDIA GH200 480GB", 989), ("NVIDIA A100-SXM4-80GB", 312)),
        *(("NVIDIA A100 80GB PCIe", 312), ("NVIDIA GeForce RTX 4090", 165.2)),
        *(("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA GeForce RTX 4090 D", None)),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_gpu_of_device_has_the_peak_of_that_very_card(device: str, peak_tflops: float | None) -> None:
    found = gpu_of_device(device)
    assert (None if found is None else found.peak_flops) == (peak_tflops and pytest.approx(peak_tflops * 1e12))


def test_gpus_are_found_by_either_name() -> None:
    assert gpu_named("L40S").memory_gib == 44.39
    names = ("NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA GeForce RTX 4090", "Tesla V100")
    found = [gpu.name if (gpu := gpu_of_device(name)) else None for name in names]
    assert found == ["a100-40", "a100-80", "h200", "4090", None]
    with pytest.raises(ConfigError, match=r"--gpu b200: not known. Valid: l40s, a100-40"):
        gpu_named("b200")
    assert plan_memory(PRODUCTION, TRAINING).fits(gpu_named("l40s").memory_gib)
    assert plan_memory(PRODUCTION, TRAINING).allocated_bytes < 25 * GIB
