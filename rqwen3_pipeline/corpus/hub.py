"""The Hugging Face Hub, through its own client: cached, verified, offline-aware.

HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean everywhere. A locked file is asked
for by its commit: at most three requests (where it lies, a redirect, its bytes), none if the cache has
it, and no listing. A transfer that breaks or is killed goes on from where it was.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from model.errors import RQwen3Error, SourceError
from model.files import sha256_file
from rqwen3_pipeline.corpus.transfer import blob_path, partial_path, transfer

TOKENIZER_REPO = "Qwen/Qwen3-0.6B"
"""Any Qwen3 model's repository carries the same tokenizer.json; this is the smallest."""

ABANDONED_S = 3600.0
"""A partial file in the cache that nobody has written to for so long was left by a killed process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """A data set at one commit."""

    dataset: str
    """`<owner>/<name>`."""
    config: str
    """The configuration that was resolved; empty for the only one."""
    revision: str
    """The commit."""


def fetch_tokenizer(repo: str = TOKENIZER_REPO) -> Path:
    """Download Qwen3's tokenizer.json, or take it from the client's cache.

    Returns:
        Its path in the cache. The caller compares its hash with the pinned one.

    Raises:
        SourceError: it is in no cache and can't be downloaded; the message says how to bring it by hand.
    """
    from rqwen3_pipeline.corpus.patience import HubUnavailableError, install

    install()
    from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType] tqdm has no types

    try:
        try:
            return Path(hf_hub_download(repo, "tokenizer.json"))
        except HubUnavailableError:
            with contextlib.suppress(Exception):
                return Path(hf_hub_download(repo, "tokenizer.json", local_files_only=True))
            raise
    except Exception as error:  # the client raises a dozen types; each means that there is no file
        raise SourceError(
            f"tokenizer.json of {repo}: not in the cache, and not to be had from the Hub "
            f"({type(error).__name__}: {first_line(error)}). Name a copy of Qwen3's tokenizer.json: "
            "make demo SAMPLES=DIR TOKENIZER=FILE, or rqwen3 run --tokenizer FILE"
        ) from error


def fetch_pinned(pin: Pin, path: str, size_bytes: int, sha256: str) -> Path:
    """Bring a file of a data set into the client's cache, unless it is there.

    Args:
        pin: the data set and its commit.
        path: of the file, in the data set.
        size_bytes: as the Hub lists it.
        sha256: as the Hub lists it.

    Returns:
        Its path in the cache; its bytes have this size and hash.

    Raises:
        SourceError: it can't be had, or what is served is something else, twice; nothing of it stays.
        DiskSpaceError: it would not fit into the cache.
    """
    from rqwen3_pipeline.corpus.patience import install

    install()
    from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType] tqdm has no types

    blob, seen = blob_path(pin.dataset, sha256), ""
    for again in (False, True):
        fresh = not is_cached(pin, path) and not blob.exists()
        try:
            if fresh:
                _sweep(blob)
                seen = transfer(pin.dataset, path, pin.revision, size_bytes, sha256, again)
                if seen:
                    continue
            found = Path(hf_hub_download(pin.dataset, path, repo_type="dataset", revision=pin.revision))
        except Exception as error:  # the client raises a dozen types
            raise explain(error, pin.dataset, pin.revision, path) from error
        if fresh and found.resolve() == blob.resolve():
            return found  # its bytes were verified before they got this name
        here = (found.stat().st_size, sha256_file(found))
        if here == (size_bytes, sha256):
            return found
        seen = f"{here[0]:,} bytes with SHA-256 {here[1][:12]}…"
        found.resolve().unlink(missing_ok=True)
        found.unlink(missing_ok=True)
    raise SourceError(
        f"{pin.dataset}/{path}: the Hub served {seen} twice, its list at {pin.revision[:12]} says {size_bytes:,} bytes "
        f"and {sha256[:12]}…. Nothing was kept. Try again later: rqwen3 sources fetch"
    )


def is_cached(pin: Pin, path: str) -> bool:
    """Whether the client's cache holds a file; its bytes are not looked at."""
    from rqwen3_pipeline.corpus.patience import install

    install()
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(pin.dataset, path, revision=pin.revision, repo_type="dataset"), str)


def _sweep(blob: Path) -> None:
    """Delete what killed transfers have left that nobody can go on with."""
    for leftover in set(blob.parent.glob(f"{blob.name}.*incomplete")) - {partial_path(blob)}:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - leftover.stat().st_mtime > ABANDONED_S:
                leftover.unlink()


def explain(error: Exception, dataset: str, revision: str, path: str = "") -> RQwen3Error:
    """Say in words why the Hub's clients failed, and the way out.

    Args:
        error: what they raised; the errors behind it are looked at too.
        dataset: that was asked for.
        revision: that was asked for.
        path: the file that was asked for, if it was one.
    """
    from huggingface_hub import constants, errors

    where, chain = f"{dataset}/{path}" if path else dataset, list(_chain(error))
    for cause in chain:
        if isinstance(cause, RQwen3Error):
            return cause
    known: list[tuple[type[Exception] | tuple[type[Exception], ...], str]] = [
        (
            errors.GatedRepoError,
            f"the data set is gated. Agree to its terms at {constants.ENDPOINT}/datasets/{dataset} with your account, "
            "then name a token of that account: HF_TOKEN=hf_…, or hf auth login",
        ),
        (
            errors.RevisionNotFoundError,
            f"the revision {revision} is not there (any more). Pin what is there now: rqwen3 sources lock --update; "
            "or bring the files by hand: rqwen3 sources lock --folder DIR",
        ),
        (
            errors.EntryNotFoundError,
            f"not found at revision {revision}. Look at {constants.ENDPOINT}/datasets/{dataset}/tree/{revision}, and "
            "lock again: rqwen3 sources lock --update",
        ),
        (
            errors.RepositoryNotFoundError,
            "no such data set, or a private one. Check dataset in the profile's [data.<source>]; for a private one "
            "set HF_TOKEN",
        ),
        (
            (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError),
            f"not in the cache ({constants.HF_HUB_CACHE}), and the Hub can't be asked. Where there is a network, with "
            "the same HF_HOME: rqwen3 sources lock, then rqwen3 sources fetch; or unset HF_HUB_OFFLINE",
        ),
    ]
    for kind, words in known:
        if any(isinstance(cause, kind) and not _is_of_the_cache(cause, kind) for cause in chain):
            return SourceError(f"{where}: {words}")
    if any(getattr(getattr(cause, "response", None), "status_code", 0) in (401, 403) for cause in chain):
        return SourceError(f"{where}: the Hub refuses access ({first_line(error)}). Check HF_TOKEN, or unset it.")
    return SourceError(f"{where}: {type(error).__name__}: {first_line(error)}. Run it again: rqwen3 sources fetch")


def _is_of_the_cache(cause: BaseException, kind: object) -> bool:
    """A missing entry of the cache is also an "entry not found"; it is told apart by its own words."""
    from huggingface_hub import errors

    return kind is errors.EntryNotFoundError and isinstance(cause, errors.LocalEntryNotFoundError)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
