"""Claims: two builds never work on the same piece, and do work side by side on different ones.

A call takes the locks of all pieces that it will make before it begins, so the second of two equal
calls is refused as a whole, with the first one's host and process, and the first goes on undisturbed.
What several builds need (a group's survivors, the tokenizer) they claim in turn. The kernel frees the
locks of a process that dies. Costs an open file a piece while the call lasts.
"""

import contextlib
import re
import resource
import socket
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from model.errors import LockHeldError
from model.files import hold_lock
from rqwen3_pipeline.settings import RunRoot

SPARE_FILES = 256
"""Files that a process may have open besides its claims."""

POLL_S = 0.2
_HOLDER = re.compile(r"\(host (.*), process (\d+)\)")


def claim_path(root: RunRoot, stage: str, item: tuple[str, str]) -> Path:
    """The lock of a piece."""
    return root.path / ".locks" / f"{stage}-{item[0]}-{item[1]}.lock"


@contextlib.contextmanager
def claimed(root: RunRoot, stage: str, items: Sequence[tuple[str, str]]) -> Generator[None, None, None]:
    """Hold the locks of pieces while the block runs.

    Raises:
        LockHeldError: another process holds one; the message names the piece, its host and process.
    """
    _allow_open_files(len(items))
    with contextlib.ExitStack() as stack:
        for item in items:
            name = f"{stage} {item[0]}/{item[1]}"
            stack.enter_context(hold_lock(claim_path(root, stage, item), "another build", name))
        yield


@contextlib.contextmanager
def claimed_in_turn(root: RunRoot, stage: str, items: Sequence[tuple[str, str]]) -> Generator[None, None, None]:
    """Hold the locks of pieces while the block runs, after waiting for whoever holds one."""
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(claimed(root, stage, items))
                break
            except LockHeldError:
                time.sleep(POLL_S)
        yield


def at_work(root: RunRoot, stage: str, item: tuple[str, str]) -> bool:
    """Whether a process claims a piece and, as far as can be seen from this host, lives."""
    try:
        match = _HOLDER.search(claim_path(root, stage, item).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    return match is None or match[1] != socket.gethostname() or Path("/proc", match[2]).exists()


def sweep_claims(root: RunRoot, stage: str, items: Sequence[tuple[str, str]]) -> None:
    """Delete the locks that killed builds have left of pieces which nobody has to make any more."""
    left = {path.name for path in (root.path / ".locks").glob("*.lock")}
    for path in (claim_path(root, stage, item) for item in items):
        if path.name in left:
            with contextlib.suppress(LockHeldError), hold_lock(path, "a sweep"):
                pass


def _allow_open_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES
    if soft < wanted and soft != resource.RLIM_INFINITY:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
