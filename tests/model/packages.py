"""What a test needs from the package index and no environment has: skipped in words where it can't be had."""

import subprocess
import sys
from pathlib import Path

import pytest


def pip_or_skip(command: str, requirement: str, *flags: str | Path) -> None:
    """Run `pip download` or `pip install` on one package, without its dependencies."""
    pip = [sys.executable, "-m", "pip", command, "--no-deps", "--quiet", "--retries", "1", "--timeout", "20"]
    try:
        done = subprocess.run([*pip, *map(str, flags), requirement], capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired:
        pytest.skip(f"needs {requirement}, which the package index did not give within four minutes")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no word from pip"]
        pytest.skip(f"needs {requirement} from the package index: {said[-1]}")
