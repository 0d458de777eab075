"""One run on one process and on two, over gloo: the same windows, the same losses, one writer."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from model import checkpoint, pretrain
from model.config import TrainConfig
from model.distributed import Team, micro_batches_each, whole
from model.errors import ConfigError, CorpusError
from model.files import read_jsonl
from model.session import TrainSession
from model.windows import StepReader, TokenWindows
from tests.model.conftest import REPOSITORY

SLOW = """
import os, sys, time
from pathlib import Path
from model import launch, pretrain
import model.session as session
Path(sys.argv[1], "pid" + os.environ["RANK"]).write_text(str(os.getpid()))
step = session.TrainSession.train_step
session.TrainSession.train_step = lambda *arguments: (time.sleep(0.05), step(*arguments))[1]
sys.exit(launch.report(pretrain.main(sys.argv[2:])))
"""
"""The trainer, its steps slowed down so that there is time to interrupt them; it leaves its process's number."""


CLOCKS = """
import os, sys, types
from model import launch, pretrain, trainer
if os.environ["RANK"] == "1":
    trainer.time = types.SimpleNamespace(monotonic=lambda: 0.0)
sys.exit(launch.report(pretrain.main(sys.argv[1:])))
"""
"""The trainer; on the second rank no time passes."""

FAILING = """
import os, sys, torch
from model import launch, pretrain
import model.session as session
step = session.TrainSession.train_step
def fail(self, *arguments):
    if os.environ["RANK"] == "1" and self.step == 3:
        raise {error}
    return step(self, *arguments)
session.TrainSession.train_step = fail
sys.exit(launch.report(pretrain.main(sys.argv[1:])))
"""
"""The trainer; the second rank fails in step 4."""

INTERRUPTED = """
import sys
from pathlib import Path
from model.config import load_run_config
from model.distributed import join, leave
from model.session import TrainSession
from model.shard_format import read_manifest
from model.windows import TokenWindows
run, team = load_run_config(Path(sys.argv[2])), join("cpu")
session = TrainSession(run, TokenWindows(read_manifest(Path(sys.argv[4])), run.training.seq_len), team)
answers = iter([False, True])
assert session.train_step(lambda: next(answers)) is None
result = session.train_step()
session.close()
if team.first:
    print("norm", result.grad_norm)
leave(team)
"""
"""A session that is told to stop after a step's first micro-batch, and then makes the step after all."""

NO_COMPILER = """
import os, sys
import torch._inductor.config as inductor
from model import launch, pretrain
if os.environ["RANK"] == "1":
    inductor.force_disable_caches, inductor.cpp.cxx = True, ("no-such-compiler",)
sys.exit(launch.report(pretrain.main(sys.argv[1:])))
"""
"""The trainer, on whose second rank there is no C++ compiler."""


STARTED: list[subprocess.Popen] = []


def start(tiny, submission: int, *more: str, program: tuple[str, ...] = ("-m", "model.pretrain")) -> subprocess.Popen:
    """Start two processes of the trainer under the launcher."""
    process = subprocess.Popen(
        [sys.executable, "-m", "model.launch", "--nproc-per-node", "2", *program, *tiny.arguments(submission, *more)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    STARTED.append(process)
    return process


def two(tiny, submission: int, *more: str) -> int:
    """Train on two processes to the end; returns the exit code."""
    process = start(tiny, submission, *more)
    output, _ = process.communicate(timeout=240)
    assert process.returncode in (0, 75), output
    return process.returncode


def run_script(tiny, script: str) -> tuple[int, str]:
    """Run a program of this test on two processes; returns exit code and output."""
    path = tiny.root / "script.py"
    path.write_text(script)
    process = start(tiny, 1, program=(str(path),))
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def add(tiny, lines: str) -> None:
    """Add keys to the configuration, whose last table is [training]."""
    tiny.config_path.write_text(tiny.config_path.read_text() + lines + "\n")


def norms(tiny) -> list[float]:
    return [r["grad_norm"] for r in read_jsonl(tiny.run_dir / "metrics.jsonl") if r["kind"] == "train"]


def one(tiny, submission: int, *more: str) -> int:
    return pretrain.main(tiny.arguments(submission, *more))


def losses(tiny) -> torch.Tensor:
    return torch.tensor(checkpoint.load(tiny.checkpoints / "final.pt")["loss_history"])


def heldout(tiny, step: int) -> list[float]:
    """Held-out losses of a step as they were logged, source by source."""
    records = read_jsonl(tiny.run_dir / "metrics.jsonl")
    return [r["loss"] for r in records if r["kind"] == "heldout" and r["step"] == step]


def wait_for(condition, what: str, timeout_s: float = 180.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)


def last_step(tiny) -> int:
    return max((r["step"] for r in read_jsonl(tiny.run_dir / "metrics.jsonl") if r["kind"] == "train"), default=0)


@pytest.fixture(autouse=True)
def _no_process_left() -> object:
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            for child in (*psutil.Process(process.pid).children(recursive=True), process):
                child.kill()


def test_ranks_together_read_the_windows_that_one_process_reads(tiny) -> None:
    windows = TokenWindows(tiny.manifest, 32)
    whole_reader = StepReader(windows, 16, 8, seed=3)
    shares = [StepReader(windows, 16, 8, seed=3, share=(rank, 4)) for rank in range(4)]
    for _ in range(5):
        parts = [reader.next() for reader in shares]
        assert torch.equal(torch.cat([part for part in parts if part is not None]), whole_reader.next())
    for reader in (whole_reader, *shares):
        reader.close()


def test_micro_batches_that_do_not_share_out_are_refused_with_ones_that_do() -> None:
    config = TrainConfig(max_steps=1000, seq_len=8, micro_batch_size=4, accumulation=3)
    assert micro_batches_each(config, Team(size=3)) == 1
    with pytest.raises(ConfigError, match="micro_batch_size = 3, accumulation = 4"):
        micro_batches_each(config, Team(size=2))
    with pytest.raises(ConfigError, match="a number of processes that divides 12"):
        micro_batches_each(config, Team(size=5))
    assert micro_batches_each(dataclasses.replace(config, micro_batch_size=3, accumulation=4), Team(size=2)) == 2


def test_team_of_one_needs_nobody() -> None:
    alone = Team()
    state = {"a": [torch.ones(2)], "b": 3}
    assert alone.first
    assert alone.agree(None) is None
    assert alone.agree("SIGTERM") == "SIGTERM"
    assert alone.first_does(lambda: 5) == 5
    assert whole(state, alone)["a"][0] is state["a"][0]  # nothing is copied
    with pytest.raises(CorpusError, match="as it was"):
        alone.first_does(lambda: (_ for _ in ()).throw(CorpusError("as it was")))


def test_one_process_then_two_lose_the_same(make_run) -> None:
    straight, mixed = make_run("straight"), make_run("mixed")
    assert one(straight, 1) == 0
    assert one(mixed, 1, "--until-step", "5") == 75
    assert two(mixed, 2) == 0
    assert (losses(mixed) - losses(straight)).abs().max() < 1e-5
    for step in (1, 6, 12):
        assert heldout(mixed, step) == pytest.approx(heldout(straight, step), abs=1e-5)
    ledger = read_jsonl(mixed.run_dir / "ledger.jsonl")
    assert [(r["from_step"], r["saved_step"], r["processes"]) for r in ledger] == [(0, 5, 1), (5, 12, 2)]
    lines = [r["step"] for r in read_jsonl(mixed.run_dir / "metrics.jsonl") if r["kind"] == "train"]
    assert lines == list(range(1, 13))  # the first rank alone writes
    assert not (mixed.run_dir / "LOCK").exists()


def test_signal_to_one_rank_stops_all_with_everything_saved(tiny) -> None:
    tiny.set(max_steps=4000, save_every_steps=5000)
    script = tiny.root / "slow.py"
    script.write_text(SLOW)
    process = start(tiny, 1, program=(str(script), str(tiny.root)))
    wait_for(lambda: last_step(tiny) >= 2, "step 2")
    os.kill(int((tiny.root / "pid1").read_text()), signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    record = read_jsonl(tiny.run_dir / "ledger.jsonl")[0]
    assert (record["stop_reason"], record["exit_code"], record["lost_steps"]) == ("SIGTERM", 75, 0)
    assert record["saved_step"] == checkpoint.steps_in(tiny.checkpoints)[-1] >= 2
    assert not (tiny.run_dir / "LOCK").exists()


@pytest.mark.long
def test_signals_to_the_launcher_save_and_its_exit_code_says_so(tiny) -> None:
    tiny.set(max_steps=4000, save_every_steps=5000)
    script = tiny.root / "slow.py"
    script.write_text(SLOW)
    process = start(tiny, 1, program=(str(script), str(tiny.root)))
    wait_for(lambda: last_step(tiny) >= 2, "step 2")
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    record = read_jsonl(tiny.run_dir / "ledger.jsonl")[0]
    assert record["stop_reason"] in ("SIGUSR1", "SIGTERM")
    assert record["lost_steps"] == 0
    for rank in range(2):
        assert not Path("/proc", (tiny.root / f"pid{rank}").read_text()).exists()


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
def test_replicated_then_sharded_then_single_lose_the_same(make_run, tied: bool) -> None:
    straight, mixed = make_run("straight"), make_run("mixed")
    for run in (straight, mixed):
        lines = run.config_path.read_text().replace("[training]", f"tie_embeddings = {str(tied).lower()}\n[training]")
        run.config_path.write_text(lines + 'parallel = "ddp"\n')
    assert one(straight, 1) == 0
    assert two(mixed, 1, "--until-step", "3") == 75
    mixed.set(parallel="fsdp")
    assert two(mixed, 2, "--until-step", "9") == 75
    state = checkpoint.load(mixed.checkpoints / "step_9.pt")
    shapes = {name: tensor.shape for name, tensor in state["model_state_dict"].items()}
    reference = checkpoint.load(straight.checkpoints / "step_12.pt")
    assert shapes == {name: tensor.shape for name, tensor in reference["model_state_dict"].items()}
    assert list(state) == list(reference)
    assert one(mixed, 3) == 0
    assert (losses(mixed) - losses(straight)).abs().max() < 1e-5
    for step in (1, 6, 12):
        assert heldout(mixed, step) == pytest.approx(heldout(straight, step), abs=1e-5)
    assert [r["step"] for r in read_jsonl(mixed.run_dir / "samples.jsonl")] == [0, 6, 12]
    assert [r["step"] for r in read_jsonl(mixed.run_dir / "weights.jsonl")] == [3, 4, 8, 9, 12]


@pytest.mark.long
def test_error_of_the_first_rank_ends_all_with_its_code(make_run) -> None:
    run = make_run("run")
    run.run_dir.mkdir(parents=True)
    holder = one(run, 1, "--until-step", "2")
    assert holder == 75
    run.set(learning_rate=2e-2)
    process = start(run, 2)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert output.count("error: ") == 1


def test_clock_of_the_first_rank_decides_when_to_save(tiny) -> None:
    add(tiny, "save_every_minutes = 1e-9")
    code, output = run_script(tiny, CLOCKS)
    assert code == 0, output
    saves = [r["step"] for r in read_jsonl(tiny.run_dir / "metrics.jsonl") if r["kind"] == "save"]
    assert saves == list(range(1, 13))


@pytest.mark.parametrize(
    ("error", "code", "reason", "told", "recorded"),
    [
        (
            "torch.OutOfMemoryError('CUDA out of memory.')",
            71,
            "out_of_memory",
            "error: rank 1: out of memory while training",
            "rank 1: out of memory while training",
        ),
        ("KeyError('a bug')", 1, "error", "on rank 1 of 2", "rank 1: KeyError('a bug')"),
    ],
)
def test_failure_of_another_rank_is_told_with_its_rank_code_and_reason(
    tiny, error: str, code: int, reason: str, told: str, recorded: str
) -> None:
    seen, output = run_script(tiny, FAILING.format(error=error))
    assert seen == code, output
    assert told in output
    record = read_jsonl(tiny.run_dir / "ledger.jsonl")[0]
    assert (record["stop_reason"], record["exit_code"]) == (reason, code)
    assert record["error"].startswith(recorded)
    assert not (tiny.run_dir / "LOCK").exists()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_stop_within_a_step_leaves_no_gradient_behind(tiny, parallel: str) -> None:
    tiny.set(micro_batch_size=2, accumulation=4)
    add(tiny, f'parallel = "{parallel}"')
    code, output = run_script(tiny, INTERRUPTED)
    assert code == 1, output  # a program that says nothing to the launcher
    alone = TrainSession(tiny.config, TokenWindows(tiny.manifest, 32))
    result = alone.train_step()
    alone.close()
    assert result is not None
    seen = next(line for line in output.splitlines() if line.startswith("norm "))
    assert float(seen.split()[1]) == pytest.approx(result.grad_norm, rel=1e-5)


@pytest.mark.long
def test_sharded_compiled_blocks_lose_the_same_through_a_resume(make_run) -> None:
    straight, sharded = make_run("straight"), make_run("sharded")
    for run in (straight, sharded):
        run.set(max_steps=4, micro_batch_size=2, accumulation=4)
    add(sharded, 'parallel = "fsdp"\ncompile_on_cpu = true')
    assert one(straight, 1) == 0
    assert two(sharded, 1, "--until-step", "2") == 75
    assert two(sharded, 2) == 0
    assert checkpoint.verify(sharded.checkpoints / "final.pt").sidecar["compiled"]
    assert norms(sharded) == pytest.approx(norms(straight), rel=1e-4)
    assert (losses(sharded) - losses(straight)).abs().max() < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_compiler_that_fails_on_one_rank_is_given_up_on_all(make_run, parallel: str) -> None:
    straight, shared = make_run("straight"), make_run("shared")
    for run in (straight, shared):
        run.set(max_steps=4, micro_batch_size=2, accumulation=4)
    add(shared, f'parallel = "{parallel}"\ncompile_on_cpu = true')
    assert one(straight, 1) == 0
    code, output = run_script(shared, NO_COMPILER)
    assert code == 0, output
    assert "the blocks are not compiled (rank 1: " in output
    assert not checkpoint.verify(shared.checkpoints / "final.pt").sidecar["compiled"]
    assert norms(shared) == pytest.approx(norms(straight), rel=1e-4)
    assert (losses(shared) - losses(straight)).abs().max() < 1e-5
