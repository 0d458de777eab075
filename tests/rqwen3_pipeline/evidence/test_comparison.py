"""Experiments side by side, from real configurations and logs."""

import pytest

from model.errors import ConfigError
from model.files import read_json
from rqwen3_pipeline.evidence.comparison import differences, write_comparison
from rqwen3_pipeline.experiments.variation import make_variation


def test_comparison_lays_the_run_and_its_variations_side_by_side(finished_run):
    make_variation(finished_run.root, finished_run.run, "cooler", ["training.learning_rate=5e-4"], "small")
    make_variation(finished_run.root, finished_run.run, "stricter", ["data.fineweb_edu.min_score=4"], "small")
    report = write_comparison(finished_run.root, "small")
    rows = {row["name"]: row for row in report["experiments"]}
    assert list(rows) == ["small", "cooler", "stricter"]
    assert rows["small"]["differs"] == []
    assert rows["cooler"]["differs"] == ["training.learning_rate = 0.0005"]
    assert rows["stricter"]["differs"] == ["data.fineweb_edu.min_score = 4"]
    assert rows["small"]["steps"] == 200
    assert rows["small"]["loss"] == pytest.approx(finished_run.loss(200, 3))
    assert rows["small"]["heldout_loss"] == pytest.approx(finished_run.loss(200, 3) + 0.4)
    assert rows["small"]["scores"]["heldout_cloze, acc"] == {"score": 0.40, "stderr": 0.04}
    assert rows["cooler"]["loss"] is None
    page = (finished_run.root.path / report["page"]).read_text()
    assert "<code>training.learning_rate = 0.0005</code>" in page
    assert "<script" not in page
    assert read_json(finished_run.root.path / report["comparison"])["experiments"][0]["steps"] == 200


def test_comparison_of_one_experiment_without_any_log_is_a_page_too(corpus_run):
    corpus_run.begin()
    report = write_comparison(corpus_run.root, "small")
    assert [row["name"] for row in report["experiments"]] == ["small"]
    assert (corpus_run.root.path / report["page"]).stat().st_size > 1000


def test_comparison_where_none_has_begun_is_refused_in_words(empty_run):
    with pytest.raises(ConfigError, match=r"no experiment has begun there.*rqwen3 status"):
        write_comparison(empty_run.root, "small")


def test_differences_name_changed_added_and_missing_keys_but_not_the_name():
    base = {"run": {"name": "a"}, "data": {"x": {"y": 1}, "gone": {"z": 2}}, "training": {"lr": 1.0}}
    other = {"run": {"name": "b"}, "data": {"x": {"y": 2}}, "training": {"lr": 1.0, "seed": 7}}
    assert differences(base, other) == ["without data.gone", "data.x.y = 2", "training.seed = 7"]
