import numpy as np
import torch

from model.layers.rms_norm import RMSNorm


def test_rms_norm_equals_float64_formula() -> None:
    norm = RMSNorm(16, 1e-6)
    x_BD = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)) * 3
    norm.weight.data.uniform_(0.5, 2.0)
    wide = x_BD.double().numpy()
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * norm.weight.detach().double().numpy()
    assert np.abs(norm(x_BD).detach().numpy() - expected).max() < 1e-5


def test_rms_norm_of_bf16_is_computed_in_fp32_and_comes_back_as_bf16() -> None:
    norm = RMSNorm(4096, 1e-6)
    x_BD = torch.full((1, 4096), 300.0, dtype=torch.bfloat16)  # the squares overflow nothing, their sum needs fp32
    assert norm(x_BD).dtype == torch.bfloat16
    assert torch.equal(norm(x_BD).float(), torch.ones(1, 4096))
