"""RMSNorm: divide by the root of the mean square, then scale by a learnt weight.

Computed in fp32 whatever comes in (Zhang and Sennrich 2019; Qwen3 rounds to the input's type before
the weight is applied, and so does this). Costs two passes over the activations.
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
        x_fp32 = x.float()
        scale = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * (x_fp32 * scale).to(x.dtype)
