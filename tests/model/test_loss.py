import numpy as np
import pytest
import torch

from model import loss as loss_module
from model.loss import IGNORE, head_loss, token_losses
from model.memory import HEAD_CHUNK_BYTES, HEAD_CHUNK_LEAST_TOKENS, head_chunk_tokens

N, D, V = 70, 24, 97


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden_ND = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(V, D, generator=generator).requires_grad_()
    targets_N = torch.randint(0, V, (N,), generator=generator)
    targets_N[[3, 11, 69]] = IGNORE
    return hidden_ND, weight_VD, targets_N


def oracle_of(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Losses and gradients of their mean by plain formulas in float64."""
    h, w, t = hidden.detach().double().numpy(), weight.detach().double().numpy(), targets.numpy()
    counted = t != IGNORE
    logits = h @ w.T
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    losses = np.where(counted, -np.log(probabilities[np.arange(len(t)), np.where(counted, t, 0)]), 0.0)
    grad_logits = probabilities.copy()
    grad_logits[np.arange(len(t)), np.where(counted, t, 0)] -= 1
    grad_logits *= counted[:, None] / counted.sum()
    return losses, grad_logits @ w, grad_logits.T @ h


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_head_loss_and_gradients_equal_float64(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(loss_module, "head_chunk_tokens", lambda vocab, tokens, cuda: chunk)
    hidden, weight, targets = inputs()
    losses, grad_hidden, grad_weight = oracle_of(hidden, weight, targets)
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
    losses, grad_hidden, grad_weight = oracle_of(hidden, weight, targets)
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


def test_chunk_adapts_to_tokens_vocabulary_and_device() -> None:
    assert head_chunk_tokens(151_936, 8192, cuda=True) * 151_936 * 4 <= HEAD_CHUNK_BYTES["cuda"]
    assert (head_chunk_tokens(151_936, 8192, cuda=True) + 1) * 151_936 * 4 > HEAD_CHUNK_BYTES["cuda"]
    assert head_chunk_tokens(151_936, 8192, cuda=False) == HEAD_CHUNK_LEAST_TOKENS
    assert head_chunk_tokens(257, 300, cuda=False) == 300  # a small batch is one chunk
    assert head_chunk_tokens(257, 0, cuda=False) == 1


@pytest.mark.parametrize("with_gradients", [True, False])
def test_head_loss_without_any_token_is_zero(with_gradients: bool) -> None:
    hidden = torch.zeros(0, D, requires_grad=True)
    weight = torch.ones(V, D, requires_grad=True)
    with torch.set_grad_enabled(with_gradients):
        loss = head_loss(hidden, weight, torch.zeros(0, dtype=torch.int64))
    assert loss.item() == 0.0
    if with_gradients:
        loss.backward()
        assert weight.grad is not None
        assert not weight.grad.any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-3)])
def test_loss_of_many_tokens_is_as_exact_as_stated(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(1500, 64, generator=generator)
    weight = (torch.randn(8000, 64, generator=generator) / 4).requires_grad_()
    targets = torch.randint(0, 8000, (1500,), generator=generator)
    full = torch.nn.functional.cross_entropy(hidden.double() @ weight.detach().double().T, targets)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = head_loss(hidden.requires_grad_(), weight, targets)
    assert loss.dtype == torch.float32
    assert abs(float(loss.detach()) / float(full) - 1) < tolerance


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_step_gives_the_loss_and_gradients_of_the_plain_one(autocast: bool) -> None:
    def step(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return head_loss(torch.tanh(hidden), weight, targets) * 2

    results = []
    for function in (step, torch.compile(step, backend="aot_eager")):
        hidden, weight, targets = inputs()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = function(hidden, weight, targets)
        loss.backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    for plain, compiled in zip(*results, strict=True):
        assert plain is not None
        assert compiled is not None
        assert (plain - compiled).abs().max() <= 1e-6 * plain.abs().max()


def test_gradient_of_the_head_is_handed_on_without_a_copy_and_once() -> None:
    hidden, weight, targets = inputs()
    loss = head_loss(hidden, weight, targets)
    made = loss.grad_fn.gradients[1]  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    address = made.data_ptr()
    del made
    loss.backward(retain_graph=True)
    assert weight.grad is not None
    assert weight.grad.data_ptr() == address
    with pytest.raises(RuntimeError, match="handed on once"):
        loss.backward()


@pytest.mark.parametrize("split", [[8], [4, 4], [2] * 4, [1] * 8, [3, 5]])
def test_accumulated_gradients_with_ignored_targets_are_those_of_one_batch(split: list[int]) -> None:
    generator = torch.Generator().manual_seed(7)
    hidden_BTD = torch.randn(8, 16, D, generator=generator)
    weight = torch.randn(V, D, generator=generator).requires_grad_()
    targets_BT = torch.randint(0, V, (8, 16), generator=generator)
    targets_BT[1, 3:] = IGNORE
    targets_BT[3, 10:] = IGNORE
    targets_BT[6] = IGNORE  # a micro-batch without any target
    counted = int((targets_BT != IGNORE).sum())
    losses, _, grad_weight = oracle_of(hidden_BTD.flatten(0, 1), weight, targets_BT.flatten())
    total = 0.0
    for hidden, targets in zip(hidden_BTD.split(split), targets_BT.split(split), strict=True):
        loss = head_loss(hidden.flatten(0, 1), weight, targets.flatten(), counted)
        loss.backward()
        total += float(loss.detach())
    assert weight.grad is not None
    assert abs(total - losses.sum() / counted) < 1e-6 * losses.sum() / counted
    assert np.abs(weight.grad.numpy() - grad_weight).max() < 1e-6


@pytest.mark.long
def test_peak_of_the_head_at_full_vocabulary_is_a_quarter_of_the_full_ones() -> None:
    from bench.model import head_peaks

    peaks = head_peaks()
    assert peaks["chunked_bytes"] <= 0.25 * peaks["full_bytes"]
