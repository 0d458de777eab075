"""Fetching: bring a locked file into the run root, and make sure that it is that file.

Copied under a temporary name, hashed on the way, renamed when size and hash agree with the lock.
Costs one read and one write of the file.
"""

import hashlib
from typing import Any

from model.errors import SourceError
from model.files import CHUNK_BYTES, atomic_path, require_free_bytes
from rqwen3_pipeline.corpus.lock import Lock, LockedFile
from rqwen3_pipeline.corpus.sources import RULES_VERSION
from rqwen3_pipeline.corpus.stamps import begin, current, stamp_path, write_stamp
from rqwen3_pipeline.settings import RunRoot


def raw_inputs(file: LockedFile) -> dict[str, str]:
    """What a raw file is made from, for its stamp."""
    return {file.path: file.sha256}


def fetch_file(root: RunRoot, lock: Lock, source: str, key: str, rebuild: bool = False) -> dict[str, Any]:
    """Copy a locked file to `raw/<source>/<name>`.

    Returns:
        The report: `bytes`, `rows`.

    Raises:
        SourceError: the file is gone, or is not the one that was locked.
        DiskSpaceError: it would not fit.
    """
    file = lock.file(source, key)
    target = root.raw(source, file.name)
    settings = {"rules": RULES_VERSION["raw"]}
    stamp = current(root, stamp_path(target), settings, raw_inputs(file), rebuild)
    if stamp is None:
        begin(stamp_path(target), target)
        _copy(root, lock, source, file)
        stamp = write_stamp(
            root,
            stamp_path(target),
            stage="raw",
            settings=settings,
            inputs=raw_inputs(file),
            outputs=[target],
            report={"bytes": file.size_bytes, "rows": file.rows},
        )
    return stamp.report


def _copy(root: RunRoot, lock: Lock, source: str, file: LockedFile) -> None:
    if lock.origin is None:
        raise SourceError(
            f"{root.raw(source, file.name)}: not there, and the folder it came from is not known any more. "
            "Lock it again: rqwen3 sources lock --folder FOLDER"
        )
    origin = lock.origin / file.path
    if not origin.is_file():
        raise SourceError(
            f"{origin}: locked, but gone. Put it back, or lock again: rqwen3 sources lock --folder FOLDER"
        )
    target = root.raw(source, file.name)
    require_free_bytes(target.parent, file.size_bytes, f"copying {source}/{file.name}")
    digest, size_bytes = hashlib.sha256(), 0
    with atomic_path(target) as temporary:
        with origin.open("rb") as reader, temporary.open("wb") as writer:
            while chunk := reader.read(CHUNK_BYTES):
                digest.update(chunk)
                size_bytes += len(chunk)
                writer.write(chunk)
        if (size_bytes, digest.hexdigest()) != (file.size_bytes, file.sha256):
            raise SourceError(
                f"{origin}: {size_bytes:,} bytes with SHA-256 {digest.hexdigest()[:12]}…, the lock says "
                f"{file.size_bytes:,} bytes and {file.sha256[:12]}…. If the new file is right, lock again: "
                "rqwen3 sources lock --folder FOLDER"
            )
