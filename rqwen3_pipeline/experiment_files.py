"""What lies in an experiment's folder: its checkpoints, and who holds its lock.

Only names, sizes and small JSON files are read, never a checkpoint itself: the cost does not depend
on the size of the model.
"""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.attempts import begun_steps
from model.errors import CorpusError
from model.files import read_json
from model.process import boot_id, has_ended, pid_namespace, process_start

_STEP = re.compile(r"step_(\d+)\.pt")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFile:
    """A checkpoint as its folder shows it."""

    path: Path
    """The `.pt` file."""
    step: int | None
    """Optimiser steps behind it; None where neither name nor sidecar says."""
    size_bytes: int
    """Size on disk."""
    sidecar: dict[str, Any] | None
    """The JSON beside it; None when it is missing or damaged."""

    @property
    def stated_bytes(self) -> int | None:
        """Size that the sidecar states."""
        stated = (self.sidecar or {}).get("bytes")
        return stated if isinstance(stated, int) else None

    @property
    def stated_sha256(self) -> str | None:
        """Hash that the sidecar states."""
        stated = (self.sidecar or {}).get("sha256")
        return stated if isinstance(stated, str) else None

    @property
    def whole(self) -> bool:
        """Whether a sidecar is there and its size agrees: only then the checkpoint counts."""
        return self.sidecar is not None and self.stated_bytes == self.size_bytes


def checkpoints(folder: Path) -> list[CheckpointFile]:
    """The `step_N.pt` files of an experiment's folder, ascending by step."""
    found = (_checkpoint(path) for path in folder.glob("checkpoints/step_*.pt") if _STEP.fullmatch(path.name))
    return sorted(found, key=lambda checkpoint: checkpoint.step or 0)


def final_checkpoint(folder: Path) -> CheckpointFile | None:
    """The `final.pt` that ends a run, or None while it goes on."""
    path = folder / "checkpoints" / "final.pt"
    return _checkpoint(path) if path.is_file() else None


def saved_step(folder: Path) -> int | None:
    """The step of the newest whole checkpoint; None where nothing was saved."""
    final = final_checkpoint(folder)
    steps = [c.step for c in [*checkpoints(folder), *([final] if final else [])] if c.whole and c.step is not None]
    return max(steps, default=None)


def trained_on(folder: Path) -> str | None:
    """SHA-256 of the manifest that the newest whole checkpoint was trained on; None where none says."""
    final = final_checkpoint(folder)
    for checkpoint in (*([final] if final else []), *reversed(checkpoints(folder))):
        stated = (checkpoint.sidecar or {}).get("data_fingerprint") if checkpoint.whole else None
        if isinstance(stated, str):
            return stated
    return None


def other_manifest(folder: Path, manifest_sha256: str | None) -> str | None:
    """A sentence where an experiment was trained on another manifest than the one that is there; else None."""
    seen = trained_on(folder)
    if seen is None or manifest_sha256 is None or seen == manifest_sha256:
        return None
    return (
        f"experiment {folder.name} was trained on the manifest {seen[:12]}, and the one that is there is "
        f"{manifest_sha256[:12]}: the corpus was made anew since, from other files or by other rules. Make it again "
        "as it was, or train on this one in a run root of its own: set RQWEN3_HOME or --home to another folder."
    )


def _checkpoint(path: Path) -> CheckpointFile:
    sidecar = _table(path.with_suffix(".json"))
    match = _STEP.fullmatch(path.name)
    stated = (sidecar or {}).get("step")
    step = int(match.group(1)) if match else (stated if isinstance(stated, int) else None)
    return CheckpointFile(path=path, step=step, size_bytes=path.stat().st_size, sidecar=sidecar)


def lock_holder(folder: Path) -> dict[str, Any] | None:
    """Who holds the experiment's lock, or None when there is none.

    Returns:
        The LOCK file's record with `alive` added: whether that very process still runs on this host;
        None when the lock names another host or container, or can't be read, since then it can't be
        told from here.
    """
    path = folder / "LOCK"
    if not path.is_file():
        return None
    record = _table(path) or {}
    return {**record, "alive": _alive(record)}


def went_on_from(folder: Path, ledger: Sequence[dict[str, Any]]) -> dict[tuple[Any, Any], int]:
    """The step that each attempt went on from, by submission and attempt, as its ledger and its lock tell it."""
    holder = lock_holder(folder) or {}
    return begun_steps((*ledger, *holder.get("predecessors", ()), holder))


def _alive(record: dict[str, Any]) -> bool | None:
    """The start time tells the holder from a later process with its number."""
    pid = record.get("pid")
    if not isinstance(pid, int) or record.get("host") != socket.gethostname():
        return None
    if "boot_id" in record and record["boot_id"] != boot_id():
        return False
    if "pid_namespace" in record and record["pid_namespace"] != pid_namespace():
        return None
    start = record.get("pid_start") or process_start(pid)  # an older trainer's lock has none
    return start is not None and not has_ended(pid, start)


def _table(path: Path) -> dict[str, Any] | None:
    try:
        value = read_json(path)
    except (CorpusError, OSError):
        return None
    return value if isinstance(value, dict) else None
