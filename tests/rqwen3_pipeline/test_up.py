"""The real webserver and daemon on a finished run root: the UI's API, `dagster job backfill`, and a clean stop."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from model.files import read_json, sha256_file
from tests.browser import needs_browser, text_on
from tests.rqwen3_pipeline.site import Site, make_site

WORKSPACE = Path(__file__).parents[2] / "workspace.yaml"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Served:
    """`rqwen3 up` on a site."""

    def __init__(self, site: Site) -> None:
        self.site, self.port = site, free_port()
        self.process = subprocess.Popen(site.command("up", "--port", str(self.port)), stdout=subprocess.PIPE, text=True)
        self.wait_until(lambda: self.query("{ version }"), 90)

    def query(self, query: str, **variables: object) -> dict:
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/graphql", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)["data"]

    def wait_until(self, ready, timeout_s: float):
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if found := ready():
                    return found
            except OSError:
                pass
            assert time.monotonic() < deadline, "it did not come about in time"
            assert self.process.poll() is None, "rqwen3 up has ended"
            time.sleep(0.5)

    def runs(self, job: str) -> list[dict]:
        found = self.query(
            "query($job: String) { runsOrError(filter: {pipelineName: $job}) { ... on Runs { results { runId status "
            "tags { key value } } } } }",
            job=job,
        )
        return found["runsOrError"]["results"]


@pytest.fixture
def begun(tmp_path):
    """`rqwen3 up` just after it has started its two children, which stands for it in a terminal."""
    site = Site(tmp_path)
    site.profile.write_text('[run]\nname = "tiny"\n')
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would inherit that this is ignored
    process = subprocess.Popen(site.command("up", "--port", str(free_port())), stdout=subprocess.PIPE, text=True)
    signal.signal(signal.SIGHUP, before)
    process.site = site
    assert "The UI of" in process.stdout.readline()
    children = psutil.Process(process.pid).children()
    process.children = {("daemon" if "dagster._daemon" in c.cmdline() else "webserver"): c for c in children}
    assert set(process.children) == {"daemon", "webserver"}
    yield process
    process.kill()
    for child in children:
        if child.is_running():
            child.kill()
    process.communicate()


def gone(children) -> bool:
    return not psutil.wait_procs(children.values(), timeout=30)[1]


def test_up_whose_terminal_closes_ends_as_by_sigterm_and_leaves_nothing_behind(begun):
    begun.send_signal(signal.SIGHUP)
    assert begun.wait(timeout=60) == 0
    assert gone(begun.children)
    assert not (begun.site.home / "dagster" / ".up.lock").exists()


def test_up_that_is_killed_takes_its_children_with_it(begun):
    begun.kill()
    begun.wait()
    assert gone(begun.children)


def test_up_after_a_killed_one_whose_daemon_hangs_is_refused_with_the_way_to_end_it(begun):
    daemon = begun.children["daemon"]
    daemon.suspend()
    begun.kill()
    begun.wait()
    assert psutil.wait_procs([begun.children["webserver"]], timeout=30)[1] == []
    second = begun.site.rqwen3("up", "--port", str(free_port()))
    assert second.returncode == 73
    assert (
        f"the last one (process {begun.pid}) was killed, and its daemon (process {daemon.pid}) has not" in second.stderr
    )
    assert f"kill -9 {daemon.pid}" in second.stderr


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    site = make_site(tmp_path_factory.mktemp("a served site"))
    assert site.run().returncode == 0
    server = Served(site)
    yield server
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(timeout=60)


@pytest.mark.long
def test_code_location_loads_and_all_daemons_are_healthy(served):
    location = (
        "{ workspaceOrError { ... on Workspace { locationEntries { name locationOrLoadError { __typename } } } } }"
    )
    (entry,) = served.query(location)["workspaceOrError"]["locationEntries"]
    assert (entry["name"], entry["locationOrLoadError"]["__typename"]) == ("rqwen3", "RepositoryLocation")
    health = "{ instance { daemonHealth { allDaemonStatuses { daemonType required healthy } } } }"

    def healthy():
        statuses = served.query(health)["instance"]["daemonHealth"]["allDaemonStatuses"]
        return all(status["healthy"] for status in statuses if status["required"])

    served.wait_until(healthy, 60)


@needs_browser
@pytest.mark.long
@pytest.mark.timeout(420)
def test_browser_shows_the_graph_the_figures_of_files_and_the_sensors(served):
    def page(path):
        return text_on(f"http://127.0.0.1:{served.port}{path}")

    graph = page("/asset-groups?expanded=global@global:training,global@global:results")
    assert {"sources", "raw_files", "survivors", "token_shards", "training", "results"} <= set(graph.split())
    assert {"preflight", "submissions", "final_checkpoint", "evidence_report"} <= set(graph.split())
    shown = page("/assets/manifest")
    assert sha256_file(served.site.home / "manifest.json") in shown
    assert "Never materialized" not in shown
    assert {"resubmission", "slurm_reconciler", "failure_notices"} <= set(page("/automation").split())


@pytest.mark.long
@pytest.mark.timeout(420)
def test_job_backfill_of_some_partitions_makes_exactly_those_again(served):
    home = served.site.home
    keys = [file["key"] for file in read_json(home / "sources.lock.json")["sources"]["openwebmath"]["files"]]
    files = [home / "filtered" / "openwebmath" / f"{key}.parquet" for key in keys]
    before = [file.read_bytes() for file in files]
    for file in files:
        file.unlink()
    environment = {**os.environ, "DAGSTER_HOME": str(home / "dagster"), "RQWEN3_PROFILE": str(served.site.profile)}
    command = [sys.executable, "-m", "dagster", "job", "backfill", "-w", str(WORKSPACE), "--noprompt"]
    command += ["-j", "filtered_documents_openwebmath", "--partitions", ",".join(keys)]
    subprocess.run(command, env=environment, check=True, capture_output=True)

    def finished():
        runs = [run for run in served.runs("filtered_documents_openwebmath") if "dagster/backfill" in str(run["tags"])]
        assert not [run for run in runs if run["status"] == "FAILURE"]
        return len(runs) == len(keys) and all(run["status"] == "SUCCESS" for run in runs)

    served.wait_until(finished, 300)
    assert [file.read_bytes() for file in files] == before


@pytest.mark.long
@pytest.mark.timeout(420)
def test_asset_backfill_makes_all_partitions_again_in_one_run_a_source(served):
    home = served.site.home
    locked = read_json(home / "sources.lock.json")["sources"]
    files = [
        home / "filtered" / s / f"{f['key']}.parquet" for s in ("openwebmath", "pes2o") for f in locked[s]["files"]
    ]
    before = [file.read_bytes() for file in files]
    for file in files:
        file.unlink()
    submitted = served.site.rqwen3("backfill", "filtered_documents/pes2o", "raw_files", "--source", "openwebmath")
    assert submitted.returncode == 0, submitted.stderr
    assert "filtered_documents/pes2o: 1 partitions" in submitted.stdout
    apart = served.site.rqwen3("backfill", "raw_files/textbooks", "filtered_documents/textbooks")
    done = served.site.rqwen3("backfill", "filtered_documents", "digests", "--source", "openwebmath")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    name = line.split()[0]
    assert line == f"{name}  filtered_documents/openwebmath, digests/openwebmath: 2 partitions"

    def finished():
        found = served.query(
            "query($id: String!) { partitionBackfillOrError(backfillId: $id) { ... on PartitionBackfill { status } } }",
            id=name,
        )["partitionBackfillOrError"]["status"]
        assert not found.startswith("FAILED")
        return found == "COMPLETED_SUCCESS" and all(file.exists() for file in files)

    def runs_of(backfill):
        made = {"key": "dagster/backfill", "value": backfill}
        return [run for run in served.runs("__ASSET_JOB") if made in run["tags"]]

    served.wait_until(finished, 300)
    served.wait_until(lambda: len(runs_of(apart.stdout.split()[0])) == 2, 300)  # fetching is a job of its own
    runs = runs_of(name)
    assert len(runs) == 1
    tags = {tag["key"]: tag["value"] for tag in runs[0]["tags"]}
    assert (tags["dagster/asset_partition_range_start"], tags["dagster/asset_partition_range_end"]) == (
        *("00000", "00001"),
    )
    assert [file.read_bytes() for file in files] == before


@pytest.mark.long
@pytest.mark.timeout(300)
def test_up_stopped_leaves_no_process_behind(served):
    children = psutil.Process(served.process.pid).children(recursive=True)
    assert children
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(timeout=60) == 0
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, alive
    assert "127.0.0.1" in served.process.stdout.read()
