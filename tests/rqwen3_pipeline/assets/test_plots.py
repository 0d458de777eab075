import base64
import math
import re
from xml.etree import ElementTree

import pytest

from rqwen3_pipeline.assets.common import metadata
from rqwen3_pipeline.assets.plots import (
    HEIGHT_PX,
    WIDTH_PX,
    curve_markdown,
    curve_svg,
    histogram_markdown,
    histogram_svg,
    short_number,
)

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (500, "500"), (1000, "1k"), (2500, "2.5k"), (100_000, "100k"), (1_000_000, "1M")],
)
def test_short_number_fits_a_narrow_place(value, text):
    assert short_number(value) == text


def test_histogram_draws_each_class_in_proportion_and_within_the_frame():
    root = ElementTree.fromstring(histogram_svg([0, 100, 5000], [10, 40, 0], "a < b & c"))
    bars = [{name: float(bar.get(name)) for name in ("x", "y", "width", "height")} for bar in root.iter(f"{SVG}rect")]
    assert bars[0]["height"] == pytest.approx(bars[1]["height"] / 4, abs=0.1)
    assert bars[2]["height"] == 0
    assert all(bar["x"] >= 0 and bar["x"] + bar["width"] <= WIDTH_PX for bar in bars)
    assert all(bar["y"] >= 0 and bar["y"] + bar["height"] <= HEIGHT_PX for bar in bars)
    words = {text.text for text in root.iter(f"{SVG}text")}
    assert {"10", "40", "0", "100", "5k", "a < b & c"} <= words


def test_histogram_shows_one_document_beside_a_million_and_nothing_where_there_is_none():
    root = ElementTree.fromstring(histogram_svg([0, 1, 2], [1_000_000, 1, 0], "t"))
    heights = [float(bar.get("height")) for bar in root.iter(f"{SVG}rect")]
    assert heights[1] >= 2
    assert heights[2] == 0


def test_histogram_of_nothing_is_drawn_too():
    assert "<rect" in histogram_svg([0, 1], [0, 0], "none")


def test_histogram_in_metadata_is_a_small_image_in_markdown():
    edges = [0, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 1_000_000]
    counts = [123_456_789 + i for i in range(12)]
    text = metadata({"length_histogram": {"edges": edges, "counts": counts}})["length_histogram"].value
    assert len(text) < 10_000
    assert text == histogram_markdown(edges, counts, re.match(r"!\[(.*?)\]", text)[1])
    svg = base64.b64decode(re.fullmatch(r"!\[.*\]\(data:image/svg\+xml;base64,(.*)\)", text)[1])
    assert ElementTree.fromstring(svg).tag == f"{SVG}svg"


def test_curve_goes_through_the_finite_points_within_the_frame_and_names_its_ends():
    root = ElementTree.fromstring(curve_svg([(1, 9.0), (2, math.nan), (3, 4.0), (5, 3.0)], "loss & step"))
    (line,) = root.iter(f"{SVG}polyline")
    points = [tuple(map(float, pair.split(","))) for pair in line.get("points", "").split()]
    assert len(points) == 3
    assert points[0][0] < points[1][0] < points[2][0] <= WIDTH_PX
    assert 0 <= points[0][1] < points[1][1] < points[2][1] <= HEIGHT_PX
    assert {"9", "3", "1", "5", "loss & step"} <= {text.text for text in root.iter(f"{SVG}text")}


def test_curve_without_a_finite_point_is_a_sentence():
    assert curve_markdown([(1, math.nan)], "loss") == "No loss to draw."
