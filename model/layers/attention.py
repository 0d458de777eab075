"""Causal self-attention with grouped heads, normalised queries and keys, and rotary positions.

Groups of num_heads / num_kv_heads query heads share a key and value head (Ainslie et al. 2023).
Queries and keys are normalised per head before the rotation, as in Qwen3. The work is PyTorch's
`scaled_dot_product_attention`: memory is linear in T, time 4·T²·N·H FLOPs forward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import CoreConfig
from model.layers.rms_norm import RMSNorm
from model.layers.rope import rotate


class KeyValueCache:
    """Keys and values of the tokens seen so far, of one layer, for generation."""

    def __init__(self, config: CoreConfig, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        """Reserve room for `capacity` tokens."""
        shape = (batch, config.num_kv_heads, capacity, config.head_dim)
        self.key_BKSH = torch.empty(shape, device=device, dtype=dtype)
        self.value_BKSH = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    def append(self, key_BKTH: Tensor, value_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens; returns keys and values of all tokens so far."""
        end = self.length + key_BKTH.shape[2]
        self.key_BKSH[:, :, self.length : end] = key_BKTH
        self.value_BKSH[:, :, self.length : end] = value_BKTH
        self.length = end
        return self.key_BKSH[:, :, :end], self.value_BKSH[:, :, :end]


class Attention(nn.Module):
    """The attention of one block."""

    def __init__(self, config: CoreConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.d_model, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.d_model, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.d_model, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.d_model, bias=False)
        norm = RMSNorm if config.qk_norm else _no_norm
        self.q_norm = norm(config.head_dim, config.rms_norm_eps)
        self.k_norm = norm(config.head_dim, config.rms_norm_eps)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Mix each token with those before it; with a cache also with those of earlier calls.

        Args:
            x_BTD: activations.
            cos_TH: cosines of the tokens' positions, (T, H/2).
            sin_TH: sines, the same.
            cache: keys and values so far; the new ones are added to it.

        Returns:
            Activations, (B, T, D).
        """
        B, T, _ = x_BTD.shape
        q_BNTH = self.q_norm(self.q_proj(x_BTD).view(B, T, self.num_heads, self.head_dim)).transpose(1, 2)
        k_BKTH = self.k_norm(self.k_proj(x_BTD).view(B, T, self.num_kv_heads, self.head_dim)).transpose(1, 2)
        v_BKSH = self.v_proj(x_BTD).view(B, T, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q_BNTH, k_BKSH = rotate(q_BNTH, cos_TH, sin_TH), rotate(k_BKTH, cos_TH, sin_TH)
        mask = None
        if cache is not None:
            k_BKSH, v_BKSH = cache.append(k_BKSH, v_BKSH)
            S = k_BKSH.shape[2]
            mask = torch.ones(T, S, dtype=torch.bool, device=x_BTD.device).tril(S - T) if 1 < T < S else None
        mixed_BNTH = F.scaled_dot_product_attention(
            q_BNTH,
            k_BKSH,
            v_BKSH,
            attn_mask=mask,
            is_causal=mask is None and T > 1,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return self.o_proj(mixed_BNTH.transpose(1, 2).reshape(B, T, self.num_heads * self.head_dim))


def _no_norm(size: int, eps: float) -> nn.Module:
    return nn.Identity()
