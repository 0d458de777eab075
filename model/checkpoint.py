"""Checkpoints that are whole and verified, or do not count.

`step_N.pt` is a `torch.save` of exactly `KEYS`, readable with `weights_only=True`; `step_N.json`, its
sidecar, holds size and SHA-256, config, data fingerprint, random state and provenance. A checkpoint
counts only when both are there and agree; the sidecar comes first and goes last, so that a kill at any
moment leaves no file that looks like a damaged checkpoint. The hash is taken of what was to
be written and compared with what the disk gives back before the file has its name. A save writes 3 · 4
bytes a parameter once and reads them once; old ones are removed only after that.
"""

import contextlib
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model import phases
from model.config import CoreConfig, TrainConfig
from model.distributed import first_process
from model.errors import CheckpointError
from model.files import atomic_path, fsync_folder, require_free_bytes, sha256_file, temporary_path, write_json
from model.rqwen3 import RQwen3
from model.snapshot import tensor_bytes

KEYS = (
    "step",
    "model_state_dict",
    "optimizer_state_dict",
    "scheduler_state_dict",
    "loss_history",
    "data_offset",
)
FORMAT_VERSION = 1
_NAME = re.compile(r"step_(\d+)\.pt")


def warn(message: str) -> None:
    """Say something aloud: on standard error, at once; of several processes only the first does.

    Where standard error is a file on a full disk, the words are lost, and nothing else is.
    """
    if first_process():
        with contextlib.suppress(OSError):
            print(f"warning: {message}", file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that was written and verified, or found good."""

    path: Path
    """The `.pt` file."""
    sidecar: dict[str, Any]
    """The content of the `.json` beside it."""

    @property
    def step(self) -> int:
        """Updates made."""
        return int(self.sidecar["step"])

    def summary(self) -> dict[str, Any]:
        """Path relative to the run's folder, size and hash, for the ledger."""
        relative = f"{self.path.parent.name}/{self.path.name}"
        return {"path": relative, "bytes": self.sidecar["bytes"], "sha256": self.sidecar["sha256"]}


class _HashingWriter:
    """A binary file that hashes what passes through."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size_bytes = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size_bytes += len(data)
        try:
            return self._file.write(data)
        except OSError as error:  # torch.save would only say that its position is unexpected
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def sidecar_path(path: Path) -> Path:
    """The sidecar of a checkpoint."""
    return path.with_suffix(".json")


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step belongs."""
    return folder / f"step_{step}.pt"


def save(path: Path, state: dict[str, Any], sidecar: dict[str, Any]) -> SavedCheckpoint:
    """Write a checkpoint and its sidecar, and verify what is on disk.

    Args:
        path: final name, `….pt`.
        state: exactly `KEYS`.
        sidecar: what else the sidecar says; step, size and hash are added.

    Raises:
        CheckpointError: the file reads back differently, or can't be written.
        DiskSpaceError: there is no room for it; nothing was written.
    """
    if set(state) != set(KEYS):
        raise CheckpointError(f"{path}: a checkpoint holds {', '.join(KEYS)}, not {', '.join(sorted(state))}")
    path.parent.mkdir(parents=True, exist_ok=True)
    require_free_bytes(path.parent, int(1.05 * tensor_bytes(state)) + 2**20, f"checkpoint {path.name}")
    try:
        with atomic_path(path) as temporary:
            writer = _write(temporary, state)
            phases.enter("hashing", state["step"])
            if temporary.stat().st_size != writer.size_bytes or sha256_file(temporary) != writer.digest.hexdigest():
                raise CheckpointError(
                    f"{path}: the disk gives back other bytes than were written. Older checkpoints are untouched; "
                    "move the run to another file system."
                )
            full = {
                **sidecar,
                "format_version": FORMAT_VERSION,
                "step": state["step"],
                "bytes": writer.size_bytes,
                "sha256": writer.digest.hexdigest(),
            }
            phases.enter("sidecar", state["step"])
            write_json(sidecar_path(path), full)
            phases.enter("rename", state["step"])
    except OSError as error:
        raise CheckpointError(
            f"{path}: could not be written ({error}). Older checkpoints are untouched. "
            "Make room, or make the folder writable, and start the trainer again."
        ) from error
    return SavedCheckpoint(path=path, sidecar=full)


def _write(temporary: Path, state: dict[str, Any]) -> _HashingWriter:
    phases.enter("writing", state["step"])
    with temporary.open("wb") as file:
        writer = _HashingWriter(file)
        try:
            torch.save(state, writer)  # pyright: ignore[reportArgumentType] write and flush suffice
        except RuntimeError as error:
            raise writer.error or error from error
    return writer


def save_final(saved: SavedCheckpoint) -> SavedCheckpoint:
    """Give the last checkpoint the name `final.pt` too, as a hard link where that is possible."""
    path = saved.path.with_name("final.pt")
    write_json(sidecar_path(path), saved.sidecar)
    temporary = temporary_path(path)
    temporary.unlink(missing_ok=True)
    try:
        temporary.hardlink_to(saved.path)
    except OSError:
        with atomic_path(path) as copy:
            shutil.copyfile(saved.path, copy)
    else:
        temporary.replace(path)
        temporary.unlink(missing_ok=True)  # renaming one link of a file onto another does nothing
        fsync_folder(path.parent)
    return SavedCheckpoint(path=path, sidecar=saved.sidecar)


def verify(path: Path) -> SavedCheckpoint:
    """Check that a checkpoint is whole: sidecar there, size and SHA-256 as it says.

    Raises:
        CheckpointError: what is wrong with which file.
    """
    beside = sidecar_path(path)
    try:
        sidecar = json.loads(beside.read_text(encoding="utf-8"))
        expected_bytes, expected_digest = int(sidecar["bytes"]), str(sidecar["sha256"])
        int(sidecar["step"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: its sidecar {beside.name} is missing or unreadable ({error!r})") from error
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        size_bytes = path.stat().st_size
        digest = sha256_file(path) if size_bytes == expected_bytes else None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error})") from error
    if digest is None:
        raise CheckpointError(f"{path}: {size_bytes:,} bytes, its sidecar says {expected_bytes:,}; the write was cut")
    if digest != expected_digest:
        raise CheckpointError(
            f"{path}: SHA-256 {digest[:12]}…, its sidecar says {expected_digest[:12]}…; it is damaged"
        )
    return SavedCheckpoint(path=path, sidecar=sidecar)


def steps_in(folder: Path) -> list[int]:
    """Steps of the files named like checkpoints, ascending; everything else is passed over."""
    if not folder.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted({int(match[1]) for match, path in matches if match and path.is_file()})


def newest_good(folder: Path, tell: Callable[[str], None] = warn) -> SavedCheckpoint | None:
    """The checkpoint of the highest step that is whole; damaged newer ones are named aloud."""
    for step in reversed(steps_in(folder)):
        try:
            return verify(step_path(folder, step))
        except CheckpointError as error:
            tell(f"{error}. Falling back to the checkpoint before it.")
    return None


def load(path: Path, device: torch.device | str = "cpu", *, mapped: bool = False) -> dict[str, Any]:
    """Read a checkpoint's six entries.

    Args:
        path: the file.
        device: where the tensors go.
        mapped: map the file instead of reading it, so that tensors that nobody touches cost nothing.

    Raises:
        CheckpointError: it can't be read, or lacks an entry.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True, mmap=mapped)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file. List them: ls {path.parent}") from error
    except Exception as error:
        raise CheckpointError(f"{path}: not readable as a checkpoint ({error}). Use an older one.") from error
    missing = [key for key in KEYS if not isinstance(state, dict) or key not in state]
    if missing:
        raise CheckpointError(f"{path}: lacks {', '.join(missing)}; it is no checkpoint of this program.")
    return state


def load_weights(model: RQwen3, state: dict[str, torch.Tensor], where: str) -> None:
    """Copy weights into the model, every one of them.

    Raises:
        CheckpointError: names or shapes differ; the message names them all, with both shapes.
    """
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    problems = tensor_problems(found, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    if problems:
        raise CheckpointError(
            f"{where}: the weights do not fit the model of the configuration: {problems}. "
            "Use the config.toml that lies beside this checkpoint's folder."
        )
    model.load_state_dict(state, strict=True)


def tensor_problems(found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> str:
    """What is missing, surplus or misshapen among named tensors, all of it; empty if nothing is."""
    misshapen = [
        f"{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    complaints = (
        ("missing", [name for name in wanted if name not in found]),
        ("surplus", [name for name in found if name not in wanted]),
        ("misshapen", misshapen),
    )
    return "; ".join(f"{len(names)} {kind}: {', '.join(names)}" for kind, names in complaints if names)


def load_model(path: Path, config: CoreConfig, device: torch.device | str = "cpu") -> RQwen3:
    """The model of a checkpoint, in evaluation mode.

    Raises:
        CheckpointError: the file is damaged, or of another shape of model.
    """
    if sidecar_path(path).exists():
        verify(path)
    model = RQwen3(config).to(device)
    load_weights(model, load(path, "cpu", mapped=True)["model_state_dict"], str(path))
    return model.eval()


def to_delete(steps: Iterable[int], config: TrainConfig) -> list[int]:
    """Which of the good checkpoints retention lets go, ascending.

    Kept: step `keep_first_step`, multiples of `keep_every_steps`, the last `keep_last`.
    """
    ordered = sorted(steps)
    kept = set(ordered[-config.keep_last :])
    return [s for s in ordered if s not in kept and s != config.keep_first_step and s % config.keep_every_steps]


def set_aside(path: Path) -> None:
    """Take the sidecar from a checkpoint that was found damaged, aloud: it counts no more, and nothing removes it."""
    beside = sidecar_path(path)
    with contextlib.suppress(FileNotFoundError):
        beside.replace(aside := beside.with_name(f"{beside.name}.damaged"))
        warn(f"{path}: counts as damaged from now on; its sidecar is now {aside.name}.")


def prune(folder: Path, config: TrainConfig, newest: SavedCheckpoint) -> list[int]:
    """Remove what retention lets go, up to the step just verified; returns the removed steps.

    A file without a sidecar of its size is damaged: it fills none of the last `keep_last` places, and
    it is left for the user to look at. A sidecar without a file is what a kill left, and goes.
    """
    phases.enter("prune", newest.step)
    good = [step for step in steps_in(folder) if step <= newest.step and _size_agrees(step_path(folder, step))]
    removed = to_delete(good, config)
    for step in removed:
        step_path(folder, step).unlink(missing_ok=True)
        sidecar_path(step_path(folder, step)).unlink(missing_ok=True)
    for sidecar in folder.glob("step_*.json"):
        if not sidecar.with_suffix(".pt").exists():
            sidecar.unlink(missing_ok=True)
    return removed


def _size_agrees(path: Path) -> bool:
    try:
        return json.loads(sidecar_path(path).read_text(encoding="utf-8"))["bytes"] == path.stat().st_size
    except (OSError, ValueError, TypeError, KeyError):
        return False
