"""The production shape, as its configuration states it."""

from pathlib import Path

from model.config import load_run_config

PRODUCTION = load_run_config(Path(__file__).parents[2] / "configs" / "rqwen3_751m.toml").model
