from pathlib import Path

import psutil
import pytest

from model.host_memory import free_host_bytes

GIB = 2**30
MEMINFO = "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n"  # 32 GiB available


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A proc and sys of its own."""
    written = {"proc/meminfo": MEMINFO, "proc/self/cgroup": groups, **files}
    for name, text in written.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/job/memory.max": "max\n", "sys/fs/cgroup/job/memory.current": "5\n"}
    assert free_host_bytes(machine(tmp_path, "0::/job\n", files)) == 32 * GIB


@pytest.mark.parametrize(
    ("groups", "folder", "limit", "usage"),
    [
        ("0::/slurm/job_1/step_0\n", "sys/fs/cgroup/slurm/job_1", "memory.max", "memory.current"),
        (
            "4:memory:/slurm/job_1/step_0\n2:cpu:/\n",
            "sys/fs/cgroup/memory/slurm/job_1",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        ),
    ],
)
def test_limit_of_the_jobs_group_above_counts_its_file_cache_as_free(
    tmp_path: Path, groups: str, folder: str, limit: str, usage: str
) -> None:
    files = {
        f"{folder}/{limit}": f"{16 * GIB}\n",
        f"{folder}/{usage}": f"{12 * GIB}\n",
        f"{folder}/memory.stat": f"anon 1\ninactive_file {5 * GIB}\n",
    }
    assert free_host_bytes(machine(tmp_path, groups, files)) == 9 * GIB


def test_what_is_unknown_is_no_room(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) == 0


def test_here_it_is_at_most_what_psutil_says_is_available() -> None:
    assert 0 < free_host_bytes() <= 1.1 * psutil.virtual_memory().available
