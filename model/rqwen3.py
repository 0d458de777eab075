"""RQwen3: a decoder of the Qwen3 kind, with the parameter names of Hugging Face's Qwen3.

Embedding, n_layer blocks, a final norm, and a head that is its own matrix unless tied. Cost per
token: `CoreConfig.flops_per_token`. The training loss never holds all logits (see `model.loss`).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.config import CoreConfig
from model.layers.attention import KeyValueCache
from model.layers.block import Block, BlockParts
from model.layers.mixture import MixtureOfExperts
from model.layers.rms_norm import RMSNorm
from model.layers.rope import RotaryTables
from model.loss import head_loss, token_losses

INIT_STD = 0.02
RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight")


def configured_parts(config: CoreConfig) -> Callable[[int], BlockParts]:
    """The parts of each block by its number: SwiGLU, or a mixture of experts where it is sparse."""
    return lambda layer: BlockParts(feed_forward=MixtureOfExperts) if config.is_sparse(layer) else BlockParts()


class Backbone(nn.Module):
    """Embedding, blocks and final norm: everything before the head."""

    def __init__(self, config: CoreConfig, parts: Callable[[int], BlockParts]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config, parts(layer)) for layer in range(config.n_layer))
        self.norm = RMSNorm(config.d_model, config.rms_norm_eps)
        self.rotary = RotaryTables(config.max_seq_len, config.head_dim, config.rope_theta)
        self.recompute = False
        """Keep only the blocks' inputs for the backward pass, and make the rest again there."""

    def forward(self, ids_BT: Tensor, caches: list[KeyValueCache] | None = None) -> Tensor:
        """Hidden states before the head, (B, T, D)."""
        start = caches[0].length if caches else 0
        cos_TH, sin_TH = self.rotary.get(start, ids_BT.shape[1], ids_BT.device)
        x_BTD = self.embed_tokens(ids_BT)
        if caches is None:
            again = self.recompute and self.training and torch.is_grad_enabled()
            for block in self.layers:
                if again:
                    x_BTD = checkpoint(block, x_BTD, cos_TH, sin_TH, use_reentrant=False)
                else:
                    x_BTD = block(x_BTD, cos_TH, sin_TH)
        else:  # past compilation, which would compile anew for every length
            for block, cache in zip(self.layers, caches, strict=True):
                x_BTD = block.forward(x_BTD, cos_TH, sin_TH, cache)
        return self.norm(x_BTD)


class RQwen3(nn.Module):
    """The model."""

    def __init__(self, config: CoreConfig, parts: Callable[[int], BlockParts] | None = None) -> None:
        """Build the model, its weights not yet meaningful: call `initialise`, or load a checkpoint.

        Args:
            config: the shape.
            parts: gives each block its classes, by the block's number; by default the configuration's.
        """
        super().__init__()
        self.config = config
        self.model = Backbone(config, parts or configured_parts(config))
        self._mixtures = [part for part in self.modules() if isinstance(part, MixtureOfExperts)]
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def initialise(self, seed: int) -> None:
        """Fill the weights: N(0, 0.02), residual outputs over sqrt(2·n_layer), norms one.

        The values depend on the seed alone: they are drawn on the CPU, in the order of the names.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in sorted(self.named_parameters()):
                if parameter.dim() < 2:
                    parameter.fill_(1.0)
                    continue
                residual = name.endswith(RESIDUAL_OUTPUTS)
                std = INIT_STD / math.sqrt(2 * self.config.n_layer) if residual else INIT_STD
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    def forward(self, ids_BT: Tensor, caches: list[KeyValueCache] | None = None) -> Tensor:
        """Logits of every position, (B, T, V), in the compute type."""
        return self.lm_head(self.model(ids_BT, caches))

    def loss(self, ids_BT: Tensor, targets_BT: Tensor, divisor: int | None = None) -> Tensor:
        """Cross-entropy, summed over the counted targets and divided by `divisor`, fp32.

        Args:
            ids_BT: inputs.
            targets_BT: the token that follows each input; `loss.IGNORE` is not counted.
            divisor: counted targets of the whole optimiser step, so that micro-batches weigh by
                their tokens; by default those of this batch.
        """
        hidden_BTD = self.model(ids_BT)
        loss = head_loss(hidden_BTD.flatten(0, 1), self.lm_head.weight, targets_BT.flatten(), divisor)
        return self._with_balance(loss, targets_BT, divisor) if self._mixtures else loss

    def token_losses(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Cross-entropy of every target, fp32, (B, T); 0 where it is `loss.IGNORE`. No gradient."""
        with torch.no_grad():
            hidden_BTD = self.model(ids_BT)
            return token_losses(hidden_BTD.flatten(0, 1), self.lm_head.weight, targets_BT.flatten()).view_as(ids_BT)

    def _with_balance(self, loss: Tensor, targets_BT: Tensor, divisor: int | None) -> Tensor:
        """Give the loss the gradient of the experts' balance too; its value stays the cross-entropy."""
        share = 1.0 if divisor is None else targets_BT.numel() / divisor
        for mixture in self._mixtures:
            if self.training and mixture.balance_loss is not None and torch.is_grad_enabled():
                balance = self.config.router_aux_loss_coef * share * mixture.balance_loss
                loss = loss + (balance - balance.detach())
            mixture.balance_loss = None
        return loss

    def new_caches(self, batch: int, capacity: int) -> list[KeyValueCache]:
        """Empty caches, one a layer, for `capacity` tokens each."""
        weight = self.model.embed_tokens.weight
        return [KeyValueCache(self.config, batch, capacity, weight.device, weight.dtype) for _ in self.model.layers]
