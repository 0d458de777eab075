"""Recompute the arithmetic that this project and the reference run published.

Every figure is made anew from the configuration's shape and compared with the published one, so that
nobody has to believe either. Free of torch, instant.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from model.config import load_run_config
from model.gpus import gpu_named
from model.memory import GIB, Execution, checkpoint_bytes, logits_bytes, plan_memory, scores_bytes
from model.memory_walk import find_failure
from rqwen3_pipeline.plan import flops, parameters_by_part
from rqwen3_pipeline.settings import shipped

_RUN = load_run_config(shipped("configs/rqwen3_751m.toml"))
PRODUCTION, TRAINING = _RUN.model, _RUN.training
REFERENCE_DROPOUT = 0.1
"""What the reference run's default was when it crashed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A published figure and what comes out here."""

    what: str
    """In words, with the unit."""
    published: float
    """As published."""
    computed: float
    """As computed."""
    tolerance: float
    """Relative; 0 means to the digit."""

    @property
    def holds(self) -> bool:
        """Whether they agree."""
        return abs(self.computed - self.published) <= self.tolerance * abs(self.published)


def claims() -> list[Claim]:
    """All of them."""
    return [*_parameters(), *_work(), *_losses(), *_memory(), *_crashes()]


def _claim(what: str, published: float, computed: float, tolerance: float = 0.0) -> Claim:
    return Claim(what=what, published=published, computed=computed, tolerance=tolerance)


def _parameters() -> Iterator[Claim]:
    parts = parameters_by_part(PRODUCTION)
    tied = dataclasses.replace(PRODUCTION, tie_embeddings=True)
    yield _claim("parameters", 751_632_384, parts["total"])
    yield _claim("parameters of the embedding", 155_582_464, parts["embedding"])
    yield _claim("parameters of the head", 155_582_464, parts["head"])
    yield _claim("parameters of a block", 15_730_944, parts["one_block"])
    yield _claim("parameters of all blocks", 440_466_432, 28 * parts["one_block"])
    yield _claim("parameters of the blocks' matrices", 440_401_920, parts["attention"] + parts["feed_forward"])
    yield _claim("parameters of the final norm", 1_024, PRODUCTION.d_model)
    yield _claim("parameters with a tied head", 596_049_920, tied.parameters())
    yield _claim("share of embedding and head", 0.41, 2 * parts["embedding"] / parts["total"], 0.01)
    yield _claim("attention's inner width", 2_048, PRODUCTION.num_heads * PRODUCTION.head_dim)


def _work() -> Iterator[Claim]:
    work, per_token = flops(PRODUCTION, TRAINING), PRODUCTION.flops_per_token(2048)
    scores = 12 * 28 * 16 * 128 * 2048
    rate = 5_000 * TRAINING.tokens_per_step / 86_400
    yield _claim("tokens of a step", 262_144, TRAINING.tokens_per_step)
    yield _claim("tokens of the run", 13_107_200_000, work["tokens"])
    yield _claim("GFLOP per token, 6·(N − embedding) + 12·L·H·hd·T", 4.985, per_token / 1e9, 2e-4)
    yield _claim("GFLOP per token, 6·N", 4.510, 6 * PRODUCTION.parameters() / 1e9, 2e-4)
    yield _claim("GFLOP per token, causal attention halved", 4.281, (per_token - scores / 2) / 1e9, 2e-4)
    yield _claim("GFLOP per token, 6·N + 12·L·H·hd·T", 5.919, (6 * PRODUCTION.parameters() + scores) / 1e9, 2e-4)
    yield _claim("share of the head in the FLOPs", 0.187, work["head_share"], 3e-3)
    yield _claim("share of attention scores in the FLOPs", 0.283, work["attention_share"], 3e-3)
    yield _claim("FLOP of the run", 6.53e19, work["run"], 1e-3)
    yield _claim("tokens/s of the reference run (5,000 steps in 24 h)", 15_170, rate, 1e-3)
    yield _claim("its MFU on an L40S", 0.209, rate * per_token / gpu_named("l40s").peak_flops, 3e-3)
    yield _claim("tokens/s at 45 % of an H200", 89_000, 0.45 * gpu_named("h200").peak_flops / per_token, 5e-3)
    yield _claim("tokens/s at 40 % of an L40S", 29_050, 0.40 * gpu_named("l40s").peak_flops / per_token, 1e-3)
    yield _claim("hours of the run there", 125, 13_107_200_000 / 29_050 / 3_600, 5e-3)


def _losses() -> Iterator[Claim]:
    yield _claim("ln V, the loss of knowing nothing", 11.931, math.log(151_936), 1e-4)
    yield _claim("perplexity at loss 2.5186", 12.41, math.exp(2.5186), 1e-3)
    yield _claim("perplexity at loss 11.88", 144_351, math.exp(11.88), 1e-3)
    yield _claim("ratio of the two", 11_631, math.exp(11.88 - 2.5186), 1e-3)


def _memory() -> Iterator[Claim]:
    plan = plan_memory(PRODUCTION, TRAINING, Execution())
    state_bytes = plan.weights_bytes + plan.gradients_bytes + plan.moments_bytes
    yield _claim("bytes of a checkpoint", 9_019_588_608, checkpoint_bytes(PRODUCTION), 1e-4)
    yield _claim("GiB of 51 checkpoints", 429, 51 * 9_019_588_608 / GIB, 2e-3)
    yield _claim("GiB of weights, gradients and moments", 11.20, state_bytes / GIB, 1e-3)
    yield _claim("GiB of bf16 copies", 1.11, plan.casts_bytes / GIB, 5e-3)
    yield _claim("GiB of fp32 logits at micro-batch 4", 4.637, logits_bytes(PRODUCTION, 4 * 2048) / GIB, 1e-3)
    for size, published_gib in ((2, 19), (4, 24), (8, 35)):
        training = dataclasses.replace(TRAINING, micro_batch_size=size)
        peak_gib = plan_memory(PRODUCTION, training, Execution()).peak_gib
        yield _claim(f"peak GiB at micro-batch {size}, compiled, chunked head", published_gib, peak_gib, 0.05)


def _crashes() -> Iterator[Claim]:
    """The reference run's three: what was asked for, and what was in use."""
    training = dataclasses.replace(TRAINING, micro_batch_size=4)
    model = dataclasses.replace(PRODUCTION, dropout=REFERENCE_DROPOUT)
    eager = Execution(compiled=False, chunked_head=False, bf16=False)
    yield _claim(
        "GiB of one block's fp32 scores at micro-batch 4",
        1.0,
        scores_bytes(model, training, dataclasses.replace(eager, fused_attention=False)) / GIB,
    )
    for number, how, asked_gib, in_use_gib in (
        (1, dataclasses.replace(eager, fused_attention=False), 1.0, 44.10),
        (2, eager, 4.64, 41.32),
        (3, dataclasses.replace(eager, bf16=True), 4.64, 40.97),
    ):
        failure = find_failure(model, training, how, gpu_named("l40s").memory_gib)
        asked = failure.allocation.size_bytes / GIB if failure else 0.0
        yield _claim(f"GiB asked for at crash {number}", asked_gib, asked, 2e-3)
        yield _claim(f"GiB in use at crash {number}", in_use_gib, failure.in_use_gib if failure else 0.0, 0.03)


def render(found: list[Claim]) -> str:
    """A table, one claim a line."""
    lines = [f"{'':6}{'published':>20}{'computed':>22}  what"]
    for claim in found:
        mark = "ok" if claim.holds else "WRONG"
        lines.append(f"{mark:<6}{_number(claim.published):>20}{_number(claim.computed):>22}  {claim.what}")
    wrong = sum(not claim.holds for claim in found)
    lines.append(f"{len(found) - wrong} of {len(found)} figures agree")
    return "\n".join(lines)


def _number(value: float) -> str:
    if abs(value) >= 1e15:
        return f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.4g}"
