"""Small plots in an asset's metadata: an SVG in a data address within Markdown, which the UI shows.

Drawn by hand: a plot library would cost every load of the definitions a second. A histogram takes
about 4 kB; colours read on light and dark alike.
"""

import base64
import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH_PX, HEIGHT_PX = 640, 240
_TOP, _BOTTOM, _SIDE = 24, 44, 10
_LEAST = 2.0
"""Height of the smallest bar, so that a few documents beside millions still show."""


def short_number(value: int) -> str:
    """`500`, `1k`, `2.5k`, `1M`: a number for a narrow place."""
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return str(value)


def histogram_svg(edges: Sequence[int], counts: Sequence[int], title: str) -> str:
    """Bars of equal width, one for each class, its count above it and its edges below.

    Args:
        edges: lower edge of each class; the last class has no upper one.
        counts: number of each class, as many as edges.
        title: what is counted.
    """
    pitch = (WIDTH_PX - 2 * _SIDE) / max(len(counts), 1)
    room, most = HEIGHT_PX - _TOP - _BOTTOM, max([*counts, 1])
    base = HEIGHT_PX - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH_PX}" height="{HEIGHT_PX}" '
        f'viewBox="0 0 {WIDTH_PX} {HEIGHT_PX}" font-family="sans-serif" font-size="11" text-anchor="middle" '
        f'fill="#808080"><title>{escape(title)}</title>'
    ]
    for i, (edge, count) in enumerate(zip(edges, counts, strict=True)):
        left, height = _SIDE + i * pitch, max(room * count / most, _LEAST if count else 0.0)
        number = f"{count:,}" if count < 1_000_000 else short_number(count)
        middle, anchor = left + pitch / 2, ' text-anchor="start"' if i == 0 else ""
        parts.append(
            f'<rect x="{left + 2:.1f}" y="{base - height:.1f}" width="{pitch - 4:.1f}" height="{height:.1f}" '
            f'fill="#4c8bf5"/><text x="{middle:.1f}" y="{base - height - 5:.1f}">{number}</text>'
            f'<text x="{left:.1f}" y="{base + 15}"{anchor}>{short_number(edge)}</text>'
        )
    parts.append(
        f'<line x1="{_SIDE}" y1="{base}" x2="{WIDTH_PX - _SIDE}" y2="{base}" stroke="#808080"/>'
        f'<text x="{WIDTH_PX / 2}" y="{HEIGHT_PX - 8}">{escape(title)}</text></svg>'
    )
    return "".join(parts)


def histogram_markdown(edges: Sequence[int], counts: Sequence[int], title: str) -> str:
    """The histogram as an image in Markdown."""
    return as_image(histogram_svg(edges, counts, title), title)


def as_image(svg: str, title: str) -> str:
    """An SVG as an image in Markdown."""
    return f"![{title}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"


def curve_svg(points: Sequence[tuple[float, float]], title: str) -> str:
    """A line through the finite points, with the smallest and largest value at its side.

    Args:
        points: (step, value), ascending by step; thin them first, each takes some ten bytes.
        title: what is drawn.
    """
    shown = [(x, y) for x, y in points if math.isfinite(y)]
    if not shown:
        return ""
    left, right, base = 60, WIDTH_PX - _SIDE, HEIGHT_PX - _BOTTOM
    first, last = shown[0][0], shown[-1][0]
    low, high = min(y for _, y in shown), max(y for _, y in shown)
    wide, tall = max(last - first, 1e-12), max(high - low, 1e-12)
    line = " ".join(
        f"{left + (right - left) * (x - first) / wide:.1f},{base - (base - _TOP) * (y - low) / tall:.1f}"
        for x, y in shown
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH_PX}" height="{HEIGHT_PX}" '
        f'viewBox="0 0 {WIDTH_PX} {HEIGHT_PX}" font-family="sans-serif" font-size="11" text-anchor="middle" '
        f'fill="#808080"><title>{escape(title)}</title>'
        f'<polyline points="{line}" fill="none" stroke="#4c8bf5" stroke-width="1.5"/>'
        f'<line x1="{left}" y1="{base}" x2="{right}" y2="{base}" stroke="#808080"/>'
        f'<text x="{left - 6}" y="{_TOP + 4}" text-anchor="end">{high:.4g}</text>'
        f'<text x="{left - 6}" y="{base + 4}" text-anchor="end">{low:.4g}</text>'
        f'<text x="{left}" y="{base + 15}" text-anchor="start">{first:,.0f}</text>'
        f'<text x="{right}" y="{base + 15}" text-anchor="end">{last:,.0f}</text>'
        f'<text x="{WIDTH_PX / 2}" y="{HEIGHT_PX - 8}">{escape(title)}</text></svg>'
    )


def curve_markdown(points: Sequence[tuple[float, float]], title: str) -> str:
    """The curve as an image in Markdown; a sentence where there is nothing to draw."""
    svg = curve_svg(points, title)
    return as_image(svg, title) if svg else f"No {title} to draw."
