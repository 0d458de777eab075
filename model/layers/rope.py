"""Rotary position embedding, half-split: channel i turns together with channel i + H/2.

Angles are computed in float64 and stored as fp32, and the tables are no buffers: a model cast to
bf16 keeps exact positions (bf16 tables lose them beyond some 256 tokens). The tables are built once
per device and cost max_seq_len * H * 4 bytes.

On a CPU, where no compiler fuses it, the rotation writes into its result and its gradient is the
rotation by the opposite angles: two passes each, and nothing but the tables is kept.
"""

import torch
from torch import Tensor


class RotaryTables:
    """Cosines and sines of every position, fp32, kept per device."""

    def __init__(self, max_seq_len: int, head_dim: int, theta: float) -> None:
        """Describe the tables; they are built when first asked for."""
        self.max_seq_len = max_seq_len
        self.head_dim = head_dim
        self.theta = theta
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def get(self, start: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions start … start + tokens - 1, each of shape (T, H/2).

        Raises:
            ValueError: a position lies beyond max_seq_len.
        """
        if start + tokens > self.max_seq_len:
            raise ValueError(f"position {start + tokens} is beyond max_seq_len = {self.max_seq_len}")
        if device not in self._tables:
            exponents_ = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
            angles_ = torch.outer(torch.arange(self.max_seq_len, dtype=torch.float64), self.theta**-exponents_)
            self._tables[device] = angles_.cos().float().to(device), angles_.sin().float().to(device)
        cos_, sin_ = self._tables[device]
        return cos_[start : start + tokens], sin_[start : start + tokens]


def rotate(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Turn each head by its position's angles; computed in fp32, returned in the input's type."""
    if x_BNTH.device.type == "cpu" and x_BNTH.dtype == torch.float32 and not torch.compiler.is_compiling():
        return _Rotate.apply(x_BNTH, cos_TH, sin_TH)
    first, second = x_BNTH.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos_TH - second * sin_TH, second * cos_TH + first * sin_TH), dim=-1)
    return turned.to(x_BNTH.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BNTH, cos_TH, sin_TH):
        ctx.save_for_backward(cos_TH, sin_TH)
        return _turn(x_BNTH, cos_TH, sin_TH, 1.0)

    @staticmethod
    def backward(ctx, *grad_outputs):
        cos_TH, sin_TH = ctx.saved_tensors
        return _turn(grad_outputs[0], cos_TH, sin_TH, -1.0), None, None


def _turn(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor, direction: float) -> Tensor:
    turned = torch.empty_like(x_BNTH)
    (first, second), (low, high) = x_BNTH.chunk(2, dim=-1), turned.chunk(2, dim=-1)
    torch.mul(first, cos_TH, out=low).addcmul_(second, sin_TH, value=-direction)
    torch.mul(second, cos_TH, out=high).addcmul_(first, sin_TH, value=direction)
    return turned
