"""Files that are either whole or absent: atomic writes, hashes, append-only logs, free space.

Everything that this project leaves under a final name was written to a temporary name in the same
folder, flushed to disk and renamed. A temporary name starts with a dot and ends in `.tmp`, so that
no reader takes it for data. Costs one fsync for the file and one for its folder per write.
"""

import contextlib
import ctypes
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TextIO

from model.errors import CorpusError, DiskSpaceError, EnvironmentProblem, LockHeldError
from model.process import boot_id, has_ended, pid_namespace, process_start

CHUNK_BYTES = 1024 * 1024
"""Read at a time where a whole file is read: what still lies in the cache when it is hashed."""
FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""What a write that finds no room answers: a full disk, a used-up quota, a limit on a file's size."""
_HELD = frozenset((errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES))
"""What `flock` answers where another holds the lock; anything else means that there are none to be had."""
_NOT_ALLOWED = frozenset((errno.EACCES, errno.EPERM, errno.EROFS))
NETWORK_FILE_SYSTEMS = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "cvfs", "dvs", "fhgfs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
    "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "vboxsf", "wekafs",
})  # fmt: skip
LOCAL_FUSE = frozenset({
    "fuse.bindfs", "fuse.encfs", "fuse.fuse-overlayfs", "fuse.fuse2fs", "fuse.gocryptfs", "fuse.lxcfs", "fuse.mergerfs",
    "fuse.ntfs-3g", "fuse.portal", "fuse.squashfuse", "fuse.squashfuse_ll", "fuse.unionfs",
})  # fmt: skip
"""Of what runs in user space the few that keep their files on this host; the others mostly reach for a server."""


def is_network(kind: str) -> bool:
    """Whether a type of file system, as the mount table names it, is one that other hosts may write to as well."""
    return kind in NETWORK_FILE_SYSTEMS or (kind.startswith("fuse.") and kind not in LOCAL_FUSE)


LEFT_S = 86_400.0
"""A temporary file or folder in which nothing has happened for so long, in seconds, has no writer any more."""
_WRITER = re.compile(r"\.([0-9a-f]{8})-(\d+)-(\d+)\.tmp$")
"""In a temporary name: machine and namespace, number and start of the process that writes."""


def temporary_path(path: Path) -> Path:
    """The name under which `path` is written before it is complete, unique to this process on any machine."""
    pid = os.getpid()
    return path.with_name(f".{path.name}.{_machine()}-{pid}-{process_start(pid) or 0}.tmp")


def _machine() -> str:
    """This machine since its start, and the namespace of this process's number."""
    return sha256_bytes(f"{boot_id() or socket.gethostname()} {pid_namespace()}".encode())[:8]


def _left(temporary: Path) -> bool:
    """Whether nobody writes a temporary file or folder any more.

    A writer of this machine and namespace is looked up; of any other one only a day's silence tells.
    """
    writer = _WRITER.search(temporary.name)
    if writer is not None and writer[1] == _machine():
        return has_ended(int(writer[2]), int(writer[3]) or None)
    return time.time() - temporary.stat().st_ctime > LEFT_S  # linking, which keeps a file's mtime, sets this


def sweep_dead(path: Path) -> None:
    """Delete what killed writers of `path` have left beside it; what can't be deleted stays."""
    _sweep(path.parent, f".{glob.escape(path.name)}.*.tmp", _left)


def _sweep(folder: Path, pattern: str, unwanted: Callable[[Path], bool]) -> None:
    for temporary in folder.glob(pattern):
        with contextlib.suppress(OSError):  # another sweep was faster, or it is another user's
            if unwanted(temporary):
                shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink()


def fsync_folder(folder: Path) -> None:
    """Flush a folder's entries, without which a rename may be lost with the power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(temporary: Path, path: Path) -> None:
    """Flush `temporary` to disk and give it its final name `path`, replacing what was there."""
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    temporary.replace(path)
    fsync_folder(path.parent)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes `path` when the block ends well, and vanishes if not.

    What killed writers of `path` have left goes first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep_dead(path)
    temporary = temporary_path(path)
    try:
        yield temporary
        commit(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_folder(draft: Path, folder: Path) -> None:
    """Give a folder its final name; one of that name is exchanged for it in one step and then deleted.

    Where the file system can't exchange, the old one is first moved aside; should that be all that is done,
    `settle_folder` brings it back.
    """
    if folder.exists():
        at_current, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
        rename = getattr(ctypes.CDLL(None), "renameat2", None)
        if rename is None or rename(at_current, os.fsencode(draft), at_current, os.fsencode(folder), exchange):
            settle_folder(folder)
            folder.rename(_aside(folder))
            draft.rename(folder)
            draft = _aside(folder)
        shutil.rmtree(draft)
    else:
        draft.rename(folder)
    fsync_folder(folder.parent)


def settle_folder(folder: Path) -> None:
    """Finish what a killed `replace_folder` began: bring back the folder that it had moved aside, or delete that."""
    aside = _aside(folder)
    if aside.exists():
        shutil.rmtree(aside) if folder.exists() else aside.rename(folder)
    sweep_dead(folder)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 to `path`, whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text, fit for hashing."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with sorted keys, whole or not at all."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        CorpusError: the file is no JSON; the message names it and the position.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CorpusError(f"{path}: not valid JSON ({error}). Delete it and run the same command again.") from error


def sha256_bytes(data: bytes) -> str:
    """SHA-256 of `data`, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append_jsonl(path: Path, record: dict[str, Any]) -> None:
    """Append one record as a line and flush it to disk.

    A torn last line, left by a kill, is first ended, so that it can't swallow the new record.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read a log of JSON lines; a missing file is an empty log, a torn line is passed over."""
    if not path.exists():
        return []
    records: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except (UnicodeDecodeError, json.JSONDecodeError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def sweep_temporaries(folder: Path, *, writers_too: bool = True) -> None:
    """Delete all temporary files and folders in a folder.

    Args:
        folder: it may be missing.
        writers_too: those too that somebody may still write, for a caller who knows that nobody does.
    """
    _sweep(folder, ".*.tmp", lambda temporary: writers_too or _left(temporary))


def require_free_bytes(folder: Path, needed_bytes: int, purpose: str) -> None:
    """Check that `folder`'s file system has room for `needed_bytes`.

    Raises:
        DiskSpaceError: there is less; the message gives both figures.
    """
    existing, free_bytes = _room(folder)
    if free_bytes < needed_bytes:
        raise DiskSpaceError(
            f"{existing}: {_size(free_bytes)} free, {purpose} needs {_size(needed_bytes)}. "
            "Free some space, or point RQWEN3_HOME at a larger file system."
        )


def _room(folder: Path) -> tuple[Path, int]:
    """The nearest folder that is there, from `folder` upwards, and the free bytes of its file system."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    return existing, shutil.disk_usage(existing).free


def _size(size_bytes: int) -> str:
    """A size for a person to read."""
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"


def why_not_written(error: OSError, folder: Path) -> str | None:
    """Say in words why a file could not be written, and the way out; None if the error is of another kind.

    Args:
        error: what the system answered.
        folder: where the work was going on.
    """
    where, words = error.filename or folder, os.strerror(error.errno or 0)
    if error.errno in FULL:
        return (
            f"{folder}: {words} ({_size(_room(folder)[1])} free now); nothing was left half-written. Free some space, "
            "or point RQWEN3_HOME at a larger file system, and run the same command again."
        )
    if error.errno in _NOT_ALLOWED:
        return f"{where}: {words}. Make it writable for you, or name another run root: RQWEN3_HOME, or --home DIR."
    return None


def file_system_kind(path: Path) -> str:
    """The type of the file system that holds `path` (`ext4`, `nfs4`, …), from the mount table.

    Returns `unknown` where there is no /proc/mounts.
    """
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return "unknown"
    target = os.path.realpath(path)
    best_point, best_kind = "", "unknown"
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        _, point, kind, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best_point):
            best_point, best_kind = point, kind
    return best_kind


@contextlib.contextmanager
def hold_lock(path: Path, purpose: str, what: str | None = None) -> Iterator[TextIO]:
    """Hold an exclusive lock while the block runs; yields the file, which names the holder and goes when it is done.

    The kernel frees it when the process dies, however it dies. It guards one host: processes on
    other hosts are told apart only where the file system passes `flock` on.

    Args:
        path: the lock file.
        purpose: what the holder does, for whoever is refused.
        what: what is locked, in words; the folder of `path` by default.

    Raises:
        LockHeldError: another process holds it; the message gives its host, process and purpose.
        EnvironmentProblem: the file system takes no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path, what or str(path.parent)) as file:
        file.truncate(0)
        file.write(f"{purpose} (host {socket.gethostname()}, process {os.getpid()})")
        file.flush()
        try:
            yield file
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path, what: str) -> TextIO:
    """The lock file, opened and locked; one that its last holder has just deleted is no lock any more."""
    while True:
        file = path.open("a+", encoding="utf-8")
        if not try_lock(file, path.parent):
            with file:
                file.seek(0)
                holder = file.read().strip() or "an unknown process"
            raise LockHeldError(f"{what}: in use by {holder}. Wait until it ends, or stop it first.")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def try_lock(file: IO[str], folder: Path) -> bool:
    """Take the lock of an open file in `folder`, unless another holds it: then false, at once.

    Raises:
        EnvironmentProblem: the file system takes no locks, as Lustre mounted without `flock`; the file is closed.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        file.close()
        raise EnvironmentProblem(
            f"{folder}: the file system ({file_system_kind(folder)}) takes no file locks: {error.strerror}. Set "
            "RQWEN3_HOME to a folder on another one, or ask for the mount option flock; rqwen3 doctor tries it."
        ) from error
    return True
