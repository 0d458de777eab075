"""The head and its cross-entropy in chunks: all logits never exist at once.

For each chunk of n tokens the logits (n, V) are made, turned into losses, then in place into the
gradient softmax − one-hot, and multiplied out to the hidden states' and the weight's gradients, all
in the forward pass. Memory: one chunk of fp32 logits, and an fp32 gradient of the weight. Time: the
three matrix products that a head costs anyway; nothing is recomputed. Matrix products run in the
autocast type, everything else in fp32, so the loss is exact to fp32 whatever the products' type.
"""

import torch
from torch import Tensor

IGNORE = -100
"""The target that is not counted."""
CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 640 * 2**20}
"""Largest fp32 logits of one chunk: what stays in a CPU's cache; some 1,100 tokens of 151,936 ids."""


def chunk_tokens(vocab_size: int, device_type: str) -> int:
    """Tokens of one chunk, so that its fp32 logits fit `CHUNK_BYTES`; 16 to 16,384."""
    return max(16, min(16384, CHUNK_BYTES.get(device_type, CHUNK_BYTES["cpu"]) // (4 * vocab_size)))


def head_loss(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, divisor: int | None = None) -> Tensor:
    """Sum of the counted targets' cross-entropies over `divisor`; a scalar, fp32.

    Args:
        hidden_ND: hidden states, N tokens.
        weight_VD: the head's matrix.
        targets_N: int64; `IGNORE` is not counted.
        divisor: by default the number of counted targets; with none at all the loss is 0.

    Returns:
        fp32 scalar that can be differentiated once with respect to both matrices.
    """
    divide_by = max(1, int((targets_N != IGNORE).sum()) if divisor is None else divisor)
    return _HeadLoss.apply(hidden_ND, weight_VD, targets_N, divide_by, torch.is_grad_enabled())


def token_losses(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Cross-entropy of every token, fp32, shape (N,); 0 where the target is `IGNORE`. No gradient."""
    dtype = _product_type(hidden_ND)
    weight = weight_VD.to(dtype)
    losses_N = torch.zeros(targets_N.shape, dtype=torch.float32, device=hidden_ND.device)
    step = chunk_tokens(weight_VD.shape[0], hidden_ND.device.type)
    with torch.no_grad(), torch.autocast(hidden_ND.device.type, enabled=False):
        for start in range(0, len(targets_N), step):
            part = slice(start, start + step)
            logits_NV = (hidden_ND[part].to(dtype) @ weight.T).float()
            losses_N[part] = _losses(logits_NV, targets_N[part])
    return losses_N


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, divisor, with_gradients):
        if not with_gradients:
            return token_losses(hidden_ND, weight_VD, targets_N).sum() / divisor
        dtype = _product_type(hidden_ND)
        weight = weight_VD.to(dtype)
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        step = chunk_tokens(weight_VD.shape[0], hidden_ND.device.type)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for start in range(0, len(targets_N), step):
                part = slice(start, start + step)
                hidden = hidden_ND[part].to(dtype)
                logits_NV = (hidden @ weight.T).float()
                total += _losses(logits_NV, targets_N[part], divisor).sum()
                grad_logits_NV = logits_NV.to(dtype)
                grad_hidden_ND[part] = grad_logits_NV @ weight
                if dtype == torch.float32:
                    grad_weight_VD.addmm_(grad_logits_NV.T, hidden)
                else:
                    grad_weight_VD += grad_logits_NV.T @ hidden
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype))
        return total / divisor

    @staticmethod
    def backward(ctx, *grad_outputs):
        grad_loss = grad_outputs[0]
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        return grad_hidden_ND * grad_loss, grad_weight_VD * grad_loss, None, None, None


def _losses(logits_NV: Tensor, targets_N: Tensor, gradient_divisor: int | None = None) -> Tensor:
    """Losses of a chunk; `logits_NV` is overwritten, with the gradient if a divisor is given."""
    counted_N1 = (targets_N != IGNORE).unsqueeze(1)
    target_N1 = targets_N.clamp(min=0).unsqueeze(1)
    largest_N1 = logits_NV.amax(1, keepdim=True)
    target_logit_N1 = logits_NV.gather(1, target_N1) - largest_N1
    sum_N1 = logits_NV.sub_(largest_N1).exp_().sum(1, keepdim=True)
    if gradient_divisor is not None:
        logits_NV.mul_(counted_N1 / (sum_N1 * gradient_divisor))
        logits_NV.scatter_add_(1, target_N1, counted_N1 * (-1.0 / gradient_divisor))
    return torch.where(counted_N1, sum_N1.log() - target_logit_N1, 0.0).squeeze(1)


def _product_type(hidden_ND: Tensor) -> torch.dtype:
    device_type = hidden_ND.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return hidden_ND.dtype
