"""A mixture of experts in place of the feed-forward (Shazeer et al. 2017; Qwen3's form of it).

A router gives each token a probability over the experts, in fp32; the likeliest
`num_experts_per_tok` are used and their weights made to add up to 1. Names and results are those of
transformers' `Qwen3MoeForCausalLM`. Experts that are never chosen never learn, so training adds the
balance loss of Fedus et al. 2021 (`balance_loss`). Costs per token: 6·D·F·k FLOPs forward and a sort
of the assignments, whatever the number of experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import CoreConfig
from model.layers.feed_forward import FeedForward


class MixtureOfExperts(nn.Module):
    """The feed-forward of a sparse block."""

    def __init__(self, config: CoreConfig) -> None:
        super().__init__()
        self.chosen = config.num_experts_per_tok
        self.gate = nn.Linear(config.d_model, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            FeedForward(config, config.moe_intermediate_size) for _ in range(config.num_experts)
        )
        self.balance_loss: Tensor | None = None
        """Of the last forward pass in training: 1 where tokens and probabilities are spread evenly,
        up to the number of experts where one gets all."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Send each token through its experts; (B, T, D) to (B, T, D)."""
        x_ND = x_BTD.flatten(0, 1)
        probabilities_NE = F.linear(x_ND, self.gate.weight).float().softmax(-1)
        weight_Nk, expert_Nk = probabilities_NE.topk(self.chosen, dim=-1)
        weight_Nk = (weight_Nk / weight_Nk.sum(-1, keepdim=True)).to(x_BTD.dtype)
        load_E = torch.bincount(expert_Nk.flatten(), minlength=len(self.experts))
        if self.training:
            share_E = load_E / expert_Nk.numel()
            self.balance_loss = len(self.experts) * (share_E * probabilities_NE.mean(0)).sum()
        order_A = expert_Nk.flatten().argsort(stable=True)  # assignments A = N·k, by expert
        token_A = order_A // self.chosen
        parts = x_ND[token_A].split(load_E.tolist())
        out_AD = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        out_AD = out_AD * weight_Nk.flatten()[order_A].unsqueeze(1)
        return torch.zeros_like(x_ND).index_add(0, token_A, out_AD.to(x_ND.dtype)).view_as(x_BTD)
