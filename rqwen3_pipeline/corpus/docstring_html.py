"""Docstrings as HTML posts: paragraphs, code blocks, lists, LaTeX and entities, as StackExchange has them.

Only the demo corpus needs this: its questions exercise the HTML reader with everything that reader
must keep intact. Costs a few regular expressions per docstring.
"""

import html
import re

_INLINE_MATH = re.compile(r":math:`([^`]+)`")
_MATH_BLOCK = re.compile(r"^([ \t]*)\.\. math::[ \t]*(.*)(?:\n|\Z)((?:[ \t]*\n|\1[ \t]+\S.*(?:\n|\Z))*)", re.MULTILINE)
_UNDERLINE = re.compile(r"([-=~^])\1{2,}[ \t]*")
_BULLET = re.compile(r"[*-] +(?=\S)")
_CODE_SPAN = re.compile(r"``([^`\n]+)``")


def has_latex(text: str) -> bool:
    """Whether a docstring bears LaTeX."""
    return ":math:`" in text or ".. math::" in text or "\\frac" in text


def with_dollars(text: str) -> str:
    """Write Sphinx's math markup with dollar signs, as web pages do."""
    if ":math:" not in text and ".. math::" not in text:
        return text
    return _INLINE_MATH.sub(r"$\1$", _MATH_BLOCK.sub(_display_math, text))


def blocks_of(text: str) -> list[str]:
    """Split at blank lines; neighbouring blocks of code stay together, indentation is kept."""
    blocks: list[str] = []
    for block in re.split(r"\n(?:[ \t]*\n)+", text.strip("\n")):
        if blocks and _is_code(block) and _is_code(blocks[-1]):
            blocks[-1] += "\n\n" + block
        elif block.strip():
            blocks.append(block)
    return blocks


def to_html(blocks: list[str]) -> str:
    """One HTML post of the blocks of a docstring."""
    return "\n\n".join(_block_html(block) for block in blocks)


def _display_math(found: re.Match[str]) -> str:
    indent = found.group(1)
    lines = [found.group(2).strip(), *(line.strip() for line in found.group(3).splitlines())]
    body = "\n".join(indent + line for line in lines if line and not line.startswith(":"))
    return f"{indent}$$\n{body}\n{indent}$$\n\n"


def _is_code(block: str) -> bool:
    return block.startswith((">>>", "    ", "\t"))


def _block_html(block: str) -> str:
    lines = block.split("\n")
    if _is_code(block):
        return f"<pre><code>{html.escape(block)}\n</code></pre>"
    if len(lines) > 1 and _UNDERLINE.fullmatch(lines[1]):
        heading = f"<h2>{_inline_html(lines[0].strip())}</h2>"
        rest = "\n".join(lines[2:])
        if not rest.strip():
            return heading
        body = f"<pre><code>{html.escape(rest)}\n</code></pre>" if "\n " in rest else f"<p>{_inline_html(rest)}</p>"
        return f"{heading}\n\n{body}"
    if all(_BULLET.match(line) or line.startswith(" ") for line in lines) and _BULLET.match(lines[0]):
        items = "\n".join(lines).split("\n" + lines[0][0] + " ")
        listed = "\n".join(f"<li>{_inline_html(_BULLET.sub('', item, count=1))}</li>" for item in items)
        return f"<ul>\n{listed}\n</ul>"
    return f"<p>{_inline_html(block)}</p>"


def _inline_html(text: str) -> str:
    return _CODE_SPAN.sub(r"<code>\1</code>", html.escape(text))
