"""One block: x + attention(norm(x)), then x + feed_forward(norm(x)).

The block is given the classes of its parts, so a layer of another kind (a mixture of experts in
every other block, say) is a choice made where the model is put together, not a copy of this file.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from model.config import CoreConfig
from model.layers.attention import Attention, KeyValueCache
from model.layers.feed_forward import FeedForward
from model.layers.rms_norm import RMSNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockParts:
    """What a block is made of."""

    attention: Callable[[CoreConfig], nn.Module] = Attention
    """Called as attention(x_BTD, cos_TH, sin_TH, cache)."""
    feed_forward: Callable[[CoreConfig], nn.Module] = FeedForward
    """Called as feed_forward(x_BTD)."""
    norm: Callable[[int, float], nn.Module] = RMSNorm
    """Called as norm(x_BTD); made of (width, eps)."""


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual path."""

    def __init__(self, config: CoreConfig, parts: BlockParts) -> None:
        super().__init__()
        self.input_layernorm = parts.norm(config.d_model, config.rms_norm_eps)
        self.self_attn = parts.attention(config)
        self.post_attention_layernorm = parts.norm(config.d_model, config.rms_norm_eps)
        self.mlp = parts.feed_forward(config)
        self.dropout = config.dropout

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return the residual stream after this block, (B, T, D)."""
        x_BTD = x_BTD + self._drop(self.self_attn(self.input_layernorm(x_BTD), cos_TH, sin_TH, cache))
        return x_BTD + self._drop(self.mlp(self.post_attention_layernorm(x_BTD)))

    def _drop(self, x_BTD: Tensor) -> Tensor:
        return F.dropout(x_BTD, self.dropout, self.training) if self.dropout else x_BTD
