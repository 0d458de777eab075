"""The source lock: which files a corpus is made from, in which order, with which hashes.

A local folder holds `<source>.parquet`, or `<source>/` with parquet files at any depth (a hyphen
for the underscore is fine). Each file gets a five-digit key, its place in a seeded order that goes
round the folders, so that any first part of it represents them all. `sources.lock.json` says
nothing of where the folder lies, so that equal files give an equal lock on every machine; that is
kept in `raw/origin.json`. Costs one read of every file, to hash it.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from model.errors import CorpusError, SourceError
from model.files import read_json, sha256_bytes, sha256_file, sweep_dead, write_json
from rqwen3_pipeline.corpus.documents import check_file
from rqwen3_pipeline.corpus.hub import Pin
from rqwen3_pipeline.corpus.sources import CorpusConfig
from rqwen3_pipeline.settings import RunRoot

FORMAT_VERSION = 1
LONGEST_NAME_BYTES = 219
"""File systems take 255 bytes. A stamp's name is 3 longer than its file's, a temporary one up to 33 longer still."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LockedFile:
    """One raw file."""

    key: str
    """Five digits: its place in the source's order, and its name in every later stage."""
    path: str
    """Below the folder it comes from."""
    name: str
    """Below `raw/<source>/`: the path with `/` written as `__`, see `raw_names`."""
    size_bytes: int
    """Its size."""
    sha256: str
    """Of its bytes."""
    rows: int | None
    """Rows by the parquet footer; None for the Hub's files, whose footers are not read before they are fetched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    """All files of a corpus, by source."""

    sources: dict[str, tuple[LockedFile, ...]]
    """In the order of the keys."""
    sha256: str
    """Of `sources.lock.json`."""
    origin: Path | None
    """The folder the files were locked in; None where that is not known any more, or they are the Hub's."""
    pins: dict[str, Pin] = field(default_factory=dict[str, Pin])
    """The Hub's data set of each source; empty for a folder."""

    def files(self, source: str) -> tuple[LockedFile, ...]:
        """A source's files, in the order of their keys.

        Raises:
            CorpusError: the lock has no such source.
        """
        if source not in self.sources:
            raise CorpusError(
                f"the lock has no source {source!r}. Lock it: rqwen3 sources lock (--folder DIR for your own)"
            )
        return self.sources[source]

    def file(self, source: str, key: str) -> LockedFile:
        """One file by its key.

        Raises:
            CorpusError: there is none.
        """
        for file in self.files(source):
            if file.key == key:
                return file
        raise CorpusError(f"the lock has no file {key!r} of {source}; it has {len(self.files(source))} files")


def lock_folder(root: RunRoot, config: CorpusConfig, folder: Path) -> Lock:
    """Lock every configured source's files in a local folder.

    Locking the same files again writes nothing.

    Raises:
        SourceError: a source is missing or there twice, two files would get one name, or a file is no
            whole parquet file or lacks a column; the message names the file. Or an experiment has been trained
            on other files.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        raise SourceError(f"{folder}: no such folder. Name the folder that holds the sources' parquet files.")
    sweep_dead(origin_path(root))
    sources = {name: _lock_source(config, folder, name) for name in config.sources}
    content = {
        "format_version": FORMAT_VERSION,
        "origin": "folder",
        "seed": config.lock_seed,
        "sources": {name: {"files": [asdict(file) for file in files]} for name, files in sources.items()},
    }
    return save_lock(root, content, folder)


def save_lock(root: RunRoot, content: dict[str, Any], folder: Path | None = None) -> Lock:
    """Write `sources.lock.json` if it says something new, and drop what was made of files locked no more.

    Raises:
        SourceError: files are no longer locked that an experiment of this run root has been trained on.
    """
    sweep_dead(root.lock)
    _require_untrained(root, content)
    if folder is not None:
        _write_if_changed(origin_path(root), {"folder": str(folder)})
    if _write_if_changed(root.lock, content):
        for name, entry in content["sources"].items():
            _remove_unlocked(root, name, {file["key"] for file in entry["files"]})
    return read_lock(root)


def _require_untrained(root: RunRoot, content: dict[str, Any]) -> None:
    """Check that no training hangs on files that would be locked no more."""
    trained = sorted({path.parents[1].name for path in root.path.glob("experiments/*/checkpoints/*.pt")})
    if not trained or not root.lock.exists():
        return
    hashes = {file["sha256"] for entry in content["sources"].values() for file in entry["files"]}
    gone = [file.path for files in read_lock(root).sources.values() for file in files if file.sha256 not in hashes]
    if gone:
        raise SourceError(
            f"{root.lock}: {len(gone):,} locked files ({gone[0]} first) are not among these sources, and the "
            f"experiment {trained[0]} has been trained on them. Another corpus goes into a run root of its own: "
            f"set RQWEN3_HOME or --home to another folder. If the training is not wanted any more, first remove "
            f"{root.path / 'experiments'}"
        )


def read_lock(root: RunRoot) -> Lock:
    """Read `sources.lock.json`.

    Raises:
        CorpusError: it is missing, damaged, or of another format version.
    """
    path = root.lock
    if not path.exists():
        raise CorpusError(f"{path}: no source lock. Make it: rqwen3 sources lock (--folder DIR for your own files)")
    content: Any = read_json(path)
    data = cast(dict[str, Any], content) if isinstance(content, dict) else {}
    again = "Lock the sources again: rqwen3 sources lock (--folder DIR for your own files)"
    if data.get("format_version") != FORMAT_VERSION:
        raise CorpusError(f"{path}: not a lock of format version {FORMAT_VERSION}. {again}")
    try:
        entries: dict[str, Any] = data["sources"]
        sources = {name: tuple(LockedFile(**file) for file in entry["files"]) for name, entry in entries.items()}
        hub = {name: entry["hub"] for name, entry in entries.items() if data["origin"] == "hub"}
        pins = {name: Pin(**pin) for name, pin in hub.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise CorpusError(f"{path}: an entry is not as it should be ({error}). {again}") from error
    origin = origin_path(root)
    folder = Path(read_json(origin)["folder"]) if origin.exists() and not pins else None
    return Lock(sources=sources, sha256=sha256_file(path), origin=folder, pins=pins)


def origin_path(root: RunRoot) -> Path:
    """Where it is kept from which folder the files were locked."""
    return root.path / "raw" / "origin.json"


def _write_if_changed(path: Path, content: Any) -> bool:
    changed = not path.exists() or read_json(path) != content
    if changed:
        write_json(path, content)
    return changed


def _remove_unlocked(root: RunRoot, source: str, keys: set[str]) -> None:
    """Delete what an earlier lock's stages made of files that are not locked any more; raw files stay."""
    places = [root.filtered(source, "x").parent, root.digests(source, "x").parent, root.survivors(source, "x").parent]
    made = [(path, path.name[:5]) for place in places for path in place.glob("[0-9]*.*")]
    for place in (root.tokens, root.heldout):
        made += [(path, path.name[len(source) + 1 :][:5]) for path in place.glob(f"{source}-[0-9]*.*")]
    for path, key in made:
        if key not in keys:
            path.unlink(missing_ok=True)


def raw_names(paths: list[str], source: str, where: str) -> dict[str, str]:
    """The name of each path below `raw/<source>/`: with `/` written as `__`.

    Of a name longer than `LONGEST_NAME_BYTES` the end stays, after the first 16 digits of its SHA-256.

    Raises:
        SourceError: two paths would get one name, or one is no UTF-8.
    """
    names: dict[str, str] = {}
    for path in paths:
        name = _fitting(path.replace("/", "__"), where)
        if name in names:
            raise SourceError(
                f"{where}/{path} and {where}/{names[name]} would both be raw/{source}/{name}. Rename one of them."
            )
        names[name] = path
    return {path: name for name, path in names.items()}


def _fitting(name: str, where: str) -> str:
    try:
        data = name.encode()
    except UnicodeEncodeError as error:
        raise SourceError(f"{where}: the name of the file {name!a} is no UTF-8. Rename it.") from error
    if len(data) <= LONGEST_NAME_BYTES:
        return name
    digest = sha256_bytes(data)[:16]
    return f"{digest}__{data[len(digest) + 2 - LONGEST_NAME_BYTES :].decode(errors='ignore')}"


def _lock_source(config: CorpusConfig, folder: Path, source: str) -> tuple[LockedFile, ...]:
    paths = _find(folder, source)
    names = raw_names(paths, source, str(folder))
    rows = {path: check_file(folder / path, source, config) for path in paths}
    with ThreadPoolExecutor() as pool:  # hashing lets the others run
        hashes = dict(zip(paths, pool.map(sha256_file, (folder / path for path in paths)), strict=True))
    return tuple(
        LockedFile(
            key=f"{index:05d}",
            path=path,
            name=names[path],
            size_bytes=(folder / path).stat().st_size,
            sha256=hashes[path],
            rows=rows[path],
        )
        for index, path in enumerate(seeded_order(paths, config.lock_seed))
    )


def _find(folder: Path, source: str) -> list[str]:
    stems = dict.fromkeys((source, source.replace("_", "-")))
    places = [folder / name for stem in stems for name in (f"{stem}.parquet", stem)]
    found = [place for place in places if (place.is_file() if place.suffix else place.is_dir())]
    if not found:
        raise SourceError(f"{folder}: no {source}.parquet and no folder {source}/. Add it, or remove [data.{source}].")
    if len(found) > 1:
        both = " and ".join(place.name for place in found)
        raise SourceError(f"{folder}: {both} are both there; which one is {source}? Remove or rename one.")
    place = found[0]
    files = [place] if place.is_file() else sorted(place.rglob("*.parquet"))
    paths = [file.relative_to(folder).as_posix() for file in files if file.is_file()]
    paths = [path for path in paths if not any(part.startswith(".") for part in path.split("/"))]
    if not paths:
        raise SourceError(f"{place}: holds no .parquet file. Add some, or remove [data.{source}].")
    return paths


def seeded_order(paths: list[str], seed: int) -> list[str]:
    """Order files by seed, going round their folders; the order in which they are listed is no matter."""
    queues = [queue for _, queue in _queues(paths, seed)]
    rounds = max((len(queue) for queue in queues), default=0)
    return [queue[i] for i in range(rounds) for queue in queues if i < len(queue)]


def weighted_order(sizes: dict[str, int], weights: dict[str, float], seed: int) -> list[str]:
    """Order files by seed so that any first part of the order spends its bytes on the folders by weight.

    Next comes a file of the folder that has had the fewest bytes for its weight.

    Args:
        sizes: bytes of each file, by its path.
        weights: of the folders, by the last part of their path; each must be there.
        seed: of the order within a folder, and among folders that are even.
    """
    queues = _queues(list(sizes), seed)
    spent = [0.0] * len(queues)
    order: list[str] = []
    while len(order) < len(sizes):
        index = min((i for i, (_, queue) in enumerate(queues) if queue), key=lambda i: (spent[i], i))
        folder, queue = queues[index]
        order.append(queue.pop(0))
        spent[index] += sizes[order[-1]] / weights[folder.rpartition("/")[2]]
    return order


def _queues(paths: list[str], seed: int) -> list[tuple[str, list[str]]]:
    """The folders and the files of each, both in seeded order."""

    def rank(name: str) -> tuple[bytes, str]:
        return hashlib.sha256(f"{seed}/{name}".encode()).digest(), name

    folders: dict[str, list[str]] = {}
    for path in paths:
        folders.setdefault(path.rpartition("/")[0], []).append(path)
    return [(folder, sorted(folders[folder], key=rank)) for folder in sorted(folders, key=rank)]
