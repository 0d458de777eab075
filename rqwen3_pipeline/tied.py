"""Runs a Python module that ends when the process that started it does, however that ends.

    python -m rqwen3_pipeline.tied PARENT MODULE ARGUMENT...

The kernel sends SIGINT when process PARENT is gone, even by SIGKILL, and the module takes this process's
place. A shell that starts `rqwen3 up` in the background has SIGINT ignored; here it counts again. Costs the
start of an interpreter.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> int:
    """Become the module; returns only where the parent is gone already."""
    parent, *module = arguments
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGINT))
    if os.getppid() != int(parent):
        return 1
    os.execv(sys.executable, [sys.executable, "-m", *module])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
