"""The launcher on a real cluster, under a real daemon and webserver: every way in, every way to end.

One instance serves the whole module; each test launches runs of its own. The assets are in
`cluster_location`, and say what they do by files in `signs/<run>`.
"""

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.dagster_server import DagsterServer, wait_for
from tests.rqwen3_pipeline.cluster_site import make_cluster_server
from tests.slurm_cluster import SlurmCluster
from tests.slurm_cluster.daemons import processes_with

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
POLL_S, RECONCILER_S, AWAY_S = 5, 30, 60


@pytest.fixture(scope="module")
def server(slurm_with_accounting: SlurmCluster) -> Iterator[DagsterServer]:
    home = Path(tempfile.mkdtemp(prefix="dagster-"))
    with make_cluster_server(home, slurm_with_accounting, poll_s=POLL_S) as server:
        yield server
    slurm_with_accounting.cancel_all()
    shutil.rmtree(home)


@pytest.fixture
def cluster(slurm_with_accounting: SlurmCluster) -> SlurmCluster:
    return slurm_with_accounting


def sign(server: DagsterServer, run: str, name: str) -> Path:
    return server.home / "signs" / run / name


def started(server: DagsterServer, run: str) -> int:
    """Wait for the asset's body; returns the worker's process number."""
    path = sign(server, run, "started")

    def there() -> bool:
        status = server.run(run)["status"]
        assert status not in ("FAILURE", "CANCELED"), server.story(run)
        return path.exists() and bool(path.read_text())

    wait_for(there, f"run {run[:8]} to begin")
    return int(path.read_text())


def release(server: DagsterServer, run: str) -> None:
    sign(server, run, "release").parent.mkdir(parents=True, exist_ok=True)
    sign(server, run, "release").touch()


def job_of(server: DagsterServer, run: str) -> str:
    """The job's id, from the run's tag."""
    return wait_for(lambda: server.run(run)["tags"].get("slurm/job_id"), f"the job of run {run[:8]}")


def jobs_of(cluster: SlurmCluster, run: str) -> list[dict[str, str]]:
    """All jobs that SLURM has or had for a run, by their comments."""
    return [job for job in cluster.jobs() if run in job["comment"]]


def test_run_from_the_ui_arrives_with_what_its_step_asks_for_and_its_logs_are_readable(server, cluster):
    run, other = server.launch("make_on_gpu"), server.launch("make_plain", tags={"slurm/time": "00:03:00"})
    server.wait(run, "SUCCESS")
    job = cluster.wait_for_state(job_of(server, run))
    asked = (job["Partition"], job["QOS"], job["TimeLimit"], job["NumCPUs"], job["TresPerNode"], job["MinMemoryNode"])
    assert asked == ("gpu", "gpu-long", "00:20:00", "2", "gres:gpu:l40s:1", "1500M")
    assert job["JobName"].startswith(f"dg-{run[:8]}-")
    assert job["JobState"] == "COMPLETED"
    assert [entry["id"] for entry in jobs_of(cluster, run)] == [job["JobId"]]
    server.wait(other, "SUCCESS")
    job = cluster.job(job_of(server, other))
    assert (job["Partition"], job["TimeLimit"]) == ("cpu", "00:03:00")
    assert "printed by the step" in server.captured(other)


def test_run_tagged_local_stays_on_this_host(server, cluster):
    run = server.launch("make_at_home")
    server.wait(run, "SUCCESS")
    assert jobs_of(cluster, run) == []


def test_job_launch_and_sensor_arrive_as_jobs(server, cluster):
    before = {run["runId"] for run in server.runs("make_plain")}
    server.command("job", "launch", "-j", "make_plain", "-l", server.location)
    server.turn_on_sensor("once")
    wait_for(lambda: len({run["runId"] for run in server.runs("make_plain")} - before) == 2, "two runs")
    for run in {run["runId"] for run in server.runs("make_plain")} - before:
        server.wait(run, "SUCCESS")
        assert len(jobs_of(cluster, run)) == 1


def test_backfill_of_24_partitions_makes_each_once_with_six_jobs_at_most(server, cluster):
    server.command("job", "backfill", "-j", "make_shards", "--noprompt", "--all", "all", "-l", server.location)
    most = 0

    def finished() -> bool:
        nonlocal most
        alive = [job for job in cluster.jobs() if job["state"] in ("RUNNING", "PENDING", "COMPLETING")]
        most = max(most, len(alive))
        statuses = Counter(run["status"] for run in server.runs("make_shards"))
        assert not statuses["FAILURE"], [server.story(run["runId"]) for run in server.runs("make_shards")]
        return statuses["SUCCESS"] == 24

    wait_for(finished, "24 runs", timeout_s=600, every_s=1.0)
    made = [line.split() for line in (server.home / "made").read_text().splitlines()]
    assert sorted(key for key, _ in made) == [f"{i:02d}" for i in range(24)]
    assert len({job for _, job in made}) == 24
    assert 2 <= most <= 6


def test_terminate_cancels_a_plain_job_within_five_seconds(server, cluster):
    run = server.launch("make_patient")
    started(server, run)
    began = time.monotonic()
    assert server.terminate(run) == "TerminateRunSuccess"
    server.wait(run, "CANCELED")
    took_s = time.monotonic() - began
    assert cluster.wait_for_state(job_of(server, run))["JobState"] == "CANCELLED"
    assert took_s < 5.0


def test_worker_killed_is_a_failed_run_within_one_poll_and_leaves_nothing(server, cluster):
    run = server.launch("make_patient")
    worker = psutil.Process(started(server, run))
    worker.kill()
    began = time.monotonic()
    server.wait(run, "FAILURE")
    assert time.monotonic() - began < 3 * POLL_S
    job = cluster.wait_for_state(job_of(server, run))
    assert job["JobState"] == "FAILED"
    assert "137" in server.story(run)
    wait_for(lambda: not processes_with("SLURM_JOB_ID", job["JobId"]), "the job's processes to be gone")


def test_memory_limit_is_a_failed_run_whose_story_says_so(server, cluster):
    run = server.launch("make_hungry")
    server.wait(run, "FAILURE")
    assert "exceeded memory limit" in server.story(run)


def test_cancelled_by_hand_ends_the_run_and_says_so(server, cluster):
    run = server.launch("make_patient")
    started(server, run)
    cluster.run("scancel", job_of(server, run))
    server.wait(run, "FAILURE", "CANCELED")
    assert "cancel" in server.story(run).lower()


def test_pending_job_cancelled_by_hand_ends_the_run_with_the_reason(server, cluster):
    run = server.launch("make_patient", tags={"slurm/partition": "closed"})
    cluster.run("scancel", job_of(server, run))
    server.wait(run, "FAILURE", "CANCELED")
    assert "cancel" in server.story(run).lower()


def test_requeued_by_hand_is_refused_by_slurm_and_the_run_goes_on(server, cluster):
    run = server.launch("make_patient")
    started(server, run)
    refused = cluster.run("scontrol", "requeue", job_of(server, run), check=False)
    assert refused.returncode != 0
    assert server.run(run)["status"] == "STARTED"
    release(server, run)
    server.wait(run, "SUCCESS")


def test_job_that_can_never_start_fails_with_slurms_reason_within_two_ticks(server, cluster):
    run = server.launch("make_too_long")
    job = job_of(server, run)
    began = time.monotonic()
    server.wait(run, "FAILURE")
    assert time.monotonic() - began < 2 * RECONCILER_S + 15
    assert "PartitionTimeLimit" in server.story(run)
    assert cluster.wait_for_state(job)["JobState"] == "CANCELLED"


def test_job_that_waits_stays_starting_and_runs_when_it_may(server, cluster):
    run = server.launch("make_plain", tags={"slurm/partition": "closed"})
    job = job_of(server, run)
    deadline = time.monotonic() + RECONCILER_S + 2 * POLL_S
    while time.monotonic() < deadline:  # beyond a tick of the reconciler and two looks of the monitor
        assert server.run(run)["status"] == "STARTING"
        time.sleep(2)
    assert cluster.job(job)["JobState"] == "PENDING"
    cluster.open_partition("closed")
    server.wait(run, "SUCCESS")
    cluster.open_partition("closed", up=False)
    assert len(jobs_of(cluster, run)) == 1


def test_waiting_run_marked_as_cancelled_in_the_ui_leaves_no_job(server, cluster):
    run = server.launch("make_patient", tags={"slurm/partition": "closed"})
    job = job_of(server, run)
    server.query(
        "mutation($run: String!) { terminateRun(runId: $run, terminatePolicy: MARK_AS_CANCELED_IMMEDIATELY) "
        "{ __typename } }",
        run=run,
    )
    server.wait(run, "CANCELED")
    assert cluster.wait_for_state(job)["JobState"] == "CANCELLED"


def test_time_limit_is_a_failed_run_whose_story_says_so(server, cluster):
    run = server.launch("make_overdue")
    server.wait(run, "FAILURE", timeout_s=300)
    job = cluster.wait_for_state(job_of(server, run))
    assert job["JobState"] == "TIMEOUT"
    story = server.story(run)
    assert "TIMEOUT" in story or "TIME LIMIT" in story


def test_node_that_dies_is_a_failed_run_whose_story_says_so(server, cluster):
    run = server.launch("make_patient")
    started(server, run)
    node = cluster.job(job_of(server, run))["NodeList"]
    cluster.stop_node(node)
    try:
        server.wait(run, "FAILURE", timeout_s=300)
        assert cluster.wait_for_state(job_of(server, run))["JobState"] == "NODE_FAIL"
        assert "NODE_FAIL" in server.story(run)
    finally:
        cluster.start_node(node)
        cluster.wait_until_idle()


def test_broken_virtual_environment_in_the_job_is_a_failed_run_whose_story_says_so(server, cluster, tmp_path):
    (tmp_path / "env.sh").write_text("export RQWEN3_VENV=/deleted\nsource sbatch/env.sh\n")
    run = server.launch("make_plain", tags={"slurm/partition": "gpu"})
    server.wait(run, "FAILURE")
    assert "does not run" in server.story(run)


def test_controller_away_for_a_minute_fails_no_run_and_doubles_none(server, cluster):
    polled, cancelled = server.launch("make_patient"), server.launch("make_patient")
    started(server, polled)
    started(server, cancelled)
    cluster.stop_controller()
    began = time.monotonic()
    try:
        submitted = [server.launch("make_plain") for _ in range(2)]
        server.terminate(cancelled)
        while time.monotonic() - began < AWAY_S:
            for run in (polled, *submitted):
                assert server.run(run)["status"] not in ("FAILURE", "CANCELED"), server.story(run)
            assert server.run(cancelled)["status"] in ("STARTED", "CANCELING")
            time.sleep(3)
    finally:
        cluster.start_controller()
    for run in submitted:
        server.wait(run, "SUCCESS", timeout_s=300)
        assert len(jobs_of(cluster, run)) == 1
    server.wait(cancelled, "CANCELED", timeout_s=300)
    assert cluster.wait_for_state(job_of(server, cancelled))["JobState"] == "CANCELLED"
    assert server.run(polled)["status"] == "STARTED"
    release(server, polled)
    server.wait(polled, "SUCCESS")


def test_daemon_and_webserver_killed_and_restarted_pick_their_jobs_up(server, cluster):
    ends_meanwhile, goes_on = server.launch("make_patient"), server.launch("make_patient")
    started(server, ends_meanwhile)
    started(server, goes_on)
    waiting = server.launch("make_plain", tags={"slurm/partition": "closed"})
    job_of(server, waiting)
    for name in ("daemon", "webserver"):
        server.kill(name)
    release(server, ends_meanwhile)
    for name in ("webserver", "daemon"):
        server.start(name)
    server.wait_until_loaded()
    server.wait(ends_meanwhile, "SUCCESS")
    assert server.run(goes_on)["status"] == "STARTED"
    psutil.Process(started(server, goes_on)).kill()
    server.wait(goes_on, "FAILURE")
    cluster.open_partition("closed")
    server.wait(waiting, "SUCCESS")
    cluster.open_partition("closed", up=False)
