import numpy as np
import pytest
import torch

from model import loss as loss_module
from model.loss import IGNORE, chunk_tokens, head_loss, token_losses

N, D, V = 70, 24, 97


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden_ND = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(V, D, generator=generator).requires_grad_()
    targets_N = torch.randint(0, V, (N,), generator=generator)
    targets_N[[3, 11, 69]] = IGNORE
    return hidden_ND, weight_VD, targets_N


def oracle(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Losses and gradients of their mean by plain formulas in float64."""
    h, w, t = hidden.detach().double().numpy(), weight.detach().double().numpy(), targets.numpy()
    counted = t != IGNORE
    logits = h @ w.T
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    losses = np.where(counted, -np.log(probabilities[np.arange(N), np.where(counted, t, 0)]), 0.0)
    grad_logits = probabilities.copy()
    grad_logits[np.arange(N), np.where(counted, t, 0)] -= 1
    grad_logits *= counted[:, None] / counted.sum()
    return losses, grad_logits @ w, grad_logits.T @ h


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_head_loss_and_gradients_equal_float64(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(loss_module, "chunk_tokens", lambda vocab, device: chunk)
    hidden, weight, targets = inputs()
    losses, grad_hidden, grad_weight = oracle(hidden, weight, targets)
    loss = head_loss(hidden, weight, targets)
    (3 * loss).backward()
    assert loss.dtype == torch.float32
    assert abs(loss.item() - losses.sum() / 67) < 1e-5
    assert hidden.grad is not None
    assert weight.grad is not None
    assert np.abs(hidden.grad.numpy() - 3 * grad_hidden).max() < 1e-6
    assert np.abs(weight.grad.numpy() - 3 * grad_weight).max() < 1e-6
    assert np.abs(token_losses(hidden, weight, targets).numpy() - losses).max() < 1e-5


def test_head_loss_of_bf16_is_exact_for_the_bf16_inputs() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    with torch.no_grad():
        weight.copy_(weight.bfloat16().float())
    losses, grad_hidden, grad_weight = oracle(hidden, weight, targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss = head_loss(hidden, weight, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert abs(float(loss.detach()) / (losses.sum() / 67) - 1) < 2e-3  # PyTorch's own is 1e-2 off
    assert weight.grad is not None
    assert hidden.grad is not None
    assert weight.grad.dtype == torch.float32
    assert np.abs(weight.grad.numpy() - grad_weight).max() < 0.02 * np.abs(grad_weight).max()
    assert np.abs(hidden.grad.float().numpy() - grad_hidden).max() < 0.02 * np.abs(grad_hidden).max()


def test_head_loss_with_extreme_logits_stays_finite() -> None:
    hidden, weight, targets = inputs()
    loss = head_loss(hidden * 1e4, weight, targets)
    loss.backward()
    assert torch.isfinite(loss)
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


def test_head_loss_without_any_counted_target_is_zero() -> None:
    hidden, weight, targets = inputs()
    loss = head_loss(hidden, weight, torch.full_like(targets, IGNORE))
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_micro_batches_with_the_step_as_divisor_add_up_to_the_whole() -> None:
    hidden, weight, targets = inputs()
    head_loss(hidden, weight, targets).backward()
    whole = weight.grad
    weight.grad = None
    counted = int((targets != IGNORE).sum())
    total = torch.zeros(())
    for part in (slice(0, 10), slice(10, 12), slice(12, None)):
        loss = head_loss(hidden[part], weight, targets[part], counted)
        loss.backward()
        total += loss.detach()
    assert whole is not None
    assert weight.grad is not None
    assert (weight.grad - whole).abs().max() < 1e-6
    assert abs(float(total) - float(head_loss(hidden, weight, targets).detach())) < 1e-6


def test_head_loss_without_gradients_equals_that_with() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        without = head_loss(hidden, weight, targets)
    assert abs(float(without) - float(head_loss(hidden, weight, targets).detach())) < 1e-6


def test_chunk_adapts_to_vocabulary_and_device() -> None:
    assert (
        chunk_tokens(151_936, "cuda") * 151_936 * 4 <= 640 * 2**20 < (chunk_tokens(151_936, "cuda") + 1) * 151_936 * 4
    )
    assert chunk_tokens(151_936, "cpu") == 16
    assert chunk_tokens(10, "cuda") == 16_384
