"""Filters: one rule per source says whether a document stays, and why not.

The rules are pure, `(document, settings) -> (kept, reason)`; the reasons of a file are counted, and
that is its funnel. What stays is written to `filtered/<source>/<nnnnn>.parquet`. A source that keeps
almost nothing is refused here: a green run over an empty source is how such a loss goes unseen. Costs
one pass over the raw file.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (pyarrow ships no types)

import bisect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from model.errors import CorpusError, SourceError
from model.files import atomic_path
from rqwen3_pipeline.corpus.decontamination import question_inputs, read_questions
from rqwen3_pipeline.corpus.documents import Document, read_documents
from rqwen3_pipeline.corpus.fetch import raw_inputs
from rqwen3_pipeline.corpus.filtered_file import FilteredWriter
from rqwen3_pipeline.corpus.lock import Lock
from rqwen3_pipeline.corpus.sources import CorpusConfig, SourceConfig
from rqwen3_pipeline.corpus.stamps import (
    FETCH,
    begin,
    current,
    input_of,
    matches,
    read_stamp,
    required_stamp,
    stamp_path,
    verify_inputs,
    write_stamp,
)
from rqwen3_pipeline.settings import RunRoot

LENGTH_EDGES = (0, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 1_000_000)
FLOOR_ROWS = 100
"""From so many rows on, one file of several must keep its share too; the source as a whole always."""

_BLANK = re.compile(r"[\s\u00ad\u200b-\u200d\u2060\ufeff]*")
_GLANCE_BYTES = 400
_DISAMBIGUATION_TITLE = re.compile(r"\(disambiguation\)\s*$", re.IGNORECASE)
_LEAD_LINES, _LEAD_CHARS, _ENTRY_CHARS = 4, 1500, 250
_POINTS_ELSEWHERE = re.compile(
    r"(?:\b(?:may|can|could|might)\b[ \w,'-]{0,40}? (?:refer to|stand for|mean)"
    r"|\b(?:commonly|often|usually|generally|typically|also)\b(?: \w+)? (?:refers? to|stands? for|means?)"
    r"|\b(?:is|are|was|were) the names? of)"
    r"(?: (?:(?:any|one|either|some|all) of |both |(?:one of )?several |various )?[ \w'-]{0,40})?:$"
    r"|\b(?:may|can|could|might)\b[ \w,'-]{0,40}? refer to$",
    re.IGNORECASE,
)


def is_disambiguation(title: str, text: str) -> bool:
    """Whether a Wikipedia page only points to others, by its title or by a lead that says so.

    The lead says so where one of the first lines *ends* in words like "may refer to:" and what follows
    are short entries. A hatnote ("X redirects here. It may refer to any …. X is a …") goes on in the
    same line, and an article's paragraphs are long.
    """
    if _DISAMBIGUATION_TITLE.search(title):
        return True
    seen_chars = 0
    for line, rest in _lead(text):
        seen_chars += len(line)
        if seen_chars > _LEAD_CHARS:
            return False
        if _POINTS_ELSEWHERE.search(" ".join(line[-200:].split())):
            entries = [entry for entry in text[rest:].split("\n") if entry.strip()]
            return bool(entries) and 2 * sum(len(entry) <= _ENTRY_CHARS for entry in entries) > len(entries)
    return False


def _lead(text: str) -> Iterator[tuple[str, int]]:
    """The first `_LEAD_LINES` lines that are not blank, each with where the next begins."""
    start, lines = 0, 0
    while lines < _LEAD_LINES and start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        if (line := text[start:end]).strip():
            lines += 1
            yield line, end + 1
        start = end + 1


def _by_length(document: Document, settings: SourceConfig) -> tuple[bool, str]:
    if document.defect:
        return False, document.defect
    if _BLANK.fullmatch(document.data[:_GLANCE_BYTES].decode(errors="ignore")) and _BLANK.fullmatch(document.text):
        return False, "blank"
    if document.chars < settings.min_chars:
        return False, "too_short"
    if settings.max_chars and document.chars > settings.max_chars:
        return False, "too_long"
    return True, "kept"


def keep_fineweb_edu(document: Document, settings: SourceConfig) -> tuple[bool, str]:
    """Float score at least `min_score` (a missing one is none), then the length."""
    if document.score is None or document.score != document.score:
        return False, "no_score"
    if settings.min_score is not None and document.score < settings.min_score:
        return False, "low_score"
    return _by_length(document, settings)


def keep_wikipedia(document: Document, settings: SourceConfig) -> tuple[bool, str]:
    """The length, and no disambiguation pages."""
    kept, reason = _by_length(document, settings)
    if kept and is_disambiguation(document.title, document.text):
        return False, "disambiguation"
    return kept, reason


RULES: dict[str, Callable[[Document, SourceConfig], tuple[bool, str]]] = {
    "fineweb_edu": keep_fineweb_edu,
    "wikipedia": keep_wikipedia,
    "openwebmath": _by_length,
    "stackexchange": _by_length,
    "pes2o": _by_length,
    "textbooks": _by_length,
}
"""The rule of each source."""

Rule = Callable[[Document], tuple[bool, str]]


@dataclass(slots=True)
class Tally:
    """The counts of one file."""

    rows: int = 0
    funnel: Counter[str] = field(default_factory=Counter[str])
    lengths: list[int] = field(default_factory=lambda: [0] * len(LENGTH_EDGES))
    kept_chars: int = 0
    repaired: int = 0

    def add(self, document: Document, kept: bool, reason: str) -> None:
        """Count one judged document."""
        self.rows += 1
        self.funnel[reason] += 1
        self.repaired += document.repaired
        if kept:
            self.kept_chars += document.chars
            self.lengths[bisect.bisect_right(LENGTH_EDGES, document.chars) - 1] += 1

    def report(self) -> dict[str, Any]:
        """`counts[i]` are kept documents of at least `edges[i]` code points and fewer than the next edge."""
        return {
            "rows": self.rows,
            "kept": self.funnel["kept"],
            "funnel": {"kept": self.funnel["kept"], **self.funnel},
            "length_histogram": {"edges": list(LENGTH_EDGES), "counts": list(self.lengths)},
            "kept_chars": self.kept_chars,
            "repaired": self.repaired,
        }


def require_share_kept(where: str, rows: int, kept: int, funnel: dict[str, int], least: float) -> None:
    """Refuse a source of which almost nothing is left.

    Raises:
        SourceError: `kept / rows` is below `least`; the message gives the reasons by number.
    """
    if rows and kept < least * rows:
        reasons = ", ".join(f"{name} {count:,}" for name, count in sorted(funnel.items(), key=lambda x: (-x[1], x[0])))
        raise SourceError(
            f"{where}: {kept:,} of {rows:,} rows kept, less than data.min_share_kept = {least:g} ({reasons}). "
            "Look at the file; if it is right, lower min_share_kept."
        )


def rule_of(root: RunRoot, config: CorpusConfig, source: str) -> Rule:
    """The source's rule, and behind it, where that is switched on, the search for benchmark questions.

    Raises:
        CorpusError: benchmarks are to be looked for, and one is not at hand.
    """
    rule, settings, cleaning = RULES[source], config.sources[source], config.decontamination
    if not cleaning.enabled:
        return lambda document: rule(document, settings)
    questions = read_questions(root, cleaning.benchmarks)

    def judge(document: Document) -> tuple[bool, str]:
        kept, reason = rule(document, settings)
        if kept and questions.first_overlap(document.text) is not None:
            return False, "contaminated"
        return kept, reason

    return judge


def filter_inputs(root: RunRoot, config: CorpusConfig, lock: Lock, source: str, key: str) -> dict[str, str]:
    """The raw file as fetched, and the benchmarks whose questions are removed.

    Raises:
        CorpusError: it was not fetched, or what was fetched is not what is locked now; or a benchmark is
            not at hand.
    """
    file = lock.file(source, key)
    raw = root.raw(source, file.name)
    stamp = required_stamp(stamp_path(raw), f"{raw}", FETCH)
    if not matches(root, stamp, stamp.settings, raw_inputs(file)):
        raise CorpusError(f"{raw}: not the file that is locked now. Fetch it again: {FETCH}")
    cleaning = config.decontamination
    return input_of(root, stamp, raw) | (question_inputs(root, cleaning.benchmarks) if cleaning.enabled else {})


def filtered_report(root: RunRoot, config: CorpusConfig, lock: Lock, source: str, key: str) -> dict[str, Any] | None:
    """The report of a file that is filtered as this configuration would; None if it is not, or not yet."""
    try:
        stamp = read_stamp(stamp_path(root.filtered(source, key)))
        inputs = filter_inputs(root, config, lock, source, key)
    except CorpusError:
        return None
    if stamp is None or not matches(root, stamp, config.settings_for("filtered", source), inputs):
        return None
    return stamp.report


def filter_file(
    root: RunRoot, config: CorpusConfig, lock: Lock, source: str, key: str, rebuild: bool = False
) -> dict[str, Any]:
    """Filter one raw file into `filtered/<source>/<key>.parquet`.

    Returns:
        The report: `rows`, `kept`, `funnel`, `length_histogram`, `kept_chars`, `repaired`.

    Raises:
        SourceError: the file is damaged, or too little of it is kept.
        CorpusError: it was not fetched, or the output was made with other settings.
    """
    target, settings = root.filtered(source, key), config.settings_for("filtered", source)
    inputs = filter_inputs(root, config, lock, source, key)
    stamp = current(root, stamp_path(target), settings, inputs, rebuild)
    if stamp is None:
        begin(stamp_path(target), target)
        verify_inputs(root, inputs)
        raw, files = root.raw(source, lock.file(source, key).name), len(lock.files(source))
        with atomic_path(target) as temporary:
            report = _write_kept(temporary, raw, source, config, rule_of(root, config, source)).report()
            if files == 1 or report["rows"] >= FLOOR_ROWS:
                require_share_kept(str(raw), report["rows"], report["kept"], report["funnel"], config.min_share_kept)
        stamp = write_stamp(
            root,
            stamp_path(target),
            stage="filtered",
            settings=settings,
            inputs=inputs,
            outputs=[target],
            report=report,
        )
    return stamp.report


def _write_kept(path: Path, raw: Path, source: str, config: CorpusConfig, rule: Rule) -> Tally:
    pa.set_memory_pool(pa.system_memory_pool())  # the others keep what one long row took
    tally = Tally()
    with FilteredWriter(path) as writer:
        for document in read_documents(raw, source, config):
            kept, reason = rule(document)
            tally.add(document, kept, reason)
            if kept:
                writer.add(document)
            del document  # its text may be long
    return tally
