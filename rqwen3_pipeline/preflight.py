"""What would fail after hours in the queue, looked for in minutes: a list of checks, each one function.

A further check is one more function in `CHECKS`. All of them run, so that one look shows all that is
wrong; the dry step comes last, and only when nothing else is. The outcome is
`experiments/<name>/preflight.json`, which the first submission waits for. Costs a `stat` a shard, the
hashes of all shards once per manifest, and a few steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.config import RunConfig
from model.errors import CorpusError, RQwen3Error
from model.files import read_json, require_free_bytes, sha256_file, write_json
from model.gpus import gpu_named
from model.memory import Execution, checkpoint_bytes
from model.shard_format import Manifest, open_shard, read_manifest
from rqwen3_pipeline.plan import refusal
from rqwen3_pipeline.programs import failure_code, run_program
from rqwen3_pipeline.settings import RunRoot
from rqwen3_pipeline.slurm import doctor
from rqwen3_pipeline.slurm.client import Slurm, SlurmMissing, SlurmUnavailable
from rqwen3_pipeline.slurm.cluster import Cluster
from rqwen3_pipeline.training import pretrain_arguments


class PreflightError(RQwen3Error):
    """The first submission would fail; the message says by what."""

    def __init__(self, message: str, code: int = RQwen3Error.exit_code) -> None:
        super().__init__(message)
        self.code = code
        """The exit code that tells of such a failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is to be checked."""

    root: RunRoot
    run: RunConfig
    config_path: Path
    """The file that the configuration came from, which the trainer reads."""
    gpu: str = ""
    """The GPU that submissions will get, as `rqwen3 plan --gpu` names it; empty where it is not known."""
    here: bool = True
    """Submissions run on this machine, so a dry step here says something of them."""
    cluster: Cluster | None = None
    """The site, where submissions are SLURM jobs."""
    slurm: Slurm | None = None
    """The way to it."""

    @property
    def folder(self) -> Path:
        """The experiment's folder."""
        return self.root.experiment(self.run.name)

    @property
    def manifest(self) -> Manifest:
        """The corpus."""
        return read_manifest(self.root.manifest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A check's outcome."""

    name: str
    passed: bool
    said: str
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    """Numbers for the record."""
    code: int = 0
    """Of a red one: the exit code that tells of such a failure."""


Answer = tuple[str, dict[str, Any]]
"""What a green check says, and its figures; a red one raises an RQwen3Error."""


def corpus(asked: Asked) -> Answer:
    """The manifest was made by the rules of this configuration, and holds what it wants of every source."""
    from rqwen3_pipeline.corpus.sources import corpus_config
    from rqwen3_pipeline.corpus.verify import unmet

    if problems := unmet(asked.root, corpus_config(asked.run), asked.run.training):
        raise CorpusError(" ".join(problems))
    return "as the configuration wants it", {}


def shard_sizes(asked: Asked) -> Answer:
    """Every shard is there, with four bytes for each of its tokens."""
    manifest = asked.manifest
    shards = (*manifest.shards, *manifest.heldout)
    for entry in shards:
        open_shard(asked.root.path, entry)
    tokens = sum(entry.tokens_used for entry in manifest.shards)
    figures = {"shards": len(shards), "tokens": tokens, "manifest_sha256": manifest.sha256}
    return f"{len(shards)} shards, {tokens:,} tokens to train on", figures


def shard_hashes(asked: Asked) -> Answer:
    """Every shard has the SHA-256 that the manifest states; read once per manifest."""
    manifest = asked.manifest
    before = _last(asked)
    if before.get("hashed_manifest") == manifest.sha256:
        return "read before, for this very manifest", {"hashed_manifest": manifest.sha256}
    for entry in (*manifest.shards, *manifest.heldout):
        seen = sha256_file(asked.root.path / entry.path)
        if seen != entry.sha256:
            raise CorpusError(
                f"{asked.root.path / entry.path}: SHA-256 is {seen[:12]}…, the manifest says {entry.sha256[:12]}…. "
                "Delete it and build again: rqwen3 corpus build"
            )
    return "all as the manifest states", {"hashed_manifest": manifest.sha256}


def tokenizer_fits(asked: Asked) -> Answer:
    """The embedding has a row for each of the tokenizer's ids."""
    ids, rows = asked.manifest.vocab_size, asked.run.model.vocab_size
    if ids > rows:
        raise CorpusError(
            f"{asked.root.manifest}: the tokenizer has {ids:,} ids, the model only {rows:,} rows. "
            "Raise model.vocab_size in the configuration."
        )
    return f"{ids:,} ids, {rows:,} rows", {}


def memory_plan(asked: Asked) -> Answer:
    """The step fits the GPU that submissions will get."""
    if not asked.gpu:
        return "which GPU is not known; rqwen3 plan says what fits which", {}
    gpu = gpu_named(asked.gpu)
    why = refusal(asked.run, Execution.of(asked.run.training), gpu)
    if why:
        raise PreflightError(why)
    return f"fits {gpu.name}", {}


def free_space(asked: Asked) -> Answer:
    """The checkpoints that the run will keep fit the disk."""
    training = asked.run.training
    checkpoints = training.keep_last + 2 + training.max_steps // training.keep_every_steps
    needed_bytes = checkpoints * checkpoint_bytes(asked.run.model)
    require_free_bytes(asked.folder, needed_bytes, f"{checkpoints} checkpoints of this run")
    return f"{needed_bytes / 2**30:.2f} GiB for {checkpoints} checkpoints", {"checkpoints_bytes": needed_bytes}


def dry_step(asked: Asked) -> Answer:
    """A few steps at full shape, an evaluation and a save, where submissions run on this machine."""
    if not asked.here:
        return "left to the first submission, which takes it on its own GPU before anything else", {}
    out = asked.folder / "dry_step.json"
    arguments = pretrain_arguments(asked.root, asked.run, asked.config_path)
    run_program("model.pretrain", [*arguments, "--dry-run", out], asked.folder / "logs" / "preflight.log")
    figures = read_json(out)
    return f"{figures['step_s']:.2f} s a step, at most {figures['peak_memory_gib']:.2f} GiB", figures


def scheduler(asked: Asked) -> Answer:
    """SLURM would take a submission's job: partition, GRES, QoS and account go together."""
    if asked.cluster is None or asked.slurm is None:
        return "submissions are no SLURM jobs here", {}
    try:
        return doctor.rehearse("gpu", asked.cluster, asked.slurm), {}
    except (SlurmUnavailable, SlurmMissing) as error:  # says nothing against the job, which is sent elsewhere or later
        return f"could not be asked: {error}", {}


CHECKS: tuple[Callable[[Asked], Answer], ...] = (
    corpus,
    shard_sizes,
    shard_hashes,
    tokenizer_fits,
    memory_plan,
    free_space,
    scheduler,
)


def run_preflight(asked: Asked) -> dict[str, Any]:
    """Run every check, and the dry step if all are green.

    Returns:
        The figures, and under `checks` what each said; also written to `experiments/<name>/preflight.json`.

    Raises:
        PreflightError: some check is red; each such is named with its reason.
    """
    out = asked.folder / "preflight.json"
    checks = [_check(function, asked) for function in CHECKS]
    if all(check.passed for check in checks):
        checks.append(_check(dry_step, asked))
    red = [check for check in checks if not check.passed]
    figures = {key: value for check in checks for key, value in check.figures.items()}
    report = {
        **figures,
        "passed": not red,
        "checks": [{"check": check.name, "passed": check.passed, "said": check.said} for check in checks],
    }
    write_json(out, report)
    if red:
        code = next((check.code for check in red if check.code != RQwen3Error.exit_code), RQwen3Error.exit_code)
        raise PreflightError("; ".join(f"{check.name}: {check.said}" for check in red), code)
    return {**report, "path": str(out)}


def first_submission_problem(root: RunRoot, name: str) -> str | None:
    """What an experiment's first submission lacks: a lock, a corpus, or a green preflight; None if nothing."""
    if not root.manifest.is_file() and not root.lock.is_file():
        return f"{root.lock} is not there: no source file is locked yet. Begin with: rqwen3 sources lock"
    if not root.manifest.is_file():
        return f"{root.manifest} is not there: the corpus is not made yet. The next step is in: rqwen3 status"
    problem = preflight_problem(root.experiment(name))
    return f"preflight: {problem}" if problem else None


def preflight_problem(folder: Path) -> str | None:
    """Why an experiment's first submission must wait: there is no preflight, or it is red; None if it is green."""
    path = folder / "preflight.json"
    if not path.exists():
        return "it has not run. Materialize preflight in the UI; where no SLURM is used, this does it too: rqwen3 run"
    report = read_json(path)
    if report.get("passed"):
        return None
    said = [f"{c['check']}: {c['said']}" for c in report.get("checks", []) if not c["passed"]]
    return "; ".join(said) or f"{path} does not say that it passed. Run it again"


def _check(function: Callable[[Asked], Answer], asked: Asked) -> Check:
    try:
        said, figures = function(asked)
    except (RQwen3Error, OSError) as error:
        return Check(name=function.__name__, passed=False, said=str(error), code=failure_code(error))
    return Check(name=function.__name__, passed=True, said=said, figures=figures)


def _last(asked: Asked) -> dict[str, Any]:
    path = asked.folder / "preflight.json"
    return read_json(path) if path.exists() else {}
