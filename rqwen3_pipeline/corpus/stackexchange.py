"""StackExchange: which answer belongs to a question, and HTML to text with code and LaTeX intact.

The answer: one that has text; the asker's choice first, then the highest `pm_score` (none is the
lowest), then the lowest answer id. The order of the list never matters. The text: a walk over
selectolax's tree, block by block; `pre` becomes a fenced block to the letter, formulas keep their
spacing, entities are unescaped once by the parser, pictures and addresses go. What only looks like a
tag, as in `vector<int>` or `$i<n$`, is text. The walk is a loop, so that deep nesting can't exhaust the
stack. Marks such as `b` are kept from the parser, since it opens each that was left open again in every
later paragraph: 55 kB took 4 GB. Costs one parse of the question and of one answer.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from selectolax.lexbor import LexborHTMLParser, LexborNode

_BLOCK_TAGS = """address article aside blockquote body center dd details div dl dt fieldset figcaption figure footer
form h1 h2 h3 h4 h5 h6 header hr html li main nav ol p pre section summary table tbody tfoot thead tr ul"""
_SKIPPED_TAGS = "head script style template title img noscript iframe svg -comment !doctype"
LONGEST_BODY_BYTES = 300_000
"""A longer body is no post: the sites take 30,000 characters of Markdown. An answer of that kind counts as one without
text; it would cost gigabytes, or hours where it is nested to the end."""

_INLINE_TAGS = """abbr acronym audio base bdi bdo br caption cite col colgroup del dfn input ins kbd link map area mark
meta object param picture q rp rt ruby samp source span sub sup td th time track var video wbr"""
_MARK_TAGS = "a b big em font i nobr s small strike strong tt u"
_TAG = re.compile(r"(</?(?!(?:p|li|ul|pre|h[1-6]|d[dlt]|div|tr|td)[\s/>])[a-zA-Z][^\s/>]*)")
"""Names of tags, but for those most frequent ones that stay as they are."""
_CODE = "x-code"
"""What `code` is called in the tree: a name that the parser has no rule for."""
_BLOCKS, _SKIPPED = frozenset(_BLOCK_TAGS.split()), frozenset(_SKIPPED_TAGS.split())
_NAMES = dict.fromkeys(_MARK_TAGS.split(), "wbr") | {"code": _CODE}  # wbr: has no content, and means nothing
_SILENT = _SKIPPED | {"wbr"}
_INDENTING = frozenset(("blockquote", "li", "ol", "tr", "ul"))
_SPEAKING = _BLOCKS | {"-text", "br", _CODE, "sup", "sub", "td", "th"}
_KNOWN = _BLOCKS | _SKIPPED | frozenset(_INLINE_TAGS.split())
_BREAKS = ("\n", "\t", "\r", "\f")
_SPACES = " " + "".join(_BREAKS)
_FORMULA = re.compile(
    r"(\$\$.{1,4000}?\$\$|\\begin\{(\w{1,20}\*?)\}.{1,4000}?\\end\{\2\}"
    r"|\\\[.{1,4000}?\\\]|\\\(.{1,4000}?\\\)|\$[^$]{1,4000}\$)",
    re.DOTALL,
)
_MOST_PREFIXES = 16
_BACKTICKS = re.compile(r"`+")
_WHOLE_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer as the file has it; the types drift between files."""

    id: Any
    """A number, or its digits."""
    score: float | None
    """`pm_score`."""
    selected: Any
    """A boolean, its name, or 0 and 1."""
    html: str
    """Its body."""
    repaired: bool = False
    """Whether something in the body became U+FFFD."""


def is_selected(value: Any) -> bool:
    """Whether the asker chose the answer, however the file says so."""
    return value.strip().lower() in ("true", "1", "yes") if isinstance(value, str) else bool(value)


def ranked(answers: Sequence[Answer]) -> list[Answer]:
    """Answers by the rule, best first, whatever their order."""

    def rank(answer: Answer) -> tuple[bool, float, bool, int, str]:
        name = str(answer.id).strip()
        number = int(name) if _WHOLE_NUMBER.fullmatch(name) else None
        score = float("-inf") if answer.score is None or answer.score != answer.score else answer.score
        return not is_selected(answer.selected), -score, number is None, number or 0, name + "\0" + answer.html

    return sorted(answers, key=rank)


def compose(question_html: str, answers: Sequence[Answer]) -> tuple[str, Answer | None]:
    """The document: the question's text, a blank line, the text of the best answer that has one.

    Returns:
        The text, empty where the question or every answer is blank; and the answer, None if none
        has text.
    """
    for answer in ranked(answers):
        if text := html_to_text(answer.html):
            question = html_to_text(question_html)
            return (f"{question}\n\n{text}" if question else ""), answer
    return "", None


@dataclass(slots=True)
class _Writer:
    """Collects blocks of text; a block is one paragraph, list item or fence."""

    blocks: list[str] = field(default_factory=list[str])
    """Finished blocks, each with the line breaks that set it apart."""
    parts: list[str] = field(default_factory=list[str])
    """The block being written."""
    prefixes: list[str] = field(default_factory=list[str])
    """What begins each line: quote marks, and indentation within lists."""
    numbers: list[int | None] = field(default_factory=list["int | None"])
    """Of each open list the next item's number; None where items have none."""
    bullet: str = ""
    """Replaces the last prefix in the next block's first line."""
    tight: bool = False
    """The next block follows without a blank line, being a list item or a table's row."""

    def inline(self, text: str) -> None:
        """Text whose runs of white space count as one space, formulas excepted."""
        if "$" not in text and "\\" not in text:
            self._plain(text)
            return
        pieces = _FORMULA.split(text)
        for index in range(0, len(pieces), 3):
            self._plain(pieces[index])
            if index + 1 < len(pieces):
                self.parts.append(pieces[index + 1])

    def _plain(self, text: str) -> None:
        parts = self.parts
        if not parts or parts[-1][-1] in " \n":
            text = text.lstrip(_SPACES)
        if not text:
            return
        for space in _BREAKS:
            if space in text:
                text = text.replace(space, " ")
        while "  " in text:
            text = text.replace("  ", " ")
        parts.append(text)

    def verbatim(self, text: str) -> None:
        """Text as it is."""
        if text:
            self.parts.append(text)

    def end_block(self, fence: bool = False) -> None:
        """Close the block, if there is anything in it."""
        whole = "".join(self.parts)
        self.parts.clear()
        whole = whole if fence else whole.strip(" \n")
        if not whole:
            return
        if self.prefixes or "\n" in whole:
            rest = "".join(self.prefixes[:_MOST_PREFIXES])
            first = "".join(self.prefixes[:-1][:_MOST_PREFIXES]) + self.bullet if self.bullet else rest
            lines = whole.split("\n")
            whole = "\n".join([(first + lines[0]).rstrip(" "), *((rest + line).rstrip(" ") for line in lines[1:])])
        gap = "" if not self.blocks else "\n" if self.tight else "\n\n"
        self.blocks.append(gap + whole)
        self.bullet, self.tight = "", False


def html_to_text(html: str) -> str:
    """Turn an HTML body into plain text.

    Paragraphs are set apart by a blank line; list items begin with `- ` or their number, quotations
    with `> `; `pre` stands between fences, `code` between backticks, a power behind `^`, an index
    behind `_`.
    """
    root = LexborHTMLParser(_renamed(html)).root
    if root is None:
        return ""
    writer = _Writer()
    for node, tag, entering in _walk(root):
        if tag == "-text":
            writer.inline(node.text_content or "")
        elif tag in _BLOCKS:
            if writer.parts:
                writer.end_block()
            if tag in _INDENTING:
                _indent(writer, node, tag, entering)
            elif tag == "pre":
                _write_fence(writer, _content(node))
        elif tag == _CODE:
            _write_code(writer, _content(node))
        elif tag == "br":
            writer.verbatim("\n")
        elif tag in ("sup", "sub"):
            writer.verbatim("^" if tag == "sup" else "_")
        elif writer.parts:  # a cell that is not the first
            writer.verbatim(" | ")
    writer.end_block()
    return "".join(writer.blocks).strip("\n")


def _renamed(html: str) -> str:
    """The HTML with the names that the parser is given."""
    pieces = _TAG.split(html)
    pieces[1::2] = map(_TAGS.__getitem__, pieces[1::2])
    return "".join(pieces)


def _rename(tag: str) -> str:
    """What the parser is given in place of `<name` or `</name`."""
    name = tag[1:].removeprefix("/")
    start = tag[: -len(name)]
    if (known := name.lower()) in _NAMES:
        return start + _NAMES[known]
    return tag if known in _KNOWN else f"&lt;{start[1:]}{name}"


class _Renamed(dict[str, str]):
    """What `_rename` says, by the tag, as often as tags repeat: all but the long ones are kept."""

    def __missing__(self, tag: str) -> str:
        name = _rename(tag)
        if len(tag) < 32 and len(self) < 4096:
            self[tag] = name
        return name


_TAGS = _Renamed()


def _walk(root: LexborNode, whole: bool = False) -> Iterator[tuple[LexborNode, str, bool]]:
    """Every node that says something with its tag, in the order of the text: a block when it begins and when it ends.

    Code is not entered, unless the `whole` of it is asked for.
    """
    closed = ("-text", "br") if whole else ("-text", "br", "pre", _CODE)
    stack = [(root, root.tag or "", True)]
    while stack:
        visit = node, tag, entering = stack.pop()
        if tag in _SPEAKING:
            yield visit
        if entering and tag not in closed:
            if tag in _BLOCKS:
                stack.append((node, tag, False))
            child = node.last_child
            while child is not None:
                if (name := child.tag or "") not in _SILENT:
                    stack.append((child, name, True))
                child = child.prev


def _indent(writer: _Writer, node: LexborNode, tag: str, entering: bool) -> None:
    if tag in ("li", "tr"):
        writer.tight = entering and node.prev is not None and _element_before(node)
    if tag == "blockquote":
        writer.prefixes.append("> ") if entering else writer.prefixes.pop()
    elif tag in ("ol", "ul"):
        writer.numbers.append(_first_number(node, tag)) if entering else writer.numbers.pop()
    elif tag == "li" and entering:
        writer.bullet = _bullet(writer)
        writer.prefixes.append(" " * len(writer.bullet))
    elif tag == "li":
        writer.prefixes.pop()
        writer.bullet = ""


def _element_before(node: LexborNode) -> bool:
    before = node.prev
    while before is not None and before.tag == "-text":
        before = before.prev
    return before is not None


def _first_number(node: LexborNode, tag: str) -> int | None:
    start = node.attributes.get("start") or "1"
    if tag == "ul":
        return None
    return int(start) if _WHOLE_NUMBER.fullmatch(start) and len(start) < 10 else 1


def _bullet(writer: _Writer) -> str:
    number = writer.numbers[-1] if writer.numbers else None
    if number is None:
        return "- "
    writer.numbers[-1] = number + 1
    return f"{number}. "


def _content(node: LexborNode) -> str:
    """All text below a node, to the letter; a block that has strayed into it begins and ends a line."""
    parts: list[str] = []
    for inner, tag, _ in _walk(node, whole=True):
        if tag == "-text":
            parts.append(inner.text_content or "")
        elif tag == "br" or (tag in _BLOCKS and parts and not parts[-1].endswith("\n")):
            parts.append("\n")
    return "".join(parts)


def _write_fence(writer: _Writer, code: str) -> None:
    writer.end_block()
    code = code.strip("\n")
    if code.strip():
        longest = max((len(run) for run in _BACKTICKS.findall(code)), default=0)
        fence = "`" * max(3, longest + 1)
        writer.verbatim(f"{fence}\n{code}\n{fence}")
        writer.end_block(fence=True)


def _write_code(writer: _Writer, code: str) -> None:
    if code.strip():
        mark = "``" if "`" in code else "`"
        writer.verbatim(f"{mark}{code}{mark}")
