"""The real webserver and daemon on an instance, asked and told things through the UI's own API."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
PATIENCE_S = 180.0
STOP_S = 10.0
ENDED = ("SUCCESS", "FAILURE", "CANCELED")
LAUNCH = """mutation($given: ExecutionParams!) { launchRun(executionParams: $given) { __typename
  ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  ... on RunConfigValidationInvalid { errors { message } } } }"""
TERMINATE = """mutation($run: String!) { terminateRun(runId: $run) { __typename
  ... on TerminateRunFailure { message } ... on PythonError { message } } }"""
RUN = """query($run: ID!) { runOrError(runId: $run) { ... on Run { runId status jobName tags { key value } } } }"""
RUNS = """query($filter: RunsFilter) { runsOrError(filter: $filter) { ... on Runs {
  results { runId status jobName tags { key value } } } } }"""
EVENTS = """query($run: ID!, $after: String) { logsForRun(runId: $run, afterCursor: $after) { ... on EventConnection {
  cursor hasMore events { __typename ... on MessageEvent { message }
  ... on LogsCapturedEvent { fileKey }
  ... on ExecutionStepFailureEvent { error { message } }
  ... on RunFailureEvent { error { message } } } } } }"""
CAPTURED = """query($key: [String!]!) { capturedLogs(logKey: $key) { stdout stderr } }"""
SENSOR_ON = """mutation($which: SensorSelector!) { startSensor(sensorSelector: $which) { __typename
  ... on PythonError { message } } }"""


def wait_for(ready: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S, every_s: float = 0.3) -> Any:
    """Ask until the answer is true; returns it."""
    deadline = time.monotonic() + timeout_s
    while not (found := ready()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(every_s)
    return found


class DagsterServer:
    """Webserver and daemon as processes of their own; a context manager starts and stops them."""

    def __init__(self, home: Path, workspace: Path, location: str, environment: dict[str, str]) -> None:
        self.home, self.location = home, location
        self.environment = {**environment, "DAGSTER_HOME": str(home)}
        self._workspace = workspace
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self.start("webserver")
            self.start("daemon")
            self.wait_until_loaded()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def wait_until_loaded(self) -> None:
        """Wait until the webserver has the code location."""
        wait_for(self._loaded, "the code location")

    def start(self, name: str) -> None:
        """Start `webserver` or `daemon`."""
        web = ["dagster_webserver", "-h", "127.0.0.1", "-p", str(self._port)]
        program = web if name == "webserver" else ["dagster._daemon", "run"]
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *program, "-w", str(self._workspace)],
                cwd=REPOSITORY,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """SIGKILL to the process and its children."""
        process = self.processes.pop(name)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            member.kill()
        process.wait()
        psutil.wait_procs(family, timeout=20)

    def stop(self) -> None:
        """Stop what runs, and all children."""
        alive = [process for process in self.processes.values() if process.poll() is None]
        family = [child for process in alive for child in psutil.Process(process.pid).children(recursive=True)]
        for process in alive:
            process.send_signal(signal.SIGINT)
        _, left = psutil.wait_procs([*family, *(psutil.Process(process.pid) for process in alive)], timeout=STOP_S)
        for member in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        for process in self.processes.values():
            process.wait()
        self.processes.clear()

    def command(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """`dagster …` in the instance's environment."""
        done = subprocess.run(
            [sys.executable, "-m", "dagster", *words, "-w", str(self._workspace)],
            cwd=REPOSITORY,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done

    def query(self, text: str, **variables: object) -> dict[str, Any]:
        """Ask the UI's API."""
        body = json.dumps({"query": text, "variables": variables}).encode()
        address, headers = f"http://127.0.0.1:{self._port}/graphql", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=60) as answer:
            found = json.load(answer)
        assert "errors" not in found, found["errors"]
        return found["data"]

    def launch(
        self, job: str, partition: str | None = None, tags: dict[str, str] | None = None, location: str | None = None
    ) -> str:
        """Launch a job as the launchpad does; returns the run's id."""
        tags = {**(tags or {}), **({"dagster/partition": partition} if partition else {})}
        where = {
            "repositoryLocationName": location or self.location,
            "repositoryName": "__repository__",
            "pipelineName": job,
        }
        meta = {"tags": [{"key": key, "value": value} for key, value in tags.items()]}
        given = {"selector": where, "mode": "default", "runConfigData": {}, "executionMetadata": meta}
        answer = self.query(LAUNCH, given=given)["launchRun"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return answer["run"]["runId"]

    def terminate(self, run: str) -> str:
        """Terminate as the UI's button does; returns what came of it."""
        return self.query(TERMINATE, run=run)["terminateRun"]["__typename"]

    def turn_on_sensor(self, name: str) -> None:
        """Turn a sensor on."""
        which = {"repositoryLocationName": self.location, "repositoryName": "__repository__", "sensorName": name}
        assert self.query(SENSOR_ON, which=which)["startSensor"]["__typename"] == "Sensor"

    def run(self, run: str) -> dict[str, Any]:
        """A run's status, job and tags."""
        return _with_tags(self.query(RUN, run=run)["runOrError"])

    def runs(self, job: str | None = None) -> list[dict[str, Any]]:
        """All runs, or those of a job."""
        chosen = {"pipelineName": job} if job else {}
        return [_with_tags(run) for run in self.query(RUNS, filter=chosen)["runsOrError"]["results"]]

    def wait(self, run: str, *statuses: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait until a run has one of these statuses; any that is final by default."""
        seen: dict[str, Any] = {}

        def arrived() -> bool:
            seen.update(self.run(run))
            over = statuses and seen["status"] in ENDED and seen["status"] not in statuses
            assert not over, f"{seen['status']} instead of {statuses}:\n" + self.story(run)
            return seen["status"] in (statuses or ENDED)

        try:
            wait_for(arrived, f"run {run[:8]} to be {statuses or ENDED}", timeout_s)
        except (AssertionError, urllib.error.URLError) as error:
            raise AssertionError(f"{error}; it is {seen.get('status')}:\n{self.story(run)}") from error
        return seen

    def events(self, run: str) -> list[dict[str, Any]]:
        """All events of a run."""
        found: list[dict[str, Any]] = []
        after = None
        while True:
            page = self.query(EVENTS, run=run, after=after)["logsForRun"]
            found += page["events"]
            after = page["cursor"]
            if not page["hasMore"]:
                return found

    def story(self, run: str) -> str:
        """What a person reads of a run in the UI: all messages and errors."""
        words: list[str] = []
        for event in self.events(run):
            words += [event["__typename"] + ": " + event.get("message", "")]
            if event.get("error"):
                words.append(event["error"]["message"])
        return "\n".join(words)

    def captured(self, run: str) -> str:
        """What the run's steps printed, as the UI shows it."""
        keys = [event["fileKey"] for event in self.events(run) if event["__typename"] == "LogsCapturedEvent"]
        logs = [self.query(CAPTURED, key=[run, "compute_logs", key])["capturedLogs"] for key in keys]
        return "".join((log["stdout"] or "") + (log["stderr"] or "") for log in logs)

    def _loaded(self) -> bool:
        text = "{ workspaceOrError { ... on Workspace { locationEntries { locationOrLoadError { __typename } } } } }"
        try:
            entries = self.query(text)["workspaceOrError"]["locationEntries"]
        except OSError:
            assert self.processes["webserver"].poll() is None, (self.home / "webserver.log").read_text()
            return False
        kinds = [(entry["locationOrLoadError"] or {}).get("__typename") for entry in entries]
        assert "PythonError" not in kinds, (self.home / "webserver.log").read_text()
        return bool(kinds) and set(kinds) == {"RepositoryLocation"}


def _with_tags(run: dict[str, Any]) -> dict[str, Any]:
    return {**run, "tags": {tag["key"]: tag["value"] for tag in run["tags"]}}
