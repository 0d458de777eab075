"""Processes that outlive the command that started them, known by number and start time, in one JSON file."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil

from model.errors import EnvironmentProblem
from model.files import read_json, write_json
from model.process import process_start
from tests.slurm_cluster.packages import search_path

STOP_S = 10.0
TAIL_LINES = 15


class Daemons:
    """The daemons of one cluster, in the order in which they were started."""

    def __init__(self, record: Path, logs: Path) -> None:
        self._record, self._logs = record, logs

    def start(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        """Start one in the background, its output into its log."""
        with (self._logs / f"{name}.out").open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PATH": search_path(), **(environment or {})},
                start_new_session=True,
            )
        self._write({**self._read(), name: (process.pid, process_start(process.pid))})

    def alive(self) -> dict[str, psutil.Process]:
        """Those that run, by name."""
        found: dict[str, psutil.Process] = {}
        for name, (pid, started) in self._read().items():
            if started is not None and process_start(pid) == started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found[name] = psutil.Process(pid)
        return found

    def require_alive(self, name: str) -> None:
        """Check that a daemon still runs.

        Raises:
            EnvironmentProblem: it has ended; the message holds the end of its logs.
        """
        if name not in self.alive():
            raise EnvironmentProblem(f"{name} has ended by itself.\n{self.tail(name)}")

    def tail(self, name: str) -> str:
        """The last lines of a daemon's output and log."""
        lines: list[str] = []
        for path in (self._logs / f"{name}.out", self._logs / f"{name}.log"):
            if path.exists():
                lines += path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join(lines)

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop one and wait; kill it where it does not end."""
        process = self.alive().get(name)
        if process is not None:
            end([process], number)
        self._write({other: entry for other, entry in self._read().items() if other != name})

    def stop_all(self) -> None:
        """Kill all, the last started first: what they would write at their leisure is thrown away anyway."""
        for name in reversed(list(self._read())):
            self.stop(name, signal.SIGKILL)

    def _read(self) -> dict[str, tuple[int, int | None]]:
        return read_json(self._record) if self._record.exists() else {}

    def _write(self, entries: dict[str, tuple[int, int | None]]) -> None:
        write_json(self._record, entries)


def end(processes: list[psutil.Process], number: signal.Signals = signal.SIGTERM) -> None:
    """Send a signal, wait, and kill what is left."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    _, left = psutil.wait_procs(processes, timeout=STOP_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=STOP_S)


def variable(process: psutil.Process, name: str) -> str | None:
    """A variable of a process's environment, as it was at its start.

    Read here, since psutil stops at the gap that slurmstepd makes when it writes its title over the first ones.
    """
    try:
        block = Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:
        return None
    found = [entry for entry in block.split(b"\0") if entry.startswith(f"{name}=".encode())]
    return found[0].decode(errors="replace").partition("=")[2] if found else None


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """All processes in whose environment the variable has this value, but this one and those above it."""
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [p for p in psutil.process_iter() if p.pid not in mine and variable(p, name) == value]
