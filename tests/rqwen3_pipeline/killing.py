"""Commands killed with SIGKILL at random moments, alone or with all of their processes."""

import os
import signal
import subprocess
import time

import pytest


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a command that says nothing, in a process group of its own."""
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def killed_after(child: subprocess.Popen[bytes], seconds: float, whole_group: bool) -> bool:
    """Kill a command that still runs after some time; returns False if it had ended.

    Args:
        child: from `start`.
        seconds: how long it may run.
        whole_group: kill all of its processes; else it alone, and its workers must then end by themselves.
    """
    try:
        child.wait(timeout=seconds)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL) if whole_group else child.kill()
    child.wait()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(child.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return pytest.fail("the workers of a killed command live on")
