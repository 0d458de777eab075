"""The documents behind a number of the funnel: reads the raw file again, with the same rule.

Which ones is decided by the number alone: `count` of them, evenly spread over all that the reason
holds, in the order of the lock. So the same call shows the same documents. Costs a read of the raw
files that hold them, each up to the last one that is shown.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (pyarrow ships no types)

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from model.errors import ConfigError, CorpusError
from rqwen3_pipeline.corpus.documents import BUFFER_BYTES, Document, read_batches, read_documents
from rqwen3_pipeline.corpus.filters import filtered_report, rule_of
from rqwen3_pipeline.corpus.lock import Lock
from rqwen3_pipeline.corpus.pieces import is_current
from rqwen3_pipeline.corpus.sources import CorpusConfig
from rqwen3_pipeline.corpus.stamps import FETCH
from rqwen3_pipeline.settings import RunRoot

SHOWN_CHARS = 1500


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """One document, and why it was kept or dropped."""

    source: str
    """Its source."""
    file: str
    """Key of its file in the lock."""
    path: str
    """The raw file."""
    reason: str
    """The rule's answer."""
    document: Document
    """As the rule saw it."""
    raw: dict[str, Any]
    """The row's columns as they lie in the raw file, where the document has no text; else empty."""


def documents_dropped(
    root: RunRoot, config: CorpusConfig, lock: Lock, source: str, reason: str, count: int
) -> Iterator[Shown]:
    """Show `count` of a source's documents that were dropped for a reason (or `kept`).

    Only files that are filtered count. Where none is, as after a source was refused for keeping too
    little, the first file that was fetched is judged here.

    Raises:
        ConfigError: no document has this reason; the message lists those that there are.
        CorpusError: nothing of the source is there.
        SourceError: a raw file is damaged.
    """
    funnels = _funnels(root, config, lock, source)
    total = sum(funnel.get(reason, 0) for funnel in funnels.values())
    if not total:
        there = sorted({name for funnel in funnels.values() for name, number in funnel.items() if number})
        raise ConfigError(
            f"--dropped-for {reason}: no document of {source} in {len(funnels)} files. There are: {', '.join(there)}."
        )
    numbers = sorted({(2 * i + 1) * total // (2 * min(count, total)) for i in range(min(count, total))})
    before = 0
    for key, funnel in funnels.items():
        here = [number - before for number in numbers if before <= number < before + funnel.get(reason, 0)]
        before += funnel.get(reason, 0)
        if here:
            yield from _of_file(root, config, lock, source, key, reason, here)


def _funnels(root: RunRoot, config: CorpusConfig, lock: Lock, source: str) -> dict[str, dict[str, int]]:
    """The funnel of each file that has one, by key."""
    found = {f.key: filtered_report(root, config, lock, source, f.key) for f in lock.files(source)}
    done = {key: report["funnel"] for key, report in found.items() if report is not None}
    if done:
        return done
    for file in lock.files(source):
        if is_current("raw", root, config, lock, (source, file.key)):
            counts: dict[str, int] = {}
            for _, reason in _judged(root, root.raw(source, file.name), source, config):
                counts[reason] = counts.get(reason, 0) + 1
            return {file.key: counts}
    raise CorpusError(f"{root.path}: no file of {source} is fetched yet. Fetch it: {FETCH}")


def _judged(root: RunRoot, path: Path, source: str, config: CorpusConfig) -> Iterator[tuple[Document, str]]:
    rule = rule_of(root, config, source)
    return ((document, rule(document)[1]) for document in read_documents(path, source, config))


def _of_file(
    root: RunRoot, config: CorpusConfig, lock: Lock, source: str, key: str, reason: str, numbers: list[int]
) -> Iterator[Shown]:
    path = root.raw(source, lock.file(source, key).name)
    matching = (document for document, why in _judged(root, path, source, config) if why == reason)
    for number, document in enumerate(itertools.islice(matching, numbers[-1] + 1)):
        if number in numbers:
            raw = {} if document.text.strip() else _raw_row(path, document.row)
            yield Shown(source=source, file=key, path=str(path), reason=reason, document=document, raw=raw)


def _raw_row(path: Path, row: int) -> dict[str, Any]:
    with pq.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
        for batch in read_batches(path, file, file.schema_arrow.names):
            if row < batch.num_rows:
                return {
                    name: _raw_value(column[row])
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                }
            row -= batch.num_rows
    return {}


def _raw_value(value: Any) -> Any:
    try:
        return value.as_py()
    except (ValueError, OverflowError):  # bytes that are no UTF-8, a time that Python has no date for
        return str(pa.array([value]))


def as_text(shown: Shown, chars: int = SHOWN_CHARS) -> str:
    """A document for a person: where it lies, what the rule looked at, and how it begins."""
    document = shown.document
    head = [f"{shown.source}/{shown.file} row {document.row:,}", f"{document.chars:,} characters", shown.reason]
    head += [f"score {document.score:g}"] if document.score is not None else []
    lines = [" · ".join(head)]
    lines += [f"{name}: {value}" for name, value in _names(document) if value]
    if document.text.strip():
        body = [_cut(document.text, chars)]
    else:
        body = [_cut(f"{name} = {value!r}", chars // max(len(shown.raw), 1)) for name, value in shown.raw.items()]
    lines += ["", *body]
    return "\n".join(lines)


def _cut(text: str, chars: int) -> str:
    more = len(text) - chars
    return text[:chars] + (f" … and {more:,} characters more" if more > 0 else "")


def _names(document: Document) -> tuple[tuple[str, str], ...]:
    return ("title", document.title), ("id", document.id), ("url", document.url)


def as_json(shown: Shown) -> dict[str, Any]:
    """A document for a program, whole."""
    document = shown.document
    return {
        "source": shown.source,
        "file": shown.file,
        "path": shown.path,
        "row": document.row,
        "reason": shown.reason,
        "id": document.id,
        "url": document.url,
        "title": document.title,
        "score": document.score,
        "text": document.text,
        "raw": shown.raw,
    }
