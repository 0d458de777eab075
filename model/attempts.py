"""The attempts of a run, as the records tell of them that ledger and lock keep."""

from collections.abc import Iterable, Mapping
from typing import Any


def begun_steps(records: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, Any], int]:
    """The step that each attempt went on from, by submission and attempt, as records of ledger or lock tell it."""
    return {
        (record.get("submission"), record.get("attempt")): step
        for record in records
        if isinstance(step := record.get("from_step"), int)
    }
