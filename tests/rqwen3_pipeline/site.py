"""A folder with a tiny profile and six tiny sources, and the command line on them."""

import os
import subprocess
import sys
from pathlib import Path

from model.files import sha256_file
from tests.rqwen3_pipeline.corpus.made import write_sources

PROFILE = """
[run]
name = "tiny"
[data]
origin = "folder"
heldout_one_in = 5
shard_max_tokens = 4000
oracle_documents = 3
[data.tokenizer]
kind = "train"
vocab_size = 400
[model]
vocab_size = 400
d_model = 16
n_layer = 1
num_heads = 2
num_kv_heads = 1
head_dim = 8
intermediate_size = 32
max_seq_len = 32
[training]
max_steps = 30
seq_len = 32
micro_batch_size = 4
learning_rate = 1e-2
min_learning_rate = 1e-3
warmup_steps = 3
log_every_steps = 1
save_every_steps = 10
keep_last = 3
eval_every_steps = 15
eval_max_tokens = 300
sample_every_steps = 15
sample_new_tokens = 5
lead_s = 1.0
[evaluation]
items = 12
"""


class Site:
    """A folder with a profile and sources, and the command line on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "run root"
        self.profile = folder / "tiny.toml"
        self.sources = folder / "six sources"

    def command(self, *arguments: str) -> list[str]:
        flags = ["--profile", str(self.profile), "--home", str(self.home), "--workers", "1"]
        return [sys.executable, "-m", "rqwen3_pipeline.cli", *flags, *arguments]

    def rqwen3(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, env={**os.environ, **environment}, check=False
        )

    def run(self) -> subprocess.CompletedProcess[str]:
        return self.rqwen3("run", "--sources", str(self.sources))


def make_site(folder: Path) -> Site:
    site = Site(folder)
    site.profile.write_text(PROFILE)
    write_sources(site.sources)
    return site


def hashes(root: Path) -> dict[str, str]:
    """Every file of a run root but Dagster's own and the logs."""
    skipped = ("dagster", "logs")
    files = [path for path in root.rglob("*") if path.is_file() and not any(part in skipped for part in path.parts)]
    return {path.relative_to(root).as_posix(): sha256_file(path) for path in files}
