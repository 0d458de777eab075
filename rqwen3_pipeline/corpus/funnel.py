"""The funnel of each source: how many of its rows were kept, and for which reason the others were not.

Adds up the reports in the stamps of `filtered/`. Files of which there is no stamp, or one that was
made with other settings or from another raw file, do not count, and are said to be missing. Costs one
small read a file.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from model.errors import SourceError
from rqwen3_pipeline.corpus.filters import LENGTH_EDGES, filtered_report, require_share_kept
from rqwen3_pipeline.corpus.lock import Lock
from rqwen3_pipeline.corpus.sources import CorpusConfig
from rqwen3_pipeline.settings import RunRoot


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFunnel:
    """What the filter made of one source, over all its files that are done."""

    files: int
    """Files in the lock."""
    files_filtered: int
    """Files that are done."""
    rows: int
    """Rows of the raw files that are done."""
    kept: int
    """Documents that were kept."""
    kept_chars: int
    """Their code points."""
    repaired: int
    """Rows in which something became U+FFFD."""
    funnel: dict[str, int]
    """Rows by reason, `kept` first, the others by their number."""
    length_histogram: dict[str, list[int]]
    """`counts[i]` are kept documents of at least `edges[i]` code points and fewer than the next edge."""

    @property
    def share_kept(self) -> float | None:
        """Part of the rows that was kept; None while there is no row."""
        return self.kept / self.rows if self.rows else None


def source_funnel(root: RunRoot, config: CorpusConfig, lock: Lock, source: str) -> SourceFunnel:
    """Add up a source's files that are filtered."""
    found = (filtered_report(root, config, lock, source, file.key) for file in lock.files(source))
    reports = [report for report in found if report is not None]
    counts: Counter[str] = Counter()
    for report in reports:
        counts.update(report["funnel"])
    histograms = [report["length_histogram"]["counts"] for report in reports] or [[0] * len(LENGTH_EDGES)]
    return SourceFunnel(
        files=len(lock.files(source)),
        files_filtered=len(reports),
        rows=sum(report["rows"] for report in reports),
        kept=counts["kept"],
        kept_chars=sum(report["kept_chars"] for report in reports),
        repaired=sum(report["repaired"] for report in reports),
        funnel=ordered(counts),
        length_histogram={
            "edges": list(LENGTH_EDGES),
            "counts": [sum(column) for column in zip(*histograms, strict=True)],
        },
    )


def ordered(funnel: Mapping[str, int]) -> dict[str, int]:
    """Reasons as a person reads them: what was kept, then the largest loss first."""
    return dict(sorted(funnel.items(), key=lambda item: (item[0] != "kept", -item[1], item[0])))


def as_json(funnels: Mapping[str, SourceFunnel]) -> dict[str, Any]:
    """The funnels by source, for a program."""
    return {source: asdict(funnel) | {"share_kept": funnel.share_kept} for source, funnel in funnels.items()}


def as_table(funnels: Mapping[str, SourceFunnel]) -> str:
    """The funnels as text: a line for each source and reason."""
    lines = [f"{'source':<14} {'reason':<16} {'documents':>13} {'share':>9}"]
    for source, funnel in funnels.items():
        name = source
        for reason, count in funnel.funnel.items():
            lines.append(f"{name:<14} {reason:<16} {count:>13,} {100 * count / max(funnel.rows, 1):>7.2f} %")
            name = ""
        done = "" if funnel.files_filtered == funnel.files else f"   {funnel.files_filtered} of {funnel.files} files"
        lines.append(f"{name:<14} {'all rows':<16} {funnel.rows:>13,}{done}")
    return "\n".join(lines)


def require_source_kept(root: RunRoot, config: CorpusConfig, lock: Lock, source: str) -> SourceFunnel:
    """The funnel of a source that keeps enough of its rows.

    Raises:
        SourceError: it keeps less than `min_share_kept`, or has no row in any of its files.
    """
    found = source_funnel(root, config, lock, source)
    if not found.rows and found.files_filtered == found.files:
        raise SourceError(
            f"{source}: its {found.files} files hold no row. Replace them and lock the sources again: "
            "rqwen3 sources lock (--folder DIR for your own)"
        )
    where = f"{source} ({found.files_filtered} of {found.files} files)"
    require_share_kept(where, found.rows, found.kept, found.funnel, config.min_share_kept)
    return found
