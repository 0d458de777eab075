"""What a submission ran on: every installed package with its version, the machine, its GPUs and their driver.

One file a submission, `environments/<submission>-a<attempt>.json`, so that a curve that bends where a
node or a package changed can be explained a year later. On a CPU another number of threads than before is
told at once, since the last bits depend on it. Costs a look through the installed packages,
and one call of nvidia-smi where there is a GPU.
"""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from model.checkpoint import warn
from model.errors import CorpusError
from model.files import read_json, write_json
from model.metrics import Attempt, provenance

SMI_FIELDS = ("name", "uuid", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "pcie.link.gen.max")
SMI_TIMEOUT_S = 20


def write_environment(run_dir: Path, attempt: Attempt, device: torch.device) -> Path:
    """Write the file of one submission; returns its path."""
    path = run_dir / "environments" / f"{attempt.submission:02d}-a{attempt.attempt}.json"
    threads, before = torch.get_num_threads(), _threads_before(path.parent)
    if device.type == "cpu" and before not in (None, threads):
        warn(f"{threads} threads, and the submission before had {before}: the last bits differ from here on.")
    write_json(path, {**provenance(device), **facts(device)})
    return path


def _threads_before(folder: Path) -> Any:
    """The number that the newest file of a folder states; None where none does."""
    newest = max(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns, default=None)
    try:
        return None if newest is None else read_json(newest)["threads"]
    except (CorpusError, OSError, KeyError, TypeError):
        return None


def facts(device: torch.device) -> dict[str, Any]:
    """Packages, machine and GPUs as they are now."""
    cuda = device.type == "cuda"
    return {
        "packages": packages(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "gpus": gpus() if cuda else [],
    }


def packages() -> dict[str, str]:
    """Every installed distribution and its version, as `pip freeze` would list them."""
    found = {str(item.metadata["Name"]): item.version for item in metadata.distributions() if item.metadata["Name"]}
    return dict(sorted(found.items(), key=lambda entry: entry[0].lower()))


def gpus() -> list[dict[str, str]]:
    """What nvidia-smi says of each GPU; none if it can't be asked."""
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(SMI_FIELDS, map(str.strip, line.split(",")), strict=False)) for line in answer.stdout.splitlines()]
