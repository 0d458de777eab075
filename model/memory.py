"""A plan of the memory a training needs, from its configuration alone.

Counts weights, gradients and both moments in fp32, the bf16 copies of the matrices that autocast
keeps, the activations saved for the backward pass, and the head. Activation bytes are those measured
with saved-tensor hooks on the real block sizes, expressed by width, so that other shapes scale. The
reference run's third crash (40.97 GiB in use) comes out within 3 %, and so do the other two
(`model.memory_walk`). Free of torch and instant: it runs on a login node before anything is submitted.
"""

from dataclasses import dataclass

from model.config import CoreConfig, TrainConfig

FP32_BYTES, BF16_BYTES, BOOL_BYTES = 4, 2, 1
GIB = 2**30
HEAD_CHUNK_BYTES = {"cpu": 32 * 2**20, "cuda": 640 * 2**20}
"""Largest fp32 logits of one chunk of the head; on CUDA some 1,100 tokens of 151,936 ids."""
HEAD_CHUNK_LEAST_TOKENS = 512
"""Below this the products with the head's matrix wait for memory instead of computing."""
CONTEXT_BYTES = int(0.45 * GIB)
"""What CUDA itself takes on the device: context, kernels, workspaces."""
MARGIN = 1.03
"""A plan fits if this much more than it would fit: the accuracy that it claims."""
EAGER_FACTOR = 1.043
"""Measured over counted: an eager block saved 75.1 KiB a token at the production shape, in bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """How the step is computed, as far as memory depends on it."""

    cuda: bool = True
    """On a GPU; else on a CPU."""
    bf16: bool = True
    """Matrix products under bf16 autocast; else all in fp32."""
    compiled: bool = True
    """Blocks compiled, or on a CPU written out to the same effect; else eager, with keys and values
    repeated for their groups."""
    fused_attention: bool = True
    """Attention never holds its scores; else they are written out and kept."""
    chunked_head: bool = True
    """The loss holds one chunk of logits; else all, with their log-softmax and its gradient."""
    recompute: bool = False
    """Blocks keep their input alone."""

    @classmethod
    def of(cls, training: TrainConfig, *, cuda: bool = True) -> "Execution":
        """How this project's trainer does it: bf16 on CUDA, fp32 on a CPU."""
        return cls(cuda=cuda, bf16=cuda, compiled=training.compile or not cuda, recompute=training.recompute)

    @property
    def width_bytes(self) -> int:
        """Bytes of a number in the compute type."""
        return BF16_BYTES if self.bf16 else FP32_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, at the peak: the end of a forward pass, gradients and moments being there."""

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
    """Saved for the backward pass of one micro-batch, all blocks."""
    layer_bytes: int
    """Of that, the most that one block saves."""
    head_bytes: int
    """Logits of a chunk or of all, and the gradient of the head's weight while it is made."""
    context_bytes: int
    """Taken by CUDA outside PyTorch."""
    checkpoint_bytes: int
    """Size of one checkpoint file: weights and moments."""

    @property
    def allocated_bytes(self) -> int:
        """Peak of what PyTorch allocates."""
        static = self.weights_bytes + self.gradients_bytes + self.moments_bytes + self.casts_bytes
        return static + self.activations_bytes + self.head_bytes

    @property
    def peak_gib(self) -> float:
        """Estimated peak on the device."""
        return (self.allocated_bytes + self.context_bytes) / GIB

    def fits(self, capacity_gib: float) -> bool:
        """Whether a device of this capacity holds it, with the margin."""
        return self.peak_gib * MARGIN <= capacity_gib


def checkpoint_bytes(model: CoreConfig) -> int:
    """Bytes of the tensors in a checkpoint: 3 · 4 a parameter (9.02 GB at 751.6 M)."""
    return 3 * FP32_BYTES * model.parameters()


def plan_memory(
    model: CoreConfig, training: TrainConfig, execution: Execution | None = None, *, cuda: bool = True
) -> MemoryPlan:
    """Estimate the memory of a training.

    Args:
        model: the shape.
        training: micro-batch and length.
        execution: how it is computed; by default as this project's trainer does it.
        cuda: where, if there is no `execution`.
    """
    how = execution or Execution.of(training, cuda=cuda)
    parameters = model.parameters()
    tokens = training.micro_batch_size * training.seq_len
    layers = [tokens * block_token_bytes(model, training.seq_len, how, layer) for layer in range(model.n_layer)]
    activations = sum(layers)
    if how.recompute:
        activations = model.n_layer * tokens * FP32_BYTES * model.d_model + max(layers)
    return MemoryPlan(
        parameters=parameters,
        weights_bytes=FP32_BYTES * parameters,
        gradients_bytes=FP32_BYTES * parameters,
        moments_bytes=2 * FP32_BYTES * parameters,
        casts_bytes=cast_bytes(model) if how.bf16 else 0,
        activations_bytes=activations,
        layer_bytes=max(layers),
        head_bytes=head_bytes(model, tokens, how),
        context_bytes=CONTEXT_BYTES if how.cuda else 0,
        checkpoint_bytes=checkpoint_bytes(model),
    )


def cast_bytes(model: CoreConfig) -> int:
    """bf16 copies of all matrices that tokens are multiplied with."""
    looked_up = 0 if model.tie_embeddings else model.vocab_size * model.d_model
    return BF16_BYTES * (model.parameters() - looked_up)


def head_chunk_tokens(vocab_size: int, tokens: int, *, cuda: bool) -> int:
    """Tokens in one chunk of the head: all, if they are few; else as many as `HEAD_CHUNK_BYTES` holds."""
    fitting = HEAD_CHUNK_BYTES["cuda" if cuda else "cpu"] // (FP32_BYTES * vocab_size)
    return max(1, min(tokens, max(HEAD_CHUNK_LEAST_TOKENS, fitting)))


def head_bytes(model: CoreConfig, tokens: int, how: Execution) -> int:
    """Peak of the head beyond its weight, its gradient in the optimiser's hands, and the casts."""
    copy = BF16_BYTES if how.bf16 else 0
    if not how.chunked_head:
        return tokens * model.vocab_size * (copy + 2 * FP32_BYTES) + logits_bytes(model, tokens)
    chunk = head_chunk_tokens(model.vocab_size, tokens, cuda=how.cuda)
    new_gradient = model.vocab_size * model.d_model * (FP32_BYTES + copy)
    return chunk * model.vocab_size * (FP32_BYTES + copy) + new_gradient + tokens * model.d_model * how.width_bytes


def logits_bytes(model: CoreConfig, tokens: int) -> int:
    """All fp32 logits at once, which only a full head has."""
    return FP32_BYTES * tokens * model.vocab_size


def scores_bytes(model: CoreConfig, training: TrainConfig, how: Execution) -> int:
    """One set of attention scores of one block, (B, N, T, T), which fused attention never has."""
    return training.micro_batch_size * model.num_heads * training.seq_len**2 * how.width_bytes


def block_token_bytes(model: CoreConfig, seq_len: int, how: Execution, layer: int) -> int:
    """Bytes that a block saves for its backward pass, per token."""
    kept = _compiled_bytes(model, how, layer) if how.compiled else _eager_bytes(model, how, layer)
    if not how.fused_attention:
        kept += score_token_bytes(model, seq_len, how)
    return kept + (2 * BOOL_BYTES * model.d_model if model.dropout else 0)


def score_token_bytes(model: CoreConfig, seq_len: int, how: Execution) -> int:
    """Saved scores per token: the probabilities, and with dropout what is left of them and the mask."""
    kept = how.width_bytes + (how.width_bytes + BOOL_BYTES if model.dropout else 0)
    return model.num_heads * seq_len * kept


def _compiled_bytes(model: CoreConfig, how: Execution, layer: int) -> int:
    """Bytes per token that a fused block saves.

    In the compute type the two normed inputs, queries and keys before and after the rotation,
    values, the mixed heads, gate, up and their product; in fp32 the residual stream twice. That is
    48.0 KiB at the production shape in bf16, where 46.7 were measured.
    """
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    values = 2 * model.d_model + 3 * queries + 3 * keys + 3 * _inner_width(model, layer)
    return how.width_bytes * values + 2 * FP32_BYTES * model.d_model


def _eager_bytes(model: CoreConfig, how: Execution, layer: int) -> int:
    """Bytes per token that an eager block saves.

    The same, with keys and values repeated for their groups, queries and keys once more between
    norm and rotation, silu's output apart, and the norms' fp32 intermediates.
    """
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    values = 2 * model.d_model + 6 * queries + 2 * keys + 4 * _inner_width(model, layer)
    return int(EAGER_FACTOR * (how.width_bytes * values + 4 * FP32_BYTES * model.d_model))


def _inner_width(model: CoreConfig, layer: int) -> int:
    sparse = model.is_sparse(layer)
    return model.num_experts_per_tok * model.moe_intermediate_size if sparse else model.intermediate_size
