"""Failures of the real trainer, brought about for real: one attempt, then a stop that says why, lifted by its command.

Without SLURM, which adds nothing here: what the trainer left is all that the decision rests on.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from model.files import read_jsonl
from rqwen3_pipeline.experiments.observed import facts_now, policy_of
from rqwen3_pipeline.experiments.policy import Action, Decision, decide
from rqwen3_pipeline.training import pretrain_arguments
from tests.dagster_server import REPOSITORY

EXTRA_MIB = 200
"""Memory that a trainer gets above what it takes to start."""

WORKER = """
import sys
from pathlib import Path
from rqwen3_pipeline.programs import run_program
run_program(sys.argv[1], sys.argv[3:], Path(sys.argv[2]))
"""


@pytest.fixture
def chain(corpus_run, monkeypatch) -> "Chain":
    monkeypatch.setenv("RQWEN3_PROFILE", str(corpus_run.config_path))
    monkeypatch.setenv("RQWEN3_HOME", str(corpus_run.root.path))
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.setenv(name, "1")
    return Chain(corpus_run)


class Chain:
    """An experiment, trained as its decisions say."""

    def __init__(self, sample) -> None:
        self.sample = sample
        self.set(
            max_steps=4, warmup_steps=0, save_every_steps=2, eval_every_steps=4, sample_every_steps=4, device='"cpu"'
        )

    def set(self, **values: object) -> None:
        """Change keys of [training]."""
        text = self.sample.config_path.read_text()
        for key, value in values.items():
            text = re.sub(rf"^{key} = .*\n", "", text, flags=re.M).replace(
                "[training]\n", f"[training]\n{key} = {value}\n"
            )
        self.sample.config_path.write_text(text)

    @property
    def run(self):
        from model.config import load_run_config

        return load_run_config(self.sample.config_path)

    def decision(self) -> Decision:
        facts = facts_now(self.sample.root, self.run, None, None, needs_preflight=False)
        return decide(facts, policy_of(self.run))

    def start(self, limit_kib: int = 0) -> "subprocess.Popen[str]":
        """The submission that is to come, which must be one."""
        decision = self.decision()
        assert decision.action is Action.SUBMIT, decision
        arguments = [*pretrain_arguments(self.sample.root, self.run, self.sample.config_path)]
        arguments += ["--submission", decision.submission, "--attempt", decision.attempt]
        command = [sys.executable, "-m", "model.pretrain", *map(str, arguments)]
        if limit_kib:
            command = ["bash", "-c", f'ulimit -v {limit_kib}; exec "$@"', "limited", *command]
        return subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ)
        )

    def train(self, limit_kib: int = 0) -> int:
        process = self.start(limit_kib)
        self.output, _ = process.communicate(timeout=240)
        return process.returncode

    def stopped_by(self, reason: str, *said: str) -> None:
        """One attempt, a record with that reason, and a stop that says it, until the command it names lifts it."""
        record = read_jsonl(self.sample.folder / "ledger.jsonl")[-1]
        assert record["stop_reason"] == reason, self.output
        self.lifted(*said)

    def lifted(self, *said: str) -> None:
        """A stop that says that, and is lifted by the command that it names."""
        decision = self.decision()
        assert decision.action is Action.STOP
        for words in said:
            assert words in decision.reason
        command = decision.reason.rpartition("; then: ")[2].split()
        assert command[:3] == ["rqwen3", "experiment", "resume"]
        done = subprocess.run(
            [sys.executable, "-m", "rqwen3_pipeline.cli", *command[1:]], cwd=REPOSITORY, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "submit" in done.stdout
        assert self.decision().action is Action.SUBMIT

    def trained(self, attempt: int) -> int:
        """The last step on record of an attempt at the first submission."""
        points = read_jsonl(self.sample.folder / "metrics.jsonl")
        return max((p["step"] for p in points if p["kind"] == "train" and p["attempt"] == attempt), default=0)

    def finishes(self) -> None:
        assert self.train() == 0, self.output
        decision = self.decision()
        assert (decision.action, decision.reason[:8]) == (Action.STOP, "finished")


def started_kib() -> int:
    """Address space of a process that has imported what the trainer imports."""
    code = "import model.trainer, re; print(re.search(r'VmPeak:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    return int(subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, check=True).stdout)


def test_out_of_memory_stops_the_chain_after_one_attempt_until_there_is_more(chain):
    chain.set(max_steps=1, micro_batch_size=8192, accumulation=1)
    assert chain.train(limit_kib=started_kib() + EXTRA_MIB * 1024) == 71
    chain.stopped_by("out_of_memory", "small.01 ended out of memory", "Lower training.micro_batch_size")
    chain.set(micro_batch_size=64, accumulation=128)  # the same step in smaller pieces
    chain.finishes()


def test_error_stops_the_chain_after_one_attempt_until_what_the_log_names_is_mended(chain):
    shard = next((chain.sample.root.tokens).glob("*.bin"))
    shutil.move(shard, shard.with_suffix(".away"))
    assert chain.train() == 1
    chain.stopped_by("error", f"small.01 ended error: {shard}", "Mend what the log names")
    shutil.move(shard.with_suffix(".away"), shard)
    chain.finishes()


def test_full_disk_stops_the_chain_after_one_attempt_until_there_is_room(chain):
    folder = chain.sample.folder
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    try:
        (folder / "filler").write_bytes(bytes(8 * 2**20 - 2**17))
        assert chain.train() == 74
        chain.stopped_by("disk_full", "small.01 ended disk full", "iB free", "Free space")
        (folder / "filler").unlink()
        chain.finishes()
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_numbers_that_are_not_finite_stop_the_chain_after_one_attempt_each(chain):
    chain.set(max_steps=40, learning_rate=1e30, min_learning_rate=1e29, save_every_steps=40)
    for _ in range(2):  # the same numbers again end as before
        assert chain.train() == 65
        chain.stopped_by("non_finite", "ended not finite: step", "rqwen3 trace", "rqwen3 experiment new")


def test_trainer_that_was_killed_is_tried_again_without_a_hand_and_what_it_lost_is_on_record(chain):
    chain.set(max_steps=3000, save_every_steps=20, keep_every_steps=3000, log_every_steps=1)
    process = chain.start()
    metrics = chain.sample.folder / "metrics.jsonl"
    wait_for(lambda: any(p["kind"] == "train" and p["step"] > 30 for p in read_jsonl(metrics)), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    chain.set(max_steps=3000)
    decision = chain.decision()
    assert (decision.action, decision.submission, decision.attempt) == (Action.SUBMIT, 1, 2)
    process = chain.start()
    wait_for(lambda: (chain.sample.folder / "ledger.jsonl").exists(), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=240) == 75
    process.communicate()
    killed, saved = read_jsonl(chain.sample.folder / "ledger.jsonl")
    assert killed["stop_reason"] == "killed"
    assert killed["lost_steps"] == killed["to_step"] - killed["saved_step"]
    assert saved["from_step"] == killed["saved_step"] >= 20


def test_slices_that_are_killed_before_their_first_save_stop_the_chain_and_one_that_is_warned_saves(chain):
    chain.set(max_steps=3000, save_every_steps=3000, keep_every_steps=3000)
    for attempt in (1, 2):
        process = chain.start()
        wait_for(lambda attempt=attempt: chain.trained(attempt) > 5, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if attempt == 1:
            assert (chain.decision().action, chain.decision().attempt) == (Action.SUBMIT, 2)
    chain.lifted("no progress: 2 slices in a row trained and saved nothing beyond step 0", "save more often")
    process = chain.start()
    wait_for(lambda: chain.trained(3) > 5, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=240) == 75
    process.communicate()
    decision = chain.decision()
    assert (decision.action, decision.submission) == (Action.SUBMIT, 2)
    assert read_jsonl(chain.sample.folder / "ledger.jsonl")[-1]["saved_step"] > 5


def test_log_of_a_submission_shows_each_line_at_once_and_keeps_the_last_one_through_a_sigkill(chain):
    """The worker's own way to its trainer, whose output goes into a file."""
    chain.set(max_steps=3000)
    log = chain.sample.folder / "logs" / "trainer.log"
    arguments = map(str, pretrain_arguments(chain.sample.root, chain.run, chain.sample.config_path))
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, "model.pretrain", str(log), *arguments, "--watch-parent"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: chain.trained(1) > 5, worker)
    (trainer,) = psutil.Process(worker.pid).children()
    trainer.suspend()  # between two steps, or within one: what it has said so far must be there
    said, known = log.read_text(), chain.trained(1)
    trainer.kill()
    assert worker.wait(timeout=240) != 0
    worker.communicate()
    shown = [int(found) for found in re.findall(r"^step +(\d+)/3,000", said, flags=re.M)]
    assert known - 1 <= max(shown) <= known
    assert log.read_text() == said


def wait_for(ready: Callable[[], bool], process: "subprocess.Popen[str]", timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_configuration_that_changed_between_submissions_is_refused_with_the_difference_unless_it_is_free(chain):
    chain.set(max_steps=150, save_every_steps=5)
    process = chain.start()
    wait_for(lambda: any(Path(chain.sample.folder / "checkpoints").glob("step_*.json")), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=240) == 75
    process.communicate()
    chain.set(learning_rate=5e-4)
    assert chain.train() == 2
    chain.stopped_by("error", "training.learning_rate = 0.0005, there 0.001")
    chain.set(learning_rate=1e-3, save_every_steps=7)
    chain.finishes()
    assert "training.save_every_steps is now 7" in chain.output
