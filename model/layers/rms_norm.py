"""RMSNorm: divide by the root of the mean square, then scale by a learnt weight.

Computed in fp32 whatever comes in (Zhang and Sennrich 2019; Qwen3 rounds to the input's type before
the weight is applied, and so does this). On CUDA the compiler fuses it into two passes over the
activations. On a CPU, where nothing does, its gradient is written out here: three passes forward and
six backward, half of what autograd makes of the formula, and only the input is kept.
"""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Normalise the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` of the same shape and type, normalised and scaled.

        Under autocast a bf16 activation comes back as bf16: the weight is cast, not the activation.
        """
        if x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling():
            return _RMSNorm.apply(x, self.weight.float(), self.eps)
        x_fp32 = x.float()
        scale = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * (x_fp32 * scale).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """The same in fp32, with y = w·x̂ and x̂ = r·x: dx = r·(w·g − x̂·mean(w·g·x̂)), dw = Σ g·x̂."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.rsqrt(length.square_().div_(x.shape[-1]).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx, *grad_outputs):
        x, weight, scale = ctx.saved_tensors
        grad, width = grad_outputs[0], x.shape[-1]
        product = grad * x
        grad_weight = scale.reshape(1, -1) @ product.reshape(-1, width)
        mean = (product @ weight).unsqueeze(-1).mul_(scale.square()).div_(-width)
        grad_x = torch.mul(grad, weight, out=product).addcmul_(x, mean).mul_(scale)
        return grad_x, grad_weight.reshape(-1), None
