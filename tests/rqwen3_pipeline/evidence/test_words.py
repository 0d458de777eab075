import json
import math

import pytest

from rqwen3_pipeline.evidence.readings import Reader, jsonable, number
from rqwen3_pipeline.evidence.words import between, dash, duration, magnitude, percent, quantity, size


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (751_632_384, "752 million"),
        (13_107_200_000, "13.1 billion"),
        (1_228_800, "1.23 million"),
        (14_960, "14,960"),
        (9_997_000, "10.0 million"),
        (999_700, "1.00 million"),
        (999_400, "999,400"),
        (1_000_000_000, "1.00 billion"),
        (0, "0"),
    ],
)
def test_magnitude_has_three_figures(value, expected):
    assert magnitude(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "pending"), (1234567, "1,234,567"), (2.51861, "2.5186"), (True, "yes"), ("not a number", "not a number")],
)
def test_quantity_of_each_kind(value, expected):
    assert quantity(value) == expected


def test_percent_size_and_duration_read_naturally():
    assert percent(0.2432, 2) == "24.32 %"
    assert percent("infinite") == "infinite"
    assert size(9_019_588_608) == "8.4 GiB"
    assert size(12) == "12 bytes"
    assert duration(86_400 * 2 + 3600 * 5) == "2 d 5 h"
    assert duration(3599.6) == "1 h 0 min"
    assert duration(12.34) == "12.3 s"
    assert dash(None) == "–"


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [(None, None, "pending"), (3, 3, "3"), (0, 1200, "0 to 1,200"), (1200, None, "at least 1,200")],
)
def test_between_says_what_is_known_of_a_number(least, most, expected):
    assert between(least, most) == expected


def test_jsonable_spells_what_json_has_no_number_for():
    made = jsonable({"a": [math.nan, math.inf, (-math.inf, 1.5)]})
    assert made == {"a": ["not a number", "infinite", ["minus infinite", 1.5]]}
    json.dumps(made, allow_nan=False)


@pytest.mark.parametrize(("value", "expected"), [(3, 3.0), ("2.5", 2.5), (True, None), (None, None), ("x", None)])
def test_number_takes_numbers_and_their_text(value, expected):
    assert number(value) == expected


def test_reader_of_a_damaged_file_notes_it_without_the_root(tmp_path):
    (tmp_path / "a.json").write_text("{", encoding="utf-8")
    (tmp_path / "b.json").write_text("[]", encoding="utf-8")
    reader = Reader(root=tmp_path)
    assert reader.table(tmp_path / "a.json") is None
    assert reader.table(tmp_path / "b.json") is None
    assert reader.table(tmp_path / "c.json") is None
    assert [problem["file"] for problem in reader.problems] == ["a.json", "b.json"]
    assert str(tmp_path) not in str(reader.problems)
