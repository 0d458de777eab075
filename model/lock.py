"""One trainer per run folder: the file LOCK names the holder, and a second trainer leaves at once.

The lock is a hard link to a complete file, which either succeeds or finds another there, on network
file systems too (without hard links, a file that is created only where none is). It is taken over only
from a holder that is known to be gone: one of this very kernel and process namespace whose process has
ended (start times guard against a reused number), one of this host before it was started anew, or one
of whose job a command says so. Costs two small writes per submission.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shlex
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import CorpusError, LockHeldError
from model.files import fsync_folder, read_json, temporary_path, write_json
from model.process import boot_id, pid_namespace, process_start

ALIVE, GONE, UNKNOWN = "alive", "gone", "unknown"
COMMAND_TIMEOUT_S = 60
NO_HARD_LINKS = frozenset((errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK))
"""What a file system without hard links answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLock:
    """A lock that this process holds."""

    path: Path
    """The file LOCK."""
    record: dict[str, Any]
    """What it says."""
    predecessor: dict[str, Any] | None
    """The record of the dead holder it was taken over from."""

    def still_held(self) -> bool:
        """Whether the file is still ours; false when somebody removed or replaced it."""
        return _read(self.path) == self.record

    def update(self, **values: Any) -> None:
        """Say more about this submission in the file.

        Raises:
            LockHeldError: it is no longer ours.
        """
        if not self.still_held():
            raise LockHeldError(_held_message(self.path, _read(self.path), "it was removed or taken over meanwhile"))
        self.record.update(values)
        write_json(self.path, self.record)

    def last_words(self, **values: Any) -> None:
        """Say more in the file as it lies: a full disk, which takes no new file, has its block already."""
        if self.still_held():
            self.record.update(values)
            with contextlib.suppress(OSError), self.path.open("r+b") as file:
                os.pwrite(file.fileno(), json.dumps(self.record, indent=1, sort_keys=True).encode(), 0)

    def release(self) -> None:
        """Remove the file if it is ours."""
        if self.still_held():
            self.path.unlink(missing_ok=True)


def acquire(path: Path, record: dict[str, Any], job_alive_command: str | None = None) -> RunLock:
    """Take the lock, or refuse.

    Args:
        path: the file LOCK, in the run's folder.
        record: what to say of this submission; host, process and a token are added.
        job_alive_command: called with the holder's job id as last argument: 0 means that the job
            lives, 1 that it is gone; anything else is not known.

    Raises:
        LockHeldError: another holds it; the message names its job, host, process and submission.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**record, **identity(), "token": secrets.token_hex(8)}
    if _create(path, record):
        return RunLock(path=path, record=record, predecessor=None)
    holder = _read(path)
    if holder is None and not path.exists() and _create(path, record):
        return RunLock(path=path, record=record, predecessor=None)
    verdict, why = holder_state(holder, job_alive_command)
    with _takers_one_by_one(path.parent):
        if verdict != GONE or _read(path) != holder or not _remove_stale(path, holder) or not _create(path, record):
            raise LockHeldError(_held_message(path, _read(path) or holder, why))
    return RunLock(path=path, record=record, predecessor=holder)


def identity() -> dict[str, Any]:
    """What identifies this process beyond its number, and its job."""
    return {
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_start": process_start(os.getpid()),
        "boot_id": boot_id(),
        "pid_namespace": pid_namespace(),
    }


def holder_state(holder: dict[str, Any] | None, job_alive_command: str | None) -> tuple[str, str]:
    """Whether a holder lives: (`alive`, `gone` or `unknown`, the reason in words)."""
    if holder is None:
        return UNKNOWN, "the lock can't be read"
    mine = identity()
    if _same(holder, mine, "boot_id") and _same(holder, mine, "pid_namespace"):
        pid, pid_start = holder.get("pid"), holder.get("pid_start")
        if not isinstance(pid, int) or not isinstance(pid_start, int):
            return UNKNOWN, "the lock names no process"
        if process_start(pid) != pid_start:
            return GONE, "its process has ended"
        return ALIVE, "its process runs on this host"
    if job_alive_command is not None and holder.get("job_id"):
        return _ask(job_alive_command, str(holder["job_id"]))
    if _same(holder, mine, "host") and holder.get("boot_id") and not _same(holder, mine, "boot_id"):
        if str(mine["host"]).startswith("localhost"):
            return UNKNOWN, "it is on a host of this name, which is the name of many"
        return GONE, "the host was started anew since"
    return UNKNOWN, "it is on another host or in another container, and no --job-alive-command and job id tell of it"


def _same(holder: dict[str, Any], mine: dict[str, Any], key: str) -> bool:
    return mine[key] is not None and holder.get(key) == mine[key]


def _ask(command: str, job_id: str) -> tuple[str, str]:
    try:
        answer = subprocess.run(
            [*shlex.split(command), job_id], capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return UNKNOWN, f"asking for job {job_id} failed: {error}"
    verdict = {0: ALIVE, 1: GONE}.get(answer.returncode, UNKNOWN)
    return verdict, f"the job-alive command answered {answer.returncode} for job {job_id}"


@contextlib.contextmanager
def _takers_one_by_one(folder: Path) -> Iterator[None]:
    """Keep other takers of the same stale lock waiting, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems can't; `_remove_stale` checks again
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _create(path: Path, record: dict[str, Any]) -> bool:
    draft = path.with_name(f".{path.name}.{record['token']}.tmp")
    write_json(draft, record)
    try:
        path.hardlink_to(draft)
    except FileExistsError:
        if _read(path) != record:  # a network file system may answer a repeated request with "exists"
            return False
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        if not _create_exclusively(path, draft.read_bytes()):
            return False
    finally:
        draft.unlink(missing_ok=True)
    fsync_folder(path.parent)
    return True


def _create_exclusively(path: Path, data: bytes) -> bool:
    """Create the lock where there are no hard links; until it is written, others find it unreadable and leave."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


def _remove_stale(path: Path, holder: dict[str, Any] | None) -> bool:
    """Move the stale lock away; false when another taker was faster, whose lock is put back."""
    aside = temporary_path(path)
    try:
        path.rename(aside)
    except FileNotFoundError:
        return True
    if _read(aside) == holder:
        aside.unlink()
        return True
    try:
        path.hardlink_to(aside)
    except FileExistsError:
        pass
    except OSError:  # no hard links here
        aside.replace(path)
        return False
    aside.unlink()
    return False


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = read_json(path)
    except (OSError, CorpusError):
        return None
    return record if isinstance(record, dict) else None


def _held_message(path: Path, holder: dict[str, Any] | None, why: str) -> str:
    holder = holder or {}
    return (
        f"{path}: held by job {holder.get('job_id')}, process {holder.get('pid')} on {holder.get('host')}, "
        f"submission {holder.get('submission')} since {holder.get('started')} ({why}). Nothing was touched. "
        f"Wait for it to end; if it is surely dead, remove the lock: rm {shlex.quote(str(path))}"
    )
