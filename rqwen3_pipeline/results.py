"""Export, benchmarks and evaluation as the pipeline sees them: programs to run, files to read.

Nothing here imports torch. Expectations are written down before the scores come in: with the time and
a hash, once, and never after a score is there, so that nobody can expect what is known already.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from model.benchmarks import members
from model.config import RunConfig, naming_the_file
from model.config_build import build
from model.errors import CheckpointError, ConfigError
from model.files import canonical_json, read_json, sha256_bytes, write_json
from model.model_card import renew_card
from rqwen3_pipeline.programs import run_program
from rqwen3_pipeline.settings import RunRoot
from rqwen3_pipeline.training import record_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """A table `[evaluation.expectations.<task>]`: what a score will be, said beforehand."""

    low: float
    """Smallest score that was expected."""
    high: float
    """Largest score that was expected."""
    metric: str = "acc"
    """`acc` or `acc_norm`."""
    why: str = ""
    """The reason, in words."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise ConfigError(f"evaluation.expectations: 0 <= low = {self.low} <= high = {self.high} <= 1 must hold")
        if self.metric not in ("acc", "acc_norm"):
            raise ConfigError(f"evaluation.expectations: metric = {self.metric!r} is none of acc, acc_norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """The `[evaluation]` section."""

    items: int = 200
    """Cloze questions made from held-out documents."""
    choices: int = 4
    """Answers per question, the right one among them."""
    benchmarks: tuple[str, ...] = ()
    """Names of benchmarks to score; none by default."""
    limit: int = 0
    """Ask only the first so many rows of each benchmark; 0 asks all."""
    control: str = ""
    """A published folder that is known to score above chance, asked the same; if it doesn't, no score counts."""
    expectations: dict[str, Expectation] = field(default_factory=dict[str, Expectation])
    """By task."""

    def __post_init__(self) -> None:
        if self.items < 1 or self.choices < 2:
            raise ConfigError("evaluation.items must be at least 1, evaluation.choices at least 2")
        if self.limit < 0:
            raise ConfigError(f"evaluation.limit = {self.limit} must not be negative")
        for name in self.benchmarks:
            members(name)


@naming_the_file
def evaluation_config(run: RunConfig) -> EvaluationConfig:
    """The `[evaluation]` section, parsed.

    Raises:
        ConfigError: a key, a value or a benchmark's name is not usable.
    """
    table = run.sections.get("evaluation", {})
    if not isinstance(table, dict):
        raise ConfigError(f"[evaluation] must be a table, not {table!r}")
    plain = {key: value for key, value in table.items() if key != "expectations"}
    tables = table.get("expectations", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"[evaluation.expectations] must be a table of tables, not {tables!r}")
    expected = {name: build(Expectation, entry, f"evaluation.expectations.{name}") for name, entry in tables.items()}
    checked = build(EvaluationConfig, plain, "evaluation")
    names = ("items", "choices", "benchmarks", "limit", "control")
    return EvaluationConfig(**{name: getattr(checked, name) for name in names}, expectations=expected)


def export_model(root: RunRoot, run: RunConfig) -> dict[str, Any]:
    """Write the final model as a Hugging Face folder; scores that are there already stand in its card."""
    folder, out = root.experiment(run.name), root.export(run.name)
    scores = root.evaluation(run.name) / "scores.json"
    arguments = [
        *("--checkpoint", folder / "checkpoints" / "final.pt", "--config", folder / "config.toml"),
        *("--tokenizer", root.tokenizer, "--manifest", root.manifest, "--out", out),
        *(("--scores", scores) if scores.is_file() else ()),
    ]
    run_program("model.huggingface", arguments, folder / "logs" / "export.log")
    size_bytes = sum(file.stat().st_size for file in out.iterdir())
    read_back = read_json(out / "export.json")["read_back"]
    names = sorted(file.name for file in out.iterdir())
    return {"path": str(out), "files": names, "bytes": size_bytes, "read_back": read_back}


def evaluate_model(root: RunRoot, run: RunConfig, data: Path) -> dict[str, Any]:
    """Score the final model: the benchmarks that are configured, cloze questions, the held-out documents.

    Args:
        root: the run root.
        run: the configuration.
        data: the folder of the benchmarks.
    """
    from rqwen3_pipeline.corpus.cloze import write_cloze_items

    folder, out = root.experiment(run.name), root.evaluation(run.name)
    wanted = evaluation_config(run)
    keep_expectations(root, run)
    made = write_cloze_items(
        root, out / "cloze.jsonl", items=wanted.items, choices=wanted.choices, seed=run.training.seed
    )
    final = folder / "checkpoints" / "final.pt"
    asked = score_benchmarks(root, run, final, out, data)
    if asked and wanted.control:
        _ask(root, run, ["--weights", wanted.control], out / "control", data)
    arguments = [
        *("--checkpoint", final, "--config", folder / "config.toml"),
        *("--manifest", root.manifest, "--items", out / "cloze.jsonl", "--out", out / "scores.json"),
        *(("--benchmarks", asked) if asked else ()),
    ]
    run_program("model.evaluate", arguments, folder / "logs" / "evaluation.log")
    sidecar = final.with_suffix(".json")
    if not (sidecar.is_file() and renew_card(root.export(run.name), run, read_json(sidecar), out / "scores.json")):
        export_model(root, run)
    scores = read_json(out / "scores.json")
    report = {**scores["tasks"]["heldout_cloze"], "engine": scores["engine"], "cloze": made, "path": str(out)}
    return report | {name: task for name, task in scores["tasks"].items() if name in wanted.benchmarks}


def score_benchmarks(root: RunRoot, run: RunConfig, checkpoint: Path, out: Path, data: Path) -> Path | None:
    """Score one checkpoint on the benchmarks that are configured; what is scored already is not asked again.

    Returns:
        The file with the scores over all tasks; None where no benchmark is configured.
    """
    if not evaluation_config(run).benchmarks:
        return None
    config = root.experiment(run.name) / "config.toml"
    return _ask(root, run, ["--checkpoint", checkpoint, "--config", config, "--tokenizer", root.tokenizer], out, data)


def _ask(root: RunRoot, run: RunConfig, model: list[str | Path], out: Path, data: Path) -> Path:
    wanted = evaluation_config(run)
    arguments: list[str | Path] = [*model, "--data", data, "--tasks", ",".join(wanted.benchmarks), "--out", out]
    arguments += ["--limit", str(wanted.limit)] if wanted.limit else []
    run_program("model.score_benchmarks", arguments, root.experiment(run.name) / "logs" / "benchmarks.log")
    return out / "benchmarks.json"


def score_submission(root: RunRoot, run: RunConfig, number: int, data: Path) -> dict[str, Any]:
    """Score the checkpoint that a submission left.

    Raises:
        CheckpointError: the submission has not ended well, or retention has removed what it left.
    """
    record = record_of(root, run.name, number)
    if record is None:
        raise CheckpointError(f"submission {number:02d} of {run.name} has left no checkpoint yet. Run it first.")
    step = int(record["saved_step"])
    checkpoint = root.experiment(run.name) / "checkpoints" / f"step_{step}.pt"
    if not checkpoint.is_file():
        raise CheckpointError(
            f"{checkpoint}: not there any more; retention keeps the last {run.training.keep_last} and every "
            f"{run.training.keep_every_steps:,} steps. Score a submission before the next ones end."
        )
    keep_expectations(root, run)
    out = root.evaluation(run.name) / checkpoint.stem
    asked = score_benchmarks(root, run, checkpoint, out, data)
    if asked is None:
        return {"step": step, "path": str(checkpoint), "benchmarks": "none configured: [evaluation] benchmarks"}
    scores = read_json(asked)
    return {"step": step, "path": str(out), "complete": scores["complete"], **scores["tasks"]}


def keep_expectations(root: RunRoot, run: RunConfig) -> dict[str, Any] | None:
    """Write down what is expected, with the time and a hash; nothing is changed once there are scores.

    Returns:
        What is kept: `written_at`, `sha256`, `tasks`; None where nothing is expected.
    """
    expected = evaluation_config(run).expectations
    path = root.evaluation(run.name) / "expectations.json"
    kept = read_json(path) if path.is_file() else None
    tasks = {
        name: {key: getattr(entry, key) for key in ("metric", "low", "high", "why")} for name, entry in expected.items()
    }
    sha256 = sha256_bytes(canonical_json(tasks).encode())
    if (kept is None and not tasks) or (kept is not None and (kept["sha256"] == sha256 or _scored(path.parent))):
        return kept
    if _scored(path.parent):
        return None  # too late: with the scores known, this would be no expectation
    kept = {"written_at": datetime.now(UTC).isoformat(timespec="seconds"), "sha256": sha256, "tasks": tasks}
    write_json(path, kept)
    return kept


def _scored(folder: Path) -> bool:
    """Whether any checkpoint of the run has a score."""
    return any(folder.rglob("scores.json")) or any(folder.rglob("benchmarks/*.json"))
