"""Fetching: bring a locked file into the run root, and make sure that it is that file.

From a folder it is copied under a temporary name, hashed on the way, and renamed when size and hash
agree with the lock: one read and one write. From the Hub it goes through the Hub client's cache, is
hashed there, and gets a second name here (a hard link, which takes no space; a copy where the cache
lies on another file system).
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (pyarrow ships no types)

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from model.errors import SourceError
from model.files import CHUNK_BYTES, atomic_path, require_free_bytes
from rqwen3_pipeline.corpus.hub import Pin, fetch_pinned, first_line, is_cached
from rqwen3_pipeline.corpus.lock import Lock, LockedFile
from rqwen3_pipeline.corpus.sources import RULES_VERSION
from rqwen3_pipeline.corpus.stamps import begin, current, stamp_path, write_stamp
from rqwen3_pipeline.corpus.transfer import blob_path, partial_path
from rqwen3_pipeline.settings import RunRoot


def raw_inputs(file: LockedFile) -> dict[str, str]:
    """What a raw file is made from, for its stamp."""
    return {file.path: file.sha256}


def fetch_file(root: RunRoot, lock: Lock, source: str, key: str, rebuild: bool = False) -> dict[str, Any]:
    """Bring a locked file to `raw/<source>/<name>`.

    Returns:
        The report: `bytes`, `rows`.

    Raises:
        SourceError: the file is gone, can't be had, or is not the one that was locked.
        DiskSpaceError: it would not fit.
    """
    file = lock.file(source, key)
    target = root.raw(source, file.name)
    settings = {"rules": RULES_VERSION["raw"]}
    stamp = current(root, stamp_path(target), settings, raw_inputs(file), rebuild)
    if stamp is None:
        begin(stamp_path(target), target)
        if source in lock.pins:
            _take_from_hub(root, lock.pins[source], source, file)
        else:
            _copy(root, lock, source, file)
        stamp = write_stamp(
            root,
            stamp_path(target),
            stage="raw",
            settings=settings,
            inputs=raw_inputs(file),
            outputs=[target],
            hashes={} if source in lock.pins else {target: file.sha256},
            report={"bytes": file.size_bytes, "rows": _rows(target) if file.rows is None else file.rows},
        )
    return stamp.report


def require_space(root: RunRoot, lock: Lock, items: Sequence[tuple[str, str]]) -> None:
    """Check, before any of them is fetched, that all these files will fit.

    Raises:
        DiskSpaceError: they would not.
    """
    here_bytes = cache_bytes = 0
    cache = _hub_cache() if lock.pins else None
    linked = cache is not None and _device(cache) == _device(root.path)
    for source, key in items:
        file = lock.file(source, key)
        target, pin = root.raw(source, file.name), lock.pins.get(source)
        if target.exists() and target.stat().st_size == file.size_bytes:
            continue
        if pin is not None and not is_cached(pin, file.path):
            cache_bytes += file.size_bytes
        if pin is None or not linked:
            here_bytes += file.size_bytes
    what = f"fetching {len(items)} files"
    if cache is not None and cache_bytes:
        require_free_bytes(cache, cache_bytes, f"{what} into the Hub's cache (HF_HOME)")
    if here_bytes:
        require_free_bytes(root.path, here_bytes, what)


def arrived_bytes(root: RunRoot, lock: Lock, source: str, key: str) -> int:
    """How much of a locked file is here by now, as a transfer goes on: for progress."""
    file = lock.file(source, key)
    target, places = root.raw(source, file.name), list[Path]()
    if source in lock.pins:
        blob = blob_path(lock.pins[source].dataset, file.sha256)
        places = [blob, partial_path(blob)]
    for place in [target, *places, *target.parent.glob(f".{file.name}.*.tmp")]:
        with contextlib.suppress(OSError):
            return min(place.stat().st_size, file.size_bytes)
    return 0


def _hub_cache() -> Path:
    from rqwen3_pipeline.corpus.patience import install

    install()
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _device(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return path.stat().st_dev


def _rows(path: Path) -> int:
    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(
            f"{path}: what the Hub published is no parquet file ({first_line(error)}). Lock another revision: "
            "revision in [data.<source>] of the profile, then rqwen3 sources lock"
        ) from error


def _take_from_hub(root: RunRoot, pin: Pin, source: str, file: LockedFile) -> None:
    cached = fetch_pinned(pin, file.path, file.size_bytes, file.sha256).resolve()
    target = root.raw(source, file.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as temporary:
        try:
            os.link(cached, temporary)
        except OSError:  # another file system, or one without hard links
            require_free_bytes(target.parent, file.size_bytes, f"copying {source}/{file.name}")
            _write_verified(cached, temporary, file)


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
    with atomic_path(target) as temporary:
        _write_verified(origin, temporary, file)


def _write_verified(origin: Path, temporary: Path, file: LockedFile) -> None:
    digest, size_bytes = hashlib.sha256(), 0
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
