"""A run folder keeps the configuration it was started with, and refuses another.

What shapes the weights (model, schedule, batch, seed, data order) may not change between submissions;
what only decides how often something is logged, saved or shown may, and a change is said aloud.
"""

import dataclasses
from pathlib import Path
from typing import Any

from model.checkpoint import warn
from model.config import RunConfig, load_run_config
from model.errors import ConfigError
from model.files import write_bytes

FREE_KEYS = frozenset(
    {
        "log_every_steps",
        "save_every_steps",
        "save_every_minutes",
        "keep_last",
        "keep_every_steps",
        "keep_first_step",
        "eval_every_steps",
        "eval_max_tokens",
        "sample_every_steps",
        "sample_prompt",
        "sample_new_tokens",
        "background_save",
        "dry_step",
        "lead_s",
        "mirror",
        "device",
        "parallel",
        "compile",
        "compile_on_cpu",
        "deterministic",
        "recompute",
    }
)
"""Keys of [training] that a later submission may change."""


def differences(old: RunConfig, new: RunConfig) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ, with both values; defaults count as values.

    Micro-batch and accumulation may trade against each other: only their product is compared.
    """
    found = [("run.name", old.name, new.name)]
    for section, before, after in (("model", old.model, new.model), ("training", old.training, new.training)):
        values = dataclasses.asdict(after)
        found += [(f"{section}.{key}", value, values[key]) for key, value in dataclasses.asdict(before).items()]
    if old.training.sequences_per_step == new.training.sequences_per_step:
        found = [entry for entry in found if entry[0] not in ("training.micro_batch_size", "training.accumulation")]
    return [(key, before, after) for key, before, after in found if before != after]


def keep_config(config: Path, kept: Path, run: RunConfig) -> None:
    """Copy the configuration into the run folder, or compare it with the copy that is there.

    Raises:
        ConfigError: it differs in something that shapes the weights; every such key is named.
    """
    if kept.exists():
        changed = differences(load_run_config(kept), run)
        fixed = [entry for entry in changed if entry[0].removeprefix("training.") not in FREE_KEYS]
        if fixed:
            listing = "; ".join(f"{key} = {after!r}, there {before!r}" for key, before, after in fixed)
            raise ConfigError(
                f"{config}: differs from {kept}, with which this run began: {listing}. "
                "Put it back, or give the experiment another run.name."
            )
        for key, before, after in changed:
            warn(f"{key} is now {after!r}; this run began with {before!r}.")
    if not kept.exists() or kept.read_bytes() != config.read_bytes():
        write_bytes(kept, config.read_bytes())
