"""A plan of the memory a training needs, from its configuration alone.

Counts weights, gradients and both moments in fp32, the bf16 copies of the matrices that autocast
keeps, the activations saved for the backward pass, and the head's chunk. Activation bytes are those
measured with saved-tensor hooks on the real block sizes, expressed by width, so that other shapes
scale. Free of torch and instant: it runs on a login node before anything is submitted.
"""

from dataclasses import dataclass

from model.config import CoreConfig, TrainConfig

FP32_BYTES, BF16_BYTES = 4, 2
HEAD_CHUNK_BYTES = {False: 4 * 2**20, True: 640 * 2**20}
"""Largest fp32 logits of one chunk, on a CPU and on CUDA; `model.loss` has the same figures."""
SAFETY = 1.03
"""For the allocator's rounding."""
EAGER_FACTOR = 1.86
"""An eager block saves this many times what a compiled one does (86.7 against 46.7 KiB a token)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes by purpose."""

    parameters: int
    """Number of parameters."""
    weights_bytes: int
    """fp32 weights."""
    gradients_bytes: int
    """fp32 gradients."""
    moments_bytes: int
    """AdamW's two moments, fp32."""
    casts_bytes: int
    """bf16 copies of the matrices under autocast."""
    activations_bytes: int
    """Saved for the backward pass of one micro-batch."""
    head_bytes: int
    """The head's chunk of logits, and its weight's gradient while both exist."""
    checkpoint_bytes: int
    """Size of one checkpoint file: weights and moments."""

    @property
    def peak_gib(self) -> float:
        """Estimated peak."""
        parts = (
            self.weights_bytes,
            self.gradients_bytes,
            self.moments_bytes,
            self.casts_bytes,
            self.activations_bytes,
            self.head_bytes,
        )
        return SAFETY * sum(parts) / 2**30


def checkpoint_bytes(model: CoreConfig) -> int:
    """Bytes of the tensors in a checkpoint: 3 · 4 a parameter (9.02 GB at 751.6 M)."""
    return 3 * FP32_BYTES * model.parameters()


def plan_memory(model: CoreConfig, training: TrainConfig, *, cuda: bool = True) -> MemoryPlan:
    """Estimate the memory of a training.

    Args:
        model: the shape.
        training: micro-batch and length.
        cuda: with bf16 autocast on CUDA; else plain fp32 on a CPU.
    """
    parameters = model.parameters()
    embedding = model.vocab_size * model.d_model
    tokens = training.micro_batch_size * training.seq_len
    chunk_bytes = max(16, min(16384, HEAD_CHUNK_BYTES[cuda] // (4 * model.vocab_size))) * model.vocab_size
    head_gradient_bytes = FP32_BYTES * embedding
    layer_bytes = block_activation_bytes(model, BF16_BYTES if cuda else FP32_BYTES)
    activation_bytes = int(tokens * model.n_layer * layer_bytes * (1 if cuda else EAGER_FACTOR))
    return MemoryPlan(
        parameters=parameters,
        weights_bytes=FP32_BYTES * parameters,
        gradients_bytes=FP32_BYTES * parameters,
        moments_bytes=2 * FP32_BYTES * parameters,
        casts_bytes=BF16_BYTES * (parameters - embedding) if cuda else 0,
        activations_bytes=activation_bytes,
        head_bytes=chunk_bytes * (FP32_BYTES + (BF16_BYTES if cuda else 0)) + head_gradient_bytes,
        checkpoint_bytes=checkpoint_bytes(model),
    )


def block_activation_bytes(model: CoreConfig, width_bytes: int) -> int:
    """Bytes that one compiled block saves per token for its backward pass.

    In the compute type the two normed inputs, queries and keys before and after the rotation,
    values, the mixed heads, gate, up and their product; in fp32 the residual stream twice. That is
    48.0 KiB at the production shape in bf16, where 46.7 were measured.
    """
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    values = 2 * model.d_model + 3 * queries + 3 * keys + 3 * model.intermediate_size
    return width_bytes * values + 2 * FP32_BYTES * model.d_model
