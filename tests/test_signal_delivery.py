"""SLURM's warning on a real slurmctld: which forms of a job script it reaches, and that the trainer saves then."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.files import read_json, read_jsonl
from tests.job_script import signal_problems
from tests.model.conftest import CONFIG, REPOSITORY, TinyRun, write_corpus
from tests.rqwen3_pipeline.site import make_site
from tests.slurm_cluster import SlurmCluster

PROGRAM = """\
import pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: (pathlib.Path("heard").touch(), sys.exit(75)))
pathlib.Path("ready").touch()
time.sleep(300)
"""
RUN = f"{sys.executable} model.pretrain.py"
FORMS = {
    "background": (f"trap 'kill -USR1 $program' USR1\n{RUN} &\nprogram=$!\nwait; wait $program", "B:USR1@60"),
    "exec": (f"exec {RUN}", "B:USR1@60"),
    "step": (f"srun {RUN}", "USR1@60"),
    "foreground": (RUN, "B:USR1@60"),
    "trapped, yet in the foreground": (f"trap 'echo warned' USR1\n{RUN}", "B:USR1@60"),
    "background without a trap": (f"{RUN} &\nwait", "B:USR1@60"),
    "to the steps, without one": (f"trap 'kill -USR1 $program' USR1\n{RUN} &\nprogram=$!\nwait", "USR1@60"),
}
"""Bodies of job scripts with their `--signal`."""


def send_as_slurm_would(slurm: SlurmCluster, job: str, option: str) -> None:
    """The warning at once instead of by the clock; slurmctld sends it the same way."""
    slurm.run("scancel", "--signal=USR1", *(["--batch"] if option.startswith("B:") else []), job)


def wait_for(condition, what: str, timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.2)


@pytest.mark.parametrize("form", FORMS)
def test_verdict_on_a_form_is_what_the_cluster_does_with_it(slurm, tmp_path, form):
    body, option = FORMS[form]
    (tmp_path / "model.pretrain.py").write_text(PROGRAM)
    script = f"#!/bin/bash\n#SBATCH --signal={option}\n{body}\n"
    job = slurm.submit(script, f"--chdir={tmp_path}", "--output=log")
    wait_for((tmp_path / "ready").exists, "the program's start")
    send_as_slurm_would(slurm, job, option)
    arrives = not signal_problems(script)
    if arrives:
        ended = slurm.wait_for_state(job)
        assert ended["ExitCode"].startswith("75"), ended
    else:
        time.sleep(1.0)  # it would have arrived within milliseconds
        slurm.run("scancel", "--signal=KILL", "--full", job, check=False)
    assert (tmp_path / "heard").exists() == arrives


@pytest.fixture
def endless(tmp_path, monkeypatch, slurm) -> Iterator[TinyRun]:
    """A tiny training run that would take hours, and nothing that saves it but a signal."""
    write_corpus(tmp_path / "root")
    (tmp_path / "root" / "tiny.toml").write_text(CONFIG)
    run = TinyRun(tmp_path / "root")
    never = 10_000_000
    run.set(max_steps=never, save_every_steps=never, eval_every_steps=never, sample_every_steps=never)
    run.set(keep_every_steps=never, keep_first_step=never, log_every_steps=10)
    monkeypatch.setenv("RQWEN3_HOME", str(run.root))
    monkeypatch.setenv("RQWEN3_VENV", sys.prefix)
    monkeypatch.setenv("RQWEN3_SCRATCH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield run
    slurm.cancel_all()


def trains(run: TinyRun) -> bool:
    metrics = run.run_dir / "metrics.jsonl"
    return metrics.exists() and any(line["kind"] == "train" for line in read_jsonl(metrics))


def option_of_trainer(run: TinyRun, name: str) -> str:
    """An option on the command line of the trainer that holds the run's lock."""
    words = Path(f"/proc/{read_json(run.run_dir / 'LOCK')['pid']}/cmdline").read_text().split("\0")
    return words[words.index(name) + 1]


def submit_by_hand(slurm: SlurmCluster, run: TinyRun, *options: str) -> str:
    command = ["sbatch", "--parsable", "--partition=cpu", "--gres=none", "--cpus-per-task=1", "--mem=2000"]
    command += [f"--chdir={REPOSITORY}", f"--output={run.root}/%j.log", *options]
    return slurm.run(*command, "sbatch/train.sbatch", str(run.config_path)).stdout.strip()


def saved(run: TinyRun, reason: str, job: str, submission: int = 1) -> None:
    """The ledger, the checkpoint and its sidecar say that the warned trainer lost nothing."""
    record = read_jsonl(run.run_dir / "ledger.jsonl")[-1]
    seen = (record["submission"], record["stop_reason"], record["exit_code"], record["lost_steps"], record["job_id"])
    assert seen == (submission, reason, 75, 0, job)
    step = record["saved_step"]
    assert step > 0
    assert (run.checkpoints / f"step_{step}.pt").exists()
    assert (run.checkpoints / f"step_{step}.json").exists()


@pytest.mark.long
def test_trainer_sent_by_hand_saves_when_warned_and_its_chained_job_goes_on(slurm, endless):
    first = submit_by_hand(slurm, endless, "--time=30", "--dependency=singleton")
    second = submit_by_hand(slurm, endless, "--time=30", "--dependency=singleton")
    wait_for(lambda: trains(endless), "training steps")
    assert slurm.job(second)["JobState"] == "PENDING"
    assert 1700 < float(option_of_trainer(endless, "--time-limit-s")) <= 1800
    send_as_slurm_would(slurm, first, "B:USR1@300")
    ended = slurm.wait_for_state(first)
    assert ended["ExitCode"] == "75:0", (endless.root / f"{first}.log").read_text()
    saved(endless, "SIGUSR1", first)
    reached = read_jsonl(endless.run_dir / "ledger.jsonl")[0]["saved_step"]
    slurm.wait_for_state(second, "RUNNING")
    wait_for(lambda: read_jsonl(endless.run_dir / "metrics.jsonl")[-1].get("submission") == 2, "the second's steps")
    send_as_slurm_would(slurm, second, "B:USR1@300")
    slurm.wait_for_state(second)
    saved(endless, "SIGUSR1", second, submission=2)
    assert read_jsonl(endless.run_dir / "ledger.jsonl")[1]["from_step"] == reached


@pytest.mark.long
def test_trainer_started_by_srun_saves_when_warned(slurm, endless):
    words = ["srun", "--time=30", "--mem=2000", "--signal=USR1@300", f"--chdir={REPOSITORY}", "--job-name=step"]
    words += [sys.executable, "-m", "model.pretrain", *endless.arguments()]
    with (endless.root / "srun.log").open("wb") as log:
        process = subprocess.Popen(words, env=slurm.full_environment(), stdout=log, stderr=log)
    wait_for(lambda: trains(endless), "training steps")
    (job,) = [job["id"] for job in slurm.jobs() if job["name"] == "step" and job["state"] == "RUNNING"]
    send_as_slurm_would(slurm, job, "USR1@300")
    assert process.wait(timeout=120) == 75
    saved(endless, "SIGUSR1", job)


@pytest.mark.long
def test_trainer_sent_by_hand_is_warned_by_slurms_own_clock(slurm, endless):
    job = submit_by_hand(slurm, endless, "--time=2", "--signal=B:USR1@55")
    ended = slurm.wait_for_state(job, timeout_s=240)
    assert ended["ExitCode"] == "75:0", (endless.root / f"{job}.log").read_text()
    saved(endless, "SIGUSR1", job)


@pytest.mark.long
def test_array_over_the_files_of_a_source_filters_each_once(slurm, tmp_path, monkeypatch):
    site = make_site(tmp_path)
    built = site.rqwen3("corpus", "build", "--sources", str(site.sources))
    assert built.returncode == 0, built.stderr
    files = sorted((site.home / "filtered" / "openwebmath").glob("*.parquet"))
    before = {path.name: path.read_bytes() for path in files}
    assert len(before) == 2
    for path in files:
        path.unlink()
    for name, value in {"HOME": site.home, "PROFILE": site.profile, "VENV": sys.prefix, "FILES_PER_TASK": 1}.items():
        monkeypatch.setenv(f"RQWEN3_{name}", str(value))
    words = ["sbatch", "--parsable", "--array=0-1", "--mem=1000", f"--chdir={REPOSITORY}", "--cpus-per-task=1"]
    words += [f"--output={tmp_path}/%a.log", "sbatch/corpus_array.sbatch", "filter", "--source", "openwebmath"]
    job = slurm.run(*words).stdout.strip()
    for task in ("0", "1"):
        ended = slurm.wait_for_state(f"{job}_{task}")
        assert ended["ExitCode"] == "0:0", (tmp_path / f"{task}.log").read_text()
    assert {name: (files[0].parent / name).read_bytes() for name in before} == before


def test_broken_environment_in_the_job_says_so_in_its_log(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("RQWEN3_VENV", str(tmp_path / "deleted"))
    script = Path(REPOSITORY / "sbatch" / "command.sbatch")
    words = ["sbatch", "--parsable", "--mem=500", f"--chdir={REPOSITORY}", f"--output={tmp_path}/log", str(script)]
    job = slurm.run(*words, "status").stdout.strip()
    assert slurm.wait_for_state(job)["ExitCode"] == "1:0"
    assert "make install" in (tmp_path / "log").read_text()
