"""Prose that every Python installation holds: language topics, package descriptions, docstrings.

The demo needs real English without a network and without shipping anybody's text, and each machine
already has some twenty million characters of it. Nothing is imported: docstrings are read by `ast`,
descriptions from the packages' METADATA, topics from `pydoc_data`. Files are visited in an order
seeded by the hash of their name, so that one package does not fill a whole source; those that are
mostly docstring come first, since parsing costs a second of CPU for some two million characters of
code. Listing a large installation takes another second.
"""

import ast
import hashlib
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = frozenset(
    {
        "test",
        "tests",
        "testing",
        "idlelib",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "_vendor",
        "vendor",
    }
)
DENSE_SHARE = 0.2
"""Share of a file's bytes inside triple quotes from which it is parsed in the first round."""
LARGEST_FILE_BYTES = 1_000_000
_OWN_FOLDERS = (Path(__file__).resolve().parents[1], Path(__file__).resolve().parents[2] / "model")
_OWN_NAME = "rqwen3_pipeline"

_TRIPLE_QUOTED = re.compile(rb"(\"\"\"|''')(.*?)\1", re.DOTALL)
_RULE_LINE = re.compile(r"^[ \t]*([*=~#^\"-])\1{3,}[ \t]*$\n?", re.MULTILINE)
_BADGE_LINE = re.compile(r"^[ \t]*(\[!\[|!\[|<img|\.\. image::|\.\. \||:target:|:alt:).*$\n?", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n[ \t]*\n([ \t]*\n)+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """One piece of prose and where it stands."""

    address: str
    """Unique within an installation: `site/numpy/linalg/_linalg.py#norm`, `topic/assert`."""
    name: str
    """What it describes, as a person would say it."""
    kind: str
    """`topic`, `description`, `module`, `class` or `function`."""
    text: str
    """Dedented text, encodable as UTF-8."""


def installed_roots() -> dict[str, Path]:
    """Folders of this interpreter that hold Python source, by label."""
    paths = sysconfig.get_paths()
    roots = {"stdlib": Path(paths["stdlib"]), "site": Path(paths["purelib"]), "platform": Path(paths["platlib"])}
    if roots["platform"].resolve() == roots["site"].resolve():
        del roots["platform"]
    return {label: root for label, root in roots.items() if root.is_dir()}


def articles(roots: Mapping[str, Path]) -> Iterator[Passage]:
    """Yield the language topics, then the descriptions of the installed packages."""
    yield from _topics()
    descriptions = [
        (f"{label}/{path.parent.name}", path)
        for label, root in roots.items()
        for path in root.glob("*.dist-info/METADATA")
    ]
    for address, path in sorted(descriptions, key=lambda item: _seed(item[0])):
        name = path.parent.name.removesuffix(".dist-info").rpartition("-")[0]
        if name == _OWN_NAME:
            continue  # or every edit of our own README would change the corpus
        try:
            _, _, body = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")
        except OSError:
            continue
        text = _BLANK_LINES.sub("\n\n", _BADGE_LINE.sub("", body)).strip()
        if text:
            yield Passage(address=address, name=name, kind="description", text=_encodable(text))


def docstrings(roots: Mapping[str, Path]) -> Iterator[Passage]:
    """Yield the docstrings below `roots`, those of docstring-rich files first."""
    sparse: list[tuple[str, Path]] = []
    for address, path in _python_files(roots):
        code = _read(path)
        prose_bytes = sum(len(found.group(2)) for found in _TRIPLE_QUOTED.finditer(code))
        if prose_bytes == 0:
            continue
        if prose_bytes < DENSE_SHARE * len(code):
            sparse.append((address, path))
        else:
            yield from _file_docstrings(address, code)
    for address, path in sparse:
        yield from _file_docstrings(address, _read(path))


def _topics() -> Iterator[Passage]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return
    for key, raw in sorted(topics.items(), key=lambda item: _seed(item[0])):
        text = _BLANK_LINES.sub("\n\n", _RULE_LINE.sub("", raw)).strip()
        if text:
            title = text.partition("\n")[0].replace('"', "").strip()
            yield Passage(address=f"topic/{key}", name=title, kind="topic", text=_encodable(text))


def _python_files(roots: Mapping[str, Path]) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for label, root in roots.items():
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS and "-info" not in name]
            if Path(folder).resolve() in _OWN_FOLDERS:
                subfolders.clear()
                continue
            for name in names:
                if name.endswith(".py"):
                    path = Path(folder, name)
                    found.append((f"{label}/{path.relative_to(root).as_posix()}", path))
    return sorted(found, key=lambda item: _seed(item[0]))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.stat().st_size <= LARGEST_FILE_BYTES else b""
    except OSError:
        return b""


def _file_docstrings(address: str, code: bytes) -> Iterator[Passage]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes are not our news
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    parts = address.removesuffix(".py").removesuffix("/__init__").split("/")[1:]
    module = ".".join(parts)
    todo: list[tuple[str, ast.AST]] = [(module, tree)]
    while todo:
        name, node = todo.pop()
        kind = "module" if isinstance(node, ast.Module) else "class" if isinstance(node, ast.ClassDef) else "function"
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node) or "").strip()
            if text:
                where = f"{address}#{node.lineno}" if not isinstance(node, ast.Module) else address
                yield Passage(address=where, name=name, kind=kind, text=_encodable(text))
        elif not isinstance(node, ast.If | ast.Try | ast.With):
            continue
        for child in reversed(node.body):
            inner = getattr(child, "name", None)
            todo.append((f"{name}.{inner}" if isinstance(inner, str) else name, child))


def _encodable(text: str) -> str:
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _seed(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
