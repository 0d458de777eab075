"""Evaluate a checkpoint: cloze questions and held-out bits per byte, per source, into one JSON file.

The questions are scored through lm-evaluation-harness where it is installed, else by our own code of
the same definitions; the file says which. A score that is no finite number is null with a reason.
Bits per byte are taken twice: with abutting windows, as in training, and with overlapping ones. Costs
one forward pass per choice, and three over at most `eval_max_tokens` held-out tokens per source.

    python -m model.evaluate --checkpoint FILE --config FILE --manifest FILE --items cloze.jsonl --out scores.json
"""

import argparse
import importlib.util
import math
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from model.benchmark_data import go_offline
from model.bits_per_byte import heldout_scores, heldout_streams
from model.checkpoint import load, load_model
from model.config import RunConfig, load_run_config
from model.errors import ConfigError, EnvironmentProblem, RQwen3Error
from model.files import read_json, sha256_file, write_json
from model.likelihood import plain_tokenizer, read_items, score_cloze
from model.rqwen3 import RQwen3
from model.shard_format import Manifest, read_manifest
from model.sliding import sliding_scores

FORMAT_VERSION = 1
OWN_ENGINE_VERSION = "1"
ENGINES = ("auto", "harness", "own")
TASK = "heldout_cloze"
PACKAGES = ("torch", "tokenizers", "numpy", "lm_eval", "datasets", "transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What is evaluated, and how."""

    checkpoint: Path
    """The `.pt` file; its sidecar is checked where there is one."""
    config: Path
    """The run's TOML file."""
    manifest: Path
    """The corpus with its held-out shards and its tokenizer."""
    items: Path
    """The cloze questions."""
    benchmarks: Path | None = None
    """What `model.score_benchmarks` wrote about the same checkpoint, to stand in the same file."""
    engine: str = "auto"
    """`harness`, `own`, or `auto`: the harness where it is installed."""
    device: str = "cpu"
    """`cpu`, `cuda`, or `auto`: CUDA where there is one."""
    batch: int = 8
    """Sequences per forward pass."""
    stride: int | None = None
    """Tokens that each overlapping window scores; half the context by default."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"--engine = {self.engine!r} is none of {', '.join(ENGINES)}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"--device = {self.device!r} is none of auto, cpu, cuda")
        if self.batch < 1:
            raise ConfigError(f"--batch = {self.batch} must be at least 1")


def evaluate(inputs: Inputs) -> dict[str, Any]:
    """Score a checkpoint; returns what `scores.json` holds, every number of it finite.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not fit the configuration.
        ConfigError: the configuration or a flag is not usable.
        CorpusError: manifest, held-out shards, tokenizer or questions are missing or damaged.
        EnvironmentProblem: the harness or the device that was asked for is not there.
    """
    engine = choose_engine(inputs.engine)
    device = device_named(inputs.device)
    run = load_run_config(inputs.config)
    manifest = read_manifest(inputs.manifest)
    items = read_items(inputs.items)
    tokenizer = plain_tokenizer(manifest.root / manifest.tokenizer_path)
    model = load_model(inputs.checkpoint, run.model, device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        if engine == "harness":
            go_offline()
            from model.harness import score_cloze_with_harness

            cloze = score_cloze_with_harness(model, tokenizer, items, manifest.eos_id, inputs.batch)
        else:
            cloze = score_cloze(model, tokenizer, items, manifest.eos_id, inputs.batch)
        bits_per_byte, sliding = _bits_per_byte(model, manifest, run, inputs)
    packages = versions()
    checkpoint_sha256 = sha256_file(inputs.checkpoint)
    return {
        **_benchmarks(inputs.benchmarks, checkpoint_sha256, cloze),
        "format_version": FORMAT_VERSION,
        "engine": engine,
        "engine_version": packages["lm_eval"] if engine == "harness" else OWN_ENGINE_VERSION,
        "checkpoint": {
            "path": str(inputs.checkpoint),
            "sha256": checkpoint_sha256,
            "step": int(load(inputs.checkpoint, mapped=True)["step"]),
        },
        "bits_per_byte": bits_per_byte,
        "bits_per_byte_sliding": sliding,
        "items_sha256": sha256_file(inputs.items),
        "manifest_sha256": manifest.sha256,
        "device": device.type,
        "precision": "bf16 autocast" if device.type == "cuda" else "fp32",
        "versions": packages,
    }


def _benchmarks(path: Path | None, checkpoint_sha256: str, cloze: dict[str, Any]) -> dict[str, Any]:
    """`tasks`, the benchmarks' beside the cloze questions, and `benchmarks`, how they were asked.

    Raises:
        ConfigError: the benchmarks' scores are another checkpoint's.
    """
    if path is None:
        return {"tasks": {TASK: cloze}}
    scored = read_json(path)
    if scored["protocol"]["model_sha256"] != checkpoint_sha256:
        raise ConfigError(f"{path}: the scores of another checkpoint. Make them again: rqwen3 eval")
    told = {key: scored[key] for key in ("engine", "protocol", "complete")}
    return {"tasks": {TASK: cloze, **scored["tasks"]}, "benchmarks": told}


def choose_engine(wanted: str) -> str:
    """`harness` or `own`; `auto` takes the harness where it is installed.

    Raises:
        EnvironmentProblem: the harness is asked for and not installed.
    """
    installed = importlib.util.find_spec("lm_eval") is not None
    if wanted == "harness" and not installed:
        raise EnvironmentProblem(
            "--engine harness: lm-evaluation-harness is not installed. Install it: pip install "
            '"lm-eval[hf]==0.4.13", or score with our own code: --engine own'
        )
    if wanted == "auto":
        return "harness" if installed else "own"
    return wanted


def device_named(wanted: str) -> torch.device:
    """The device of `cpu`, `cuda`, or `auto`: CUDA where there is one.

    Raises:
        EnvironmentProblem: CUDA is asked for and not there.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise EnvironmentProblem("--device cuda: torch sees no CUDA device here. Use --device cpu, or a GPU node.")
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def _bits_per_byte(
    model: RQwen3, manifest: Manifest, run: RunConfig, inputs: Inputs
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """By source, with windows that abut; and with overlapping ones, whose context and stride are stated."""
    context = run.training.seq_len
    stride = inputs.stride or max(1, context // 2)
    streams, missing = heldout_streams(manifest, run.training.eval_max_tokens)
    nothing = {name: {"bits_per_byte": None, "reason": "no document of this source is held out"} for name in missing}
    if not streams:
        nothing["all"] = {"bits_per_byte": None, "reason": "no document is held out at all"}
    abutting = heldout_scores(model, streams, context, inputs.batch) or {}
    overlapping = sliding_scores(model, streams, context, stride, inputs.batch)
    told = {"context_tokens": context, "stride_tokens": stride}
    return (
        {name: _finite(values) for name, values in abutting.items()} | nothing,
        told | {"sources": {name: _finite(values) for name, values in overlapping.items()} | nothing},
    )


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """The values, with null for what is no finite number, and a reason where anything is null."""
    cleaned = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
    if cleaned["bits_per_byte"] is None:
        return cleaned | {"reason": "the loss is not finite: the checkpoint's weights hold NaN or infinity"}
    if None in cleaned.values():
        return cleaned | {"reason": "no standard error can be had from a single document"}
    return cleaned


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that scores may depend on; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m model.evaluate", description="Evaluate a checkpoint.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--items", type=Path, required=True, help="cloze questions, JSON lines")
    parser.add_argument("--benchmarks", type=Path, help="the benchmarks.json of the same checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="the scores.json to write")
    parser.add_argument("--engine", default="auto", help="auto, harness or own")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--batch", type=int, default=8, help="sequences per forward pass")
    parser.add_argument("--stride", type=int, help="tokens that each overlapping window scores; half the context")
    options = parser.parse_args(arguments)
    try:
        inputs = Inputs(
            checkpoint=options.checkpoint,
            config=options.config,
            manifest=options.manifest,
            items=options.items,
            benchmarks=options.benchmarks,
            engine=options.engine,
            device=options.device,
            batch=options.batch,
            stride=options.stride,
        )
        scores = evaluate(inputs)
        write_json(options.out, scores)
    except RQwen3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    cloze = scores["tasks"][TASK]
    print(f"{TASK} acc {cloze['acc']}, acc_norm {cloze['acc_norm']} over {cloze['n']} (chance {cloze['chance']:.3f})")
    bits = scores["bits_per_byte"]["all"]["bits_per_byte"]
    print(f"bits per byte {bits} (tokens and texts agree on every byte); engine {scores['engine']}: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
