import math

import pytest

from model.files import write_json
from rqwen3_pipeline.evidence.known_runs import MODELS, SCORES
from rqwen3_pipeline.evidence.readings import Reader
from rqwen3_pipeline.evidence.scores import evaluation_evidence, judge
from rqwen3_pipeline.settings import RunRoot


def test_judge_above_chance_needs_more_than_three_standard_errors():
    assert judge(0.25 + 0.0301, 0.01, 0.25)["verdict"] == "above chance"
    assert judge(0.25 + 0.0299, 0.01, 0.25)["verdict"] == "not told apart from chance"
    assert judge(0.25 - 0.0301, 0.01, 0.25)["verdict"] == "below chance"
    assert judge(0.5, 0.1, 0.25)["sigmas"] == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("score", "stderr", "chance", "lacking"),
    [
        (None, 0.1, 0.25, "score"),
        (0.3, None, 0.25, "standard error"),
        (0.3, 0.0, 0.25, "standard error"),
        (0.3, 0.1, None, "chance level"),
    ],
)
def test_judge_without_a_figure_says_which_is_lacking(score, stderr, chance, lacking):
    judged = judge(score, stderr, chance)
    assert judged["verdict"] == "can't be judged"
    assert lacking in judged["words"]


def test_judge_of_the_published_scores_finds_only_hellaswag_above_chance():
    assert [entry["task"] for entry in SCORES if entry["verdict"] == "above chance"] == ["HellaSwag"]


def test_known_run_perplexity_is_e_to_its_loss():
    loss = next(model["loss"] for model in MODELS if model["model"].startswith("RQwen3"))
    assert round(math.exp(loss), 2) == 12.41


def entry(acc, stderr=0.01):
    return {"acc": acc, "acc_stderr": stderr, "chance": 0.25, "n": 100}


def test_expectations_are_judged_by_the_scores_as_they_were_written_down(tmp_path):
    root = RunRoot(tmp_path)
    folder = root.evaluation("demo")
    expected = {"metric": "acc", "low": 0.3, "high": 0.4, "why": "said so"}
    tasks = dict.fromkeys(("hit", "near", "missed", "unscored", "absent"), expected)
    write_json(folder / "expectations.json", {"written_at": "2026-01-01", "sha256": "ab", "tasks": tasks})
    scored = {"hit": entry(0.35), "near": entry(0.295), "missed": entry(0.28), "unscored": entry(None, None)}
    write_json(folder / "scores.json", {"tasks": scored, "bits_per_byte": {"all": {"bits_per_byte": 1.5}}})
    found = evaluation_evidence(Reader(root=tmp_path), root, "demo")["expectations"]
    assert (found["written_at"], found["sha256"]) == ("2026-01-01", "ab")
    assert {row["task"]: row["holds"] for row in found["judged"]} == {
        "hit": True,
        "near": True,
        "missed": False,
        "unscored": None,
        "absent": None,
    }
    assert "Not as expected: 28.0 % lies below" in next(r["words"] for r in found["judged"] if r["task"] == "missed")
    (folder / "expectations.json").unlink()
    assert evaluation_evidence(Reader(root=tmp_path), root, "demo")["expectations"] is None


def test_control_that_is_above_chance_nowhere_is_said_to_be(tmp_path):
    root = RunRoot(tmp_path)
    folder = root.evaluation("demo")
    write_json(folder / "scores.json", {"tasks": {"arc_easy": entry(0.26)}})
    assert evaluation_evidence(Reader(root=tmp_path), root, "demo")["control"] is None
    for acc, words in ((0.5, "above chance on arc_easy"), (0.26, "above chance nowhere")):
        asked = {"tasks": {"arc_easy": entry(acc)}, "protocol": {"model": "smol"}}
        write_json(folder / "control" / "benchmarks.json", asked)
        control = evaluation_evidence(Reader(root=tmp_path), root, "demo")["control"]
        assert words in control["words"]
        assert (control["model"], control["scores"][0]["score"]) == ("smol", acc)
