"""SwiGLU feed-forward: down(silu(gate(x)) * up(x)) (Shazeer 2020).

Three matrices of D x F; 6·D·F FLOPs per token forward.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from model.config import CoreConfig


class FeedForward(nn.Module):
    """The feed-forward of one block."""

    def __init__(self, config: CoreConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform each token by itself; (B, T, D) to (B, T, D)."""
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
