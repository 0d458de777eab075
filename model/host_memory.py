"""How much main memory this process may still take: the machine's, and its control groups'.

SLURM limits a job by a control group, of version 2 or 1; what the kernel can drop again at once (the
page cache of files) counts as free there, as it does in the machine's own figure. Costs a few small
reads of /proc and /sys.
"""

from pathlib import Path

UNLIMITED_BYTES = 2**60
"""Version 1 writes some number above this for no limit."""


def free_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken now; the least of all limits that are known, 0 if none is.

    Args:
        root: where proc and sys are mounted.
    """
    found = [_machine(root / "proc/meminfo"), *_groups(root)]
    known = [free for free in found if free is not None]
    return max(0, min(known, default=0))


def _machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _groups(root: Path) -> list[int | None]:
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: list[int | None] = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "":
            names, base = ("memory.max", "memory.current"), root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names, base = ("memory.limit_in_bytes", "memory.usage_in_bytes"), root / "sys/fs/cgroup/memory"
        else:
            continue
        folder = base / path.strip("/")
        while folder.is_relative_to(base):  # a limit above holds too
            found.append(_group(folder, *names))
            folder = folder.parent
    return found


def _group(folder: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text(encoding="ascii").strip()
        used_bytes = int((folder / usage_name).read_text(encoding="ascii"))
        statistics = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    if not limit.isdigit() or int(limit) >= UNLIMITED_BYTES:
        return None
    cache_bytes = next((int(line.split()[1]) for line in statistics if line.startswith("inactive_file ")), 0)
    return int(limit) - used_bytes + cache_bytes
