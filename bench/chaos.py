"""Kill whatever a chain of submissions stands on, at random moments, and have another program judge the end.

    python -m bench.chaos [--faults 36] [--steps 1200] [--folder DIR]

A tiny experiment is trained by two-minute jobs of the tests' cluster, driven by the resubmission sensor
alone. Meanwhile slurmctld, daemon, webserver, database, worker and trainer are killed (SIGKILL; Postgres
by an immediate stop) in a random order, again and again; what a person would start again is started again
some seconds later, the rest is the chain's own affair. The last line is the verdict of
`bench/chaos_verdict.py`, from ledger, checkpoints and SLURM's job log. Takes some twenty minutes.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil

from model.errors import EnvironmentProblem
from rqwen3_pipeline.preflight import Asked, run_preflight
from tests.dagster_server import DagsterServer, wait_for
from tests.postgres import PostgresServer
from tests.rqwen3_pipeline.chain_site import ChainSite
from tests.slurm_cluster import SlurmCluster
from tests.slurm_cluster.daemons import processes_with

SUBMISSIONS = "retries = 100\nback_off_s = 1.0\nidle_slices = 100"
"""So many losses are no reason to stop here."""
BETWEEN_S, AWAY_S, INTO_S = (1.0, 8.0), (1.0, 10.0), (0.0, 25.0)
"""Between two faults; until what was killed is started again; into the life of a worker or trainer."""
PATIENCE_S = 600.0
VERDICT = Path(__file__).with_name("chaos_verdict.py")


@dataclass(kw_only=True)
class Campaign:
    """A chain at work, and what is done to it."""

    site: ChainSite
    server: DagsterServer
    postgres: PostgresServer
    draw: random.Random
    faults: Path
    """Takes one line a fault."""
    count: int = 0
    kinds: dict[str, Callable[[], bool]] = field(init=False)

    def __post_init__(self) -> None:
        self.kinds = {
            "slurmctld": self._slurmctld,
            "daemon": lambda: self._process("daemon"),
            "webserver": lambda: self._process("webserver"),
            "database": self._database,
            "worker": lambda: self._of_job("execute_run"),
            "trainer": lambda: self._of_job("model.pretrain"),
        }

    def run(self, faults: int) -> None:
        """Strike so often, unless the experiment ends before; then let it end."""
        kinds = [kind for kind, _ in zip(list(self.kinds) * faults, range(faults), strict=False)]
        self.draw.shuffle(kinds)
        for kind in kinds:
            time.sleep(self.draw.uniform(*BETWEEN_S))
            if self.site.finished():
                print("it finished before all faults were made; give it more --steps", flush=True)
                return
            if self.kinds[kind]():
                self._record(kind)
        wait_for(self.site.finished, "the experiment to finish", 3 * PATIENCE_S, every_s=2.0)

    def _record(self, kind: str) -> None:
        self.count += 1
        with self.faults.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "time": datetime.now(UTC).isoformat()}) + "\n")
        last = (self.site.ledger() or [{}])[-1]
        where = f"submission {last.get('submission')} saved step {last.get('saved_step')}"
        print(f"fault {self.count:>3} {kind:<10} last on record: {where}", flush=True)

    def _away(self) -> None:
        time.sleep(self.draw.uniform(*AWAY_S))

    def _slurmctld(self) -> bool:
        self.site.cluster.stop_controller(signal.SIGKILL)
        self._away()
        self.site.cluster.start_controller()
        return True

    def _process(self, name: str) -> bool:
        self.server.kill(name)
        self._away()
        self.server.start(name)
        return True

    def _database(self) -> bool:
        self.postgres.stop()
        self._away()
        self.postgres.start()
        return True

    def _of_job(self, word: str) -> bool:
        """Kill a process of the job that runs, some time into its life; false if the experiment ended first."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.site.finished():
            if found := self._processes(word):
                time.sleep(self.draw.uniform(*INTO_S))
                if still := [process for process in found if process.is_running()]:
                    still[0].kill()
                    return True
            if time.monotonic() > deadline:
                raise SystemExit(f"no {word} in {PATIENCE_S:.0f} s: the chain has stopped; see {self.site.folder}")
            time.sleep(0.5)
        return False

    def _processes(self, word: str) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for process in processes_with("SLURM_CONF", str(self.site.cluster.files.conf)):
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            if len(command) > 1 and "python" in command[0] and word in command:
                found.append(process)
        return found


def chaos(folder: Path, faults: int, steps: int, seed: int) -> int:
    """Run a campaign in an empty folder; returns the verdict's exit code."""
    with SlurmCluster.temporary() as cluster, PostgresServer(folder / "postgres") as postgres:
        site = ChainSite(
            folder, cluster, steps=steps, save_every=25, submissions=SUBMISSIONS, postgres_url=postgres.url
        )
        site.train_uncut(folder / "uncut")
        run_preflight(Asked(root=site.root, run=site.run, config_path=site.config_path, here=False))
        began = time.monotonic()
        with site.server() as server:
            server.turn_on_sensor("resubmission")
            log = folder / "faults.jsonl"
            campaign = Campaign(site=site, server=server, postgres=postgres, draw=random.Random(seed), faults=log)
            try:
                campaign.run(faults)
                cluster.wait_until_idle()
            finally:
                shutil.copyfile(cluster.files.job_log, folder / "jobs")
        print(f"{campaign.count} faults, {len(site.ledger())} records, {time.monotonic() - began:.0f} s", flush=True)
        command = [sys.executable, str(VERDICT), str(site.experiment), str(folder / "uncut"), str(folder / "jobs")]
        return subprocess.run([*command, str(folder / "faults.jsonl")], check=False).returncode


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description="Kill what a chain stands on.")
    parser.add_argument("--faults", type=int, default=36)
    parser.add_argument("--steps", type=int, default=1200, help="length of the experiment, 0.2 s each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep everything here; else it is removed after a good end")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)  # Postgres, which refuses to run as root, then runs as another
    if any(folder.iterdir()):
        raise SystemExit(f"{folder}: not empty. Name a new folder.")
    try:
        code = chaos(folder, options.faults, options.steps, options.seed)
    except EnvironmentProblem as problem:
        sys.exit(f"error: {problem}")
    if code == 0 and options.folder is None:
        shutil.rmtree(folder)
    return code


if __name__ == "__main__":
    sys.exit(main())
