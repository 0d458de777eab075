import csv
import io
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rqwen3_pipeline.evidence.curves import CSV_COLUMNS, effective, loss_csv, of_source, thin
from rqwen3_pipeline.evidence.training import step_ranges


def lines(submission, steps, *, kind="train", attempt=1, **more):
    return [
        {
            "kind": kind,
            "step": step,
            "loss": submission + step / 1000,
            "submission": submission,
            "attempt": attempt,
            **more,
        }
        for step in steps
    ]


def test_effective_after_a_resume_takes_the_later_line_of_each_step():
    curve = effective([*lines(1, range(1, 8)), *lines(2, range(5, 10))], "train")
    assert [(p["step"], p["submission"]) for p in curve.points] == [
        *((step, 1) for step in range(1, 5)),
        *((step, 2) for step in range(5, 10)),
    ]
    assert curve.superseded_steps == (5, 6, 7)
    assert curve.abandoned_steps == ()


def test_effective_while_the_resumed_attempt_has_not_caught_up_drops_the_lost_branch():
    curve = effective([*lines(1, range(1, 20)), *lines(2, range(11, 14))], "train")
    assert [p["step"] for p in curve.points] == list(range(1, 14))
    assert curve.superseded_steps == (11, 12, 13)
    assert curve.abandoned_steps == tuple(range(14, 20))


def test_effective_of_a_second_attempt_at_the_same_submission_supersedes_too():
    curve = effective([*lines(3, (1, 2, 3)), *lines(3, (2, 3, 4), attempt=2)], "train")
    assert [(p["step"], p["attempt"]) for p in curve.points] == [(1, 1), (2, 2), (3, 2), (4, 2)]


def test_effective_after_a_resume_that_logs_more_seldom_keeps_nothing_after_the_step_it_went_on_from():
    records = [*lines(1, range(1, 18)), *lines(2, (20, 30))]
    curve = effective(records, "train", {(1, 1): 0, (2, 1): 12})
    assert [p["step"] for p in curve.points] == [*range(1, 13), 20, 30]
    assert curve.abandoned_steps == (13, 14, 15, 16, 17)


def test_effective_heldout_of_a_lost_branch_is_dropped_by_the_training_lines():
    records = [
        *lines(1, range(1, 12)),
        *lines(1, (10,), kind="heldout", source="all"),
        *lines(2, range(6, 9)),
    ]
    assert effective(records, "heldout").points == ()
    assert effective(records, "heldout").abandoned_steps == (10,)


def test_effective_heldout_keeps_each_source_apart_and_the_last_of_each():
    records = [
        *lines(1, (5,), kind="heldout", source="a"),
        *lines(1, (5,), kind="heldout", source="b"),
        *lines(2, (5,), kind="heldout", source="a"),
    ]
    curve = effective(records, "heldout")
    assert [(p["source"], p["submission"]) for p in curve.points] == [("a", 2), ("b", 1)]
    assert len(of_source(curve, "a").points) == 1


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 15)), min_size=1, max_size=6))
def test_effective_equals_replaying_the_run_step_by_step(attempts):
    records, state, saved = [], {}, 0
    for submission, (back, length) in enumerate(attempts, start=1):
        start = max(0, saved - back)
        saved = start + length
        records += lines(submission, range(start + 1, saved + 1))
        state = {step: owner for step, owner in state.items() if step <= start}
        state |= dict.fromkeys(range(start + 1, saved + 1), submission)
    curve = effective(records, "train")
    assert {p["step"]: p["submission"] for p in curve.points} == state


def test_losses_of_a_null_loss_is_not_a_number():
    records = [{"kind": "train", "step": 1, "loss": 2.0}, {"kind": "train", "step": 2, "loss": None}]
    (_, first), (_, second) = effective(records, "train").losses()
    assert first == 2.0
    assert math.isnan(second)


@settings(max_examples=50)
@given(
    st.lists(st.floats(-100, 100) | st.just(math.nan), min_size=1, max_size=400),
    st.integers(4, 60),
)
def test_thin_keeps_ends_extremes_and_bad_points_and_is_short(values, limit):
    points = [(float(i), value) for i, value in enumerate(values)]
    kept = thin(points, limit)
    assert kept[0] is points[0]
    assert kept[-1] is points[-1]
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        shown = [y for _, y in kept if math.isfinite(y)]
        assert (min(shown), max(shown)) == (min(finite), max(finite))
    bad = sum(math.isnan(value) for value in values)
    assert sum(math.isnan(y) for _, y in kept) == bad
    assert len(kept) <= max(limit, bad + limit)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})


def test_thin_with_no_room_is_refused():
    with pytest.raises(ValueError, match="limit = 3"):
        thin([(0.0, 1.0)], 3)


def test_loss_csv_holds_every_point_and_spells_what_is_not_finite():
    train = effective([*lines(1, (1, 2)), {"kind": "train", "step": 3, "loss": None}], "train")
    held = effective(lines(1, (2, 5), kind="heldout", source="all", bits_per_byte=1.5), "heldout")
    rows = list(csv.DictReader(io.StringIO(loss_csv(train, held))))
    assert list(rows[0]) == list(CSV_COLUMNS)
    assert [row["step"] for row in rows] == ["1", "2", "3", "5"]
    assert [row["loss"] for row in rows] == ["1.001", "1.002", "not a number", ""]
    assert [row["heldout_bits_per_byte"] for row in rows] == ["", "1.5", "", "1.5"]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [((), []), ((7,), [[7, 7]]), ((5, 6, 7), [[5, 7]]), ((10, 20, 30, 100, 110), [[10, 30], [100, 110]])],
)
def test_step_ranges_join_neighbours_at_the_closest_distance(steps, expected):
    assert step_ranges(steps) == expected
