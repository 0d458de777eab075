"""Which phase the trainer is in, one JSON line for each that it enters, for whoever asked with `--phases FILE`.

For a person it says where a run hangs; for the torture campaign, when to kill, and afterwards which
windows were read when: each micro-batch names its windows by fingerprint. Off by default, and then a
call costs one comparison; on, one `write` of some hundred bytes.
"""

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_descriptor: int | None = None
_outer: str | None = None


def announce_to(path: Path | None) -> None:
    """Begin to append to a file, or with None stop."""
    global _descriptor
    if _descriptor is not None:
        os.close(_descriptor)
    _descriptor = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def enter(phase: str, step: int | None = None, **more: Any) -> None:
    """Say that a phase begins; a line is one write, so that a kill can't mix two of them."""
    if _descriptor is None:
        return
    in_background = threading.current_thread() is not threading.main_thread()
    record = {"phase": phase, "within": _outer, "step": step, "background": in_background, "pid": os.getpid(), **more}
    os.write(_descriptor, (json.dumps({**record, "monotonic_s": time.monotonic()}) + "\n").encode())


def enter_micro_batch(phase: str, step: int, tokens_BL: Any) -> None:
    """Say that a micro-batch begins, and with which windows: SHA-256 of their ids as little-endian uint32."""
    if _descriptor is not None:
        rows = (bytes(memoryview(row_.astype("<u4"))) for row_ in tokens_BL.__array__())
        enter(phase, step, windows=[hashlib.sha256(row).hexdigest()[:16] for row in rows])


@contextlib.contextmanager
def within(outer: str) -> Iterator[None]:
    """What is entered in the block belongs to a larger phase."""
    global _outer
    enter(outer)
    before, _outer = _outer, outer
    try:
        yield
    finally:
        _outer = before
