"""The learning rate of each step: linear warm-up, then a cosine that ends exactly at its minimum.

A pure function of the step number, so a resumed run can't lag, restart the warm-up or rescale the
cosine (Loshchilov and Hutter 2017). Costs nothing.
"""

import math

from model.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of update number `step`, 1 … max_steps.

    Step `warmup_steps` has the peak; step `max_steps` has exactly `min_learning_rate`.

    Raises:
        ValueError: the step lies outside 1 … max_steps.
    """
    if not 1 <= step <= config.max_steps:
        raise ValueError(f"step {step} lies outside 1 … {config.max_steps}")
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.max_steps - config.warmup_steps)
    above_minimum = config.learning_rate - config.min_learning_rate
    return config.min_learning_rate + 0.5 * (1.0 + math.cos(math.pi * progress)) * above_minimum


def scheduler_state(step: int, config: TrainConfig) -> dict[str, float | int]:
    """What a checkpoint says of the schedule after `step` updates: position, rate, and its shape."""
    return {
        "last_step": step,
        "last_learning_rate": learning_rate(step, config) if step else 0.0,
        "max_steps": config.max_steps,
        "warmup_steps": config.warmup_steps,
        "learning_rate": config.learning_rate,
        "min_learning_rate": config.min_learning_rate,
    }
