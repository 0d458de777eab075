"""Benchmark questions in the corpus: found by 13 equal words in a row, counted, and removed if wanted.

Words are runs of letters and digits of the case-folded NFC text: punctuation, spaces and line breaks
don't count. A document is contaminated if it shares one run of 13 words with a question and its right
answer; a question of fewer words can't be found, and is counted as too short. Hashes only choose where
to look: every find is compared word by word, so that the result depends on no hash. Costs some 40 bytes
a run of the benchmarks and 32 MiB, and one pass over the text, some 15 MB a second on one core; a long
text is taken in pieces, so that its words are never in memory all at once.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (pyarrow ships no types)

import multiprocessing
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from model.benchmarks import data_file, members, read_rows
from model.errors import CorpusError
from model.files import read_json, sha256_file, write_json
from rqwen3_pipeline.corpus.documents import read_batches
from rqwen3_pipeline.corpus.lock import Lock
from rqwen3_pipeline.corpus.stamps import input_of, required_stamp, stamp_path
from rqwen3_pipeline.settings import RunRoot

NGRAM_WORDS = 13
_TABLE_BITS = 25
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_WORD = re.compile(r"[^\W_]+")
_PIECE_CHARS = 1_000_000
_SPACE = re.compile(r"\s")
MOST_NAMED = 100
"""Offending documents that a file's report names; all are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """A run of words that a text shares with a benchmark."""

    task: str
    """Name of the benchmark."""
    item: int
    """Row in the benchmark's file, from 1."""
    words: str
    """The first run of words that both have."""


def words_of(text: str) -> list[str]:
    """The words that are compared: runs of letters and digits, case-folded."""
    return _WORD.findall(text.casefold())


class Questions:
    """The runs of words of all questions, ready to be looked for."""

    def __init__(self, texts: Iterable[tuple[str, int, str]]) -> None:
        """Index questions.

        Args:
            texts: task, row in its file, and the question with its right answer.
        """
        self.items: Counter[str] = Counter()
        """Questions of each task."""
        self.too_short: Counter[str] = Counter()
        """Those with fewer than 13 words."""
        self._names: list[tuple[str, int]] = []
        self._words: list[str] = []
        hashes: list[npt.NDArray[np.uint64]] = []
        for task, row, text in texts:
            words = words_of(text)
            self.items[task] += 1
            if len(words) < NGRAM_WORDS:
                self.too_short[task] += 1
                continue
            self._names.append((task, row))
            self._words.append(" ".join(words))
            hashes.append(_run_hashes(words))
        owner_N = np.repeat(np.arange(len(hashes), dtype=np.int32), [len(h) for h in hashes])
        hash_N = np.concatenate(hashes) if hashes else np.empty(0, np.uint64)
        order_N = np.argsort(hash_N, kind="stable")
        self._hash_N, self._owner_N = hash_N[order_N], owner_N[order_N]
        self._may_be = np.zeros(1 << _TABLE_BITS, dtype=np.bool_)
        self._may_be[_places(self._hash_N)] = True

    def first_overlap(self, text: str) -> Overlap | None:
        """The first run of words that the text shares with a question; of several the first in the file."""
        return next(self._overlaps(text), None)

    def tasks_in(self, text: str) -> dict[tuple[str, int], Overlap]:
        """Every question that the text shares a run of words with, by task and row."""
        found: dict[tuple[str, int], Overlap] = {}
        for overlap in self._overlaps(text):
            found.setdefault((overlap.task, overlap.item), overlap)
        return found

    def _overlaps(self, text: str) -> Iterator[Overlap]:
        words: list[str] = []
        for piece in _pieces(text):
            words = words[1 - NGRAM_WORDS :] + words_of(piece)  # a run may begin in the piece before
            for start in self._places_to_look(words):
                yield from self._sharing(words[start : start + NGRAM_WORDS])

    def _places_to_look(self, words: Sequence[str]) -> list[int]:
        """Where the runs begin whose hash some run of a question may have."""
        if len(words) < NGRAM_WORDS or not len(self._hash_N):
            return []
        return np.flatnonzero(self._may_be[_places(_run_hashes(words))]).tolist()

    def _sharing(self, run: Sequence[str]) -> Iterator[Overlap]:
        """The questions that hold a run of 13 words."""
        (hash_,) = _run_hashes(run)
        first, last = (int(np.searchsorted(self._hash_N, hash_, side)) for side in ("left", "right"))
        words = " ".join(run)
        for owner in dict.fromkeys(self._owner_N[first:last].tolist()):
            if f" {words} " in f" {self._words[owner]} ":
                task, row = self._names[owner]
                yield Overlap(task=task, item=row, words=words)


def _pieces(text: str) -> Iterator[str]:
    """A text cut before spaces, into pieces of a bounded length where it has any."""
    start = 0
    while start < len(text):
        space = _SPACE.search(text, start + _PIECE_CHARS)
        end = space.start() if space else len(text)
        yield text[start:end]
        start = end


def _run_hashes(words: Sequence[str]) -> npt.NDArray[np.uint64]:
    """A hash of each run of 13 words: uint64, shape (words - 12,). Of this process alone."""
    word_W = np.fromiter(map(hash, words), dtype=np.int64, count=len(words)).view(np.uint64)
    runs = len(words) - NGRAM_WORDS + 1
    hash_N = np.zeros(runs, dtype=np.uint64)
    for place in range(NGRAM_WORDS):
        hash_N = hash_N * _MULTIPLIER + word_W[place : place + runs]
    return hash_N


def _places(hash_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    return (hash_N >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)


def question_files(root: RunRoot, tasks: Sequence[str]) -> dict[str, Path]:
    """The file of each task and part of one, by the task's name.

    Raises:
        CorpusError: one is not at hand; a corpus can't be said to be free of what nobody looked for.
    """
    parts = [part for name in tasks for part in members(name)]
    files = {part.name: data_file(root.benchmarks, part) for part in parts}
    missing = [name for name, file in files.items() if file is None]
    if missing:
        raise CorpusError(
            f"{root.benchmarks}: has no rows of {missing[0]} ({len(missing)} of {len(files)} missing), so the corpus "
            "can't be compared with it. Bring them: rqwen3 eval --prefetch"
        )
    return {name: file for name, file in files.items() if file is not None}


def question_inputs(root: RunRoot, tasks: Sequence[str]) -> dict[str, str]:
    """SHA-256 of each task's file, by its path below the run root: inputs of what is filtered by them."""
    files = question_files(root, tasks)
    return {path.relative_to(root.path).as_posix(): _hash(*_seen(path)) for path in files.values()}


def read_questions(root: RunRoot, tasks: Sequence[str]) -> Questions:
    """The questions of some benchmarks, indexed; kept for the next call in this process.

    Raises:
        CorpusError: a benchmark is not at hand.
        SourceError: a file of one lacks a column or a label.
    """
    files = question_files(root, tasks)
    return _indexed(tuple((name, *_seen(path)) for name, path in files.items()))


def _seen(path: Path) -> tuple[Path, int, int]:
    stat = path.stat()
    return path, stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=256)
def _hash(path: Path, size_bytes: int, modified_ns: int) -> str:
    return sha256_file(path)


@lru_cache(maxsize=1)
def _indexed(files: tuple[tuple[str, Path, int, int], ...]) -> Questions:
    def texts() -> Iterator[tuple[str, int, str]]:
        for name, path, _, _ in files:
            (task,) = members(name)
            for row, content in enumerate(read_rows(path, task), 1):
                yield name, row, task.text(content)

    return Questions(texts())


def scan_corpus(
    root: RunRoot, lock: Lock, sources: Sequence[str], tasks: Sequence[str], workers: int = 1
) -> dict[str, Any]:
    """Look for questions in every kept document; a file that was looked at is not read again.

    Returns:
        `tasks` {name: questions, too_short, questions_found, documents}, `documents` (contaminated, in all),
        `documents_read`, and `offending` (source, file, row, id, url, task, item, words), at most 100 a file.

    Raises:
        CorpusError: a benchmark or a filtered file is missing, or a worker was killed.
    """
    pieces = [(source, file.key) for source in sources for file in lock.files(source)]
    questions = read_questions(root, tasks)
    reports = _scan_files(partial(scan_file, root.path, tuple(tasks)), pieces, min(workers, len(pieces)))
    found = {(task, item) for report in reports for task, item in report["found"]}
    documents: Counter[str] = Counter()
    for report in reports:
        documents.update(report["documents_by_task"])
    return {
        "tasks": {
            task: {
                "questions": count,
                "too_short": questions.too_short[task],
                "questions_found": sum(name == task for name, _ in found),
                "documents": documents[task],
            }
            for task, count in questions.items.items()
        },
        "documents": sum(report["documents"] for report in reports),
        "documents_read": sum(report["documents_read"] for report in reports),
        "offending": [entry for report in reports for entry in report["offending"]],
    }


def _scan_files(
    scan: Callable[[tuple[str, str]], dict[str, Any]], pieces: Sequence[tuple[str, str]], workers: int
) -> list[dict[str, Any]]:
    if workers < 2:
        return list(map(scan, pieces))
    try:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            return list(pool.map(scan, pieces))
    except BrokenProcessPool as error:
        raise CorpusError(
            f"a worker that looked for benchmark questions was killed ({error}). Run again, with fewer workers if "
            "memory was short; what was looked at is kept."
        ) from error


def scan_file(folder: Path, tasks: tuple[str, ...], piece: tuple[str, str]) -> dict[str, Any]:
    """Look for questions in one filtered file, or read what was found before; kept in `contamination/`."""
    root, (source, key) = RunRoot(folder), piece
    filtered, kept = root.filtered(source, key), root.path / "contamination" / source / f"{key}.json"
    inputs = input_of(root, required_stamp(stamp_path(filtered), str(filtered)), filtered)
    inputs |= question_inputs(root, tasks)
    before = read_json(kept) if kept.is_file() else {}
    if before.get("inputs") == inputs:
        return before
    questions = read_questions(root, tasks)
    found: dict[tuple[str, int], None] = {}
    by_task: Counter[str] = Counter()
    offending: list[dict[str, Any]] = []
    documents = read = 0
    with pq.ParquetFile(filtered) as file:
        for batch in read_batches(filtered, file, ("row", "id", "url", "text")):
            for document in batch.to_pylist():
                read += 1
                overlaps = questions.tasks_in(document["text"])
                if not overlaps:
                    continue
                documents += 1
                found |= dict.fromkeys(overlaps)
                by_task.update({overlap.task for overlap in overlaps.values()})
                if len(offending) < MOST_NAMED:
                    first = asdict(next(iter(overlaps.values())))
                    place = {name: document[name] for name in ("row", "id", "url")}
                    offending.append({"source": source, "file": key} | place | first)
    report = {"inputs": inputs, "found": [list(name) for name in found], "documents_by_task": dict(by_task)}
    report |= {"documents": documents, "documents_read": read, "offending": offending}
    write_json(kept, report)
    return report
