"""What a submission ran on: every installed package with its version, the machine, its GPUs and their driver.

One file a submission, `environments/<submission>-a<attempt>.json`, so that a curve that bends where a
node or a package changed can be explained a year later. Costs a look through the installed packages,
and one call of nvidia-smi where there is a GPU.
"""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from model.files import write_json
from model.metrics import Attempt, provenance

SMI_FIELDS = ("name", "uuid", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "pcie.link.gen.max")
SMI_TIMEOUT_S = 20


def write_environment(run_dir: Path, attempt: Attempt, device: torch.device) -> Path:
    """Write the file of one submission; returns its path."""
    path = run_dir / "environments" / f"{attempt.submission:02d}-a{attempt.attempt}.json"
    write_json(path, {**provenance(device), **facts(device)})
    return path


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
