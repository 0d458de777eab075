"""What a run needs, from its configuration alone: memory, time, submissions, disk.

Answers on a login node in a moment, without torch, before anything is submitted. Accuracy: the memory
within 3 % of what the reference run's crashes reported; time as good as the share of the peak (MFU)
that one believes in.
"""

import dataclasses
import math
from typing import Any

from model.config import CoreConfig, RunConfig, TrainConfig
from model.gpus import GPUS, Gpu
from model.memory import FP32_BYTES, GIB, MARGIN, Execution, plan_memory
from model.memory_walk import find_failure, fits, largest_micro_batch
from rqwen3_pipeline.training import submissions_config

MFUS = (0.2, 0.3, 0.4, 0.45, 0.5)
"""Shares of the peak for which times are given unless one is asked for."""
CONVENTION = "6·(N − embedding) + 12·L·H·hd·T"


def changed(
    run: RunConfig,
    *,
    micro_batch_size: int | None,
    precision: str,
    attention: str,
    head: str,
    eager: bool,
    dropout: float | None,
    recompute: bool,
) -> tuple[RunConfig, Execution]:
    """The configuration with the command line's changes, and how its step is computed."""
    model, training = run.model, run.training
    if micro_batch_size is not None:
        accumulation = max(1, training.sequences_per_step // micro_batch_size)
        training = dataclasses.replace(training, micro_batch_size=micro_batch_size, accumulation=accumulation)
    if dropout is not None:
        model = dataclasses.replace(model, dropout=dropout)
    how = Execution(
        bf16=precision == "bf16",
        compiled=training.compile and not eager,
        fused_attention=attention == "fused",
        chunked_head=head == "chunked",
        recompute=recompute or training.recompute,
    )
    return dataclasses.replace(run, model=model, training=training), how


def make_plan(run: RunConfig, how: Execution, gpu: Gpu | None, mfu: float | None = None) -> dict[str, Any]:
    """The plan, as it is printed with `--json`.

    Args:
        run: the configuration.
        how: how the step is computed.
        gpu: the device asked for; None plans for all that are known.
        mfu: model FLOPs utilisation to compute times for.
    """
    model, training = run.model, run.training
    memory = plan_memory(model, training, how)
    return {
        "name": run.name,
        "parameters": parameters_by_part(model),
        "flops": flops(model, training),
        "execution": dataclasses.asdict(how),
        "micro_batch_size": training.micro_batch_size,
        "memory_bytes": {**dataclasses.asdict(memory), "allocated_bytes": memory.allocated_bytes},
        "peak_gib": memory.peak_gib,
        "gpus": {one.name: _on_gpu(run, how, one, mfu) for one in ((gpu,) if gpu else GPUS)},
        "disk_bytes": disk(run, memory.checkpoint_bytes),
    }


def parameters_by_part(model: CoreConfig) -> dict[str, int]:
    """Numbers of parameters; the parts add up to the total."""
    embedding, sparse = model.vocab_size * model.d_model, model.sparse_layers
    feed_forward = (model.n_layer - sparse) * model.feed_forward_parameters()
    return {
        "embedding": embedding,
        "attention": model.n_layer * model.attention_parameters(),
        "feed_forward": feed_forward + sparse * model.feed_forward_parameters(sparse=True),
        "norms": model.n_layer * model.norm_parameters() + model.d_model,
        "head": 0 if model.tie_embeddings else embedding,
        "total": model.parameters(),
        "one_block": model.block_parameters(),
        "active_per_token": model.parameters(active=True),
    }


def flops(model: CoreConfig, training: TrainConfig) -> dict[str, Any]:
    """FLOPs of a training token, forward and backward, and of the whole run."""
    per_token = model.flops_per_token(training.seq_len)
    tokens = training.max_steps * training.tokens_per_step
    scores = 12 * model.n_layer * model.num_heads * model.head_dim * training.seq_len
    head = 6 * model.vocab_size * model.d_model
    return {
        "convention": CONVENTION,
        "per_token": per_token,
        "attention_share": scores / per_token,
        "head_share": head / per_token,
        "tokens": tokens,
        "run": per_token * tokens,
    }


def disk(run: RunConfig, checkpoint_bytes: int) -> dict[str, int]:
    """Bytes of checkpoints that retention keeps (and one being written), and of the token shards."""
    training = run.training
    saved = [*range(training.save_every_steps, training.max_steps, training.save_every_steps), training.max_steps]
    kept = {step for step in saved if step == training.keep_first_step or step % training.keep_every_steps == 0}
    kept |= set(saved[-training.keep_last :])
    tokens = training.max_steps * training.tokens_per_step
    return {
        "checkpoints_kept": len(kept),
        "checkpoints": (len(kept) + 1) * checkpoint_bytes,
        "shards": FP32_BYTES * tokens,
    }


def _on_gpu(run: RunConfig, how: Execution, gpu: Gpu, mfu: float | None) -> dict[str, Any]:
    model, training, capacity = run.model, run.training, gpu.memory_gib
    failure = find_failure(model, training, how, capacity) or find_failure(model, training, how, capacity, MARGIN)
    limit_s = submissions_config(run).time_limit_s
    slice_s = limit_s - min(training.lead_s, limit_s / 3)
    times = {}
    for share in (mfu,) if mfu else MFUS:
        tokens_per_s = share * gpu.peak_flops / model.flops_per_token(training.seq_len)
        seconds = training.max_steps * training.tokens_per_step / tokens_per_s
        times[f"{share:.3g}"] = {
            "tokens_per_s": tokens_per_s,
            "step_s": training.tokens_per_step / tokens_per_s,
            "days": seconds / 86_400,
            "submissions": math.ceil(seconds / slice_s) if limit_s else 1,
        }
    return {
        "capacity_gib": capacity,
        "fits": fits(model, training, how, capacity),
        "breaks_at": None if failure is None else str(failure),
        "asked_gib": None if failure is None else failure.allocation.size_bytes / GIB,
        "in_use_gib": None if failure is None else failure.in_use_gib,
        "largest_micro_batch": {
            "as_asked": largest_micro_batch(model, training, how, capacity),
            "this_trainer": largest_micro_batch(model, training, Execution(), capacity),
            "recomputing": largest_micro_batch(model, training, Execution(recompute=True), capacity),
        },
        "mfu": times,
    }


def refusal(run: RunConfig, how: Execution, gpu: Gpu) -> str:
    """Why the run does not fit a GPU, and what would; empty if it fits."""
    model, training = run.model, run.training
    if fits(model, training, how, gpu.memory_gib):
        return ""
    found = _on_gpu(run, how, gpu, None)
    why = found["breaks_at"] or (
        f"a peak of {plan_memory(model, training, how).peak_gib:.2f} GiB leaves less than the plan's own error"
    )
    return (
        f"micro-batch {training.micro_batch_size} × {training.seq_len:,} tokens does not fit the {gpu.memory_gib} GiB "
        f"of an {gpu.name}: {why}. {_what_fits(run, how, gpu, found['largest_micro_batch'])}"
    )


def _what_fits(run: RunConfig, how: Execution, gpu: Gpu, largest: dict[str, int]) -> str:
    training, ways = run.training, list[str]()
    plain = Execution.of(training)
    for label, key, execution in (
        ("as it is", "as_asked", how),
        ("with fused attention, the chunked head and compiled blocks", "this_trainer", Execution()),
        ("recomputing blocks as well (training.recompute = true)", "recomputing", Execution(recompute=True)),
    ):
        if key == "this_trainer" and how == plain == execution:
            continue
        size = _divisor_at_most(training.sequences_per_step, largest[key])
        if size:
            fitting = dataclasses.replace(training, micro_batch_size=size)
            peak_gib = plan_memory(run.model, fitting, execution).peak_gib
            ways.append(
                f"{label}: micro-batch {size} × accumulation {training.sequences_per_step // size} ({peak_gib:.1f} GiB)"
            )
    if ways:
        return "What fits: " + "; ".join(ways) + "."
    return "Nothing fits: take a GPU with more memory, a shorter training.seq_len, or a smaller model."


def _divisor_at_most(sequences: int, largest: int) -> int:
    """The largest micro-batch up to `largest` that divides the step's sequences, so the step stays the same."""
    return max((size for size in range(1, min(sequences, largest) + 1) if sequences % size == 0), default=0)


def render(plan: dict[str, Any]) -> str:
    """The plan for a person."""
    memory, work, lines = plan["memory_bytes"], plan["flops"], list[str]()
    lines.append(f"{plan['name']}: {plan['parameters']['total']:,} parameters")
    parts = ("embedding", "attention", "feed_forward", "norms", "head")
    lines += [
        f"  {part:<14}{plan['parameters'][part]:>16,}  {plan['parameters'][part] / plan['parameters']['total']:6.1%}"
        for part in parts
    ]
    lines.append(
        f"\n{work['per_token'] / 1e9:.3f} GFLOP per token ({work['convention']}): "
        f"attention scores {work['attention_share']:.1%}, head {work['head_share']:.1%}"
    )
    lines.append(f"{work['tokens']:,} tokens, {work['run']:.3g} FLOP")
    lines.append(f"\nmemory at micro-batch {plan['micro_batch_size']}, GiB")
    names = ("weights", "gradients", "moments", "casts", "activations", "head", "context")
    lines += [f"  {name:<14}{memory[f'{name}_bytes'] / GIB:>8.2f}" for name in names]
    lines.append(f"  {'peak':<14}{plan['peak_gib']:>8.2f}   ({memory['layer_bytes'] / GIB:.2f} of activations a block)")
    lines.append("\nlargest micro-batch, GiB   as asked   this trainer   recomputing")
    for name, found in plan["gpus"].items():
        largest = found["largest_micro_batch"]
        verdict = "fits" if found["fits"] else "does not fit"
        lines.append(
            f"  {name:<10}{found['capacity_gib']:>9.2f}   {largest['as_asked']:>11}{largest['this_trainer']:>15}"
            f"{largest['recomputing']:>14}   {verdict}"
        )
    lines += ["", *_times(plan), "", *_disk(plan["disk_bytes"])]
    return "\n".join(lines)


def _times(plan: dict[str, Any]) -> list[str]:
    lines = ["share of peak (MFU)          tokens/s    s/step     days   submissions"]
    for name, found in plan["gpus"].items():
        for share, time in found["mfu"].items():
            lines.append(
                f"  {name:<10}{float(share):>8.1%}{time['tokens_per_s']:>19,.0f}{time['step_s']:>10.1f}"
                f"{time['days']:>9.2f}{time['submissions']:>14}"
            )
    return lines


def _disk(disk_bytes: dict[str, int]) -> list[str]:
    kept = disk_bytes["checkpoints_kept"]
    return [
        f"disk: checkpoints {disk_bytes['checkpoints'] / GIB:,.1f} GiB ({kept} kept and one being written), "
        f"token shards {disk_bytes['shards'] / GIB:,.1f} GiB"
    ]
