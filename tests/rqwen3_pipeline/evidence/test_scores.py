import math

import pytest

from rqwen3_pipeline.evidence.known_runs import MODELS, SCORES
from rqwen3_pipeline.evidence.scores import judge


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
