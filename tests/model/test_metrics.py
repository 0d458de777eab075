import json
import math

import torch
from torch import nn

from model.files import read_jsonl
from model.metrics import Attempt, RunLog, finite, last_train_step, model_flops_utilisation, weight_statistics


def test_records_carry_submission_and_time_and_no_nan(tmp_path) -> None:
    log = RunLog(tmp_path, Attempt(submission=2, attempt=3))
    log.train({"step": 1, "loss": math.nan})
    log.heldout(1, {"all": {"loss": 2.0, "loss_stderr": math.inf}})
    first, second = read_jsonl(tmp_path / "metrics.jsonl")
    assert (first["kind"], first["loss"], first["submission"], first["attempt"]) == ("train", None, 2, 3)
    assert (second["kind"], second["source"], second["loss_stderr"]) == ("heldout", "all", None)
    assert first["time"].endswith("+00:00")


def test_last_train_step_is_that_of_the_attempt_asked_for(tmp_path) -> None:
    RunLog(tmp_path, Attempt(submission=1, attempt=1)).train({"step": 9})
    RunLog(tmp_path, Attempt(submission=1, attempt=2)).train({"step": 7})
    assert [last_train_step(tmp_path, 1, attempt) for attempt in (1, 2, 3)] == [9, 7, None]


def test_log_knows_the_samples_and_the_whole_evaluations_that_it_has(tmp_path) -> None:
    log = RunLog(tmp_path, Attempt(submission=1, attempt=1))
    log.train({"step": 5})
    log.sample(5, "a", "b")
    log.heldout(5, {"wikipedia": {"loss": 1.0}})
    log.heldout(6, {"wikipedia": {"loss": 1.0}, "all": {"loss": 1.0}})
    assert [log.has_sample(step) for step in (5, 6)] == [True, False]
    assert [log.has_heldout(step) for step in (5, 6, 7)] == [False, True, False]


def test_finite_reaches_into_lists_and_tables() -> None:
    assert finite({"a": [1.0, math.nan, (math.inf,)]}) == {"a": [1.0, None, [None]]}


def test_weight_statistics_equal_plain_formulas() -> None:
    layer = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[-2.0, 0.1, 0.1], [1.0, 1.9, 2.0]]))
    found = weight_statistics(layer)["weight"]
    values = [-2.0, 0.1, 0.1, 1.0, 1.9, 2.0]
    mean = sum(values) / 6
    assert math.isclose(found["mean"], mean, rel_tol=1e-6)
    assert math.isclose(found["std"], math.sqrt(sum((v - mean) ** 2 for v in values) / 6), rel_tol=1e-6)
    assert found["absmax"] == 2.0
    assert sum(found["histogram"]) == 6
    assert (found["histogram"][0], found["histogram"][-1], found["histogram"][16]) == (1, 2, 2)
    json.dumps(found, allow_nan=False)


def test_weight_statistics_of_zeros_are_finite() -> None:
    layer = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(layer.weight)
    assert weight_statistics(layer)["weight"]["absmax"] == 0.0


def test_utilisation_on_a_cpu_is_unknown() -> None:
    assert model_flops_utilisation(1e4, 10**9, torch.device("cpu")) is None
