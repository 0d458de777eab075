"""What one SLURM job a run costs: `make bench-launcher`.

On the cluster of the tests (Debian's packages; it says how to get them), in three parts:

- start latency: runs alternate between a SLURM job and Dagster's default launcher, under one daemon; from
  "starting" to "started", the ratio of the medians over `--pairs` pairs;
- the launcher's own cost: `--runs` launches in this process, its CPU time with that of the commands it starts,
  and the memory that stays with it or with a process it leaves, each per run;
- polling: the commands that one poll takes (the monitor's question for each run, and a tick of the reconciler)
  with one job and with `--runs` jobs, counted by a wrapper in front of each command on PATH.

Takes some minutes. The last line is one JSON object.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
from dagster import DagsterRunStatus
from dagster._core.events import DagsterEvent, DagsterEventType
from dagster._core.launcher import LaunchRunContext
from dagster._core.storage.dagster_run import DagsterRun
from dagster._core.test_utils import create_run_for_test

from model.errors import EnvironmentProblem
from rqwen3_pipeline.launcher import SlurmRunLauncher
from rqwen3_pipeline.sensors.reconciler import slurm_reconciler
from tests.rqwen3_pipeline.cluster_site import ServedSite
from tests.slurm_cluster import SlurmCluster
from tests.slurm_cluster.packages import search_path

COMMANDS = ("sbatch", "squeue", "scontrol", "sacct", "scancel", "sinfo")
WARM_UP_RUNS = 3
STATS = """query($run: ID!) { runOrError(runId: $run) { ... on Run {
  stats { ... on RunStatsSnapshot { launchTime startTime } } } } }"""


class Counter:
    """A folder of wrappers that note each call and then become the command."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._log = folder, folder / "calls"
        folder.mkdir()
        for name in COMMANDS:
            real = shutil.which(name, path=search_path())
            wrapper = folder / name
            wrapper.write_text(f"#!/bin/sh\necho {name} >> '{self._log}'\nexec '{real}' \"$@\"\n")
            wrapper.chmod(0o755)

    def take(self) -> int:
        """How many calls there were since the last time."""
        calls = len(self._log.read_text().splitlines()) if self._log.exists() else 0
        self._log.unlink(missing_ok=True)
        return calls


def start_latency_ratio(server: ServedSite, pairs: int) -> tuple[float, str]:
    """The ratio of median start latencies, SLURM over the default launcher; and a finished run."""
    took: dict[str, list[float]] = {"slurm": [], "local": []}
    run = ""
    for number in range(pairs + 1):
        for where, seconds in took.items():
            run = server.launch("make_plain", tags={"slurm/where": where})
            server.wait(run, "SUCCESS")
            stats = server.query(STATS, run=run)["runOrError"]["stats"]
            if number:  # the first pair pays for what later ones find in memory
                seconds.append(stats["startTime"] - stats["launchTime"])
    slurm, local = (statistics.median(took[where]) for where in ("slurm", "local"))
    print(f"start latency over {pairs} pairs: SLURM {slurm:.2f} s, default launcher {local:.2f} s")
    return slurm / local, run


class Launches:
    """Launches in this process, as the daemon makes them; the jobs wait in a closed partition."""

    def __init__(self, home: Path, model: str) -> None:
        self.instance = dg.DagsterInstance.from_config(str(home))
        launcher = self.instance.run_launcher
        assert isinstance(launcher, SlurmRunLauncher)
        self.launcher = launcher
        found = self.instance.get_run_by_id(model)
        assert found is not None
        self._model = found

    def create(self) -> DagsterRun:
        """A run like the model that is about to be launched."""
        return create_run_for_test(
            self.instance,
            job_name=self._model.job_name,
            job_code_origin=self._model.job_code_origin,
            status=DagsterRunStatus.STARTING,
            tags={"slurm/partition": "closed"},
        )

    def launch(self, runs: list[DagsterRun]) -> tuple[float, float]:
        """Launch them; returns CPU-seconds and MiB of resident memory that it took, of children too."""
        before_s, before_mib = _cpu_s(), _resident_mib()
        for run in runs:
            self.launcher.launch_run(LaunchRunContext(dagster_run=run, workspace=None))
        return _cpu_s() - before_s, _resident_mib() - before_mib

    def poll(self, runs: list[DagsterRun], counter: Counter) -> int:
        """The commands of one poll of these runs, by a launcher that knows nothing yet."""
        for run in runs:
            event = DagsterEvent(event_type_value=DagsterEventType.RUN_START.value, job_name=run.job_name)
            self.instance.report_dagster_event(event, run.run_id)
        self.launcher.slurm.jobs(fresh=True)
        time.sleep(self.launcher.slurm.cache_s + 0.1)
        counter.take()
        for run in runs:
            current = self.instance.get_run_by_id(run.run_id)
            assert current is not None
            self.launcher.check_run_worker_health(current)
        context = dg.build_sensor_context(instance=self.instance)
        print("reconciler:", slurm_reconciler(context))
        return counter.take()


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _resident_mib() -> float:
    process = psutil.Process()
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True))) / 2**20


def bench(folder: Path, pairs: int, runs: int) -> dict[str, Any]:
    """All three parts."""
    counter = Counter(folder / "bin")
    site = folder / "site"
    site.mkdir()
    with SlurmCluster.temporary() as cluster:
        path = f"{counter.folder}:{search_path()}"
        with ServedSite(site, cluster, PATH=path) as server:
            ratio, model = start_latency_ratio(server, pairs)
            home, told = server.home, server.environment
        os.environ.update({**told, "DAGSTER_HOME": str(home)})
        launches = Launches(home, model)
        first = launches.create()
        launches.launch([first])
        polled_1 = launches.poll([first], counter)
        others = [launches.create() for _ in range(runs - 1)]
        launches.launch(others[:WARM_UP_RUNS])
        measured = others[WARM_UP_RUNS:]
        cpu_s, mib = launches.launch(measured)
        polled_all = launches.poll([first, *others], counter)
    return {
        "cpu_s_per_run": round(cpu_s / len(measured), 4),
        "rss_mib_per_run": round(max(0.0, mib) / len(measured), 4),
        "start_latency_ratio_default": round(ratio, 3),
        "slurm_commands_per_poll_1": polled_1,
        f"slurm_commands_per_poll_{runs}": polled_all,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.launcher", description="What one SLURM job a run costs.")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of runs whose starts are compared")
    parser.add_argument("--runs", type=int, default=200, help="launches and jobs to poll")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-launcher-"))
    try:
        print(json.dumps(bench(folder, options.pairs, options.runs)))
    except EnvironmentProblem as problem:
        sys.exit(f"error: {problem}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
