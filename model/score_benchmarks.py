"""Score a checkpoint, or a published folder, on the benchmarks: one file a task, and one over all.

Each task's scores are written as soon as it is done, with what they were made from; a second call
asks only what is missing or was made from something else, so a killed evaluation goes on. A task
without data, with damaged data or with log-likelihoods that are no numbers has no score, and says
why. Costs one forward pass a choice: some 190,000 for all of them, an hour of a large GPU for 0.75 B.

    python -m model.score_benchmarks --checkpoint FILE --config FILE --tokenizer FILE --data DIR --tasks ... --out DIR
    python -m model.score_benchmarks --weights DIR [--through transformers] --data DIR --tasks ... --out DIR
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from model.benchmark_data import fetch, go_offline
from model.benchmarks import Benchmark, data_file, members, read_rows
from model.checkpoint import load_model, verify
from model.config import load_run_config
from model.errors import ConfigError, CorpusError, EnvironmentProblem, RQwen3Error, SourceError
from model.evaluate import choose_engine, device_named, versions
from model.files import canonical_json, read_json, sha256_bytes, sha256_file, write_json
from model.generate import EOS_TOKEN, load_tokenizer
from model.likelihood import plain_tokenizer
from model.published import end_of_text_ids, load_published, weight_files

FORMAT_VERSION = 1
START_TOKEN = "none; the end-of-text id stands where a context is empty"
RESULT = "benchmarks.json"
METRICS = ("acc", "acc_norm")
THROUGH = ("own", "transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What is scored, and how."""

    out: Path
    """The folder of the scores."""
    data: Path
    """The benchmarks' files, in the Hub's columns."""
    tasks: tuple[str, ...]
    """Names of benchmarks."""
    checkpoint: Path | None = None
    """A `.pt` file with its sidecar; or `weights`."""
    config: Path | None = None
    """The run's TOML file, for a checkpoint."""
    tokenizer: Path | None = None
    """The corpus' tokenizer.json, for a checkpoint."""
    weights: Path | None = None
    """A published folder, or an export."""
    through: str = "own"
    """`own`, this project's model, or `transformers`, for a folder."""
    limit: int | None = None
    """Ask only the first so many rows of each task."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: CUDA where there is one."""
    batch: int = 8
    """Sequences per forward pass; no score depends on it."""

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.weights is None):
            raise ConfigError("give --checkpoint with --config and --tokenizer, or --weights; not both")
        if self.checkpoint is not None and None in (self.config, self.tokenizer):
            raise ConfigError("--checkpoint needs --config and --tokenizer")
        if self.through not in THROUGH or (self.through == "transformers" and self.weights is None):
            raise ConfigError(f"--through = {self.through!r}: own, or transformers for a folder of --weights")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit = {self.limit} must be at least 1")
        if self.batch < 1:
            raise ConfigError(f"--batch = {self.batch} must be at least 1")


def score(inputs: Inputs, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Score all tasks that are not scored yet; returns what `benchmarks.json` holds.

    Raises:
        RQwen3Error: the model, the harness or the device can't be had; or there is no such task.
    """
    tasks = {name: members(name) for name in inputs.tasks}
    choose_engine("harness")
    go_offline()
    device = device_named(inputs.device)
    identity = _identity(inputs)
    made_from = {
        **identity,
        "engine_version": version("lm_eval"),
        "through": inputs.through,
        "precision": "bf16 autocast" if device.type == "cuda" else "fp32",
        "shots": 0,
        "start_token": START_TOKEN,
        "limit": inputs.limit,
    }
    asked = _Asked(inputs, made_from, device)
    pieces: dict[str, dict[str, Any]] = {}
    for task in dict.fromkeys(task for group in tasks.values() for task in group):
        pieces[task.name] = piece = asked.piece(task)
        say(f"{task.name}: {_line(piece)}")
    result = {
        "format_version": FORMAT_VERSION,
        "engine": "lm-evaluation-harness",
        "protocol": made_from,
        "complete": all(piece["acc"] is not None for piece in pieces.values()),
        "tasks": {name: combine([pieces[task.name] for task in group]) for name, group in tasks.items()},
        "versions": versions(),
    }
    write_json(inputs.out / RESULT, result)
    return result


class _Asked:
    """The model is loaded when the first task needs it, and kept."""

    def __init__(self, inputs: Inputs, made_from: dict[str, Any], device: torch.device) -> None:
        self._inputs, self._made_from, self._device = inputs, made_from, device
        self._model: Any = None

    def piece(self, task: Benchmark) -> dict[str, Any]:
        """A task's scores, from its file if they were made from the same; else asked now."""
        path = self._inputs.out / "benchmarks" / f"{task.name}.json"
        try:
            file = data_file(self._inputs.data, task) or fetch(task, self._inputs.data)
            rows = read_rows(file, task)
        except (SourceError, EnvironmentProblem) as error:
            return _unscored(str(error))
        made_from = self._made_from | {"data_sha256": sha256_file(file)}
        before = read_json(path) if path.is_file() else {}
        if isinstance(before, dict) and before.get("made_from") == made_from:
            return before
        from model.harness import score_benchmark

        if self._model is None:
            self._model = _harness_model(self._inputs, self._device)
        try:
            with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._device.type == "cuda"):
                scores = score_benchmark(self._model, task, rows, self._inputs.limit)
        except ConfigError as error:  # a question longer than the model's context
            return _unscored(str(error))
        data = {"dataset": task.dataset, "config": task.config, "split": task.split, "rows": len(rows)}
        piece = {**scores, "made_from": made_from, "data": data, "limited": scores["n"] < len(rows)}
        write_json(path, piece)
        return piece


def _unscored(reason: str) -> dict[str, Any]:
    return {"acc": None, "acc_stderr": None, "n": 0, "chance": None, "reason": reason, "limited": False}


def _line(piece: dict[str, Any]) -> str:
    if piece["acc"] is None:
        return f"no score: {piece['reason']}"
    error = "unknown" if piece["acc_stderr"] is None else f"{piece['acc_stderr']:.4f}"
    return f"acc {piece['acc']:.4f} ± {error} over {piece['n']:,} (chance {piece['chance']:.3f})"


def combine(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """One score over several tasks, each weighted by its questions, as the harness does for MMLU.

    Tasks without a score are left out, and said to be; with one that is no number there is no score at
    all, since a model that answers NaN anywhere has not been measured.
    """
    if len(pieces) == 1:
        return {key: value for key, value in pieces[0].items() if key != "made_from"}
    scored = [piece for piece in pieces if piece["acc"] is not None]
    told = [piece["reason"] for piece in pieces if piece["acc"] is None]
    spoilt = [piece["reason"] for piece in pieces if piece["acc"] is None and piece["n"]]
    if spoilt or not scored:
        return _unscored((spoilt or told)[0])
    n = sum(piece["n"] for piece in scored)
    combined: dict[str, Any] = {
        "n": n,
        "chance": sum(piece["chance"] * piece["n"] for piece in scored) / n,
        "subtasks": len(scored),
        "subtasks_wanted": len(pieces),
        "limited": bool(told) or any(piece["limited"] for piece in scored),
    }
    for metric in METRICS:
        if all(metric in piece for piece in scored):
            combined[metric] = sum(piece[metric] * piece["n"] for piece in scored) / n
            combined[f"{metric}_stderr"] = _pooled(
                [(piece[f"{metric}_stderr"], piece["n"]) for piece in scored if piece["n"] > 1]
            )
    if told:
        combined["reason"] = f"over {len(scored)} of {len(pieces)} parts only; of the others: {told[0]}"
    return combined


def _pooled(parts: list[tuple[float | None, int]]) -> float | None:
    """Standard error over several samples by their pooled variance (`pooled_sample_stderr` of the harness)."""
    known = [(stderr, n) for stderr, n in parts if stderr is not None]
    total = sum(n for _, n in known)
    if total <= len(known):
        return None
    variance = sum((n - 1) * stderr**2 * n for stderr, n in known) / (total - len(known))
    return math.sqrt(variance / total)


def _identity(inputs: Inputs) -> dict[str, Any]:
    """Which model this is, by its bytes and its tokenizer's."""
    if inputs.checkpoint is not None and inputs.tokenizer is not None:
        saved = verify(inputs.checkpoint)
        return {
            "model": inputs.checkpoint.name,
            "model_sha256": saved.sidecar["sha256"],
            "step": saved.step,
            "tokenizer_sha256": _hash(inputs.tokenizer),
        }
    assert inputs.weights is not None
    hashes = {path.name: sha256_file(path) for path in (inputs.weights / "config.json", *weight_files(inputs.weights))}
    return {
        "model": inputs.weights.resolve().name,
        "model_sha256": sha256_bytes(canonical_json(hashes).encode()),
        "step": None,
        "tokenizer_sha256": _hash(inputs.weights / "tokenizer.json"),
    }


def _hash(path: Path) -> str:
    if not path.is_file():
        raise CorpusError(f"{path}: no such file. Name the tokenizer.json that the model was trained with.")
    return sha256_file(path)


def _harness_model(inputs: Inputs, device: torch.device) -> Any:
    """The model as the harness asks it."""
    from model.harness import HarnessModel, through_transformers

    if inputs.through == "transformers":
        assert inputs.weights is not None
        return through_transformers(inputs.weights, inputs.batch, device.type)
    if inputs.checkpoint is not None:
        assert inputs.config is not None
        assert inputs.tokenizer is not None
        model = load_model(inputs.checkpoint, load_run_config(inputs.config).model, device)
        tokenizer, eos_id = inputs.tokenizer, load_tokenizer(inputs.tokenizer).token_to_id(EOS_TOKEN)
    else:
        assert inputs.weights is not None
        model, tokenizer = load_published(inputs.weights, device), inputs.weights / "tokenizer.json"
        eos_id = min(end_of_text_ids(inputs.weights), default=None)
    ids = load_tokenizer(tokenizer).get_vocab_size(with_added_tokens=True)
    if eos_id is None or ids > model.config.vocab_size:
        raise CorpusError(
            f"{tokenizer}: {ids:,} ids and end-of-text id {eos_id}; the model has {model.config.vocab_size:,} rows. "
            "They don't belong together: name the tokenizer.json that the model was trained with."
        )
    return HarnessModel(model, plain_tokenizer(tokenizer), eos_id, inputs.batch)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m model.score_benchmarks", description="Score the benchmarks.")
    for name in ("checkpoint", "config", "tokenizer", "weights"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", required=True, help="names, separated by commas")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--through", default="own", help="own or transformers")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args(arguments)
    try:
        inputs = Inputs(
            out=options.out,
            data=options.data,
            tasks=tuple(options.tasks.split(",")),
            checkpoint=options.checkpoint,
            config=options.config,
            tokenizer=options.tokenizer,
            weights=options.weights,
            through=options.through,
            limit=options.limit,
            device=options.device,
            batch=options.batch,
        )
        result = score(inputs, _say)
    except RQwen3Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for name, combined in result["tasks"].items():
        if "subtasks" in combined:
            _say(f"{name} ({combined['subtasks']} of {combined['subtasks_wanted']} parts): {_line(combined)}")
    _say(str(options.out / RESULT))
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
