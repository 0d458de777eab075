"""What tells a process from every other one: its number alone is used again, and by every container.

From /proc; None where there is none. Costs a read of a small file.
"""

from functools import cache
from pathlib import Path


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is none (or a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


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
