"""A tiny corpus and configuration, made in a temporary folder.

The tokenizer knows the 256 bytes and the end-of-text token; the documents are sentences of a small
grammar, so that a model can learn them in a few dozen steps.
"""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders

from model.config import RunConfig, load_run_config
from model.files import sha256_bytes, sha256_file, write_json
from model.shard_format import Manifest, docs_path, read_manifest

EOS_ID = 256
VOCAB_SIZE = 257
REPOSITORY = Path(__file__).resolve().parents[2]

CONFIG = """
[run]
name = "tiny"

[model]
vocab_size = 272
d_model = 32
n_layer = 2
num_heads = 4
num_kv_heads = 2
head_dim = 8
intermediate_size = 64
max_seq_len = 64

[training]
max_steps = 12
seq_len = 32
micro_batch_size = 4
accumulation = 2
learning_rate = 1e-2
min_learning_rate = 1e-3
warmup_steps = 3
log_every_steps = 1
save_every_steps = 4
keep_last = 2
keep_every_steps = 100
keep_first_step = 4
eval_every_steps = 6
eval_max_tokens = 400
sample_every_steps = 6
sample_prompt = "the "
sample_new_tokens = 8
device = "cpu"
"""


def sentences(seed: int, documents: int) -> list[str]:
    """Documents of a few sentences from a fixed grammar."""
    draw = random.Random(seed)
    nouns, verbs = ["cat", "dog", "moon", "river", "naïve fox"], ["sees", "follows", "finds"]
    return [
        " ".join(
            f"the {draw.choice(nouns)} {draw.choice(verbs)} the {draw.choice(nouns)}."
            for _ in range(draw.randint(1, 6))
        )
        for _ in range(documents)
    ]


def make_tokenizer() -> Tokenizer:
    """Bytes as ids 0 … 255, and the end-of-text token as 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = token_decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def write_shard(root: Path, path: str, source: str, texts: list[str], tokenizer: Tokenizer) -> dict:
    """Write a shard with its document table; returns its entry in the manifest."""
    ids = [[*tokenizer.encode(text, add_special_tokens=False).ids, EOS_ID] for text in texts]
    tokens_ = np.array([token for document in ids for token in document], dtype="<u4")
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(tokens_.tobytes())
    lengths = [len(document) for document in ids]
    table = pa.table(
        {
            "end": pa.array(np.cumsum(lengths), pa.uint64()),
            "tokens": pa.array(lengths, pa.uint32()),
            "text_bytes": pa.array([len(text.encode()) for text in texts], pa.uint64()),
            "row": pa.array(range(len(texts)), pa.uint32()),
            "id": [f"{source}-{i}" for i in range(len(texts))],
            "url": ["" for _ in texts],
            "digest": pa.array([bytes.fromhex(sha256_bytes(text.encode())) for text in texts], pa.binary(32)),
        }
    )
    pq.write_table(table, docs_path(file))
    return {
        "path": path,
        "source": source,
        "tokens": len(tokens_),
        "tokens_used": len(tokens_),
        "documents": len(texts),
        "sha256": sha256_file(file),
    }


def write_corpus(root: Path, documents: int = 60) -> Path:
    """Write two sources, the first in two shards; returns the manifest's path."""
    tokenizer = make_tokenizer()
    root.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(root / "tokenizer.json"))
    shards = [
        write_shard(root, f"tokens/wikipedia-00000-0{part}.bin", "wikipedia", sentences(part, documents), tokenizer)
        for part in range(2)
    ]
    shards.append(write_shard(root, "tokens/textbooks-00000-00.bin", "textbooks", sentences(7, documents), tokenizer))
    heldout = [
        write_shard(root, f"tokens/heldout/{source}-00000-00.bin", source, sentences(seed, 9), tokenizer)
        for source, seed in (("wikipedia", 100), ("textbooks", 101))
    ]
    manifest = {
        "format_version": 1,
        "tokenizer": {
            "path": "tokenizer.json",
            "vocab_size": VOCAB_SIZE,
            "eos_id": EOS_ID,
            "sha256": sha256_file(root / "tokenizer.json"),
        },
        "shards": shards,
        "heldout": heldout,
    }
    write_json(root / "manifest.json", manifest)
    return root / "manifest.json"


@dataclass(frozen=True, slots=True)
class TinyRun:
    """A run root with a corpus and a configuration."""

    root: Path

    @property
    def config_path(self) -> Path:
        return self.root / "tiny.toml"

    @property
    def manifest_path(self) -> Path:
        return self.root / "manifest.json"

    @property
    def run_dir(self) -> Path:
        return self.root / "experiments" / "tiny"

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def config(self) -> RunConfig:
        return load_run_config(self.config_path)

    @property
    def manifest(self) -> Manifest:
        return read_manifest(self.manifest_path)

    def set(self, **values: object) -> None:
        """Change keys of the configuration file."""
        lines = self.config_path.read_text().splitlines()
        for key, value in values.items():
            index = next(i for i, line in enumerate(lines) if line.startswith(f"{key} = "))
            lines[index] = f"{key} = {json.dumps(value)}"
        self.config_path.write_text("\n".join(lines) + "\n")

    def arguments(self, submission: int = 1, *more: str) -> list[str]:
        """Arguments of the trainer."""
        return [
            *("--config", str(self.config_path), "--manifest", str(self.manifest_path)),
            *("--run-dir", str(self.run_dir), "--submission", str(submission), "--attempt", "1", *more),
        ]

    def start(self, submission: int = 1, *more: str, wrapper: list[str] | None = None) -> subprocess.Popen[str]:
        """Start the trainer as its own process."""
        return subprocess.Popen(
            [*(wrapper or []), sys.executable, "-m", "model.pretrain", *self.arguments(submission, *more)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models are fastest on one thread, and two processes must agree on their number."""
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[[str], TinyRun]:
    """Make run roots, all with the same corpus and configuration."""

    def make(name: str = "root") -> TinyRun:
        write_corpus(tmp_path / name)
        (tmp_path / name / "tiny.toml").write_text(CONFIG)
        return TinyRun(tmp_path / name)

    return make


@pytest.fixture
def tiny(make_run: Callable[[str], TinyRun]) -> TinyRun:
    """One run root."""
    return make_run("root")
