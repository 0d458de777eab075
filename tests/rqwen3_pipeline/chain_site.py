"""A run root whose experiment is trained by jobs of a test cluster, under the project's own definitions.

The trainer is the real one, on a tiny model. So that a slice lasts by the clock and not by the machine,
each of its looks for a reason to stop takes `pace_s` in jobs; the uncut run that it is compared with does
without. At the same looks happens what `fault` asks for: real faults of the machine, at a step that is known.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from model.config import load_run_config
from model.files import read_jsonl, write_text
from rqwen3_pipeline.instance import open_instance
from rqwen3_pipeline.settings import RunRoot, shipped
from rqwen3_pipeline.training import finished
from tests.dagster_server import REPOSITORY, DagsterServer
from tests.rqwen3_pipeline.conftest import build, write_sources
from tests.slurm_cluster import SlurmCluster

NAME = "chain"
CONFIG = """
[run]
name = "chain"

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
max_steps = {steps}
seq_len = 32
micro_batch_size = 2
accumulation = 1
learning_rate = 1e-3
min_learning_rate = 1e-4
warmup_steps = 20
log_every_steps = 1
save_every_steps = {save_every}
keep_every_steps = 100000
keep_first_step = 100000
eval_every_steps = {steps}
eval_max_tokens = 100
sample_every_steps = {steps}
sample_new_tokens = 4
sample_prompt = "The theory"
device = "cpu"

[submissions]
{submissions}
"""
PACE = """
import json, os, sys, time
from pathlib import Path

if "model.pretrain" in sys.orig_argv:
    from model.preemption import StopWatch

    look = StopWatch.noticed
    folder = Path(sys.orig_argv[sys.orig_argv.index("--run-dir") + 1])
    fault, kept = Path(__file__).with_name(folder.name + ".fault"), {"folder": folder, "done": set()}

    def noticed(self):
        time.sleep(float(os.environ["TEST_PACE_S"]))
        if fault.exists() and (folder / "metrics.jsonl").exists():
            points = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            step = max((point["step"] for point in points), default=0)
            exec(fault.read_text(), {**kept, "step": step, "stop_file": self.stop_file, "sys": sys, "time": time})
        return look(self)

    StopWatch.noticed = noticed
"""
CLUSTER = """
[cluster]
name = "test"
gpu = "l40s"
env_file = "env.sh"

[options]
partition = "{partition}"
time = "{time}"
cpus_per_task = "1"
mem = "{mem}"

[options.gpu]
gres = "gpu:l40s:1"
"""


class ChainSite:
    """A built corpus, an experiment, a cluster's file, and Dagster's home."""

    def __init__(
        self,
        folder: Path,
        cluster: SlurmCluster,
        *,
        steps: int,
        save_every: int = 100000,
        pace_s: float = 0.2,
        submissions: str = "",
        postgres_url: str = "",
    ) -> None:
        """Make all of it; `submissions` are lines of that section."""
        self.folder, self.cluster, self.postgres_url = folder, cluster, postgres_url
        self.root, self.config_path = RunRoot(folder / "home"), folder / f"{NAME}.toml"
        self.config_path.write_text(CONFIG.format(steps=steps, save_every=save_every, submissions=submissions))
        self.run = load_run_config(self.config_path)
        write_sources(folder / "sources")
        build(self.root, self.run, folder / "sources")
        (folder / "pace").mkdir()
        (folder / "pace" / "sitecustomize.py").write_text(PACE)
        exports = f"export TEST_PACE_S={pace_s} PYTHONPATH={folder / 'pace'} SLURM_CPUS_PER_TASK=1 OMP_NUM_THREADS=1\n"
        self._env = f"{exports}source {shipped('sbatch/env.sh')}\n"
        self.limit_address_space(None)
        self.write_cluster()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**self.environment(), "DAGSTER_HOME": ""}.items():
                patch.setenv(name, value)
            open_instance(self.root).dispose()

    @property
    def cluster_file(self) -> Path:
        """What jobs ask for; read at each launch."""
        return self.folder / "cluster.toml"

    @property
    def experiment(self) -> Path:
        """The experiment's folder."""
        return self.root.experiment(NAME)

    def write_cluster(self, partition: str = "gpu", time: str = "00:02:00", mem: str = "1500M") -> None:
        """Let jobs go there, and ask for that, from now on."""
        self.cluster_file.write_text(CLUSTER.format(partition=partition, time=time, mem=mem))

    def limit_address_space(self, kib: int | None) -> None:
        """Let no process of the jobs that start from now on take more; None lifts that."""
        limit = f"ulimit -v {kib}\n" if kib else ""
        (self.folder / "env.sh").write_text(limit + self._env)

    def environment(self) -> dict[str, str]:
        """What every process of the pipeline is told."""
        kept = {key: value for key, value in self.cluster.full_environment().items() if key in ("PATH", "SLURM_CONF")}
        told = {"RQWEN3_HOME": str(self.root.path), "RQWEN3_PROFILE": str(self.config_path), "RQWEN3_VENV": sys.prefix}
        told |= {"RQWEN3_LAUNCHER": "slurm", "RQWEN3_CLUSTER": str(self.cluster_file)}
        return {**kept, **told, **({"RQWEN3_POSTGRES_URL": self.postgres_url} if self.postgres_url else {})}

    def server(self) -> DagsterServer:
        """Webserver and daemon, not started."""
        return DagsterServer(self.root.dagster_home, REPOSITORY / "workspace.yaml", "rqwen3", self.environment())

    def rqwen3(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """The command line on this run root."""
        return subprocess.run(
            [sys.executable, "-m", "rqwen3_pipeline.cli", *words],
            cwd=REPOSITORY,
            env={**os.environ, **self.environment()},
            capture_output=True,
            text=True,
            check=False,
        )

    def train_uncut(self, folder: Path) -> None:
        """The same run in one go, in another folder."""
        arguments = ["--config", self.config_path, "--manifest", self.root.manifest, "--run-dir", folder]
        subprocess.run(
            [sys.executable, "-m", "model.pretrain", *map(str, arguments)],
            cwd=REPOSITORY,
            env={**os.environ, "SLURM_CPUS_PER_TASK": "1", "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
        )

    def add_experiment(self, name: str, steps: int, *, save_every: int = 100000, **training: object) -> None:
        """Another experiment over the same corpus, of so many steps, with such values in [training]."""
        text = CONFIG.format(steps=steps, save_every=save_every, submissions="").replace('"chain"', f'"{name}"')
        write_text(self.config_of(name), text)
        self.set_training(name, **training)

    def config_of(self, name: str) -> Path:
        """The configuration of an experiment."""
        return self.config_path if name == NAME else self.root.experiment(name) / "config.toml"

    def set_training(self, name: str, **values: object) -> None:
        """Change keys of [training]; values are TOML."""
        text = self.config_of(name).read_text()
        for key, value in values.items():
            text, found = re.subn(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
            text = text if found else text.replace("[training]\n", f"[training]\n{key} = {value}\n")
        self.config_of(name).write_text(text)

    def fault(self, name: str, program: str | None) -> None:
        """Let this happen in an experiment's trainers, or, with None, no longer.

        The program runs at each look for a reason to stop, once a step is on record. It knows `step`, the last
        one, `folder`, the experiment's, `done`, a set that lasts as long as the trainer, and its `stop_file`.
        """
        path = self.folder / "pace" / f"{name}.fault"
        path.unlink(missing_ok=True)
        if program is not None:
            write_text(path, program)

    def finished(self, name: str = NAME) -> bool:
        """Whether the final checkpoint is there."""
        return finished(self.root, name)

    def ledger(self, name: str = NAME) -> list[dict[str, Any]]:
        """The records of an experiment's submissions."""
        return read_jsonl(self.root.experiment(name) / "ledger.jsonl")


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """The final weights of a run."""
    return torch.load(run_dir / "checkpoints" / "final.pt", weights_only=True)["model_state_dict"]
