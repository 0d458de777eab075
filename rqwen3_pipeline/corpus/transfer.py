"""One file's transfer from the Hub, which goes on where a killed one was.

The Hub's client gives each transfer a temporary name of its own, so what a killed one had is lost: the
files have 2 GB. Its own `http_get` can go on from a byte, though. Here it writes to one name for all,
beside the cache's blob; under the client's own lock, so that of many jobs one transfers and the others
wait. Only what has the size and SHA-256 of the Hub's list becomes the blob, which the client then finds.
A part with a wrong beginning, as a power cut may leave it, is found by its hash and dropped. Costs one
read of the file, to hash it.
"""

# pyright: reportUnknownVariableType=false
# (the Hub's client shows tqdm, which has no types)

import os
import uuid
from pathlib import Path

from model.errors import DiskSpaceError
from model.files import FULL, commit, require_free_bytes, sha256_file

MARK = "rqwen3"
"""Tells our partial files from the client's own."""


def repository_folder(dataset: str) -> Path:
    """A data set's folder in the Hub's cache."""
    from rqwen3_pipeline.corpus.patience import install

    install()
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"datasets--{dataset.replace('/', '--')}"


def blob_path(dataset: str, sha256: str) -> Path:
    """Where the cache keeps a file's bytes."""
    return repository_folder(dataset) / "blobs" / sha256


def partial_path(blob: Path) -> Path:
    """Where the bytes of a file lie that are there so far."""
    return blob.with_name(f"{blob.name}.{MARK}.incomplete")


def transfer(dataset: str, path: str, revision: str, size_bytes: int, sha256: str, again: bool = False) -> str:
    """Bring a file into the cache's blobs, unless it is there.

    Args:
        dataset: `<owner>/<name>`.
        path: of the file, in the data set.
        revision: the commit.
        size_bytes: as the Hub lists it.
        sha256: as the Hub lists it.
        again: begin anew, under a name that no other process can write to.

    Returns:
        Empty; or what was served, in words, if it was something else. Nothing is left of that.

    Raises:
        DiskSpaceError: it does not fit.
        Exception: a dozen types of the Hub's client; what has arrived stays, for the next call.
    """
    blob = blob_path(dataset, sha256)
    locks = blob.parents[2] / ".locks" / blob.parents[1].name
    for folder in (blob.parent, locks):
        folder.mkdir(parents=True, exist_ok=True)
    from huggingface_hub.utils import WeakFileLock

    with WeakFileLock(locks / f"{sha256}.lock"):
        if blob.exists():
            return ""
        part = blob.with_name(f"{sha256}.{uuid.uuid4().hex[:8]}.incomplete") if again else partial_path(blob)
        _receive(part, dataset, path, revision, size_bytes)
        seen = (part.stat().st_size, sha256_file(part))
        if seen != (size_bytes, sha256):
            part.unlink()
            return f"{seen[0]:,} bytes with SHA-256 {seen[1][:12]}…"
        commit(part, blob)
    return ""


def _receive(part: Path, dataset: str, path: str, revision: str, size_bytes: int) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    had_bytes = part.stat().st_size if part.exists() else 0
    if had_bytes > size_bytes:
        part.unlink()
        had_bytes = 0
    if had_bytes == size_bytes:
        return
    require_free_bytes(part.parent, size_bytes - had_bytes, f"fetching {dataset}/{path} into the Hub's cache (HF_HOME)")
    url = hf_hub_url(dataset, path, repo_type="dataset", revision=revision)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    try:
        with part.open("r+b" if had_bytes else "wb") as file:
            file.seek(had_bytes)
            http_get(url, file, resume_size=had_bytes, headers=headers)
    except OSError as error:
        if error.errno not in FULL:
            raise
        part.unlink()
        raise DiskSpaceError(
            f"{part.parent}: {os.strerror(error.errno)} while fetching {dataset}/{path}; what had arrived was removed. "
            "Free some space, or point HF_HOME at a larger file system, and run the same command again."
        ) from error
    finally:
        if part.exists() and not part.stat().st_size:
            part.unlink()
