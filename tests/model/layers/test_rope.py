import numpy as np
import torch

from model.layers.rope import RotaryTables, rotate


def half_split(x_TH: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Rotation in float64, channel by channel."""
    half = x_TH.shape[1] // 2
    out = np.empty(x_TH.shape)
    for row, position in enumerate(positions):
        for i in range(half):
            angle = position * theta ** (-2 * i / x_TH.shape[1])
            a, b = float(x_TH[row, i]), float(x_TH[row, i + half])
            out[row, i] = a * np.cos(angle) - b * np.sin(angle)
            out[row, i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def test_rotate_near_and_far_equals_float64_rotation() -> None:
    tables, device = RotaryTables(2048, 64, 1e6), torch.device("cpu")
    for start in (0, 2040):
        x_TH = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
        turned = rotate(torch.from_numpy(x_TH), *tables.get(start, 8, device)).numpy()
        assert np.abs(turned - half_split(x_TH, np.arange(start, start + 8), 1e6)).max() < 1e-5


def test_rotate_of_bf16_uses_exact_angles() -> None:
    tables = RotaryTables(2048, 64, 1e6)
    x_TH = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    cos_TH, sin_TH = tables.get(2040, 8, torch.device("cpu"))
    assert cos_TH.dtype == torch.float32
    turned = rotate(x_TH, cos_TH, sin_TH)
    assert turned.dtype == torch.bfloat16
    expected = half_split(x_TH.float().numpy(), np.arange(2040, 2048), 1e6)
    assert np.abs(turned.float().numpy() - expected).max() < 0.02


def test_rotate_leaves_scores_to_depend_on_distance_alone() -> None:
    tables, device = RotaryTables(2048, 64, 1e6), torch.device("cpu")
    q, k = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(2))

    def score(m: int, n: int) -> float:
        return float((rotate(q, *tables.get(m, 1, device)) * rotate(k, *tables.get(n, 1, device))).sum())

    assert abs(score(7, 3) - score(2007, 2003)) < 1e-4
    assert abs(score(7, 3) - score(9, 3)) > 1e-3
