"""Start, question, hurt and stop the cluster."""

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from model.errors import EnvironmentProblem
from tests.slurm_cluster import accounting
from tests.slurm_cluster.daemons import Daemons, end, processes_with, variable
from tests.slurm_cluster.packages import check_packages, search_path
from tests.slurm_cluster.settings import ClusterSettings, Files, free_ports, gres_conf, slurm_conf, slurmdbd_conf

READY_S, IDLE_S = 90.0, 200.0
COMMAND_S = 60.0
ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
)


class SlurmCluster:
    """A cluster in a folder; a context manager starts and stops it."""

    def __init__(self, folder: Path, settings: ClusterSettings | None = None) -> None:
        self.settings = settings or ClusterSettings()
        self.files = Files(folder)
        self._daemons = Daemons(self.files.processes, folder / "log")

    @classmethod
    def temporary(cls, settings: ClusterSettings | None = None) -> Self:
        """A cluster in a new folder with a path short enough for sockets; `stop` deletes the folder."""
        return cls(Path(tempfile.mkdtemp(prefix="slurm-")), settings)

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs beside the programs on its PATH."""
        return {"SLURM_CONF": str(self.files.conf)}

    def full_environment(self) -> dict[str, str]:
        """This process's environment, for a client of the cluster."""
        return {**os.environ, "PATH": search_path(), **self.environment}

    def start(self) -> None:
        """Write the configuration, start the daemons, and wait until every node is idle.

        Raises:
            EnvironmentProblem: a package is missing, or a daemon does not come up.
        """
        check_packages(accounting=self.settings.accounting)
        folder = self.files.folder
        if folder.exists() and any(folder.iterdir()):
            raise EnvironmentProblem(f"{folder} is not empty; name a new folder for the cluster")
        for name in ("log", "pid", "state"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        ports = free_ports(2 + self.settings.nodes)
        self.files.conf.write_text(slurm_conf(self.files, self.settings, ports))
        (folder / "gres.conf").write_text(gres_conf(self.settings))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._start_munge()
        if self.settings.accounting:
            conf = folder / "slurmdbd.conf"
            conf.write_text(slurmdbd_conf(self.files, ports[1]))
            conf.chmod(0o600)
            accounting.start(self._daemons, self.files, self._wait)
        self._start_controller_process()
        if self.settings.accounting:
            accounting.add_accounts(self.run, self._wait)
        for name in self.settings.node_names():
            self.start_node(name)
        self.wait_until_idle()

    def stop(self, *, delete: bool = True) -> None:
        """Stop the jobs and the daemons by number; delete the folder."""
        self._daemons.stop_all()
        end(processes_with("SLURM_CONF", str(self.files.conf)), signal.SIGKILL)
        if delete:
            shutil.rmtree(self.files.folder)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def run(self, *command: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a client command.

        Raises:
            EnvironmentProblem: it failed; the message holds what it said.
        """
        done = subprocess.run(
            command,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            env=self.full_environment(),
            check=False,
        )
        if check and done.returncode:
            raise EnvironmentProblem(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr}{done.stdout}")
        return done

    def submit(self, script: str, *options: str) -> str:
        """Send a script to sbatch; returns the job's id."""
        return self.run("sbatch", "--parsable", *options, stdin=script).stdout.strip().split(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """What the controller knows of a job, by scontrol's names; empty when it knows nothing."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job_id, check=False)
        return dict(word.split("=", 1) for word in shown.stdout.split() if "=" in word)

    def jobs(self, *options: str) -> list[dict[str, str]]:
        """All jobs that the controller remembers: id, state, reason, name, partition, gres, qos, time, comment."""
        names = ("id", "state", "reason", "name", "partition", "gres", "qos", "time", "comment")
        shown = self.run(
            "squeue", "-h", "-a", "-t", "all", "-o", "%i\x1f%T\x1f%r\x1f%j\x1f%P\x1f%b\x1f%q\x1f%l\x1f%k", *options
        )
        return [dict(zip(names, line.split("\x1f"), strict=True)) for line in shown.stdout.splitlines()]

    def wait_for_state(self, job_id: str, *states: str, timeout_s: float = 120.0) -> dict[str, str]:
        """Wait until a job is in one of these states (any ended one by default); returns what is known of it."""
        found: dict[str, str] = {}

        def arrived() -> bool:
            found.clear()
            found.update(self.job(job_id))
            return found.get("JobState") in (states or ENDED)

        self._wait(arrived, f"job {job_id} to be {' or '.join(states) or 'ended'}", timeout_s, lambda: str(found))
        return found

    def wait_until_idle(self, timeout_s: float = IDLE_S) -> None:
        """Wait until no job is left and every node may take one."""

        def idle() -> bool:
            self._daemons.require_alive("slurmctld")
            nodes = self.run("sinfo", "-h", "-N", "-p", "cpu", "-o", "%N %T", check=False).stdout.split("\n")
            return sorted(filter(None, nodes)) == [f"{name} idle" for name in sorted(self.settings.node_names())]

        def seen() -> str:
            states = self.run("sinfo", "-N", "-o", "%N %T %E", check=False).stdout
            return "\n".join((states, *map(self._daemons.tail, ("slurmctld", *self.settings.node_names()))))

        self._wait(idle, "every node to be idle", timeout_s, seen)

    def open_partition(self, name: str, *, up: bool = True) -> None:
        """Let jobs of a partition start, or let them wait; `closed` lets none start at first."""
        self.run("scontrol", "update", f"PartitionName={name}", f"State={'UP' if up else 'DOWN'}")

    def cancel_all(self) -> None:
        """Cancel every job, and wait until the nodes are free."""
        if ids := [job["id"] for job in self.jobs() if job["state"] not in ENDED]:
            self.run("scancel", *ids)
        self.wait_until_idle()

    def stop_controller(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Take slurmctld away; the nodes and their jobs go on."""
        self._daemons.stop("slurmctld", number)

    def start_controller(self) -> None:
        """Bring slurmctld back; returns when it answers."""
        self._start_controller_process()

    def stop_node(self, name: str) -> None:
        """Kill a node's slurmd and all that runs on it, as a failing machine would."""
        self._daemons.stop(name, signal.SIGKILL)
        ours = [p for p in processes_with("SLURM_CONF", str(self.files.conf)) if variable(p, "SLURMD_NODENAME") == name]
        steps = [parent for p in ours if (parent := p.parent()) is not None and parent.name().startswith("slurmstepd")]
        end([*steps, *ours], signal.SIGKILL)

    def start_node(self, name: str) -> None:
        """Start a node's slurmd."""
        (self.files.folder / "spool" / name).mkdir(parents=True, exist_ok=True)
        self._daemons.start(name, ["slurmd", "-D", "-N", name, "-f", str(self.files.conf)], self.environment)

    def alive(self) -> list[str]:
        """Names of the daemons that run."""
        return list(self._daemons.alive())

    def _start_munge(self) -> None:
        folder = self.files.folder
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        options = {"key-file": key, "socket": self.files.munge_socket, "pid-file": folder / "pid" / "munged.pid"}
        options |= {"log-file": self.files.log("munged"), "seed-file": folder / "munge.seed"}
        flags = [f"--{option}={value}" for option, value in options.items()]
        self._daemons.start("munged", ["munged", "--foreground", "--force", *flags])

        def answers() -> bool:
            self._daemons.require_alive("munged")
            return self.run("munge", "-n", "-S", str(self.files.munge_socket), check=False).returncode == 0

        self._wait(answers, "munged to answer", READY_S, lambda: self._daemons.tail("munged"))

    def _start_controller_process(self) -> None:
        self._daemons.start("slurmctld", ["slurmctld", "-D", "-f", str(self.files.conf)], self.environment)

        def answers() -> bool:
            self._daemons.require_alive("slurmctld")
            return self.run("scontrol", "ping", check=False).stdout.find(" is UP") > 0

        self._wait(answers, "slurmctld to answer", READY_S, lambda: self._daemons.tail("slurmctld"))

    @staticmethod
    def _wait(ready: Callable[[], Any], what: str, timeout_s: float, seen: Callable[[], str]) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > deadline:
                raise EnvironmentProblem(f"waited {timeout_s:.0f} s for {what}. Seen last:\n{seen()}")
            time.sleep(0.1)
