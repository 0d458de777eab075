"""The chain of submissions by itself: real jobs on a real cluster, under a real daemon, driven by the sensor alone.

One life serves the module. Experiment `chain` is cut by its jobs' two-minute limit again and again; beside it
`short` waits in a partition that is closed for longer than it trains, and `hurt` is cancelled by hand.
"""

import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from model.files import read_jsonl
from tests.dagster_server import DagsterServer, wait_for
from tests.rqwen3_pipeline.chain_site import NAME, ChainSite, weights
from tests.slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]
STEPS, SHORT_STEPS, HURT_STEPS, PACE_S = 1000, 24, 120, 0.2
NAMES = (NAME, "short", "hurt")
HELD_S = 45.0
"""How long the first jobs wait."""
PATIENCE_S = 2400.0
MATERIALIZED = """query($key: AssetKeyInput!) { assetOrError(assetKey: $key) { ... on Asset {
  assetMaterializations { runId partition metadataEntries { label ... on FloatMetadataEntry { floatValue }
  ... on IntMetadataEntry { intValue } ... on TextMetadataEntry { text } } } } } }"""


@dataclass
class Life:
    """What is left when all is over."""

    site: ChainSite
    server: DagsterServer
    held: dict[str, str]
    """The runs that waited, by experiment."""
    said: str
    """What the chain said after the scancel."""

    def receipts(self) -> dict[str, dict[str, object]]:
        """Metadata of the submissions by partition."""
        found = self.server.query(MATERIALIZED, key={"path": ["submissions"]})["assetOrError"]
        return {
            one["partition"]: {
                entry["label"]: next((value for key, value in entry.items() if key != "label"), None)
                for entry in one["metadataEntries"]
            }
            for one in found["assetMaterializations"]
        }


@pytest.fixture(scope="module")
def life(slurm_with_accounting: SlurmCluster) -> Iterator[Life]:
    cluster, folder = slurm_with_accounting, Path(tempfile.mkdtemp(prefix="chain-"))
    site = ChainSite(folder, cluster, steps=STEPS, pace_s=PACE_S)
    with site.server() as server:
        server.start("second daemon")  # by mistake: nothing may be done twice for that
        preflight = server.launch("run_preflight")
        site.train_uncut(folder / "uncut")
        server.wait(preflight, "SUCCESS", timeout_s=PATIENCE_S)
        site.add_experiment("short", steps=SHORT_STEPS)
        site.add_experiment("hurt", steps=HURT_STEPS)
        site.write_cluster(partition="closed")
        server.turn_on_sensor("resubmission")
        held = {name: _run_of(server, f"{name}.01", "STARTING") for name in NAMES}
        site.write_cluster()
        _hold(server, list(held.values()))
        cluster.open_partition("closed")
        said = _scancel(site, server, held["hurt"])
        wait_for(lambda: all(site.finished(name) for name in NAMES), "all to finish", PATIENCE_S, every_s=2.0)
        for run in server.runs("train_submission"):
            server.wait(run["runId"])
        yield Life(site, server, held, said)
    cluster.open_partition("closed", up=False)
    cluster.cancel_all()
    shutil.rmtree(folder)


def _run_of(server: DagsterServer, partition: str, status: str) -> str:
    """The one run of a submission, once it has that status."""

    def there() -> str | None:
        runs = [run for run in server.runs("train_submission") if run["tags"].get("dagster/partition") == partition]
        assert len(runs) < 2, runs
        return next((run["runId"] for run in runs if run["status"] == status and run["tags"].get("slurm/job_id")), None)

    return wait_for(there, f"{partition} to be {status}", PATIENCE_S)


def _hold(server: DagsterServer, runs: list[str]) -> None:
    """Let jobs wait for longer than `short` trains; nothing may become of their runs meanwhile."""
    began = time.monotonic()
    while time.monotonic() - began < HELD_S:
        for run in runs:
            assert server.run(run)["status"] == "STARTING", server.story(run)
        time.sleep(2)


def _scancel(site: ChainSite, server: DagsterServer, run: str) -> str:
    """Cancel a training job by hand, as its owner would, and lift the stop that comes of it, whose words it returns."""
    metrics = site.root.experiment("hurt") / "metrics.jsonl"
    wait_for(lambda: sum(point["kind"] == "train" for point in read_jsonl(metrics)) > 3, "some steps", PATIENCE_S)
    site.cluster.run("scancel", server.run(run)["tags"]["slurm/job_id"])
    server.wait(run)

    def stopped() -> str:
        told = site.rqwen3("experiment", "status", "hurt").stdout
        last = told.splitlines()[-1] if told else ""
        return last if "next: stop" in last else ""

    said = wait_for(stopped, "the chain to stop", PATIENCE_S, every_s=3.0)
    lifted = site.rqwen3(*said.rpartition("; then: rqwen3 ")[2].split())
    assert lifted.returncode == 0, lifted.stderr
    return said


def test_chain_cut_by_its_jobs_limits_ends_with_the_weights_of_an_uncut_run(life):
    records = life.site.ledger()
    assert len(records) >= 4
    assert [record["submission"] for record in records] == list(range(1, len(records) + 1))
    assert {record["attempt"] for record in records} == {1}
    assert {record["stop_reason"] for record in records[:-1]} <= {"stop_file", "deadline"}
    assert [record["exit_code"] for record in records] == [75] * (len(records) - 1) + [0]
    assert all(record["lost_steps"] == 0 for record in records)
    ours, uncut = weights(life.site.experiment), weights(life.site.folder / "uncut")
    assert ours.keys() == uncut.keys()
    assert all(torch.equal(ours[name], uncut[name]) for name in uncut)


def test_chain_takes_each_step_once(life):
    steps = [point["step"] for point in read_jsonl(life.site.experiment / "metrics.jsonl") if point["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1))


def test_chain_is_one_job_a_submission_each_of_them_completed_one_after_the_other(life):
    runs = [run for run in life.server.runs("train_submission") if run["tags"]["rqwen3/experiment"] == NAME]
    assert {run["status"] for run in runs} == {"SUCCESS"}
    assert {run["tags"].get("slurm/state", "COMPLETED") for run in runs} == {"COMPLETED"}  # noted every half a minute
    ids = [record["job_id"] for record in life.site.ledger()]
    assert sorted(ids) == sorted(run["tags"]["slurm/job_id"] for run in runs)

    def ended() -> dict[str, list[str]] | None:
        asked = life.site.cluster.run("sacct", "-X", "-n", "-P", "-j", ",".join(ids), "--format=JobID,State,Start,End")
        jobs = {line.split("|")[0]: line.split("|")[1:] for line in asked.stdout.split()}
        return jobs if all(job in jobs and jobs[job][2] != "Unknown" for job in ids) else None

    jobs = wait_for(ended, "the accounting to know of every end", PATIENCE_S)
    assert {jobs[job][0] for job in ids} == {"COMPLETED"}
    assert all(jobs[before][2] <= jobs[after][1] for before, after in itertools.pairwise(ids))


def test_submission_that_waited_long_in_the_queue_is_neither_failed_nor_doubled_and_says_how_long(life):
    runs = [run for run in life.server.runs("train_submission") if run["tags"]["rqwen3/experiment"] == "short"]
    assert {run["status"] for run in runs} == {"SUCCESS"}
    assert life.held["short"] in [run["runId"] for run in runs]
    records = life.site.ledger("short")  # one, but on a machine so slow that the job's limit cuts two dozen steps
    assert [(record["submission"], record["attempt"]) for record in records] == [(n + 1, 1) for n in range(len(runs))]
    assert float(str(life.receipts()["short.01"]["queue_wait_s"])) >= HELD_S


def test_scancel_by_hand_saves_and_stops_the_chain_until_the_command_that_it_names_lifts_that(life):
    cancelled, finished = life.site.ledger("hurt")
    assert "hurt.01 ended cancelled" in life.said
    assert life.said.endswith("rqwen3 experiment resume hurt")
    assert (cancelled["exit_code"], cancelled["lost_steps"]) == (75, 0)
    assert (finished["submission"], finished["from_step"]) == (2, cancelled["saved_step"])
    assert finished["exit_code"] == 0


def test_receipts_say_what_each_submission_came_to(life):
    receipts = life.receipts()
    for record in life.site.ledger():
        receipt = receipts[f"{NAME}.{record['submission']:02d}"]
        assert {"saved_step", "loss", "stop_reason", "job_id", "host", "queue_wait_s", "loss_plot"} <= receipt.keys()
        assert receipt["saved_step"] == record["saved_step"]
        assert receipt["job_id"] == record["job_id"]


def test_status_of_the_finished_chain_says_so_and_submits_nothing_more(life):
    told = life.site.rqwen3("experiment", "status", NAME)
    assert told.returncode == 0, told.stderr
    assert "next: stop: finished" in told.stdout
