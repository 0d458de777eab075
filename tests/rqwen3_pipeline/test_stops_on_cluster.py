"""What stops a chain, brought about in real jobs of a real cluster, and what lifts each stop.

One life serves the module: the experiments fail side by side, each in its own way, under a real daemon whose
sensor is on; each is then mended as its sentence says, resumed by the command that it names, and trained to
its end. All but three are the same run, so that their final weights must be equal, whatever befell them.
"""

import math
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from model.files import read_jsonl
from rqwen3_pipeline.evidence.curves import effective
from tests.dagster_server import ENDED, DagsterServer, wait_for
from tests.model.test_saver import small_disk
from tests.rqwen3_pipeline.chain_site import NAME, ChainSite, weights
from tests.slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
STEPS, SAVE_EVERY, SAMPLE_EVERY = 40, 10, 15
BEFALLS_AT = 12
"""The step after which something happens to those that are hurt in the middle."""
LARGE, ADDRESS_SPACE_KIB = 8192, 2_400_000
"""Sequences of a micro-batch that does not fit that address space."""
TIGHT, ROOMY, HOARDERS, HOARD_MIB = "2500M", "4000M", 2, 1300
TIME = "00:15:00"
"""Nothing here is to be ended by the clock, however busy the machine is."""
DISK = "8m"
LATER_TICKS = 2
PATIENCE_S = 900.0
HOARD = f"""
import subprocess
if step >= {BEFALLS_AT} and not done:
    done.add("hoard")
    program = "import os, time; parent = os.getppid(); hoard = bytearray(os.urandom(2**20)) * {HOARD_MIB}"
    program += chr(10) + "while os.getppid() == parent: time.sleep(0.2)"
    for _ in range({HOARDERS}):
        subprocess.Popen([sys.executable, "-c", program])
if done:
    time.sleep(0.3)
"""
BLOCK_SAMPLES = f"""
if step >= {BEFALLS_AT} and not done:
    done.add("samples")
    (folder / "samples.jsonl").rename(folder / "samples.aside")
    (folder / "samples.jsonl").mkdir()
"""
FILL_DISK = f"""
if step >= {BEFALLS_AT} and not done:
    done.add("disk")
    try:
        with (folder / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(512)):
                pass
    except OSError:
        pass
"""
POISON = f"""
import gc, torch
if step >= {BEFALLS_AT}:
    for model in gc.get_objects():
        if type(model).__name__ == "RQwen3":
            next(model.parameters()).data.fill_(float("nan"))
"""
WAIT = f"""
while step >= {BEFALLS_AT} and not stop_file.exists():
    time.sleep(0.1)
"""
TICKS = """query($which: SensorSelector!) { sensorOrError(sensorSelector: $which) { ... on Sensor {
  sensorState { ticks(limit: 50) { timestamp status } } } } }"""
UNEQUAL = (NAME, "diverging")
"""Those that are other runs than the rest."""
STOPPED = (NAME, "hoard", "exception", "device", "disk", "poisoned", "diverging", "terminated")


@dataclass
class Life:
    """What is left when all is over."""

    site: ChainSite
    server: DagsterServer
    said: dict[str, str]
    """The last line of each experiment's status when it had stopped."""
    attempts: dict[str, list[dict]]
    """The runs of each, some ticks later."""
    ticks: list[str]
    """What came of those ticks."""
    said_again: str
    """Of the one that diverges, after it was resumed though nothing was mended."""

    def train_points(self, name: str) -> list[dict]:
        """All training lines of an experiment."""
        return [p for p in read_jsonl(self.site.root.experiment(name) / "metrics.jsonl") if p["kind"] == "train"]


def runs_of(server: DagsterServer, name: str) -> list[dict]:
    """The runs of an experiment's submissions, oldest first."""
    runs = [r for r in server.runs("train_submission") if r["tags"]["dagster/partition"].rpartition(".")[0] == name]
    return runs[::-1]


@pytest.fixture(scope="module")
def life(slurm_with_accounting: SlurmCluster) -> Iterator[Life]:
    cluster, folder = slurm_with_accounting, Path(tempfile.mkdtemp(prefix="stops-"))
    try:
        site = ChainSite(folder, cluster, steps=STEPS, pace_s=0.05)
        with small_disk(site.root.experiment("disk"), DISK), site.server() as server:
            hurt(site)
            server.wait(server.launch("run_preflight"), "SUCCESS", timeout_s=PATIENCE_S)
            site.limit_address_space(ADDRESS_SPACE_KIB)
            server.turn_on_sensor("resubmission")
            terminate(server, "terminated")
            for name in STOPPED:
                ended(server, name, 1)
            since = time.time()
            said = dict(zip(STOPPED, in_parallel(lambda name: status(site, name), STOPPED), strict=True))
            later = later_ticks(server, since)
            attempts = {name: runs_of(server, name) for name in STOPPED}
            mend(site, said)
            in_parallel(lambda name: follow(site, said[name]), STOPPED)
            for name in (*STOPPED, "calm"):
                ended(server, name, 1 if name == "calm" else 2)
            yield Life(site, server, said, attempts, later, status(site, "diverging"))
            cluster.cancel_all()
    finally:
        shutil.rmtree(folder)


def hurt(site: ChainSite) -> None:
    """The experiments, and what is to befall each."""
    site.write_cluster(time=TIME, mem=TIGHT)
    site.set_training(NAME, micro_batch_size=LARGE, max_steps=1, warmup_steps=0)
    for name in STOPPED[1:]:
        site.add_experiment(name, STEPS, save_every=SAVE_EVERY, sample_every_steps=SAMPLE_EVERY)
    site.set_training("device", device='"cuda"')
    site.set_training("diverging", learning_rate=1e30, warmup_steps=0)
    faults = {"hoard": HOARD, "exception": BLOCK_SAMPLES, "disk": FILL_DISK, "poisoned": POISON, "terminated": WAIT}
    for name, program in faults.items():
        site.fault(name, program)


def mend(site: ChainSite, said: dict[str, str]) -> None:
    """Do what the sentences say; the hoard stays, and fits what is asked for now."""
    named = re.search(r"rqwen3 (experiment new .+?)VALUE", said["diverging"])
    assert named is not None, said["diverging"]
    made = site.rqwen3(*(named[1].replace("NAME", "calm") + "1e-3").split())
    assert made.returncode == 0, made.stderr
    site.write_cluster(time=TIME, mem=ROOMY)
    site.set_training(NAME, micro_batch_size=LARGE // 16, accumulation=16)
    for name in ("exception", "disk", "poisoned", "terminated"):
        site.fault(name, None)
    samples = site.root.experiment("exception") / "samples.jsonl"
    samples.rmdir()
    (samples.parent / "samples.aside").rename(samples)
    site.set_training("device", device='"cpu"')
    (site.root.experiment("disk") / "filler").unlink()


def follow(site: ChainSite, said: str) -> None:
    """Type the command that a sentence names."""
    done = site.rqwen3(*said.rpartition("; then: rqwen3 ")[2].split())
    assert done.returncode == 0, done.stderr
    assert "submit" in done.stdout


def status(site: ChainSite, name: str) -> str:
    """What comes next, once nothing is under way any more: a job may take its time to be gone."""

    def told() -> str:
        done = site.rqwen3("experiment", "status", name)
        assert done.returncode == 0, done.stderr
        last = done.stdout.splitlines()[-1]
        return "" if last.startswith("next: wait") and "may still be running" in last else last

    return wait_for(told, f"{name} to come to a decision", PATIENCE_S, every_s=2.0)


def in_parallel(work: Callable[[str], Any], names: Sequence[str]) -> list[Any]:
    """Do something for each, two at a time."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(work, names))


def ended(server: DagsterServer, name: str, count: int) -> None:
    """Wait until so many runs of an experiment have ended."""

    def arrived() -> bool:
        return sum(run["status"] in ENDED for run in runs_of(server, name)) >= count

    wait_for(arrived, f"{count} runs of {name} to end", PATIENCE_S)


def terminate(server: DagsterServer, name: str) -> None:
    """Press the UI's button."""
    metrics = server.home.parent / "experiments" / name / "metrics.jsonl"
    wait_for(lambda: any(point["step"] >= BEFALLS_AT for point in read_jsonl(metrics)), "some steps", PATIENCE_S)
    (run,) = runs_of(server, name)
    assert server.terminate(run["runId"]) == "TerminateRunSuccess"


def later_ticks(server: DagsterServer, since: float) -> list[str]:
    """What the sensor made of its looks from a moment on, once there are some."""
    which = {"repositoryLocationName": server.location, "repositoryName": "__repository__"}

    def ticks() -> list[str]:
        found = server.query(TICKS, which={**which, "sensorName": "resubmission"})["sensorOrError"]["sensorState"]
        later = [t["status"] for t in found["ticks"] if t["timestamp"] > since and t["status"] != "STARTED"]
        return later if len(later) >= LATER_TICKS else []

    return wait_for(ticks, "the sensor to look again", PATIENCE_S, every_s=1.0)


@pytest.mark.parametrize("name", STOPPED)
def test_each_cause_made_one_attempt_after_which_nothing_was_submitted(life: Life, name: str) -> None:
    (run,) = life.attempts[name]
    assert run["status"] == ("CANCELED" if name == "terminated" else "FAILURE")
    assert len(life.ticks) >= LATER_TICKS
    assert set(life.ticks) == {"SKIPPED"}


SENTENCES = {
    NAME: (
        "out of memory: out of memory in the dry step",
        "allocate memory",
        f"micro_batch_size = {LARGE // 2} with accumulation = 2",
        "Lower training.micro_batch_size",
    ),
    "hoard": ("out of memory: ", "exceeded memory limit", "ask for more memory (mem in the cluster's file)"),
    "exception": ("error: IsADirectoryError: ", "samples.jsonl", "Mend what the log names"),
    "device": ("error: dry_step: ", "training.device = 'cuda', but PyTorch sees no CUDA device", "Mend what"),
    "disk": ("disk full: ", "No space left on device", "Free space, or move the run root"),
    "poisoned": ("not finite: step 16: loss nan", "trace --step 16 --loss", "a fault of the machine"),
    "diverging": ("not finite: step ", "experiment new NAME --from diverging --set training.learning_rate=VALUE"),
    "terminated": ("cancelled: its run was terminated, and it saved step 1", "If that was not meant"),
}
"""What the stop of each must say, the outcome first."""


@pytest.mark.parametrize("name", STOPPED)
def test_sentence_says_what_ended_it_where_the_log_is_and_what_to_do(life: Life, name: str) -> None:
    said, (begin, *more) = life.said[name], SENTENCES[name]
    assert said.startswith(f"next: stop: {name}.01 ended {begin}")
    assert all(words in said for words in more), said
    assert said.endswith(f"; then: rqwen3 experiment resume {name}")
    log = re.search(r" \(log: (.+?)\)", said)
    assert log is not None, said
    trainer = life.site.root.experiment(name) / "logs" / "submission-01-a1.log"
    assert Path(log[1]).is_file()
    assert Path(log[1]) == trainer or (name == "device" and not trainer.exists())


@pytest.mark.parametrize("name", ["poisoned", "diverging"])
def test_trace_that_the_sentence_names_tells_the_documents_of_the_step(life: Life, name: str) -> None:
    named = re.search(r"rqwen3 (--profile .+? trace --step \d+ (--loss|--sequence 0))", life.said[name])
    assert named is not None, life.said[name]
    told = life.site.rqwen3(*shlex.split(named[1]))
    assert told.returncode == 0, told.stderr
    assert (named[2] == "--loss") == (name == "poisoned")  # the other one has no weights saved
    assert "#" in told.stdout, "no document's id"


@pytest.mark.parametrize("name", [name for name in STOPPED if name != "diverging"])
def test_command_that_the_sentence_names_takes_the_run_to_its_end(life: Life, name: str) -> None:
    assert life.site.finished(name)
    steps = 1 if name == NAME else STEPS
    curve = effective(life.train_points(name), "train")
    assert [point["step"] for point in curve.points] == list(range(1, steps + 1))
    final = torch.load(life.site.root.experiment(name) / "checkpoints" / "final.pt", weights_only=True)
    assert len(final["loss_history"]) == steps
    assert all(math.isfinite(loss) for loss in final["loss_history"])


LOST = {
    NAME: ("out_of_memory", 71, 0, 0),
    "hoard": ("killed", None, None, None),
    "exception": ("error", 1, SAMPLE_EVERY, SAVE_EVERY),
    "disk": ("disk_full", 74, None, SAVE_EVERY),
    "poisoned": ("non_finite", 65, BEFALLS_AT + 4, SAVE_EVERY),
    "terminated": ("stop_file", 75, None, None),
}
"""The first record of each: stop reason, exit code, step reached, step saved; None where it may be any."""


@pytest.mark.parametrize("name", LOST)
def test_nothing_is_lost_but_the_steps_since_the_last_save(life: Life, name: str) -> None:
    first, second = life.site.ledger(name)
    seen = (first["stop_reason"], first["exit_code"], first["to_step"], first["saved_step"])
    assert all(expected in (None, found) for expected, found in zip(LOST[name], seen, strict=True)), seen
    assert first["lost_steps"] == 0 or name != "terminated"
    assert first["saved_step"] >= (0 if name == NAME else SAVE_EVERY)
    assert first["lost_steps"] == first["to_step"] - first["saved_step"] <= SAVE_EVERY
    assert (second["from_step"], second["exit_code"]) == (first["saved_step"], 0)
    assert (second["submission"], second["attempt"]) == ((2, 1) if name == "terminated" else (1, 2))


def test_all_that_are_the_same_run_end_with_the_weights_of_the_one_that_never_stopped_in_its_course(life: Life) -> None:
    (whole,) = life.site.ledger("device")
    assert (whole["from_step"], whole["to_step"], whole["attempt"]) == (0, STEPS, 2)
    uncut = weights(life.site.root.experiment("device"))
    for name in set(STOPPED) - {"device", *UNEQUAL}:
        ours = weights(life.site.root.experiment(name))
        assert ours.keys() == uncut.keys()
        assert all(torch.equal(ours[key], uncut[key]) for key in uncut), name


def test_run_that_diverges_does_so_again_and_its_variation_finishes(life: Life) -> None:
    assert "diverging.01 ended not finite" in life.said_again
    assert [record["attempt"] for record in life.site.ledger("diverging")] == [1, 2]
    assert life.site.finished("calm")
    assert not life.site.finished("diverging")


def test_slurm_itself_ended_the_job_that_hoarded_memory_and_not_the_one_that_asked_for_more(life: Life) -> None:
    killed, whole = (life.site.cluster.job(run["tags"]["slurm/job_id"]) for run in runs_of(life.server, "hoard"))
    assert killed["ExitCode"] == "0:9"
    assert (whole["JobState"], whole["ExitCode"]) == ("COMPLETED", "0:0")
