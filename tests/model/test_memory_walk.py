"""The reference run's three crashes on a 48 GB L40S, as PyTorch reported them, and what fits instead."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import TrainConfig
from model.memory import GIB, Execution, plan_memory
from model.memory_walk import find_failure, fits, largest_micro_batch
from tests.model.production import PRODUCTION

TRAINING = TrainConfig(max_steps=1000, seq_len=2048, micro_batch_size=4, accumulation=32)
L40S_GIB = 44.39
EAGER = Execution(compiled=False, chunked_head=False)


@pytest.mark.parametrize(
    ("how", "asked_gib", "in_use_gib", "when", "what"),
    [
        (
            {"bf16": False, "fused_attention": False},
            1.00,
            44.10,
            "forward",
            "attention scores of block 13 (4 × 16 × 2,048",
        ),
        ({"bf16": False}, 4.64, 41.32, "backward", "gradient of the logits (8,192 × 151,936, fp32)"),
        ({}, 4.64, 40.97, "backward", "gradient of the logits (8,192 × 151,936, fp32)"),
    ],
)
def test_crash_of_the_reference_run_is_foreseen(
    how: dict, asked_gib: float, in_use_gib: float, when: str, what: str
) -> None:
    model = dataclasses.replace(PRODUCTION, dropout=0.1)
    failure = find_failure(model, TRAINING, dataclasses.replace(EAGER, **how), L40S_GIB)
    assert failure is not None
    assert abs(failure.allocation.size_bytes / GIB - asked_gib) < 0.005
    assert abs(failure.in_use_gib / in_use_gib - 1) < 0.03
    assert failure.allocation.when == when
    assert what in str(failure)
    assert not fits(model, TRAINING, dataclasses.replace(EAGER, **how), L40S_GIB)


def test_what_fits_an_l40s_is_what_was_published() -> None:
    assert largest_micro_batch(PRODUCTION, TRAINING, EAGER, L40S_GIB) in (2, 3)  # the reference was forced to 2
    assert 8 <= largest_micro_batch(PRODUCTION, TRAINING, Execution(), L40S_GIB) < 16
    assert largest_micro_batch(PRODUCTION, TRAINING, Execution(recompute=True), L40S_GIB) >= 32
    assert largest_micro_batch(PRODUCTION, TRAINING, Execution(), 8.0) == 0


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 40),
    capacity=st.floats(14.0, 150.0),
    compiled=st.booleans(),
    fused=st.booleans(),
    chunked=st.booleans(),
    recompute=st.booleans(),
)
def test_walk_and_sum_agree(
    size: int, capacity: float, compiled: bool, fused: bool, chunked: bool, recompute: bool
) -> None:
    how = Execution(compiled=compiled, fused_attention=fused, chunked_head=chunked, recompute=recompute)
    training = dataclasses.replace(TRAINING, micro_batch_size=size)
    peak_gib = plan_memory(PRODUCTION, training, how).peak_gib
    failure = find_failure(PRODUCTION, training, how, capacity)
    if peak_gib < 0.9 * capacity and fused:
        assert failure is None
    if peak_gib > 1.001 * capacity:
        assert failure is not None
        assert failure.in_use_gib <= capacity < failure.in_use_gib + failure.allocation.size_bytes / GIB


@settings(max_examples=20, deadline=None)
@given(capacity=st.floats(13.0, 150.0), compiled=st.booleans(), recompute=st.booleans())
def test_largest_micro_batch_is_the_border(capacity: float, compiled: bool, recompute: bool) -> None:
    how = Execution(compiled=compiled, recompute=recompute)
    size = largest_micro_batch(PRODUCTION, TRAINING, how, capacity)
    if size:
        assert fits(PRODUCTION, dataclasses.replace(TRAINING, micro_batch_size=size), how, capacity)
    assert not fits(PRODUCTION, dataclasses.replace(TRAINING, micro_batch_size=size + 1), how, capacity)
