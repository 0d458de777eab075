import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rqwen3_pipeline.evidence.axes import fit_axis, nice_step
from rqwen3_pipeline.evidence.charts import BarChart, LineChart, Series, bar_chart, line_chart

NUMBERS = st.floats(-1e12, 1e12, allow_subnormal=False)


def parse(markup):
    return ElementTree.fromstring(f"<div>{markup}</div>")


def chart(*series, **more):
    facts = {"key": "k", "title": "Loss", "description": "Falls.", "x_label": "step", "y_label": "nats"}
    return LineChart(**{**facts, **more}, series=series)


def wide(markup):
    return next(element for element in parse(markup).iter("div") if element.get("class") == "wide")


@settings(max_examples=50)
@given(st.lists(NUMBERS, min_size=1, max_size=20), st.integers(2, 10))
def test_axis_ticks_cover_the_values_with_round_steps(values, wanted):
    axis = fit_axis(values, start_px=0, end_px=100, wanted=wanted)
    ticks = axis.ticks()
    slack = 1e-6 * axis.step
    assert axis.low - slack <= min(values)
    assert max(values) <= axis.high + slack
    assert 2 <= len(ticks) <= wanted + 3
    mantissa = axis.step / 10 ** math.floor(math.log10(axis.step) + 1e-9)
    assert any(math.isclose(mantissa, nice, rel_tol=1e-6) for nice in (1, 2, 5, 10))
    assert len({axis.label(tick) for tick in ticks}) == len(ticks)


@pytest.mark.parametrize(("span", "wanted", "expected"), [(10, 5, 2), (1, 5, 0.2), (300, 8, 50), (3, 6, 0.5)])
def test_nice_step_of_known_spans(span, wanted, expected):
    assert nice_step(span, wanted) == pytest.approx(expected)


def test_axis_of_small_values_takes_out_a_power_of_ten():
    axis = fit_axis([0.0, 3e-4], start_px=0, end_px=100, wanted=6)
    assert axis.multiplier == " (× 10⁻⁴)"
    assert axis.label(1.5e-4) == "1.5"
    assert axis.px(1.5e-4) == pytest.approx(50)


def test_axis_of_nothing_finite_is_drawable():
    assert fit_axis([math.nan, math.inf], start_px=0, end_px=10, wanted=5).px(1.0) == pytest.approx(10)


def test_line_chart_places_points_by_the_axes():
    markup = line_chart(chart(Series(name="a", points=[(0, 0), (50, 5), (100, 10)], dots=True), from_zero=True))
    circles = list(wide(markup).iter("circle"))
    xs, ys = ([float(c.get(name)) for c in circles] for name in ("cx", "cy"))
    assert xs[1] == pytest.approx((xs[0] + xs[2]) / 2, abs=0.1)
    assert ys[1] == pytest.approx((ys[0] + ys[2]) / 2, abs=0.1)
    assert xs[0] < xs[1] < xs[2]
    assert ys[0] > ys[1] > ys[2]


def test_line_chart_is_named_described_and_escapes_its_text():
    markup = line_chart(chart(Series(name="<i>&", points=[(1, 1.0), (2, 2.0)]), title="A < B", description="x & y"))
    page = parse(markup)
    ids = [element.get("id") for element in page.iter() if element.get("id")]
    assert len(ids) == len(set(ids)) == 4
    for svg in page.iter("svg"):
        if svg.get("role") == "img":
            title, description = svg.get("aria-labelledby").split()
            texts = {element.get("id"): element.text for element in svg}
            assert (texts[title], texts[description]) == ("A < B", "x & y")
    assert "<i>" not in markup


def test_line_chart_breaks_at_a_point_that_is_not_finite_and_says_so():
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, 2.0), (5, 1.0)]
    svg = wide(line_chart(chart(Series(name="a", points=points))))
    lines = [e for e in svg.iter("path") if e.get("class", "").startswith("line")]
    bad = [e for e in svg.iter("path") if e.get("class") == "bad"]
    assert len(lines) == 2
    assert [e.find("title").text for e in bad] == ["step 3: not a number"]
    assert "nan" not in ElementTree.tostring(svg, encoding="unicode").replace("finance", "")


def test_line_chart_marks_and_band_are_drawn_with_labels():
    series = Series(name="a", points=[(0, 1.0), (100, 2.0)])
    svg = wide(line_chart(chart(series, marks=[(50, "#1 deadline")], band=(0, 10, "Warm-up"))))
    titles = [element.text for element in svg.iter("title")]
    assert "#1 deadline, step 50" in titles
    assert "Warm-up" in titles
    assert any(e.text == "#1 deadline" for e in svg.iter("text"))


@pytest.mark.parametrize("points", [[], [(1, math.nan)]])
def test_line_chart_without_a_point_says_so(points):
    assert "no points to draw yet" in line_chart(chart(Series(name="a", points=points)))


def test_line_chart_of_one_point_is_drawn():
    assert len(list(wide(line_chart(chart(Series(name="a", points=[(1, 5.0)])))).iter("circle"))) == 1


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 10**9), min_size=3, max_size=3), min_size=1, max_size=4))
def test_bar_chart_widths_are_shares_of_each_row(rows):
    facts = {"key": "b", "title": "Funnel", "description": "d", "x_label": "x", "categories": ["a", "b", "c"]}
    markup = bar_chart(BarChart(**facts, rows=[(f"r{i}", values) for i, values in enumerate(rows)]))
    if not any(map(sum, rows)):
        assert "nothing to draw" in markup
        return
    by_row = {}
    for rect in wide(markup).iter("rect"):
        by_row.setdefault(rect.get("y"), []).append(float(rect.get("width")))
    full = [values for values in rows if sum(values)]
    assert len(by_row) == len(full)
    for widths, values in zip(by_row.values(), full, strict=True):
        expected = [716 * value / sum(values) for value in values if value]
        assert widths == pytest.approx(expected, abs=0.02)


def test_bar_chart_with_more_categories_than_colours_tells_them_apart():
    names = [f"c{i}" for i in range(10)]
    facts = {"key": "b", "title": "t", "description": "d", "x_label": "x", "categories": names}
    rects = [r.get("class") for r in wide(bar_chart(BarChart(**facts, rows=[("r", [1] * 10)]))).iter("rect")]
    assert len(set(rects)) == 10
