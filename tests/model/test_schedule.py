import math

import pytest

from model.config import TrainConfig
from model.schedule import learning_rate, scheduler_state

CONFIG = TrainConfig(max_steps=50_000, seq_len=8, micro_batch_size=1)


def test_learning_rate_at_its_corners_is_exact() -> None:
    assert learning_rate(1, CONFIG) == 3e-4 / 500
    assert learning_rate(500, CONFIG) == 3e-4
    assert learning_rate(50_000, CONFIG) == 3e-5
    assert abs(learning_rate(500 + 24_750, CONFIG) - (3e-4 + 3e-5) / 2) < 1e-12


def test_learning_rate_follows_the_formula_and_never_rises_after_the_warmup() -> None:
    rates = [learning_rate(step, CONFIG) for step in range(1, 50_001)]
    assert rates[:500] == sorted(rates[:500])
    assert rates[499:] == sorted(rates[499:], reverse=True)
    assert min(rates[499:]) == 3e-5
    for step in (501, 12_345, 49_999):
        share = (1 + math.cos(math.pi * (step - 500) / 49_500)) / 2
        assert abs(rates[step - 1] - (3e-5 + share * 2.7e-4)) < 1e-15


def test_learning_rate_without_warmup_starts_below_the_peak() -> None:
    config = TrainConfig(max_steps=10, seq_len=8, micro_batch_size=1, warmup_steps=0)
    assert 2.9e-4 < learning_rate(1, config) < 3e-4
    assert learning_rate(10, config) == 3e-5


@pytest.mark.parametrize("step", [0, 50_001])
def test_learning_rate_outside_the_run_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        learning_rate(step, CONFIG)


def test_scheduler_state_names_step_and_rate() -> None:
    assert scheduler_state(0, CONFIG)["last_learning_rate"] == 0.0
    state = scheduler_state(500, CONFIG)
    assert (state["last_step"], state["last_learning_rate"], state["max_steps"]) == (500, 3e-4, 50_000)
