from pathlib import Path

import numpy as np
import pytest
import torch

from model.layers.rope import RotaryTables, rotate

FIXTURE = Path(__file__).resolve().parents[4] / "shared" / "cases" / "N03" / "rope_fixture.npz"


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


def interleaved(x_TH: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """The other layout, in float64: neighbours turn together."""
    angles = np.outer(positions, theta ** (-np.arange(0, x_TH.shape[1], 2) / x_TH.shape[1]))
    pairs = (x_TH[:, 0::2] + 1j * x_TH[:, 1::2]) * np.exp(1j * angles)
    return np.stack([pairs.real, pairs.imag], -1).reshape(x_TH.shape)


@pytest.mark.parametrize("start", [0, 200, 2000])
def test_rotate_at_the_production_width_is_half_split_and_not_interleaved(start: int) -> None:
    tables, positions = RotaryTables(2048, 128, 1e6), np.arange(start, start + 48)
    x_TH = np.random.default_rng(3).standard_normal((48, 128)).astype(np.float32)
    turned = rotate(torch.from_numpy(x_TH), *tables.get(start, 48, torch.device("cpu"))).numpy()
    assert np.abs(turned - half_split(x_TH, positions, 1e6)).max() < 1e-5
    assert np.abs(turned - interleaved(x_TH, positions, 1e6)).max() > 0.5


@pytest.mark.parametrize("first_position", [0, 2000])
def test_rotate_gives_the_numbers_of_the_shared_fixture(first_position: int) -> None:
    if not FIXTURE.is_file():
        pytest.skip("needs the shared fixture beside the checkout")
    with np.load(FIXTURE) as fixture:
        given, wanted = ("x_far", "y_far") if first_position else ("x", "y")
        assert fixture["first_pos_far"] == 2000
        x_TH, expected = fixture[given], fixture[wanted]
    tables = RotaryTables(2048, x_TH.shape[1], 1e6).get(first_position, len(x_TH), torch.device("cpu"))
    assert np.abs(rotate(torch.from_numpy(x_TH), *tables).numpy() - expected).max() < 1e-5


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
