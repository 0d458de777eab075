"""Sensors: what Dagster does by itself, each a thin face over a pure function."""
