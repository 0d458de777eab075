"""Walk through a training step's allocations, and name the one that does not fit.

The order is that of a forward and a backward pass: first with the weights alone on the device (the
first micro-batch), then with gradients and both moments (every later step). Small and short-lived
allocations are left out. It finds the three crashes of the reference run where they happened, which a
sum cannot: in the scores of a block in the forward pass, and in the gradient of the logits in the
backward pass. Free of torch; costs a few operations a block.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from model.config import CoreConfig, TrainConfig
from model.memory import (
    BF16_BYTES,
    FP32_BYTES,
    GIB,
    MARGIN,
    Execution,
    block_token_bytes,
    head_bytes,
    logits_bytes,
    plan_memory,
    score_token_bytes,
    scores_bytes,
)

LARGEST_MICRO_BATCH = 4096
"""The search for what fits ends here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """One allocation; negative bytes are freed."""

    what: str
    """In words, with its shape."""
    when: str
    """`forward` or `backward`."""
    size_bytes: int
    """How much is asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The allocation that does not fit."""

    allocation: Allocation
    """What was asked for."""
    in_use_gib: float
    """What was in use before."""
    step: str
    """`the first micro-batch`, or `a later step` (with gradients and moments)."""

    def __str__(self) -> str:
        """In one sentence, as PyTorch would report it."""
        asked_gib = self.allocation.size_bytes / GIB
        return (
            f"{self.step}, {self.allocation.when}: {self.allocation.what}: {asked_gib:.2f} GiB asked, "
            f"{self.in_use_gib:.2f} GiB in use"
        )


def find_failure(
    model: CoreConfig, training: TrainConfig, how: Execution, capacity_gib: float, margin: float = 1.0
) -> Failure | None:
    """The first allocation that a device of this capacity can't serve; None if all fit."""
    plan = plan_memory(model, training, how)
    later_bytes = plan.gradients_bytes + plan.moments_bytes
    for step, base_bytes in (("the first micro-batch", 0), ("a later step", later_bytes)):
        used_bytes = base_bytes + plan.weights_bytes + plan.context_bytes
        for allocation in _allocations(model, training, how):
            if (used_bytes + allocation.size_bytes) * margin > capacity_gib * GIB and allocation.size_bytes > 0:
                return Failure(allocation=allocation, in_use_gib=used_bytes / GIB, step=step)
            used_bytes += allocation.size_bytes
    return None


def fits(model: CoreConfig, training: TrainConfig, how: Execution, capacity_gib: float) -> bool:
    """Whether the whole step fits, with the margin."""
    plan_fits = plan_memory(model, training, how).fits(capacity_gib)
    return plan_fits and find_failure(model, training, how, capacity_gib, MARGIN) is None


def largest_micro_batch(model: CoreConfig, training: TrainConfig, how: Execution, capacity_gib: float) -> int:
    """Most sequences in one forward pass that fit; 0 if not even one does."""

    def fit(size: int) -> bool:
        return fits(model, dataclasses.replace(training, micro_batch_size=size), how, capacity_gib)

    low, high = 0, 1
    while high <= LARGEST_MICRO_BATCH and fit(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low


def _allocations(model: CoreConfig, training: TrainConfig, how: Execution) -> Iterator[Allocation]:
    """Those of one micro-batch, forward and backward."""
    tokens = training.micro_batch_size * training.seq_len
    for layer in range(model.n_layer):
        if how.bf16:
            size_bytes = BF16_BYTES * model.block_parameters(sparse=model.is_sparse(layer))
            yield _forward(f"bf16 copies of block {layer + 1}'s matrices", size_bytes)
        if how.recompute:
            yield _forward(f"input of block {layer + 1}", tokens * FP32_BYTES * model.d_model)
        else:
            yield from _block(model, training, how, layer)
    if how.bf16:
        yield _forward("bf16 copy of the head's matrix", BF16_BYTES * model.vocab_size * model.d_model)
    yield from _head(model, tokens, how)
    if how.recompute:
        size_bytes = max(
            tokens * block_token_bytes(model, training.seq_len, how, layer) for layer in range(model.n_layer)
        )
        yield Allocation(what="activations of one block, made again", when="backward", size_bytes=size_bytes)


def _block(model: CoreConfig, training: TrainConfig, how: Execution, layer: int) -> Iterator[Allocation]:
    tokens, number = training.micro_batch_size * training.seq_len, layer + 1
    kept_bytes = tokens * block_token_bytes(model, training.seq_len, how, layer)
    if how.fused_attention:
        yield _forward(f"activations of block {number}, {tokens:,} tokens", kept_bytes)
        return
    saved_scores = tokens * score_token_bytes(model, training.seq_len, how)
    other_bytes, one_bytes = kept_bytes - saved_scores, scores_bytes(model, training, how)
    shape = f"{training.micro_batch_size} × {model.num_heads} × {training.seq_len:,} × {training.seq_len:,}"
    scores = f"attention scores of block {number} ({shape}, {'bf16' if how.bf16 else 'fp32'})"
    yield _forward(f"queries, keys and values of block {number}", other_bytes // 3)
    yield _forward(scores, one_bytes)  # q @ k.T
    yield _forward(f"{scores}, scaled", one_bytes)
    yield _forward("freed", -one_bytes)
    yield _forward(f"{scores}, masked", one_bytes)
    yield _forward("freed", -one_bytes)
    yield _forward(f"{scores}, softmax", one_bytes)
    yield _forward("freed", -one_bytes)
    if saved_scores > one_bytes:
        yield _forward(f"{scores}, dropout", saved_scores - one_bytes)
    yield _forward(f"feed-forward activations of block {number}, {tokens:,} tokens", other_bytes - other_bytes // 3)


def _head(model: CoreConfig, tokens: int, how: Execution) -> Iterator[Allocation]:
    if how.chunked_head:
        yield _forward("one chunk of logits, and the gradient of the head's matrix", head_bytes(model, tokens, how))
        return
    shape, one_bytes = f"{tokens:,} × {model.vocab_size:,}", logits_bytes(model, tokens)
    if how.bf16:
        yield _forward(f"logits ({shape}, bf16)", one_bytes // 2)
    yield _forward(f"logits ({shape}, fp32)", one_bytes)
    yield _forward(f"log-softmax of the logits ({shape}, fp32)", one_bytes)
    yield Allocation(what=f"gradient of the logits ({shape}, fp32)", when="backward", size_bytes=one_bytes)


def _forward(what: str, size_bytes: int) -> Allocation:
    return Allocation(what=what, when="forward", size_bytes=size_bytes)
