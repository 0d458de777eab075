"""The gradients written out for a CPU are those that autograd makes of the formulas, in float64."""

import pytest
import torch
import torch.nn.functional as F

from model.config import CoreConfig
from model.layers.feed_forward import FeedForward
from model.layers.rms_norm import RMSNorm
from model.layers.rope import RotaryTables, rotate

CONFIG = CoreConfig(
    vocab_size=8,
    d_model=24,
    n_layer=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=12,
    intermediate_size=40,
    max_seq_len=64,
)


def close(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    assert found is not None
    assert expected is not None
    return bool((found - expected).abs().max() <= 2e-6 * expected.abs().max())


def draw(*shape: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers in fp32 and in float64, both with gradients."""
    single = (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).requires_grad_()
    return single, single.detach().double().requires_grad_()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("transposed", [False, True])
def test_norm_has_the_gradients_of_its_formula(scale: float, transposed: bool) -> None:
    norm = RMSNorm(24, 1e-6)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    (x, x64), weight64 = draw(3, 5, 24, scale=scale), norm.weight.detach().double().requires_grad_()
    given, given64 = (t.transpose(0, 1) if transposed else t for t in (x, x64))
    out, out64 = norm(given), weight64 * given64 / (given64.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(upstream)
    out64.backward(upstream.double())
    assert close(out, out64)
    assert close(x.grad, x64.grad)
    assert close(norm.weight.grad, weight64.grad)


def test_rotation_has_the_gradient_of_its_formula() -> None:
    cos_TH, sin_TH = RotaryTables(64, 12, 1e4).get(40, 7, torch.device("cpu"))
    x, x64 = draw(2, 7, 3, 12)
    out = rotate(x.transpose(1, 2), cos_TH, sin_TH)
    first, second = x64.transpose(1, 2).chunk(2, -1)
    out64 = torch.cat((first * cos_TH - second * sin_TH, second * cos_TH + first * sin_TH), -1)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(upstream)
    out64.backward(upstream.double())
    assert close(out, out64)
    assert close(x.grad, x64.grad)


def test_feed_forward_has_the_gradients_of_its_formula() -> None:
    made = FeedForward(CONFIG)
    x, x64 = draw(2, 9, 24)
    gate, up, down = (
        p.weight.detach().double().requires_grad_() for p in (made.gate_proj, made.up_proj, made.down_proj)
    )
    out, out64 = made(x), (F.silu(x64 @ gate.T) * (x64 @ up.T)) @ down.T
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(upstream)
    out64.backward(upstream.double())
    assert close(out, out64)
    assert close(x.grad, x64.grad)
    pairs = ((made.gate_proj, gate), (made.up_proj, up), (made.down_proj, down))
    assert all(close(linear.weight.grad, weight.grad) for linear, weight in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_plain_formula_and_written_one_agree_under_compilation_and_in_other_types(dtype: torch.dtype) -> None:
    norm, made = RMSNorm(24, 1e-6).to(dtype), FeedForward(CONFIG).to(dtype)
    x = draw(2, 9, 24)[0].detach().to(dtype)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5

    def both(x: torch.Tensor) -> torch.Tensor:
        return made(norm(x))

    with torch.no_grad():
        plain, compiled = both(x), torch.compile(both, backend="eager")(x)
    assert plain.dtype == compiled.dtype == dtype
    assert (plain - compiled).abs().max() <= tolerance * plain.abs().max()
