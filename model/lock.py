"""One trainer per run folder: the file LOCK names the holder, and a second trainer leaves at once.

The lock is a hard link to a complete file, which either succeeds or finds another there, on network
file systems too (without hard links, a file that is created only where none is). It is taken over only
from a holder that is known to be gone: one of this very kernel and process namespace whose process has
ended (start times guard against a reused number), one of this host before it was started anew, or one
of whose job a command says so. The lock of a dead holder is set aside, never just removed, and the new
one names those before it until the ledger does: a kill at any moment loses none of them. Costs two small
writes per submission, one more for a takeover.
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
from model.files import fsync_folder, read_json, write_json
from model.process import boot_id, has_ended, pid_namespace, process_start

ALIVE, GONE, UNKNOWN = "alive", "gone", "unknown"
COMMAND_TIMEOUT_S = 60
DRAFTS = 3
"""Times that a lock is drafted: a holder that has just begun may sweep a draft away as a leftover."""
NO_HARD_LINKS = frozenset((errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK))
"""What a file system without hard links answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLock:
    """A lock that this process holds."""

    path: Path
    """The file LOCK."""
    record: dict[str, Any]
    """What it says."""

    @property
    def predecessors(self) -> list[dict[str, Any]]:
        """What the locks of dead holders said, oldest first, as long as the ledger may lack their records."""
        return self.record.get("predecessors", [])

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
        """Remove the file if it is ours, and stands for no dead holder."""
        if not self.predecessors and self.still_held():
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
    if not _create(path, record) and (path.exists() or not _create(path, record)):
        _take_over(path, record, job_alive_command)
    held = RunLock(path=path, record=record)
    _adopt(held, job_alive_command)
    return held


def _take_over(path: Path, record: dict[str, Any], job_alive_command: str | None) -> None:
    holder = _read(path)
    verdict, why = holder_state(holder, job_alive_command)
    aside = _aside(path, record["token"])
    with _takers_one_by_one(path.parent):
        if verdict != GONE or _read(path) != holder or not _set_aside(path, aside, holder) or not _create(path, record):
            raise LockHeldError(_held_message(path, _read(path) or holder, why))


def _adopt(held: RunLock, job_alive_command: str | None) -> None:
    """Let the lock stand for the dead holders whose locks were set aside, by us or by a taker that came no further."""
    ours = _aside(held.path, held.record["token"])
    found = {aside: _read(aside) for aside in held.path.parent.glob(_aside(held.path, "*").name)}
    dead = {
        aside: record
        for aside, record in found.items()
        if record and (aside == ours or holder_state(record, job_alive_command)[0] == GONE)
    }
    if not dead:
        return
    predecessors: dict[str | None, dict[str, Any]] = {}
    for record in sorted(dead.values(), key=lambda record: str(record.get("started"))):
        before = record.pop("predecessors", [])
        predecessors |= {one.get("token"): one for one in (*before, record)}
    held.update(predecessors=list(predecessors.values()))
    for aside in dead:
        aside.unlink(missing_ok=True)


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
        if has_ended(pid, pid_start):
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
    """Create the lock; false when there is one."""
    draft = path.with_name(f".{path.name}.{record['token']}.tmp")
    for _ in range(DRAFTS):
        try:
            write_json(draft, record)
            return _link(path, draft, record)
        except FileNotFoundError:  # the draft was swept away
            if path.exists():
                return _read(path) == record
        finally:
            draft.unlink(missing_ok=True)
    return False


def _link(path: Path, draft: Path, record: dict[str, Any]) -> bool:
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


def _aside(path: Path, token: str) -> Path:
    """Where a taker puts the lock of a dead holder; a name that no sweep of temporary files takes for one."""
    return path.with_name(f".{path.name}.{token}.gone")


def _set_aside(path: Path, aside: Path, holder: dict[str, Any] | None) -> bool:
    """Move the stale lock away; false when another taker was faster, whose lock is put back."""
    try:
        path.rename(aside)
    except FileNotFoundError:
        return True
    if _read(aside) == holder:
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
