"""The commands over a trained model: `rqwen3 export | eval`.

Each runs a program of `model` with its output on the terminal; here it is found out which checkpoint,
folder and data are meant.
"""

from collections.abc import Sequence
from pathlib import Path

from model.benchmarks import GROUPS, members
from model.errors import CheckpointError
from rqwen3_pipeline.experiment_files import checkpoints
from rqwen3_pipeline.programs import run_here
from rqwen3_pipeline.results import evaluation_config, keep_expectations
from rqwen3_pipeline.settings import Settings


def export_checkpoint(
    settings: Settings,
    checkpoint: Path | None,
    dtype: str,
    out: Path | None,
    tokenizer: Path | None,
    gguf: str | None,
    force: bool,
) -> int:
    """Write a checkpoint as a Hugging Face folder; returns the program's exit code.

    Raises:
        CheckpointError: no checkpoint is given and the run has none.
    """
    root, run = settings.root, settings.run_config
    chosen = checkpoint or _newest(settings)
    final = chosen == root.experiment(run.name) / "checkpoints" / "final.pt"
    name = run.name if final and dtype == "fp32" else f"{run.name}-{chosen.stem}-{dtype}"
    scores = [path for path in (root.evaluation(run.name) / "scores.json",) if path.is_file()]
    arguments: list[str | Path] = [
        *("--checkpoint", chosen, "--config", _config_beside(settings, chosen), "--dtype", dtype),
        *("--tokenizer", tokenizer or root.tokenizer, "--out", out or root.export(name)),
        *(("--manifest", root.manifest) if root.manifest.is_file() else ()),
        *(part for path in scores for part in ("--scores", path)),
        *(("--gguf", gguf) if gguf else ()),
        *(("--force",) if force else ()),
    ]
    return run_here("model.huggingface", arguments)


def prefetch(settings: Settings, named: Sequence[str], data: Path | None) -> int:
    """Bring the benchmarks into the data folder, for nodes without a network; returns the exit code."""
    tasks = ",".join(_tasks(settings, named))
    return run_here("model.benchmark_data", ["--data", data or settings.root.benchmarks, "--tasks", tasks])


def score(
    settings: Settings,
    checkpoint: Path | None,
    weights: Path | None,
    named: Sequence[str],
    data: Path | None,
    out: Path | None,
    options: dict[str, str | int | None],
) -> int:
    """Score a checkpoint of the run, or a published folder, on benchmarks; returns the program's exit code.

    Raises:
        CheckpointError: nothing is given and the run has no checkpoint.
        ConfigError: there is no such benchmark.
    """
    root, run = settings.root, settings.run_config
    limited = f"first-{options['limit']}" if options.get("limit") else ""  # never in place of whole scores
    arguments: list[str | Path] = ["--data", data or settings.root.benchmarks]
    arguments += ["--tasks", ",".join(_tasks(settings, named))]
    if weights is not None:
        way = f"{weights.resolve().name}-{options.get('through') or 'own'}"
        arguments += ["--weights", weights, "--out", out or root.evaluation("published") / way / limited]
    else:
        chosen = checkpoint or _newest(settings)
        keep_expectations(root, run)
        arguments += ["--checkpoint", chosen, "--config", _config_beside(settings, chosen)]
        arguments += ["--tokenizer", root.tokenizer, "--out", out or _out(settings, chosen) / limited]
    for name, value in options.items():
        if value is not None:
            arguments += [f"--{name}", str(value)]
    return run_here("model.score_benchmarks", arguments)


def continue_prompt(settings: Settings, weights: Path | None, prompt: str, sampling: dict[str, float]) -> int:
    """Continue a prompt; returns the program's exit code.

    Args:
        settings: the settings in force.
        weights: a published folder; None takes the run's final model, or its newest checkpoint.
        prompt: the text.
        sampling: the program's options by name.

    Raises:
        CheckpointError: there is no such folder, or the run has no checkpoint.
    """
    arguments: list[str | Path] = ["--prompt", prompt]
    for name, value in sampling.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    if weights is not None:
        if not weights.is_dir():
            raise CheckpointError(f"{weights}: no such folder. Name one that holds published weights, or leave it out.")
        arguments += ["--weights", weights]
    else:
        chosen = _newest(settings)
        arguments += ["--checkpoint", chosen, "--config", _config_beside(settings, chosen)]
        arguments += ["--tokenizer", settings.root.tokenizer]
    return run_here("model.generate", arguments)


def _out(settings: Settings, checkpoint: Path) -> Path:
    """Where a checkpoint's scores belong: the final one's beside the run's `scores.json`."""
    folder = settings.root.evaluation(settings.run_config.name)
    return folder if checkpoint.stem == "final" else folder / checkpoint.stem


def _tasks(settings: Settings, named: Sequence[str]) -> list[str]:
    """The benchmarks that are meant: those named, else those of the configuration, else all."""
    names = list(named) or list(evaluation_config(settings.run_config).benchmarks) or list(GROUPS)
    for name in names:
        members(name)
    return names


def _newest(settings: Settings) -> Path:
    """The run's final checkpoint, or the newest whole one while it goes on."""
    folder = settings.root.experiment(settings.run_config.name)
    final = folder / "checkpoints" / "final.pt"
    if final.is_file():
        return final
    whole = [found.path for found in checkpoints(folder) if found.whole]
    if not whole:
        raise CheckpointError(f"{folder}: has no checkpoint yet. Train: rqwen3 run; or name one: --checkpoint FILE")
    return whole[-1]


def _config_beside(settings: Settings, checkpoint: Path) -> Path:
    """The configuration that a checkpoint was trained with; the profile's where none lies beside it."""
    beside = checkpoint.resolve().parent.parent / "config.toml"
    return beside if beside.is_file() else settings.config_path
