"""The head and its cross-entropy in chunks: all logits never exist at once.

For each chunk of n tokens the logits (n, V) are made, turned into losses, then in place into the
gradient softmax − one-hot, and multiplied out to the hidden states' and the weight's gradients, all
in the forward pass. Memory: one chunk of fp32 logits, and an fp32 gradient of the weight, which the
backward pass hands on without a copy. Time: the three matrix products that a head costs anyway;
nothing is recomputed. A batch that is small enough is one chunk. Matrix products run in the autocast
type, everything else in fp32, so the loss is exact to fp32 whatever the products' type.

`torch.compile` leaves the head as it is: a traced loop would be unrolled, and anew for every length.
"""

import threading
from typing import Any

import torch
from torch import Tensor

from model.memory import HEAD_CHUNK_BYTES, head_chunk_tokens

IGNORE = -100
"""The target that is not counted."""


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
    if divisor is None:  # counted where the targets are: nothing waits for the device
        scale = 1.0 / (targets_N != IGNORE).sum().clamp(min=1)
    else:
        scale = torch.full((), 1.0 / max(1, divisor), device=hidden_ND.device)
    return _uncompiled_loss(hidden_ND, weight_VD, targets_N, scale, torch.is_grad_enabled())


def token_losses(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Cross-entropy of every token, fp32, shape (N,); 0 where the target is `IGNORE`. No gradient."""
    dtype = _product_type(hidden_ND)
    weight = weight_VD.to(dtype)
    losses_N = torch.zeros(targets_N.shape, dtype=torch.float32, device=hidden_ND.device)
    with torch.no_grad(), torch.autocast(hidden_ND.device.type, enabled=False):
        for part in _chunks(hidden_ND, weight_VD):
            logits_NV = (hidden_ND[part].to(dtype) @ weight.T).float()
            losses_N[part] = _losses(logits_NV, targets_N[part])
    return losses_N


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, scale, with_gradients):
        if not with_gradients:
            return token_losses(hidden_ND, weight_VD, targets_N).sum() * scale
        dtype = _product_type(hidden_ND)
        weight = weight_VD.to(dtype)
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD: Tensor | None = None
        losses_N = torch.empty(targets_N.shape, dtype=torch.float32, device=hidden_ND.device)
        parts = _chunks(hidden_ND, weight_VD)
        longest = min(parts[0].stop, len(targets_N)) if parts else 0
        buffer_NV = _kept.buffer(longest, weight.shape[0], dtype, hidden_ND.device)  # of every chunk
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for part in parts:
                hidden = hidden_ND[part].to(dtype)
                logits_NV = torch.mm(hidden, weight.T, out=buffer_NV[: len(hidden)]).float()
                losses_N[part] = _losses(logits_NV, targets_N[part], scale)
                grad_logits_NV = logits_NV.to(dtype)
                grad_hidden_ND[part] = grad_logits_NV @ weight
                if grad_weight_VD is None:
                    grad_weight_VD = (grad_logits_NV.T @ hidden).float()
                elif dtype == torch.float32:
                    grad_weight_VD.addmm_(grad_logits_NV.T, hidden)
                else:
                    grad_weight_VD += grad_logits_NV.T @ hidden
        if grad_weight_VD is None:
            grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        ctx.gradients = grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype)
        return losses_N.sum() * scale

    @staticmethod
    def backward(ctx, *grad_outputs):
        if ctx.gradients is None:
            raise RuntimeError("the head's gradients are handed on once; compute the loss again")
        grad_hidden_ND, grad_weight_VD = ctx.gradients
        ctx.gradients = None  # so that the optimiser's gradient is this very tensor, not a copy of it
        grad_loss = grad_outputs[0]
        return grad_hidden_ND.mul_(grad_loss), grad_weight_VD.mul_(grad_loss), None, None, None


class _KeptBuffer(threading.local):
    """The memory of a CPU's chunk of logits, kept from step to step.

    The C library gives back what is as large as this at once, and the kernel zeroes it anew, page by
    page, at the next step: a tenth of the head's time. CUDA's allocator keeps its memory itself.
    """

    memory = torch.empty(0)

    def buffer(self, tokens: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised (tokens, vocab_size); the next call may hand out the same memory."""
        size = tokens * vocab_size
        if device.type != "cpu" or dtype != torch.float32 or size * dtype.itemsize > HEAD_CHUNK_BYTES["cpu"]:
            return torch.empty((tokens, vocab_size), dtype=dtype, device=device)
        if self.memory.numel() < size:
            self.memory = torch.empty(size)
        return self.memory[:size].view(tokens, vocab_size)


_kept = _KeptBuffer()
_uncompiled_loss: Any = torch.compiler.disable(_HeadLoss.apply)


def _chunks(hidden_ND: Tensor, weight_VD: Tensor) -> list[slice]:
    """Parts of the tokens, of equal size but for the last."""
    tokens, vocab_size = hidden_ND.shape[0], weight_VD.shape[0]
    size = head_chunk_tokens(vocab_size, tokens, cuda=hidden_ND.device.type == "cuda")
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _losses(logits_NV: Tensor, targets_N: Tensor, scale: Tensor | None = None) -> Tensor:
    """Losses of a chunk; `logits_NV` is overwritten, with the gradient times `scale` if that is given."""
    counted_N1 = (targets_N != IGNORE).unsqueeze(1)
    target_N1 = targets_N.clamp(min=0).unsqueeze(1)
    largest_N1 = logits_NV.amax(1, keepdim=True)
    target_logit_N1 = logits_NV.gather(1, target_N1) - largest_N1
    sum_N1 = logits_NV.sub_(largest_N1).exp_().sum(1, keepdim=True)
    if scale is not None:
        scale_N1 = counted_N1 * scale
        logits_NV.mul_(scale_N1 / sum_N1)
        logits_NV.scatter_add_(1, target_N1, -scale_N1)
    return torch.where(counted_N1, sum_N1.log() - target_logit_N1, 0.0).squeeze(1)


def _product_type(hidden_ND: Tensor) -> torch.dtype:
    device_type = hidden_ND.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return hidden_ND.dtype
