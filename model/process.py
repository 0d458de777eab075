"""What tells a process from every other one: its number alone is used again, and by every container.

From /proc; where there is none (macOS) as psutil tells it. Costs a read of a small file. Never a time of day:
when the clock is set, Linux moves those at which processes began.
"""

import os
from functools import cache
from pathlib import Path

_PROC = Path("/proc/self/stat")


def process_start(pid: int) -> int | None:
    """Start of a process, in clock ticks since boot (macOS: s since 1970); None when there is none (or a zombie)."""
    if not _PROC.exists():
        return _start_by_psutil(pid)
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _start_by_psutil(pid: int) -> int | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time())
    except psutil.Error:
        return None


def has_ended(pid: int, start: int | None) -> bool:
    """Whether the process of that number and start is gone; one that /proc hides from this user may not be.

    Args:
        pid: of this machine and namespace.
        start: as `process_start` gave it.
    """
    seen = process_start(pid)
    return seen != start and not (seen is None and _hidden(pid))


def _hidden(pid: int) -> bool:
    """Whether another user's process has that number, of which /proc shows nothing (its mount option hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return not Path(f"/proc/{pid}/stat").exists()
    except (OSError, OverflowError):
        pass
    return False


@cache
def boot_id() -> str | None:
    """What this machine's kernel calls itself since it was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return None


def pid_namespace() -> str | None:
    """The namespace that this process's number belongs to."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None
