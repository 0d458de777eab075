"""The launcher on a real cluster, under a real daemon and webserver: every way in, every way to end.

One instance serves the whole module; each test launches runs of its own. The assets are in
`cluster_location`, and say what they do by files in `signs/<run>`.
"""

import time
from collections import Counter

import psutil
import pytest

from tests.dagster_server import wait_for
from tests.rqwen3_pipeline.cluster_site import FILES, MOST_RUNS, OWN, ServedSite
from tests.slurm_cluster import SlurmCluster
from tests.slurm_cluster.daemons import processes_with

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
POLL_S, RECONCILER_S, AWAY_S = 15, 30, 60


@pytest.fixture
def server(served_site: ServedSite) -> ServedSite:
    return served_site


@pytest.fixture
def cluster(slurm_with_accounting: SlurmCluster) -> SlurmCluster:
    return slurm_with_accounting


def test_run_from_the_ui_arrives_with_what_its_step_asks_for_and_its_logs_are_readable(server, cluster):
    run, other = server.launch("make_on_gpu"), server.launch("make_plain", tags={"slurm/time": "00:03:00"})
    server.wait(run, "SUCCESS")
    job = server.ended_job(run)
    asked = (job["Partition"], job["QOS"], job["TimeLimit"], job["NumCPUs"], job["TresPerNode"], job["MinMemoryNode"])
    assert asked == ("gpu", "gpu-long", "00:20:00", "2", "gres:gpu:l40s:1", "1500M")
    assert job["JobName"].startswith(f"dg-{run[:8]}-")
    assert job["JobState"] == "COMPLETED"
    assert [entry["id"] for entry in server.jobs_of(run)] == [job["JobId"]]
    server.wait(other, "SUCCESS")
    job = cluster.job(server.job_id(other))
    assert (job["Partition"], job["TimeLimit"]) == ("cpu", "00:03:00")
    assert "printed by the step" in server.captured(other)


def test_run_tagged_local_stays_on_this_host(server, cluster):
    run = server.launch("make_at_home")
    server.wait(run, "SUCCESS")
    assert server.jobs_of(run) == []


def test_job_launch_and_sensor_arrive_as_jobs(server):
    before = {run["runId"] for run in server.runs("make_plain")}
    server.command("job", "launch", "-j", "make_plain", "-l", server.location)
    server.turn_on_sensor("once")
    wait_for(lambda: len({run["runId"] for run in server.runs("make_plain")} - before) == 2, "two runs")
    for run in {run["runId"] for run in server.runs("make_plain")} - before:
        server.wait(run, "SUCCESS")
        assert len(server.jobs_of(run)) == 1


def test_job_backfill_of_24_partitions_makes_each_once_with_six_jobs_at_most(server):
    files = sorted((server.site.home / "filtered" / "openwebmath").glob("*.parquet"))
    before = [file.read_bytes() for file in files]
    assert len(before) == FILES
    for file in files:
        file.unlink()
    job = "filtered_documents_openwebmath"
    server.command("job", "backfill", "-j", job, "--noprompt", "--all", "all", "-l", OWN)
    most = 0

    def finished() -> bool:
        nonlocal most
        statuses = Counter(run["status"] for run in server.runs(job))
        assert not statuses["FAILURE"], [server.story(run["runId"]) for run in server.runs(job)]
        most = max(most, statuses["STARTING"] + statuses["STARTED"])
        return statuses["SUCCESS"] == FILES

    wait_for(finished, f"{FILES} runs", timeout_s=600, every_s=1.0)
    runs = server.runs(job)
    assert sorted(run["tags"]["dagster/partition"] for run in runs) == [f"{i:05d}" for i in range(FILES)]
    assert [len(server.jobs_of(run["runId"])) for run in runs] == [1] * FILES
    assert 2 <= most <= MOST_RUNS
    assert [file.read_bytes() for file in files] == before


def test_asset_backfill_of_the_command_line_arrives_in_jobs_of_several_partitions(server):
    done = server.site.rqwen3("backfill", "digests", "--source", "openwebmath", **server.environment)
    assert done.returncode == 0, done.stderr
    name = done.stdout.split()[0]

    def of_it() -> list[dict]:
        return [run for run in server.runs("__ASSET_JOB") if run["tags"].get("dagster/backfill") == name]

    wait_for(lambda: of_it() and all(run["status"] == "SUCCESS" for run in of_it()), "the back-fill", 300)
    assert sum(len(server.jobs_of(run["runId"])) for run in of_it()) == len(of_it()) < FILES


def test_terminate_cancels_a_plain_job_within_five_seconds(server, cluster):
    run = server.launch("make_patient")
    server.started(run)
    began = time.monotonic()
    assert server.terminate(run) == "TerminateRunSuccess"
    server.wait(run, "CANCELED")
    took_s = time.monotonic() - began
    assert server.ended_job(run)["JobState"] == "CANCELLED"
    assert took_s < 5.0


def test_worker_killed_is_a_failed_run_within_one_poll_and_leaves_nothing(server, cluster):
    run = server.launch("make_patient")
    worker = psutil.Process(server.started(run))
    worker.kill()
    began = time.monotonic()
    server.wait(run, "FAILURE")
    assert time.monotonic() - began < 3 * POLL_S
    job = server.ended_job(run)
    assert job["JobState"] == "FAILED"
    assert "137" in server.story(run)
    wait_for(lambda: not processes_with("SLURM_JOB_ID", job["JobId"]), "the job's processes to be gone")


def test_memory_limit_is_a_failed_run_whose_story_says_so(server, cluster):
    run = server.launch("make_hungry")
    server.wait(run, "FAILURE")
    assert "exceeded memory limit" in server.story(run)


def test_cancelled_by_hand_ends_the_run_and_says_so(server, cluster):
    run = server.launch("make_patient")
    server.started(run)
    cluster.run("scancel", server.job_id(run))
    server.wait(run, "FAILURE")
    wait_for(lambda: "is CANCELLED" in server.story(run), "SLURM's reason")


def test_requeued_by_hand_is_refused_by_slurm_and_the_run_goes_on(server, cluster):
    run = server.launch("make_patient")
    server.started(run)
    refused = cluster.run("scontrol", "requeue", server.job_id(run), check=False)
    assert refused.returncode != 0
    assert server.run(run)["status"] == "STARTED"
    server.release(run)
    server.wait(run, "SUCCESS")


def test_job_that_can_never_start_fails_with_slurms_reason_within_two_ticks(server, cluster):
    run = server.launch("make_too_long")
    job = server.job_id(run)
    began = time.monotonic()
    server.wait(run, "FAILURE")
    assert time.monotonic() - began < 2 * RECONCILER_S + 15
    assert "PartitionTimeLimit" in server.story(run)
    assert cluster.wait_for_state(job)["JobState"] == "CANCELLED"


def test_job_that_waits_stays_starting_and_runs_when_it_may(server, cluster):
    run = server.launch("make_plain", tags={"slurm/partition": "closed"})
    job = server.job_id(run)
    deadline = time.monotonic() + RECONCILER_S + 2 * POLL_S
    while time.monotonic() < deadline:  # beyond a tick of the reconciler and two looks of the monitor
        assert server.run(run)["status"] == "STARTING"
        time.sleep(2)
    assert cluster.job(job)["JobState"] == "PENDING"
    cluster.open_partition("closed")
    server.wait(run, "SUCCESS")
    cluster.open_partition("closed", up=False)
    assert len(server.jobs_of(run)) == 1


def test_waiting_run_marked_as_cancelled_in_the_ui_leaves_no_job(server, cluster):
    run = server.launch("make_patient", tags={"slurm/partition": "closed"})
    job = server.job_id(run)
    server.query(
        "mutation($run: String!) { terminateRun(runId: $run, terminatePolicy: MARK_AS_CANCELED_IMMEDIATELY) "
        "{ __typename } }",
        run=run,
    )
    server.wait(run, "CANCELED")
    assert cluster.wait_for_state(job)["JobState"] == "CANCELLED"


def test_node_that_dies_is_a_failed_run_whose_story_says_so(server, cluster):
    run = server.launch("make_patient")
    server.started(run)
    node = cluster.job(server.job_id(run))["NodeList"]
    cluster.stop_node(node)
    try:
        server.wait(run, "FAILURE", timeout_s=300)
        assert server.ended_job(run)["JobState"] == "NODE_FAIL"
        assert "NODE_FAIL" in server.story(run)
    finally:
        cluster.start_node(node)
        cluster.wait_until_idle()


def test_controller_away_for_a_minute_fails_no_run_and_doubles_none(server, cluster):
    polled, cancelled = server.launch("make_patient"), server.launch("make_patient")
    server.started(polled)
    server.started(cancelled)
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
        assert len(server.jobs_of(run)) == 1
    server.wait(cancelled, "CANCELED", timeout_s=300)
    assert cluster.wait_for_state(server.job_id(cancelled))["JobState"] == "CANCELLED"
    assert server.run(polled)["status"] == "STARTED"
    server.release(polled)
    server.wait(polled, "SUCCESS")


def test_daemon_and_webserver_killed_and_restarted_pick_their_jobs_up(server, cluster):
    ends_meanwhile, goes_on = server.launch("make_patient"), server.launch("make_patient")
    server.started(ends_meanwhile)
    server.started(goes_on)
    waiting = server.launch("make_plain", tags={"slurm/partition": "closed"})
    server.job_id(waiting)
    for name in ("daemon", "webserver"):
        server.kill(name)
    server.release(ends_meanwhile)
    for name in ("webserver", "daemon"):
        server.start(name)
    server.wait_until_loaded()
    server.wait(ends_meanwhile, "SUCCESS")
    assert server.run(goes_on)["status"] == "STARTED"
    psutil.Process(server.started(goes_on)).kill()
    server.wait(goes_on, "FAILURE")
    cluster.open_partition("closed")
    server.wait(waiting, "SUCCESS")
    cluster.open_partition("closed", up=False)


@pytest.fixture(scope="module")
def doomed(served_site: ServedSite) -> dict[str, str]:
    """Runs whose ends take their time, under way together."""
    description = served_site.site.folder / "cluster.toml"
    before = description.read_text()
    (served_site.site.folder / "env.sh").write_text("echo 'no such module: cuda/0.1' >&2; false\n")
    description.write_text(before.replace('name = "fake"', 'name = "fake"\nenv_file = "env.sh"'))
    try:
        runs = {"broken": served_site.launch("make_plain")}
        served_site.job_id(runs["broken"])
    finally:
        description.write_text(before)
    runs["overdue"] = served_site.launch("make_overdue")
    runs["cancelled"] = served_site.launch("make_patient", tags={"slurm/partition": "closed"})
    served_site.cluster.run("scancel", served_site.job_id(runs["cancelled"]))
    return runs


def test_pending_job_cancelled_by_hand_ends_the_run_with_the_reason(server, doomed):
    server.wait(doomed["cancelled"], "FAILURE")
    assert "is CANCELLED" in server.story(doomed["cancelled"])


def test_broken_environment_in_the_job_is_a_failed_run_whose_story_says_so(server, doomed):
    server.wait(doomed["broken"], "FAILURE")
    assert "no such module: cuda/0.1" in server.story(doomed["broken"])


def test_time_limit_is_a_failed_run_whose_story_says_so(server, doomed):
    server.wait(doomed["overdue"], "FAILURE", timeout_s=300)
    assert server.ended_job(doomed["overdue"])["JobState"] == "TIMEOUT"
    wait_for(lambda: "is TIMEOUT" in server.story(doomed["overdue"]), "SLURM's reason")
