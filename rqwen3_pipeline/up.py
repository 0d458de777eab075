"""The web UI and the daemon on one run root, until Ctrl-C or until one of them ends."""

import getpass
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import TextIO

from model.errors import ConfigError, EnvironmentProblem, LockHeldError
from model.files import hold_lock, sha256_bytes
from model.process import process_start
from rqwen3_pipeline.assets.sources import register_partitions
from rqwen3_pipeline.corpus.lock import read_lock
from rqwen3_pipeline.instance import fail_orphans, open_instance
from rqwen3_pipeline.settings import RunRoot, Settings, shipped

LOOPBACK, DEFAULT_PORT = "127.0.0.1", 3000
FIRST_PAGE = "/asset-groups"
"""The assets and what they are made from; the UI's own first page is a timeline that lacks the command line's runs."""
STOP_S = 20.0
ENDS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end it as Ctrl-C does; the second comes when its terminal closes."""
_HOLDER = re.compile(r"\(host (?P<host>.+), process (?P<pid>\d+)\)(?P<children>.*)")


def serve(settings: Settings, port: int | None, public: bool = False) -> int:
    """Start webserver and daemon and wait.

    Args:
        settings: the settings in force.
        port: of loopback; None takes a private socket where runs are SLURM jobs, since a login node is
            shared, and port 3000 elsewhere.
        public: whether a port may be opened where runs are SLURM jobs.

    Returns:
        0 after Ctrl-C, SIGTERM or SIGHUP, 1 when one of the two ended by itself.

    Raises:
        ConfigError: a port was named where runs are SLURM jobs, which everyone on the login node could open.
        EnvironmentProblem: the port is taken, or the run root's file system is unfit.
        CorpusError: the source lock is damaged.
        LockHeldError: another one serves this run root from this host, or its children still do; a second daemon
            would be one too many.
    """
    root, shared_host = settings.root, settings.launcher == "slurm"
    if shared_host and port is not None and not public:
        raise ConfigError(
            f"--port {port}: runs are SLURM jobs here, and everyone logged in on this host could open that port. "
            "Leave it out (PORT of make ui): rqwen3 up then listens on a socket of your own, and says how to reach it "
            "from your machine. If the host is yours alone, add --public."
        )
    private = shared_host and port is None
    port = port or DEFAULT_PORT
    if not private:
        require_free_port(port)
    lock, what = root.dagster_home / ".up.lock", f"the UI and the daemon of {root.path}"
    try:
        with hold_lock(lock, "rqwen3 up", what) as held:
            return _serve(settings, port, private, held)
    except LockHeldError as error:
        left = _left_over(lock)
        raise LockHeldError(f"{what}: {left}") if left else error from None


def _left_over(lock: Path) -> str | None:
    """What to do about the children of an `rqwen3 up` that was killed on this host; None if it is none such."""
    holder = _HOLDER.search(lock.read_text(encoding="utf-8")) if lock.is_file() else None
    if holder is None or holder["host"] != socket.gethostname() or process_start(int(holder["pid"])) is not None:
        return None
    found = re.findall(r"(\w+) (\d+)", holder["children"])
    alive = [(name, pid) for name, pid in found if process_start(int(pid)) is not None]
    if not alive:
        return None
    names = " and ".join(f"its {name} (process {pid})" for name, pid in alive)
    return (
        f"the last one (process {holder['pid']}) was killed, and {names} has not ended yet. That takes some seconds; "
        f"if it lasts: kill -9 {' '.join(pid for _, pid in alive)}. Then start it again: rqwen3 up"
    )


def _serve(settings: Settings, port: int, private: bool, held: TextIO) -> int:
    """Serve; the children inherit the lock `held`, which names them, so that none outlives it unseen."""
    root = settings.root
    instance = open_instance(root)
    fail_orphans(instance)
    if root.lock.exists():
        register_partitions(instance, read_lock(root))
    environment = {
        **os.environ,
        "RQWEN3_PROFILE": str(settings.config_path),
        "RQWEN3_HOME": str(root.path),
        "RQWEN3_WORKERS": str(settings.workers),
    }
    workspace = str(shipped("workspace.yaml"))
    web = ["dagster_webserver", "-h", LOOPBACK, "-p", str(port), "-w", workspace]
    if private:
        web = ["rqwen3_pipeline.private_web", str(private_socket(root)), workspace]
    daemon = ["dagster._daemon", "run", "-w", workspace]
    for number in ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _interrupt)
    children: list[subprocess.Popen[bytes]] = []
    try:
        for name, arguments in (("webserver", web), ("daemon", daemon)):
            children.append(_start(arguments, environment, root.dagster_home / f"{name}.log", held))
            held.write(f", {name} {children[-1].pid}")
            held.flush()
        where = _socket_words(private_socket(root)) if private else f"http://{LOOPBACK}:{port}{FIRST_PAGE}"
        print(f"The UI of {root.path}: {where}  (Ctrl-C stops it; logs in {root.dagster_home})", flush=True)
        while all(child.poll() is None for child in children):
            time.sleep(0.5)
        print(f"The webserver or the daemon ended by itself; see {root.dagster_home}/*.log", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        _stop(children)


def private_socket(root: RunRoot) -> Path:
    """Where the UI listens on a shared host: a short path on a local disk, in a folder of the user's own."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or f"{tempfile.gettempdir()}/rqwen3-{os.getuid()}")
    folder = base / f"ui-{sha256_bytes(str(root.path).encode())[:12]}"
    for each in (base, folder):
        each.mkdir(mode=0o700, exist_ok=True)
        if each.is_symlink() or each.stat().st_uid != os.getuid():
            raise EnvironmentProblem(f"{each} belongs to another user. Set XDG_RUNTIME_DIR to a folder of your own.")
    folder.chmod(0o700)
    return folder / "socket"


def _socket_words(listen: Path) -> str:
    host = socket.gethostname()
    return (
        f"{listen}\n  On your own machine:  ssh -N -L {DEFAULT_PORT}:{listen} {getpass.getuser()}@{host}\n"
        f"  then open http://{LOOPBACK}:{DEFAULT_PORT}{FIRST_PAGE} there"
    )


def require_free_port(port: int) -> None:
    """Check that nothing listens on the port.

    Raises:
        EnvironmentProblem: something does; the message says how to take another.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise EnvironmentProblem(
                f"Port {port} on {LOOPBACK} is taken ({error.strerror}). Use another: "
                f"rqwen3 up --port {port + 1}, or: make ui PORT={port + 1}"
            ) from error


def _start(arguments: list[str], environment: dict[str, str], log: Path, held: TextIO) -> "subprocess.Popen[bytes]":
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "rqwen3_pipeline.tied", str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            pass_fds=(held.fileno(),),
        )


def _stop(children: list["subprocess.Popen[bytes]"]) -> None:
    for number in (signal.SIGINT, *ENDS):  # a closing terminal sends more than one
        signal.signal(number, signal.SIG_IGN)
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
    deadline = time.monotonic() + STOP_S
    for child in children:
        try:
            child.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
