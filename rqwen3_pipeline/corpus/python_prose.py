"""A demo corpus from the Python installation itself: six source folders of parquet, no network.

Passages are dealt to the sources by what they are (LaTeX to openwebmath, long ones to pes2o,
functions to stackexchange, ...), and else to the source that has least of what it wants. Each file
also gets what its filters and the deduplication are there for: short and over-long documents, low
scores, disambiguation pages, duplicates inside the file, across files and across sources. The
result depends on the installation and `target_tokens` alone. About 10 s of CPU and 100 MB of memory
for the default; nothing is read beyond what is needed.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# (pyarrow ships no types)

import hashlib
import itertools
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from model.errors import EnvironmentProblem, SourceError
from model.files import atomic_path, read_json, sha256_file, sweep_temporaries, write_json
from rqwen3_pipeline.corpus.demo_planting import Stock, plant
from rqwen3_pipeline.corpus.demo_sources import CHARS_PER_TOKEN, FILES, SCHEMAS, document_text, fineweb_score, row
from rqwen3_pipeline.corpus.docstring_html import blocks_of, has_latex
from rqwen3_pipeline.corpus.installed_prose import Passage, articles, docstrings, installed_roots

STAMP_NAME = "python_prose.json"
FORMAT_VERSION = 1
DEFAULT_TARGET_TOKENS = 1_300_000
"""A little above the demo's 300 steps of 4,096 tokens."""

SHARES = {
    "fineweb_edu": 7.0,
    "wikipedia": 2.0,
    "openwebmath": 1.5,
    "stackexchange": 1.0,
    "pes2o": 1.0,
    "textbooks": 0.5,
}
SPARE = 1.3 / 0.95
"""30 % more than the budget, after one document in twenty is held out."""
MIN_DOCUMENTS_PER_FILE = 4
ROW_GROUP_ROWS = 500

_SHORTEST = {"wikipedia": 500, "pes2o": 1000, "openwebmath": 200, "stackexchange": 300, "textbooks": 300}
_SHORT_CHARS = 100
_SHORTS_KEPT = 400
_ONE_COPY_IN = 20
"""Of the copies that an installation holds by nature, at most one for so many documents is used."""
_LONGEST_ARTICLE_CHARS = 10_000
"""So that wikipedia, too, has enough documents for some to be held out."""

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class _Share:
    """What one source has been dealt so far."""

    wanted_chars: int
    wanted_documents: int
    passages: list[Passage] = field(default_factory=list[Passage])
    kept_chars: int = 0
    kept_documents: int = 0

    @property
    def full(self) -> bool:
        return self.kept_chars >= self.wanted_chars and self.kept_documents >= self.wanted_documents

    @property
    def filled(self) -> float:
        return self.kept_chars / self.wanted_chars


def write_python_prose(
    folder: Path,
    *,
    target_tokens: int = DEFAULT_TARGET_TOKENS,
    progress: Progress | None = None,
    roots: Mapping[str, Path] | None = None,
) -> dict[str, dict[str, int]]:
    """Write the six source folders below `folder`; a finished folder is left alone.

    Args:
        folder: made if missing; one that holds parquet files of other origin is refused.
        target_tokens: training tokens that the filtered corpus shall suffice for, at four characters each.
        progress: called with (source, characters so far, characters wanted) now and then.
        roots: folders of Python source by label; this interpreter's by default.

    Returns:
        For each source its `files`, `documents` (rows) and `characters` (of the rows' texts).

    Raises:
        EnvironmentProblem: the installation holds too little prose.
        SourceError: the folder holds somebody else's parquet files.
    """
    stamp_path = folder / STAMP_NAME
    if (finished := _finished(folder, target_tokens)) is not None:
        return finished
    if target_tokens < 1:
        raise SourceError(f"target_tokens = {target_tokens} must be at least 1")
    if not stamp_path.exists() and any(folder.rglob("*.parquet")):
        raise SourceError(
            f"{folder}: holds parquet files that were not written from this Python installation. "
            "Name another folder for the demo's sources, or use these as they are."
        )
    shares, shorts, names = _deal(roots or installed_roots(), target_tokens, progress)
    stamp: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "target_tokens": target_tokens,
        "python": platform.python_version(),
        "finished": False,
    }
    write_json(stamp_path, stamp)
    rows = plant(_rows(shares, shorts), _stock(shares, shorts, names))
    report, files = _write(folder, rows)
    write_json(stamp_path, stamp | {"finished": True, "sources": report, "files": files})
    return report


def _finished(folder: Path, target_tokens: int) -> dict[str, dict[str, int]] | None:
    path = folder / STAMP_NAME
    if not path.exists():
        return None
    stamp = read_json(path)
    asked = {"format_version": FORMAT_VERSION, "target_tokens": target_tokens, "finished": True}
    if any(stamp.get(key) != value for key, value in asked.items()):
        return None
    for name, size_bytes in stamp["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size_bytes["bytes"]:
            return None
    return stamp["sources"]


def _deal(
    roots: Mapping[str, Path], target_tokens: int, progress: Progress | None
) -> tuple[dict[str, _Share], list[Passage], dict[str, list[Passage]]]:
    """Deal passages to the sources until each has what it wants."""
    whole_chars = target_tokens * CHARS_PER_TOKEN * SPARE / sum(SHARES.values())
    shares = {
        source: _Share(
            wanted_chars=int(share * whole_chars) + 1, wanted_documents=MIN_DOCUMENTS_PER_FILE * len(FILES[source])
        )
        for source, share in SHARES.items()
    }
    shorts: list[Passage] = []
    names: dict[str, list[Passage]] = {}
    seen: dict[bytes, str] = {}
    copies = 0
    article = (passage for passage in articles(roots) if len(passage.text) <= _LONGEST_ARTICLE_CHARS)
    first = itertools.takewhile(lambda _: not shares["wikipedia"].full, article)
    order: Iterable[Passage] = itertools.chain(first, docstrings(roots), article)
    for count, passage in enumerate(order):
        if len(passage.text) < _SHORT_CHARS:
            if len(shorts) < _SHORTS_KEPT:
                shorts.append(passage)
            continue
        digest = hashlib.sha256(passage.text.encode("utf-8")).digest()
        if digest in seen:
            if (copies + 1) * _ONE_COPY_IN <= len(seen):
                shares[seen[digest]].passages.append(passage)
                copies += 1
            continue
        source = _source_for(passage, shares)
        if source is None:
            if all(share.full for share in shares.values()):
                break
            continue
        seen[digest] = source
        _take(shares[source], source, passage)
        last_name = passage.name.rpartition(".")[2]
        if passage.kind == "function" and not last_name.startswith("_"):
            names.setdefault(last_name, []).append(passage)
        if progress is not None and count % 200 == 0:
            progress(source, shares[source].kept_chars, shares[source].wanted_chars)
    _require_enough(shares, target_tokens, roots)
    return shares, shorts, names


def _take(share: _Share, source: str, passage: Passage) -> None:
    share.passages.append(passage)
    if source != "fineweb_edu" or fineweb_score(passage.address) >= 3.0:
        share.kept_chars += len(document_text(source, passage))
        share.kept_documents += 1


def _source_for(passage: Passage, shares: Mapping[str, _Share]) -> str | None:
    """The source that a passage suits, or None if those that it suits are full."""
    length = len(passage.text)
    whole = passage.kind in ("module", "class")
    if passage.kind in ("topic", "description") and not shares["wikipedia"].full:
        return "wikipedia" if length >= _SHORTEST["wikipedia"] else None
    latex = has_latex(passage.text) and length >= _SHORTEST["openwebmath"]
    if latex and not shares["openwebmath"].full:
        return "openwebmath"
    suits = {
        "fineweb_edu": True,
        "wikipedia": whole,
        "pes2o": True,
        "stackexchange": passage.kind == "function" and len(blocks_of(passage.text)) > 1,
        "textbooks": whole,
    }
    open_ones = [
        source
        for source, fits in suits.items()
        if fits and length >= _SHORTEST.get(source, _SHORT_CHARS) and not shares[source].full
    ]
    if open_ones:
        return min(open_ones, key=lambda source: shares[source].filled)
    others_full = all(share.full for source, share in shares.items() if source != "openwebmath")
    if others_full and length >= _SHORTEST["openwebmath"] and not shares["openwebmath"].full:
        return "openwebmath"
    return None


def _require_enough(shares: Mapping[str, _Share], target_tokens: int, roots: Mapping[str, Path]) -> None:
    lacking = {source: share for source, share in shares.items() if not share.full}
    if not lacking:
        return
    enough_for = int(target_tokens * min(share.filled for share in shares.values()) * 0.95)
    found = ", ".join(f"{source} {s.kept_chars:,} of {s.wanted_chars:,}" for source, s in lacking.items())
    raise EnvironmentProblem(
        f"The Python installation ({', '.join(map(str, roots.values()))}) holds too little prose for "
        f"{target_tokens:,} training tokens: characters for {found}; about enough for {enough_for:,} tokens. Install "
        "more packages beside this one (numpy, scipy, scikit-learn and torch are rich in it), ask for fewer "
        "target_tokens, or give a folder with sources of your own: rqwen3 sources lock --folder FOLDER"
    )


def _rows(shares: Mapping[str, _Share], shorts: list[Passage]) -> dict[str, list[list[dict[str, Any]]]]:
    """Rows by source and file, dealt out in turn, so that no file lacks documents."""
    files: dict[str, list[list[dict[str, Any]]]] = {}
    for source, share in shares.items():
        files[source] = [[] for _ in FILES[source]]
        for i, passage in enumerate(share.passages):
            others = [shorts[(2 * i + k) % len(shorts)] for k in range(2)] if shorts else []
            files[source][i % len(files[source])].append(row(source, passage, others))
    return files


def _stock(shares: Mapping[str, _Share], shorts: list[Passage], names: dict[str, list[Passage]]) -> Stock:
    often = sorted(names.items(), key=lambda item: (-len(item[1]), item[0]))
    passages = [passage for share in shares.values() for passage in share.passages]
    return Stock(shorts=shorts, passages=passages, shared_names=often)


def _write(
    folder: Path, rows: Mapping[str, list[list[dict[str, Any]]]]
) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, Any]]]:
    report: dict[str, dict[str, int]] = {}
    files: dict[str, dict[str, Any]] = {}
    for source, source_rows in rows.items():
        report[source] = {"files": len(source_rows), "documents": 0, "characters": 0}
        for name, file_rows in zip(FILES[source], source_rows, strict=True):
            path = folder / source / name
            table = pa.Table.from_pylist(file_rows, schema=SCHEMAS[source])
            path.parent.mkdir(parents=True, exist_ok=True)
            sweep_temporaries(path.parent)
            with atomic_path(path) as temporary:
                pq.write_table(table, temporary, compression="zstd", row_group_size=ROW_GROUP_ROWS)
            files[f"{source}/{name}"] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
            report[source]["documents"] += len(file_rows)
            report[source]["characters"] += sum(_characters(source, values) for values in file_rows)
    return report, files


def _characters(source: str, values: Mapping[str, Any]) -> int:
    if source == "stackexchange":
        return len(values["question"]) + sum(len(answer["text"]) for answer in values["answers"])
    return len(values["content" if source == "pes2o" else "text"])
