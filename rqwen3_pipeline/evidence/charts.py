"""Charts as inline SVG: no library, no script, no font, no file beside the page.

Colours and text come from the page's style sheet by class (`c0` … `c7`), so that one drawing serves
light, dark and paper. A chart is drawn twice, for a wide and for a narrow screen, and the style sheet
shows one of them: scaled down to a phone, the wide one's text could not be read. Title and
description stand in the SVG for those who listen; `<title>` on parts gives the figures on hovering.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rqwen3_pipeline.evidence.axes import Axis, fit_axis
from rqwen3_pipeline.evidence.curves import thin
from rqwen3_pipeline.evidence.readings import spelled

COLOURS = 8
WIDE_PX, NARROW_PX = 860, 360


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One named set of points."""

    name: str
    """As the legend shows it."""
    points: Sequence[tuple[float, float]]
    """(x, y), ascending by x; y may be not finite."""
    dots: bool = False
    """Draw each point, rather than only the line through them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineChart:
    """What a line chart shows."""

    key: str
    """Its id in the page, unique."""
    title: str
    """Short name."""
    description: str
    """What there is to see, in words."""
    x_label: str
    """Quantity and unit of the horizontal axis."""
    y_label: str
    """Quantity and unit of the vertical axis."""
    series: Sequence[Series]
    """At most eight, by their colours."""
    marks: Sequence[tuple[float, str]] = ()
    """Vertical lines: x and a short label."""
    band: tuple[float, float, str] | None = None
    """A shaded stretch: from x, to x, label."""
    from_zero: bool = False
    """Let the vertical axis begin at 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BarChart:
    """Horizontal stacked bars, one a row, each filled to its own total."""

    key: str
    """Its id in the page, unique."""
    title: str
    """Short name."""
    description: str
    """What there is to see, in words."""
    x_label: str
    """What the full width stands for."""
    categories: Sequence[str]
    """Names of the stacked parts, in order."""
    rows: Sequence[tuple[str, Sequence[float]]]
    """(label, value per category)."""


def line_chart(chart: LineChart) -> Markup:
    """The chart in both widths with its legend; a sentence instead when there is no point to draw."""
    drawn = [point for series in chart.series for point in series.points if math.isfinite(point[1])]
    if not drawn:
        return Markup('<p class="pending">{}: there are no points to draw yet.</p>').format(chart.title)
    legend = [series.name for series in chart.series]
    return _both(lambda key, width: _draw_lines(chart, key, width), chart.key, legend)


def bar_chart(chart: BarChart) -> Markup:
    """The bars in both widths with their legend; a sentence instead when every bar is empty."""
    if not any(sum(values) > 0 for _, values in chart.rows):
        return Markup('<p class="pending">{}: there is nothing to draw yet.</p>').format(chart.title)
    return _both(lambda key, width: _draw_bars(chart, key, width), chart.key, chart.categories)


def _both(draw: Callable[[str, int], Markup], key: str, legend: Sequence[str]) -> Markup:
    entry = Markup(
        '<li><svg class="key" viewBox="0 0 12 12" aria-hidden="true">'
        '<rect class="fill c{}{}" width="12" height="12"/></svg>{}</li>'
    )
    entries = Markup("").join(entry.format(i % COLOURS, _pale(i), name) for i, name in enumerate(legend))
    return Markup(
        '<figure><div class="wide">{}</div><div class="narrow">{}</div><ul class="legend">{}</ul></figure>'
    ).format(draw(key, WIDE_PX), draw(f"{key}-narrow", NARROW_PX), entries)


def _pale(i: int) -> str:
    """The ninth colour on are the first ones again, paler."""
    return " pale" if i >= COLOURS else ""


def _svg(key: str, title: str, description: str, size_px: tuple[int, int], parts: Sequence[Markup]) -> Markup:
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-labelledby="{}-title {}-desc">'
        '<title id="{}-title">{}</title><desc id="{}-desc">{}</desc>{}</svg>'
    ).format(*size_px, key, key, key, title, key, description, Markup("").join(parts))


def _text(x: float, y: float, text: str, kind: str, anchor: str = "middle") -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(kind, x, y, anchor, text)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(kind, x1, y1, x2, y2)


def _draw_lines(chart: LineChart, key: str, width: int) -> Markup:
    narrow = width < 500
    height = 250 if narrow else 330
    top, bottom, left, right = 34, height - 44, (46 if narrow else 62), width - 14
    xs = [x for series in chart.series for x, _ in series.points]
    ys = [y for series in chart.series for _, y in series.points]
    x_axis = fit_axis(xs, start_px=left, end_px=right, wanted=4 if narrow else 8, from_zero=True)
    y_axis = fit_axis(ys, start_px=bottom, end_px=top, wanted=6, from_zero=chart.from_zero)
    parts: list[Markup] = []
    if chart.band is not None:
        parts.append(_band(chart.band, x_axis, (top, bottom)))
    parts += _frame(chart, x_axis, y_axis, narrow)
    parts += _marks(chart.marks, x_axis, (top, bottom), narrow)
    for i, series in enumerate(chart.series):
        parts += _curve(series, i % COLOURS, x_axis, y_axis, limit=250 if narrow else 700)
    return _svg(key, chart.title, chart.description, (width, height), parts)


def _frame(chart: LineChart, x_axis: Axis, y_axis: Axis, narrow: bool) -> list[Markup]:
    left, right, bottom, top = x_axis.start_px, x_axis.end_px, y_axis.start_px, y_axis.end_px
    parts = [_line(left, y_axis.px(tick), right, y_axis.px(tick), "grid") for tick in y_axis.ticks()]
    parts += [_text(left - 6, y_axis.px(tick) + 4, y_axis.label(tick), "tick", "end") for tick in y_axis.ticks()]
    for tick in x_axis.ticks():
        at = x_axis.px(tick)
        anchor = "end" if at > right - 12 else "middle"
        parts += [_line(at, bottom, at, bottom + 5, "axis"), _text(at, bottom + 19, x_axis.label(tick), "tick", anchor)]
    parts += [_line(left, bottom, right, bottom, "axis"), _line(left, top, left, bottom, "axis")]
    parts.append(_text((left + right) / 2, bottom + 38, chart.x_label + x_axis.multiplier, "label"))
    parts.append(_text(4 if narrow else 8, 14, chart.y_label + y_axis.multiplier, "label", "start"))
    return parts


def _band(band: tuple[float, float, str], x_axis: Axis, y_range_px: tuple[float, float]) -> Markup:
    top, bottom = y_range_px
    first, last = x_axis.px(max(band[0], x_axis.low)), x_axis.px(min(band[1], x_axis.high))
    if last <= first:
        return Markup("")
    return Markup(
        '<rect class="band" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
    ).format(first, top, last - first, bottom - top, band[2])


def _marks(
    marks: Sequence[tuple[float, str]], x_axis: Axis, y_range_px: tuple[float, float], narrow: bool
) -> list[Markup]:
    """Vertical lines; labels that would overlap the last one written are left to the hover title."""
    top, bottom = y_range_px
    parts: list[Markup] = []
    free_from = -math.inf
    for x, label in marks:
        if not x_axis.low <= x <= x_axis.high:
            continue
        at = x_axis.px(x)
        parts.append(
            Markup("<g>{}<title>{}</title></g>").format(_line(at, top, at, bottom, "mark"), f"{label}, step {x:,.0f}")
        )
        half_px = len(label) * (3.0 if narrow else 3.3) + 3
        middle = min(at, x_axis.end_px + 12 - half_px)
        if middle - half_px >= free_from:
            parts.append(_text(middle, top - 5, label, "mark-label"))
            free_from = middle + half_px
    return parts


def _curve(series: Series, colour: int, x_axis: Axis, y_axis: Axis, limit: int) -> list[Markup]:
    points = list(series.points) if series.dots else thin(series.points, limit)
    stretches: list[list[str]] = [[]]
    parts: list[Markup] = []
    for x, y in points:
        if not math.isfinite(y):
            stretches.append([])
            at, top = x_axis.px(x), y_axis.end_px
            parts.append(
                Markup('<path class="bad" d="M{:.1f} {:.1f}l-5 -9h10z"><title>{}</title></path>').format(
                    at, top + 9, f"step {x:,.0f}: {spelled(y)}"
                )
            )
            continue
        stretches[-1].append(f"{x_axis.px(x):.1f} {y_axis.px(y):.1f}")
        if series.dots:
            parts.append(
                Markup('<circle class="fill c{}" cx="{:.1f}" cy="{:.1f}" r="3.5"><title>{}</title></circle>').format(
                    colour, x_axis.px(x), y_axis.px(y), f"{series.name}, step {x:,.0f}: {y:.4f}"
                )
            )
    paths = [
        Markup('<path class="line{} c{}" d="M{}"/>').format(" faint" if series.dots else "", colour, "L".join(stretch))
        for stretch in stretches
        if len(stretch) > 1
    ]
    if not series.dots:
        lone = [stretch[0].split(" ") for stretch in stretches if len(stretch) == 1]
        parts += [Markup('<circle class="fill c{}" cx="{}" cy="{}" r="2.5"/>').format(colour, *at) for at in lone]
    return paths + parts


def _draw_bars(chart: BarChart, key: str, width: int) -> Markup:
    narrow = width < 500
    left, right, top = (8 if narrow else 128), width - 16, 8
    pitch, bar_px = (44, 18) if narrow else (34, 20)
    bottom = top + pitch * len(chart.rows)
    axis = fit_axis([0.0, 100.0], start_px=left, end_px=right, wanted=5)
    parts = [_line(axis.px(tick), top, axis.px(tick), bottom, "grid") for tick in axis.ticks()]
    for tick in axis.ticks():
        anchor = {0.0: "start", 100.0: "end"}.get(tick, "middle")
        parts.append(_text(axis.px(tick), bottom + 16, f"{tick:.0f} %", "tick", anchor))
    parts.append(_text((left + right) / 2, bottom + 36, chart.x_label, "label"))
    for row, (label, values) in enumerate(chart.rows):
        y = top + row * pitch + (20 if narrow else 6)
        parts.append(
            _text(left, y - 5, label, "row", "start") if narrow else _text(left - 8, y + 15, label, "row", "end")
        )
        parts += _stack(label, values, chart.categories, axis, y, bar_px)
    return _svg(key, chart.title, chart.description, (width, bottom + 46), parts)


def _stack(
    label: str, values: Sequence[float], categories: Sequence[str], axis: Axis, y: float, bar_px: float
) -> list[Markup]:
    total = sum(values)
    parts: list[Markup] = []
    done = 0.0
    for i, value in enumerate(values):
        if value <= 0:
            continue
        first, last = axis.px(100 * done / total), axis.px(100 * (done + value) / total)
        done += value
        share = f"{label}, {categories[i]}: {value:,.0f} ({100 * value / total:.2f} %)"
        parts.append(
            Markup(
                '<rect class="fill part c{}{}" x="{:.2f}" y="{:.1f}" width="{:.2f}" height="{:.1f}">'
                "<title>{}</title></rect>"
            ).format(i % COLOURS, _pale(i), first, y, last - first, bar_px, share)
        )
    return parts
