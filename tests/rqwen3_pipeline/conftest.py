"""A small run root: a real corpus of three sources, and the files that a killed and resumed run leaves.

The corpus is built once per session by the corpus' own functions, from rows with planted faults whose
numbers the tests know; each test gets a copy. The training's files are written here, since a report
must be told apart from the trainer that it reports on: losses follow a formula, and checkpoints are a
few bytes with true sidecars.
"""

import json
import math
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model.config import RunConfig, load_run_config
from model.files import append_jsonl, read_json, sha256_file, write_bytes, write_json, write_text
from rqwen3_pipeline.corpus.build import items_of, run_stage
from rqwen3_pipeline.corpus.lock import lock_folder
from rqwen3_pipeline.corpus.manifest import budgets, fold_manifest
from rqwen3_pipeline.corpus.sources import corpus_config
from rqwen3_pipeline.corpus.tokenization import make_tokenizer
from rqwen3_pipeline.settings import RunRoot
from tests.slurm_cluster import SlurmCluster

if TYPE_CHECKING:
    from tests.rqwen3_pipeline.cluster_site import ServedSite

CONFIG = """
[run]
name = "small"

[data]
heldout_one_in = 8
allow_repeats = true
[data.tokenizer]
kind = "train"
vocab_size = 300
[data.fineweb_edu]
share = 5.0
[data.wikipedia]
share = 3.0
[data.pes2o]
share = 2.0

[model]
vocab_size = 320
d_model = 16
n_layer = 2
num_heads = 2
num_kv_heads = 1
head_dim = 8
intermediate_size = 32
max_seq_len = 32

[training]
max_steps = 200
seq_len = 32
micro_batch_size = 2
accumulation = 2
learning_rate = 1e-3
min_learning_rate = 1e-4
warmup_steps = 20
log_every_steps = 1
save_every_steps = 40
eval_every_steps = 50
sample_every_steps = 50
sample_prompt = "The theory"
"""
WORDS = ("energy", "model", "field", "curve", "river", "stone", "number", "prime", "light", "theory", "orbit", "cell")
WIKIPEDIA_GOOD, WIKIPEDIA_SHORT, WIKIPEDIA_COPIES = 24, 5, 4
FINEWEB_GOOD, FINEWEB_LOW_SCORE, FINEWEB_OF_WIKIPEDIA = 170, 7, 6
PES2O_GOOD = 12
TOKENS_PER_STEP = 128


def prose(seed: str, chars: int) -> str:
    """Words of at least `chars` characters, different for each seed."""
    draw, text = random.Random(seed), seed
    while len(text) < chars:
        text += " " + draw.choice(WORDS)
    return text + "."


def write_sources(folder: Path) -> None:
    """Three source files with the planted rows."""
    folder.mkdir(parents=True)
    good = [prose(f"wikipedia {i}", 520) for i in range(WIKIPEDIA_GOOD)]
    texts = [*good, *(prose(f"stub {i}", 80) for i in range(WIKIPEDIA_SHORT)), *good[:WIKIPEDIA_COPIES]]
    titles = [f"Article {i}" for i in range(len(texts))]
    pq.write_table(pa.table({"text": texts, "title": titles}), folder / "wikipedia.parquet")
    web = [prose(f"web {i}", 300) for i in range(FINEWEB_GOOD)]
    low = [prose(f"low {i}", 300) for i in range(FINEWEB_LOW_SCORE)]
    copied = good[-FINEWEB_OF_WIKIPEDIA:]
    scores = [3.5] * len(web) + [2.9] * len(low) + [4.0] * len(copied)
    pq.write_table(pa.table({"text": [*web, *low, *copied], "score": scores}), folder / "fineweb_edu.parquet")
    papers = [prose(f"paper {i}", 1100) for i in range(PES2O_GOOD)]
    pq.write_table(pa.table({"content": papers}), folder / "pes2o.parquet")


def build(root: RunRoot, run: RunConfig, folder: Path) -> None:
    """All stages of the corpus, in this process."""
    config = corpus_config(run)
    lock = lock_folder(root, config, folder)
    for stage in ("raw", "filtered", "digests", "survivors", "tokens"):
        if stage == "tokens":
            make_tokenizer(root, config, lock, None)
        outcomes = run_stage(stage, root, config, lock, items_of(stage, config, lock))
        assert not [outcome.error for outcome in outcomes if outcome.error]
    fold_manifest(root, config, lock, budgets(config, run.training))


@dataclass
class SampleRun:
    """A run root with its configuration, and the means to write a training into it."""

    root: RunRoot
    run: RunConfig
    config_path: Path
    sources: Path

    @property
    def folder(self) -> Path:
        """The experiment's folder."""
        return self.root.experiment(self.run.name)

    def loss(self, step: int, submission: int) -> float:
        """ln 320 + 0.02 at step 1, falling; a little different in each submission, to tell lines apart."""
        return 2.5 + (math.log(320) + 0.02 - 2.5) * math.exp(-(step - 1) / 40) + 1e-4 * (submission - 1)

    def log_steps(self, submission: int, first: int, last: int, attempt: int = 1, **more: Any) -> None:
        """Training lines, and held-out lines and samples where they are due."""
        who = {"submission": submission, "attempt": attempt, "time": "2026-07-01T00:00:00.000+00:00"}
        lines: list[dict[str, Any]] = []
        for step in range(first, last + 1):
            line = {
                "kind": "train",
                "step": step,
                "loss": self.loss(step, submission),
                "tokens": step * TOKENS_PER_STEP,
            }
            line |= {"learning_rate": 1e-3 * min(1, step / 20), "grad_norm": 1.0, "tokens_per_s": 1000.0 + step}
            line |= {"mfu": None, "memory_gib": 0.5, "data_wait_s": 0.001}
            lines.append({**line, **who, **more})
            if step % 50 == 0:
                lines += [{**entry, **who} for entry in self.heldout(step, submission)]
                text = f" of step {step} <b>&"
                append_jsonl(self.folder / "samples.jsonl", {"step": step, "prompt": "The theory", "text": text, **who})
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as log:
            log.writelines(json.dumps(line) + "\n" for line in lines)

    def heldout(self, step: int, submission: int) -> list[dict[str, Any]]:
        """Held-out lines whose bits per byte follow from loss, tokens and bytes."""
        entries: list[dict[str, Any]] = []
        for i, source in enumerate(("fineweb_edu", "wikipedia", "pes2o", "all")):
            loss, tokens, text_bytes = self.loss(step, submission) + 0.1 * (i + 1), 400 + i, 1500 + 7 * i
            bits = loss * tokens / (text_bytes * math.log(2))
            entry = {"kind": "heldout", "step": step, "source": source, "loss": loss, "loss_stderr": 0.05}
            entries.append({**entry, "bits_per_byte": bits, "tokens": tokens, "text_bytes": text_bytes})
        return entries

    def end(self, submission: int, first: int, last: int, saved: int, reason: str, code: int, **more: Any) -> None:
        """A ledger record."""
        record = {"submission": submission, "attempt": 1, "from_step": first, "to_step": last, "saved_step": saved}
        record |= {"stop_reason": reason, "exit_code": code, "tokens": (last - first) * TOKENS_PER_STEP}
        record |= {
            "seconds": 60.0 + last,
            "lost_steps": last - saved,
            "job_id": f"{1000 + submission}",
            "host": "node7",
        }
        record |= {"gpu": None, "pid": 1, "started": "2026-07-01T00:00:00+00:00", "ended": "2026-07-01T00:02:00+00:00"}
        record |= {"commit": None, "versions": {"torch": "2.13.0", "cuda": None}, "checkpoint": None, "error": None}
        append_jsonl(self.folder / "ledger.jsonl", {**record, **more})

    def save(self, step: int, name: str | None = None) -> Path:
        """A checkpoint of a few bytes with a true sidecar."""
        path = self.folder / "checkpoints" / f"{name or f'step_{step}'}.pt"
        write_bytes(path, b"checkpoint of step %d" % step)
        facts = {"step": step, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
        write_json(path.with_suffix(".json"), {**facts, "data_fingerprint": sha256_file(self.root.manifest)})
        return path

    def begin(self) -> None:
        """The copy of the config, and the sample before training."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.config_path, self.folder / "config.toml")
        sample = {"step": 0, "prompt": "The theory", "text": " qzx qzx", "submission": 1, "attempt": 1}
        append_jsonl(self.folder / "samples.jsonl", sample)

    def train_all(self) -> None:
        """Three submissions: cut by the clock at 80, killed at 133 with 120 saved, finished at 200."""
        self.begin()
        self.log_steps(1, 1, 80)
        self.end(1, 0, 80, 80, "deadline", 75)
        self.log_steps(2, 81, 133)
        self.end(2, 80, 133, 120, "killed", 137)
        self.log_steps(3, 121, 200)
        self.end(3, 120, 200, 200, "finished", 0)
        for step in (80, 120, 160, 200):
            self.save(step)
        self.save(200, "final")

    def export_and_score(self) -> None:
        """An export of two files, and scores: one above chance, one not."""
        write_text(self.root.export("small") / "config.json", "{}")
        write_bytes(self.root.export("small") / "model.safetensors", b"weights")
        final = read_json(self.folder / "checkpoints" / "final.json")
        tasks = {
            "heldout_cloze": {
                **{"acc": 0.40, "acc_stderr": 0.04, "acc_norm": 0.30, "acc_norm_stderr": 0.04},
                **{"n": 150, "chance": 0.25},
            }
        }
        scores = {"engine": "own", "engine_version": "1", "tasks": tasks, "versions": {"torch": "2.13.0"}}
        scores["checkpoint"] = {"path": "checkpoints/final.pt", "sha256": final["sha256"], "step": 200}
        scores["bits_per_byte"] = {"all": {"bits_per_byte": 1.11}}
        write_json(self.root.evaluation("small") / "scores.json", scores)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus, built once: `home`, `config.toml` and `sources`."""
    base = tmp_path_factory.mktemp("sample_corpus")
    (base / "config.toml").write_text(CONFIG, encoding="utf-8")
    write_sources(base / "sources")
    build(RunRoot(base / "home"), load_run_config(base / "config.toml"), base / "sources")
    return base


@pytest.fixture(scope="session")
def trained(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with everything but the report, made once; not to be changed."""
    sample = copy_of(built, tmp_path_factory.mktemp("sample_run"))
    sample.train_all()
    sample.export_and_score()
    return sample.config_path.parent


def copy_of(base: Path, folder: Path) -> SampleRun:
    """A copy of a made run root."""
    copy = folder / "copy"
    shutil.copytree(base, copy)
    return SampleRun(
        RunRoot(copy / "home"), load_run_config(copy / "config.toml"), copy / "config.toml", copy / "sources"
    )


@pytest.fixture
def empty_run(tmp_path: Path) -> SampleRun:
    """A run root with nothing in it."""
    (tmp_path / "config.toml").write_text(CONFIG, encoding="utf-8")
    write_sources(tmp_path / "sources")
    run = load_run_config(tmp_path / "config.toml")
    return SampleRun(RunRoot(tmp_path / "home"), run, tmp_path / "config.toml", tmp_path / "sources")


@pytest.fixture
def corpus_run(built: Path, tmp_path: Path) -> SampleRun:
    """A run root with its corpus and no training."""
    return copy_of(built, tmp_path)


@pytest.fixture
def finished_run(trained: Path, tmp_path: Path) -> SampleRun:
    """A run root with everything but the report."""
    return copy_of(trained, tmp_path)


@pytest.fixture(scope="session")
def finished_to_read(trained: Path) -> SampleRun:
    """The same, shared by the tests that only read it."""
    run = load_run_config(trained / "config.toml")
    return SampleRun(RunRoot(trained / "home"), run, trained / "config.toml", trained / "sources")


@pytest.fixture(scope="session")
def served_site(slurm_with_accounting: SlurmCluster) -> "Iterator[ServedSite]":
    """A site with its corpus, under a webserver and a daemon whose runs are jobs of the cluster."""
    from tests.rqwen3_pipeline.cluster_site import ServedSite

    folder = Path(tempfile.mkdtemp(prefix="site-"))
    with ServedSite(folder, slurm_with_accounting) as site:
        yield site
    slurm_with_accounting.cancel_all()
    shutil.rmtree(folder)
