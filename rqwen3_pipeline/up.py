"""The web UI and the daemon on one run root, until Ctrl-C or until one of them ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from model.errors import EnvironmentProblem
from rqwen3_pipeline.instance import fail_orphans, open_instance
from rqwen3_pipeline.settings import Settings, shipped

LOOPBACK = "127.0.0.1"
STOP_S = 20.0


def serve(settings: Settings, port: int) -> int:
    """Start webserver and daemon on loopback and wait.

    Returns:
        0 after Ctrl-C or SIGTERM, 1 when one of the two ended by itself.

    Raises:
        EnvironmentProblem: the port is taken, or the run root's file system is unfit.
    """
    require_free_port(port)
    root = settings.root
    fail_orphans(open_instance(root))
    environment = {
        **os.environ,
        "RQWEN3_PROFILE": str(settings.config_path),
        "RQWEN3_HOME": str(root.path),
        "RQWEN3_WORKERS": str(settings.workers),
    }
    workspace = ["-w", str(shipped("workspace.yaml"))]
    web = ["dagster_webserver", "-h", LOOPBACK, "-p", str(port), *workspace]
    daemon = ["dagster._daemon", "run", *workspace]
    signal.signal(signal.SIGTERM, _interrupt)
    children: list[subprocess.Popen[bytes]] = []
    try:
        for name, arguments in (("webserver", web), ("daemon", daemon)):
            children.append(_start(arguments, environment, root.dagster_home / f"{name}.log"))
        print(
            f"The UI of {root.path}: http://{LOOPBACK}:{port}  (Ctrl-C stops it; logs in {root.dagster_home})",
            flush=True,
        )
        while all(child.poll() is None for child in children):
            time.sleep(0.5)
        print(f"The webserver or the daemon ended by itself; see {root.dagster_home}/*.log", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        _stop(children)


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
                f"Port {port} on {LOOPBACK} is taken ({error.strerror}). Use another: make ui PORT={port + 1}"
            ) from error


def _start(arguments: list[str], environment: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _stop(children: list["subprocess.Popen[bytes]"]) -> None:
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
