"""What a demo file needs so that every rule has something to do: planted rows, each for a reason.

Real prose from an installation has hardly any document of 100,000 characters, no disambiguation
page and few copies; here they are made, out of the same prose, and put at places given by a hash.
Costs a few hundred rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rqwen3_pipeline.corpus.demo_sources import again, number, row
from rqwen3_pipeline.corpus.installed_prose import Passage

SHORT_ROWS_ONE_IN = 40
OVER_LONG_CHARS = 100_001
STUB_CHARS = 500

Rows = dict[str, list[list[dict[str, Any]]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stock:
    """What planted rows are made of."""

    shorts: Sequence[Passage]
    """Passages under 100 characters; may be empty."""
    passages: Sequence[Passage]
    """All others that were dealt out, at least one."""
    shared_names: Sequence[tuple[str, Sequence[Passage]]]
    """Names of functions with all that bear them, the commonest first."""


def plant(rows: Rows, stock: Stock) -> Rows:
    """Add to each file the rows that give its filters and the deduplication their work."""
    planted: Rows = {}
    for source, files in rows.items():
        planted[source] = []
        for i, file_rows in enumerate(files):
            extra = _short_rows(source, i, max(2, len(file_rows) // SHORT_ROWS_ONE_IN), stock)
            extra.append(again(source, file_rows[-1], f"copy={i}"))
            neighbour = files[(i + 1) % len(files)]
            extra.append(again(source, neighbour[len(neighbour) // 2], f"mirror={i}"))
            if source == "fineweb_edu":
                extra += _fineweb_rows(i, rows, stock)
            elif source == "wikipedia":
                extra += _wikipedia_rows(i, stock)
            planted[source].append(_mixed(file_rows, extra, f"{source}/{i}"))
    return planted


def _mixed(file_rows: list[dict[str, Any]], extra: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    mixed = list(file_rows)
    for i, values in enumerate(extra):
        mixed.insert(number(f"{where}/{i}", "place", len(mixed) + 1), values)
    return mixed


def _short_rows(source: str, file_index: int, count: int, stock: Stock) -> list[dict[str, Any]]:
    shorts = stock.shorts or [replace(stock.passages[0], text=stock.passages[0].text[:60], name="x")]
    rows: list[dict[str, Any]] = []
    for i in range(count):
        short = shorts[(file_index * count + i) % len(shorts)]
        short = replace(short, address=f"{short.address}?short={source}-{file_index}-{i}")
        if source == "stackexchange":
            short = replace(short, text=short.text[:20])
        values = row(source, short, [])
        if source == "stackexchange":  # the asker's own sentence would make it long enough
            values["question"] = f"<p>{short.text[:10].replace('<', ' ').replace('&', ' ')}?</p>"
        rows.append(values)
    return rows


def _fineweb_rows(file_index: int, rows: Rows, stock: Stock) -> list[dict[str, Any]]:
    """One over-long document, a blank one, one just below the score, and a copy of a Wikipedia article."""
    example = stock.passages[file_index % len(stock.passages)]
    parts: list[str] = []
    length = 0
    while length < OVER_LONG_CHARS + 2:  # the join has one separator fewer
        part = stock.passages[number(f"{file_index}/{len(parts)}", "over-long", len(stock.passages))].text
        parts.append(part)
        length += len(part) + 2
    low = row("fineweb_edu", replace(example, address=f"{example.address}?low={file_index}", text=parts[0] * 2), [])
    low["score"], low["int_score"] = 2.99, 3
    made = [low]
    for mark, text in (("long", "\n\n".join(parts) + "."), ("blank", " \n\t" * 60)):
        passage = replace(example, address=f"{example.address}?{mark}={file_index}", text=text)
        values = row("fineweb_edu", passage, [])
        made.append(values | {"score": 3.5, "int_score": 4})
    article_files = rows["wikipedia"]
    article = article_files[file_index % len(article_files)][file_index]
    passage = Passage(address=f"{article['url']}?mirror", name=article["title"], kind="topic", text=article["text"])
    return [*made, row("fineweb_edu", passage, []) | {"score": 4.0, "int_score": 4}]


def _wikipedia_rows(file_index: int, stock: Stock) -> list[dict[str, Any]]:
    """A disambiguation page by title, one by its lead alone, and an article that has only a hatnote."""
    names = stock.shared_names
    fallback: tuple[str, Sequence[Passage]] = ("Python", stock.passages[:1])
    pages: list[tuple[str, str, str]] = []
    for mark, place in (("title", 2 * file_index), ("lead", 2 * file_index + 1)):
        name, bearers = names[place % len(names)] if names else fallback
        listed = "\n".join(_entries(bearers, stock))
        if mark == "title":
            text = f"{name} is the name of several things in programming.\n\n{listed}"
            pages.append((mark, f"{name} (disambiguation)", text))
        else:
            pages.append((mark, name, f"{name} may refer to:\n\n{listed}"))
    longest = max(stock.passages[:200], key=lambda passage: len(passage.text))
    hatnote = (
        f"For other uses of this name, see {longest.name} (disambiguation).\n\nFile {file_index + 1}. {longest.text}"
    )
    pages.append(("hatnote", longest.name, hatnote))
    return [
        row("wikipedia", Passage(address=f"{mark}/{file_index}/{title}", name=title, kind="topic", text=text), [])
        for mark, title, text in pages
    ]


def _entries(bearers: Sequence[Passage], stock: Stock) -> list[str]:
    """Lines of a disambiguation page, with so many that it is no stub."""
    entries: list[str] = []
    for passage in (*bearers[:40], *stock.passages[:200]):
        entries.append(f"{passage.name}, {passage.text.partition(chr(10))[0][:120]}")
        if len(entries) >= min(len(bearers), 40) and sum(map(len, entries)) > STUB_CHARS:
            break
    return entries
