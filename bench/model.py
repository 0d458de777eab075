"""Speed and memory of the model against transformers' Qwen3, same weights, same optimiser.

On a CPU: the time of a whole training step (forward, backward, clipping, AdamW) at two vocabularies,
as the median ratio over interleaved pairs, so that a busy neighbour slows both; and the peak of the
chunked head against the full one's. On a GPU: tokens/s, MFU and peak memory at the production shape
for micro-batches 2 to 32, beside what the plan says. The last line is one JSON object.

    python -m bench.model [--pairs 7] [--device cpu|cuda]

A few minutes on two cores, and some 6 GB of memory; on a GPU some minutes, and as much memory as it has.
"""

import argparse
import dataclasses
import gc
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.compiler import compile_blocks
from model.config import CoreConfig, TrainConfig, load_run_config
from model.gpus import gpu_of_device
from model.loss import head_loss
from model.memory import GIB, Execution, plan_memory
from model.metrics import memory_bytes
from model.optimizer import make_optimizer
from model.rqwen3 import RQwen3
from model.session import set_threads

SMALL = CoreConfig(
    vocab_size=8192,
    d_model=256,
    n_layer=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=768,
    max_seq_len=512,
)
BATCH, SEQ_LEN = 4, 256
TRAINING = TrainConfig(max_steps=1000, seq_len=SEQ_LEN, micro_batch_size=BATCH)
HEAD_TOKENS, HEAD_WIDTH, FULL_VOCABULARY = 4096, 128, 151_936
MICRO_BATCHES = (2, 4, 8, 16, 32)
PRODUCTION = Path(__file__).resolve().parents[1] / "configs" / "rqwen3_751m.toml"
Step = Callable[[], float]


def their_model(config: CoreConfig) -> nn.Module:
    """Transformers' model of the same shape."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_seq_len,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            use_cache=False,
        )
    )


def make_step(model: nn.Module, training: TrainConfig, loss_of: Callable[[], Tensor]) -> Step:
    """A whole optimiser step; returns its loss."""
    model.train()
    optimizer = make_optimizer(model, training)

    def step() -> float:
        loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def our_step(ours: RQwen3, tokens_BL: Tensor) -> Step:
    """Our training step on these tokens."""
    return make_step(ours, TRAINING, lambda: ours.loss(tokens_BL[:, :-1], tokens_BL[:, 1:]))


def their_step(theirs: nn.Module, tokens_BL: Tensor) -> Step:
    """Transformers' on the same: inputs and targets already shifted."""
    inputs_BT, targets_BT = tokens_BL[:, :-1].contiguous(), tokens_BL[:, 1:].contiguous()
    return make_step(theirs, TRAINING, lambda: theirs(inputs_BT, labels=inputs_BT, shift_labels=targets_BT).loss)


def step_time_ratio(config: CoreConfig, pairs: int, *, compiled: bool = False) -> float | None:
    """Median of ours / theirs over interleaved pairs, in alternating order; None if not compiled."""
    theirs, ours = their_model(config), RQwen3(config)
    ours.load_state_dict(theirs.state_dict())
    if compiled and compile_blocks(ours) is not None:
        return None
    tokens_BL = torch.randint(0, config.vocab_size, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    steps = our_step(ours, tokens_BL), their_step(theirs, tokens_BL)
    for first, second in ((steps[0](), steps[1]()) for _ in range(2)):  # warm up, and prove the same work
        if abs(first - second) > 1e-3 * second:
            raise RuntimeError(f"the losses differ, {first} and {second}: the two do not do the same work")
    ratios = []
    for pair in range(pairs):
        seconds = [0.0, 0.0]
        for which in (0, 1) if pair % 2 else (1, 0):
            began = time.perf_counter()
            steps[which]()
            seconds[which] = time.perf_counter() - began
        ratios.append(seconds[0] / seconds[1])
        say(f"  V {config.vocab_size:,}: {seconds[0] * 1000:.0f} ms, theirs {seconds[1] * 1000:.0f} ms")
    return statistics.median(ratios)


def head_peaks() -> dict[str, int]:
    """Peak bytes of either head beyond inputs, weight and the weight's gradient, each in its own process."""
    return {f"{kind}_bytes": _in_a_process(kind) for kind in ("chunked", "full")}


def _in_a_process(kind: str) -> int:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_head_peak, (kind,))


def _head_peak(kind: str) -> int:
    """Growth of this process's largest resident memory over a forward and a backward pass."""
    torch.manual_seed(0)
    hidden_ND = torch.randn(HEAD_TOKENS, HEAD_WIDTH, requires_grad=True)
    weight_VD = torch.randn(FULL_VOCABULARY, HEAD_WIDTH, requires_grad=True)
    targets_N = torch.randint(0, FULL_VOCABULARY, (HEAD_TOKENS,))
    for _ in range(2):  # the libraries' own buffers first
        head_loss(torch.zeros(64, 8, requires_grad=True), torch.zeros(100, 8, requires_grad=True), targets_N[:64] % 100)
    before_bytes = memory_bytes("VmRSS")
    if kind == "chunked":
        loss = head_loss(hidden_ND, weight_VD, targets_N)
    else:
        loss = F.cross_entropy(hidden_ND @ weight_VD.T, targets_N)
    loss.backward()
    return memory_bytes("VmHWM") - before_bytes - weight_VD.numel() * weight_VD.element_size()


def bench_cpu(pairs: int) -> dict[str, Any]:
    """All figures of a CPU."""
    threads = set_threads()
    full = dataclasses.replace(SMALL, vocab_size=FULL_VOCABULARY)
    say(f"CPU, {threads} threads, {BATCH} × {SEQ_LEN} tokens, d {SMALL.d_model}, {SMALL.n_layer} layers")
    figures: dict[str, Any] = {
        "step_time_ratio_transformers_8k": step_time_ratio(SMALL, pairs),
        "step_time_ratio_transformers_152k": step_time_ratio(full, pairs),
        "compiled_ratio": step_time_ratio(SMALL, pairs, compiled=True),
    }
    peaks = head_peaks()
    figures["head_peak_ratio"] = peaks["chunked_bytes"] / peaks["full_bytes"]
    return {**figures, "device": "cpu", "threads": threads, "pairs": pairs, "batch": BATCH, "seq_len": SEQ_LEN, **peaks}


def bench_cuda(steps: int = 10) -> dict[str, Any]:
    """Speed and peak at the production shape, by micro-batch, ours compiled and theirs as it comes."""
    run, device = load_run_config(PRODUCTION), torch.device("cuda")
    gpu = gpu_of_device(torch.cuda.get_device_name(device))
    rows: list[dict[str, Any]] = []
    for size in MICRO_BATCHES:
        training = dataclasses.replace(run.training, micro_batch_size=size)
        planned_gib = plan_memory(run.model, training, Execution()).allocated_bytes / GIB
        row: dict[str, Any] = {"micro_batch_size": size, "planned_gib": planned_gib}
        for name, build in (("ours", _our_model), ("transformers", _compiled_theirs)):
            measured = _measure_cuda(build(run.model, device), training, device, steps)
            gc.collect()  # the model and its optimiser refer to each other
            torch.cuda.empty_cache()
            row |= {f"{name}_{key}": value for key, value in measured.items()}
        if gpu and row.get("ours_tokens_per_s"):
            flops = run.model.flops_per_token(training.seq_len)
            row["ours_mfu"] = row["ours_tokens_per_s"] * flops / gpu.peak_flops
        say(json.dumps(row))
        rows.append(row)
    fitting = [row for row in rows if row.get("ours_tokens_per_s")]
    best = max(fitting, key=lambda row: row["ours_tokens_per_s"], default={})
    return {"device": torch.cuda.get_device_name(device), "best": best, "by_micro_batch": rows}


def _our_model(config: CoreConfig, device: torch.device) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    ours = RQwen3(config)
    ours.initialise(1)
    ours.to(device)
    compile_blocks(ours)
    return ours, lambda tokens_BL: ours.loss(tokens_BL[:, :-1], tokens_BL[:, 1:])


def _compiled_theirs(config: CoreConfig, device: torch.device) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    theirs = their_model(config).to(device)
    for layer in theirs.model.layers:  # pyright: ignore[reportGeneralTypeIssues, reportAttributeAccessIssue]
        layer.compile()

    def loss_of(tokens_BL: Tensor) -> Tensor:
        return theirs(tokens_BL[:, :-1], labels=tokens_BL[:, :-1], shift_labels=tokens_BL[:, 1:].contiguous()).loss

    return theirs, loss_of


def _cuda_step(built: Any, training: TrainConfig, device: torch.device, accumulation: int) -> Callable[[], None]:
    model, loss_of = built
    model.train()
    optimizer = make_optimizer(model, training)
    tokens_BL = torch.randint(0, 150_000, (training.micro_batch_size, training.seq_len + 1), device=device)

    def step() -> None:
        for _ in range(accumulation):
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(tokens_BL)
            (loss / accumulation).backward()
        nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _measure_cuda(built: Any, training: TrainConfig, device: torch.device, steps: int) -> dict[str, float | None]:
    """tokens/s and peak GiB of micro-batches with their share of optimiser steps; None out of memory."""
    accumulation = max(1, 16 // training.micro_batch_size)
    try:
        step = _cuda_step(built, training, device, accumulation)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        peak_gib = torch.cuda.max_memory_allocated() / GIB
    except torch.OutOfMemoryError:
        return {"tokens_per_s": None, "peak_gib": None}
    tokens = steps * accumulation * training.micro_batch_size * training.seq_len
    return {"tokens_per_s": tokens / seconds, "peak_gib": peak_gib}


def say(line: str) -> None:
    """One line, at once."""
    print(line, flush=True)


def main() -> None:
    """Run the benchmark of the device."""
    parser = argparse.ArgumentParser(prog="python -m bench.model", description="The model against transformers.")
    parser.add_argument("--pairs", type=int, default=7, help="interleaved pairs of steps")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args()
    if options.pairs < 5:
        parser.error("--pairs must be at least 5: the median of fewer says little")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here. The GPU part needs one with a CUDA build of PyTorch.")
    cuda = options.device != "cpu" and torch.cuda.is_available()
    print(json.dumps(bench_cuda() if cuda else bench_cpu(options.pairs)))


if __name__ == "__main__":
    main()
