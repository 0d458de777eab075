"""SwiGLU feed-forward: down(silu(gate(x)) * up(x)) (Shazeer 2020).

Three matrices of D x F; 6·D·F FLOPs per token forward. On a CPU, where no compiler fuses it, the
product and its gradient are written out here: fewer buffers, and only gate and up are kept.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import CoreConfig


class FeedForward(nn.Module):
    """The feed-forward of one block."""

    def __init__(self, config: CoreConfig, inner: int | None = None) -> None:
        """Make the matrices; `inner` is the inner width, by default the configuration's."""
        super().__init__()
        inner = inner or config.intermediate_size
        self.gate_proj = nn.Linear(config.d_model, inner, bias=False)
        self.up_proj = nn.Linear(config.d_model, inner, bias=False)
        self.down_proj = nn.Linear(inner, config.d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform each token by itself; (B, T, D) to (B, T, D)."""
        gate_BTF, up_BTF = self.gate_proj(x_BTD), self.up_proj(x_BTD)
        if gate_BTF.device.type == "cpu" and gate_BTF.dtype == torch.float32 and not torch.compiler.is_compiling():
            return self.down_proj(_GatedProduct.apply(gate_BTF, up_BTF))
        return self.down_proj(F.silu(gate_BTF) * up_BTF)


class _GatedProduct(torch.autograd.Function):
    """silu(gate)·up, whose gradients are g·silu(gate) for up and silu'(gate) of g·up for gate."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, *grad_outputs):
        gate, up = ctx.saved_tensors
        grad = grad_outputs[0]
        grad_up = F.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), grad_up
