"""The run's records: metrics.jsonl, samples.jsonl, weights.jsonl and ledger.jsonl.

These files are the truth about a run; what Dagster shows is a mirror of them. Each record is one
line, flushed to disk (some milliseconds). After a resume, lines of the same step supersede older
ones: the last one counts. Times are UTC, ISO 8601.
"""

import dataclasses
import math
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from model.distributed import Team, whole_tensor
from model.files import append_jsonl, read_jsonl
from model.gpus import gpu_of_device
from model.mirror import Mirror, scalars

HISTOGRAM_BINS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Which slice of the run writes."""

    submission: int
    """Number of the submission, from 1."""
    attempt: int
    """Number of the attempt at it, from 1."""


class RunLog:
    """Appends to the four files of one run folder."""

    def __init__(self, run_dir: Path, attempt: Attempt, team: Team | None = None) -> None:
        """Write in `run_dir`, in the name of `attempt`; of a team only the first rank writes."""
        self.run_dir, self.team = run_dir, team or Team()
        self._stamp = dataclasses.asdict(attempt)
        self._mirror: Mirror | None = None

    def show(self, mirror: Mirror | None) -> None:
        """Show the curve there too from now on."""
        self._mirror = mirror

    def close(self) -> None:
        """Write out what the mirror has not written yet."""
        self._in_mirror(lambda mirror: mirror.close())
        self._mirror = None

    def _in_mirror(self, work: Callable[[Mirror], None]) -> None:
        """Do something with the mirror, if there is one: it fails aloud, and no training fails with it."""
        try:
            if self._mirror is not None:
                work(self._mirror)
        except Exception as error:
            print(f"warning: the mirror of the metrics failed and is given up: {error!r}", file=sys.stderr, flush=True)
            self._mirror = None

    def _append(self, name: str, record: dict[str, Any]) -> None:
        if self.team.first:
            append_jsonl(self.run_dir / name, {**finite(record), **self._stamp, "time": now()})
            if values := scalars(finite(record)):
                self._in_mirror(lambda mirror: mirror.add(int(record["step"]), values))

    def train(self, record: dict[str, Any]) -> None:
        """One training line."""
        self._append("metrics.jsonl", {"kind": "train", **record})

    def save(self, record: dict[str, Any]) -> None:
        """One line for a checkpoint: its bytes, and how long it took and held up the training."""
        self._append("metrics.jsonl", {"kind": "save", **record})

    def heldout(self, step: int, scores: dict[str, dict[str, Any]]) -> None:
        """One held-out line a source, and at last, `all`, one for all."""
        for source, score in scores.items():
            self._append("metrics.jsonl", {"kind": "heldout", "step": step, "source": source, **score})

    def sample(self, step: int, prompt: str, text: str) -> None:
        """The model's continuation of the fixed prompt."""
        self._append("samples.jsonl", {"step": step, "prompt": prompt, "text": text})

    def weights(self, step: int, model: nn.Module) -> None:
        """Distribution of every weight tensor."""
        self._append("weights.jsonl", {"step": step, "tensors": weight_statistics(model)})

    def ledger(self, record: dict[str, Any]) -> None:
        """The record of an ended attempt."""
        if self.team.first:
            append_jsonl(self.run_dir / "ledger.jsonl", finite(record))

    def has_sample(self, step: int) -> bool:
        """Whether a sample of this step is there already; every rank must ask."""
        return self._has("samples.jsonl", {"step": step})

    def has_heldout(self, step: int) -> bool:
        """Whether the last of this step's held-out lines is there already; every rank must ask."""
        return self._has("metrics.jsonl", {"step": step, "kind": "heldout", "source": "all"})

    def _has(self, name: str, wanted: dict[str, Any]) -> bool:
        path = self.run_dir / name
        return self.team.first_does(lambda: any(wanted.items() <= record.items() for record in read_jsonl(path)))


def last_train_step(run_dir: Path, submission: int, attempt: int, *, since: str = "") -> int | None:
    """Last step that an attempt logged, or one of its numbers since then (ISO 8601, UTC); None if none."""
    steps = [
        record["step"]
        for record in read_jsonl(run_dir / "metrics.jsonl")
        if record.get("kind") == "train"
        and (record.get("submission"), record.get("attempt")) == (submission, attempt)
        and str(record.get("time")) >= since
    ]
    return steps[-1] if steps else None


def finite(value: Any) -> Any:
    """The same value with null for every NaN and infinity, which JSON does not know."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value


@torch.no_grad()
def weight_statistics(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Mean, standard deviation, largest magnitude and a histogram over ± that, by tensor."""
    tensors: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        values = whole_tensor(parameter.detach()).float().flatten()
        std, mean = torch.std_mean(values, correction=0)
        absmax = float(values.abs().max())
        counts = torch.histc(values, HISTOGRAM_BINS, min=-absmax, max=absmax) if absmax else torch.zeros(HISTOGRAM_BINS)
        histogram = [int(count) for count in counts.tolist()]
        tensors[name] = {"mean": float(mean), "std": float(std), "absmax": absmax, "histogram": histogram}
    return tensors


MFU_CONVENTION = "6*(N - embedding) + 12*L*H*hd*T FLOPs a token, over the dense peak"
"""How `mfu` counts, as every line that has one says."""


def model_flops_utilisation(tokens_per_s: float, flops_per_token: int, device: torch.device) -> float | None:
    """Share of a device's peak that the model's own FLOPs make up; None where no peak is known.

    `tokens_per_s` is the pace of one device: with several, the team's pace over their number. FLOPs by
    `CoreConfig.flops_per_token`: 6·(N − embedding) + 12·L·H·hd·T.
    """
    if device.type != "cuda":
        return None
    gpu = gpu_of_device(torch.cuda.get_device_name(device))
    return None if gpu is None else tokens_per_s * flops_per_token / gpu.peak_flops


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory so far: of the device, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    return memory_bytes("VmHWM") / 2**30


def memory_bytes(field: str) -> int:
    """A size from this process's status: `VmRSS` now, `VmHWM` at the most.

    getrusage's ru_maxrss won't do: it starts at the size of the process that started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field + ":"))


def now() -> str:
    """The time, UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def provenance(device: torch.device) -> dict[str, Any]:
    """Job, host, device, process, commit and versions, for ledger and checkpoints."""
    return {
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "host": socket.gethostname(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "pid": os.getpid(),
        "commit": _commit(),
        "versions": versions(),
    }


def bare_provenance() -> dict[str, Any]:
    """The same without a device: for records of what never came as far as having one."""
    return provenance(torch.device("cpu"))


def versions() -> dict[str, str | None]:
    """Versions of what shapes the numbers."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "numpy", "rqwen3-pipeline"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    return found


def _commit() -> str | None:
    noted = Path(__file__).parents[1] / "COMMIT"  # a copy of the sources says which commit it was taken of
    if noted.exists():
        return noted.read_text(encoding="utf-8").strip() or None
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
