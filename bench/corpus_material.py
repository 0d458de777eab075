"""The bench's corpus: prose of Debian's documentation and of installed packages, in our sources' columns.

Documentation packages are downloaded by `apt-get download` and unpacked beside the corpus; nothing is
installed. HTML pages become StackExchange's questions and answers, and text for the other sources; a
content that was taken once is never taken again. The shares of the sources are those of the recipe.
Making 900 MB takes some 600 MB of downloads, 5 GB of disk and six minutes, once; the folder is kept.
"""

import dataclasses
import functools
import gzip
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from selectolax.lexbor import LexborHTMLParser

from rqwen3_pipeline.corpus.demo_sources import SCHEMAS
from rqwen3_pipeline.corpus.installed_prose import articles, docstrings, installed_roots
from rqwen3_pipeline.corpus.stackexchange import html_to_text
from rqwen3_pipeline.corpus.text import nfc

FORMAT = 3
"""Raised when the material changes, so that a folder with an older one is made again."""
FILE_BYTES = 160_000_000
"""Text of one parquet file, roughly; the published sets have five times as much and more."""
LONG_CHARS = 20_000
"""From so many characters on a page counts as long, and goes to pes2o."""
THREAD_CHARS = 8000
"""Pages of HTML with up to so much text become questions and answers, which are short."""
LEAST_TEXT_IN_POST = 0.5
"""Of a post's HTML, at least so much is text; real posts have 0.85 of it on average, whole pages here 0.16."""
_POST_TAGS = """a b blockquote br code dd del dl dt em h1 h2 h3 hr i img kbd li ol p pre s strike strong sub sup ul"""
"""What StackExchange's sites leave of a post's HTML, with the addresses of links and pictures as only attributes."""
POST_TAGS = frozenset(_POST_TAGS.split())
ROW_GROUP_ROWS = 1000
SHARES = {
    "fineweb_edu": 7.0,
    "wikipedia": 2.0,
    "openwebmath": 1.5,
    "stackexchange": 1.0,
    "pes2o": 1.0,
    "textbooks": 0.5,
}

GENERAL = [
    r"linux-doc-\d.*",
    r"python3\.\d+-doc",
    r"postgresql-doc-\d+",
    r"git-doc",
    r"debian-handbook",
    r"developers-reference",
    r"debian-policy",
    r"debian-reference-en",
    r"debian-faq",
    r"apache2-doc",
    r"sqlite3-doc",
    r"python-django-doc",
    r"gnome-user-docs",
    r"erlang-doc",
    r"installation-guide-amd64",
    r"libreoffice-help-en-us",
    r"libboost1\.\d+-doc",
    r"vim-runtime",
    r"perl-doc",
    r"gimp-help-en",
    r"rust-doc",
    r"openjdk-\d+-doc",
    r"ghc-doc",
    r"racket-doc",
    r"llvm-\d+-doc",
    r"libgtk-3-doc",
    r"libglib2\.0-doc",
    r"libstdc\+\+-\d+-doc",
    r"wx3\.\d+-doc",
    r"qtbase5-doc-html",
    r"scala-doc",
    r"petsc3\.\d+-doc",
]
MATHEMATICS = [
    "octave-doc",
    "maxima-doc",
    "python-scipy-doc",
    "python-sympy-doc",
    "singular-doc",
    "r-doc-html",
    "python-sklearn-doc",
    "python-pandas-doc",
    "python-astropy-doc",
    "gap-doc",
    "pari-doc",
]
"""Debian packages by regular expression of their names, since some carry a version; the last match is taken."""

_PAGES, _PLAIN = (".html", ".htm"), (".txt", ".rst", ".pod", ".md", ".page", ".txt.gz")
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(r"<[^<>]{1,400}>")
_NO_POST = re.compile(r"<(script|style|nav|header|footer|svg)[\s>].*?</\1>|<!--.*?-->", re.DOTALL)
_ELEMENT = re.compile(r"<(/?)([a-z][^\s/>]*)((?:[^>\"]|\"[^\"]*\")*)>")
_GAPS = re.compile(r"\n\s*\n\s*\n")
_ADDRESS = re.compile(r' (?:href|src)="[^"]*"')
_LARGEST_BYTES = 4_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """One document of the material."""

    address: str
    """Package and path, or what the prose says of itself."""
    kind: str
    """`html pages`, `text files`, `package descriptions` or `docstrings`."""
    title: str
    """Of an HTML page; else its name."""
    text: str
    """As plain text."""
    html: str = ""
    """Its body as a post, if it makes one."""
    mathematics: bool = False
    """Whether its package is one of `MATHEMATICS`."""


def resolve_packages(patterns: list[str]) -> dict[str, str]:
    """The newest package of each pattern that apt knows, by the pattern.

    Raises:
        SystemExit: apt is not there, or knows none of them.
    """
    if shutil.which("apt-get") is None:
        raise SystemExit(
            "bench-corpus takes its text from Debian packages; there is no apt-get here. Give --corpus DIR."
        )
    known = subprocess.run(["apt-cache", "pkgnames"], check=True, capture_output=True, text=True).stdout.split()
    found = {p: max(names) for p in patterns if (names := [n for n in known if re.fullmatch(p, n)])}
    if not found:
        raise SystemExit("apt knows none of the documentation packages. Run first: apt-get update")
    return found


def unpack(package: str, folder: Path) -> Path:
    """Download a package and unpack it below `folder`; one that is there is left alone."""
    target = folder / package
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["apt-get", "download", "-q", package], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"apt-get download {package} failed: {done.stderr.strip()}. Run first: apt-get update")
        (archive,) = folder.glob(f"{package}_*.deb")
        part = folder / f".{package}.tmp"
        shutil.rmtree(part, ignore_errors=True)
        subprocess.run(["dpkg-deb", "-x", str(archive), str(part)], check=True)
        part.rename(target)
        archive.unlink()
    return target


def _read(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    return data.decode("utf-8", "replace")


def _read_page(where: tuple[str, Path, Path]) -> Page | None:
    package, top, path = where
    if path.stat().st_size > _LARGEST_BYTES:
        return None
    content, is_html = _read(path), path.suffix in _PAGES
    text = html_to_text(content) if is_html else content
    if path.suffix == ".page":  # Mallard's XML
        text = _TAG.sub("", text)
    title = _TITLE.search(content) if is_html else None
    post = as_post(content) if is_html and len(text) < THREAD_CHARS else ""
    return Page(
        address=f"{package}/{path.relative_to(top).as_posix()}",
        kind="html pages" if is_html else "text files",
        title=html_to_text(title.group(1))[:200] if title else path.stem,
        text=nfc(text),
        html=post if len(html_to_text(post)) >= LEAST_TEXT_IN_POST * len(post) else "",
    )


def as_post(html: str) -> str:
    """A page's body as StackExchange's sites would keep it: a few kinds of tags, hardly an attribute."""
    body = LexborHTMLParser(html).body
    whole = _NO_POST.sub("", body.html or "") if body is not None else ""
    return _GAPS.sub("\n\n", _ELEMENT.sub(_as_in_post, whole)).strip()


def _as_in_post(element: re.Match[str]) -> str:
    end, name, attributes = element.groups()
    if name not in POST_TAGS:
        return "" if name == "span" else " "
    return f"<{end}{name}{''.join(_ADDRESS.findall(attributes))}>"


def _package_pages(packages: list[str], folder: Path) -> Iterator[Page]:
    """All pages of the packages, in an order that mixes them and is the same each time."""
    places: list[tuple[str, Path, Path]] = []
    for package in packages:
        top = unpack(package, folder)
        files = [path for path in top.rglob("*") if path.is_file() and not path.is_symlink()]
        found = [path for path in files if path.name.lower().endswith(_PAGES)]  # else what they were made from
        found = found or [path for path in files if path.name.lower().endswith(_PLAIN)]
        places += [(package, top, path) for path in found]
    places.sort(key=lambda place: hashlib.sha256(f"{place[0]}/{place[2].relative_to(place[1])}".encode()).digest())
    with ProcessPoolExecutor() as pool:
        for start in range(0, len(places), 1024):  # so that few are read in vain once there is enough
            yield from filter(None, pool.map(_read_page, places[start : start + 1024], chunksize=32))


def _installed() -> Iterator[Page]:
    """Package descriptions and docstrings of this Python installation, the docstrings of a module as one."""
    roots = installed_roots()
    for passage in articles(roots):
        yield Page(address=passage.address, kind="package descriptions", title=passage.name, text=nfc(passage.text))
    parts: list[str] = []
    module = ""
    for passage in docstrings(roots):
        here = passage.address.partition("#")[0]
        if parts and here != module:
            yield Page(address=module, kind="docstrings", title=module, text=nfc("\n\n".join(parts)))
            parts = []
        module = here
        parts.append(passage.text)


@functools.cache
def _blank(source: str) -> dict[str, Any]:
    return dict.fromkeys(SCHEMAS[source].names)


def _row(source: str, page: Page, number: int) -> dict[str, Any]:
    address = f"https://example.org/{page.address}"
    filled: dict[str, dict[str, Any]] = {
        "fineweb_edu": {
            "text": page.text,
            "id": page.address,
            "url": address,
            "score": 3.0 + number % 3 - (number % 50 == 0),
        },
        "wikipedia": {"id": str(number), "url": address, "title": page.title, "text": page.text},
        "openwebmath": {"url": address, "text": page.text},
        "pes2o": {"content": page.text},
        "textbooks": {"text": page.text, "prompt": page.title},
    }
    return _blank(source) | filled[source]


def _thread(question: Page, answer: Page, number: int) -> dict[str, Any]:
    """Two HTML pages as a question and its answer."""
    one = dict.fromkeys(("author", "author_profile"), "") | {"author_id": 1, "answer_id": number, "pm_score": 1}
    address = f"https://example.org/{question.address}"
    return _blank("stackexchange") | {
        "qid": number,
        "question": question.html,
        "answers": [one | {"selected": True, "text": answer.html}],
        "metadata": [address, "https://example.org", "https://example.org/u/1"],
    }


class _Files:
    """Writes a source's rows to files of about `FILE_BYTES` of text each; counts bytes by kind."""

    def __init__(self, folder: Path, source: str, budget_bytes: float) -> None:
        self.folder, self.source, self.budget_bytes = folder / source, source, budget_bytes
        self.files = max(1, round(budget_bytes / FILE_BYTES))
        self.bytes, self.rows, self.long = 0, 0, 0
        self.kinds: dict[str, int] = {}
        self._writer: Any = None
        self._written, self._waiting = 0, list[dict[str, Any]]()
        self.folder.mkdir(parents=True)

    @property
    def full(self) -> bool:
        """Whether the source has its share."""
        return self.bytes >= self.budget_bytes

    def add(self, row: dict[str, Any], pages: list[Page], size_bytes: int) -> None:
        """Append a row made of pages."""
        if self._writer is None or self.bytes >= self._written * self.budget_bytes / self.files:
            self.close()
            path = self.folder / f"{self._written:03d}.parquet"
            self._writer = pq.ParquetWriter(path, SCHEMAS[self.source], compression="snappy")
            self._written += 1
        self._waiting.append(row)
        self.bytes, self.rows, self.long = self.bytes + size_bytes, self.rows + 1, self.long + (size_bytes > LONG_CHARS)
        for page in pages:
            self.kinds[page.kind] = self.kinds.get(page.kind, 0) + size_bytes // len(pages)
        if len(self._waiting) >= ROW_GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_pylist(self._waiting, schema=SCHEMAS[self.source]))
            self._waiting = []

    def close(self) -> None:
        """End the file in progress."""
        if self._writer is not None:
            self._flush()
            self._writer.close()
            self._writer = None

    @property
    def mix(self) -> dict[str, Any]:
        """What the source has been made of."""
        kinds = {kind: round(size / 1e6, 1) for kind, size in sorted(self.kinds.items())}
        return {"mb": round(self.bytes / 1e6, 1), "rows": self.rows, "rows_over_20_kb": self.long, "kinds_mb": kinds}


def _place(page: Page, open_: dict[str, _Files]) -> str | None:
    """The source that takes a page: those it suits best come first, a full one takes no more."""
    if page.mathematics:
        wanted = ["openwebmath", "fineweb_edu"]
    elif page.kind == "package descriptions":
        wanted = ["wikipedia"]
    elif page.kind == "docstrings":
        wanted = ["textbooks", "fineweb_edu"]
    else:
        wanted = ["pes2o"] if len(page.text) >= LONG_CHARS else []
        wanted += ["fineweb_edu", "wikipedia"]
    return next((source for source in wanted if not open_[source].full), None)


def assemble(folder: Path, packages: Path, megabytes: int) -> dict[str, Any]:
    """Make the corpus, or take the one that is there.

    Args:
        folder: gets `<source>/<nnn>.parquet` and `mix.json`.
        packages: where the Debian packages are unpacked.
        megabytes: of text (of posts in HTML, for StackExchange), if there is so much.

    Returns:
        The mix, by source: `mb`, `rows`, `rows_over_20_kb`, `kinds_mb`.
    """
    report = folder / "mix.json"
    made = {"format": FORMAT, "megabytes": megabytes}
    if report.is_file() and (there := json.loads(report.read_text())).items() >= made.items():
        return there["sources"]
    shutil.rmtree(folder, ignore_errors=True)
    whole = sum(SHARES.values())
    open_ = {name: _Files(folder, name, megabytes * 1e6 * share / whole) for name, share in SHARES.items()}
    seen: set[bytes] = set()
    waiting: Page | None = None
    for page in _material(packages):
        if all(files.full for files in open_.values()):
            break
        digest = hashlib.sha256(page.text.encode()).digest()
        if digest in seen or len(page.text) < 200:
            continue
        seen.add(digest)
        threads = open_["stackexchange"]
        if page.html and not threads.full and digest[0] % 4:
            if waiting is None:
                waiting = page
            else:
                size = len(waiting.html.encode()) + len(page.html.encode())
                threads.add(_thread(waiting, page, threads.rows), [waiting, page], size)
                waiting = None
            continue
        if (source := _place(page, open_)) is not None:
            open_[source].add(_row(source, page, open_[source].rows), [page], len(page.text.encode()))
    for files in open_.values():
        files.close()
    mix = {name: files.mix for name, files in open_.items()}
    report.write_text(json.dumps(made | {"sources": mix}, indent=1) + "\n")
    return mix


def _material(packages: Path) -> Iterator[Page]:
    yield from _installed()
    for patterns, mathematics in ((MATHEMATICS, True), (GENERAL, False)):
        names = list(resolve_packages(patterns).values())
        for page in _package_pages(names, packages):
            yield dataclasses.replace(page, mathematics=mathematics)
