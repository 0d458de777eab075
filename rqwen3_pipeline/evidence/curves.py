"""The effective curve of a run that was killed and resumed: what the kept model really went through.

`metrics.jsonl` is append-only. An attempt that is resumed from step 1,000 after its predecessor had
logged up to 1,999 writes the steps from 1,001 on again; from its first training line on, whatever
earlier attempts logged after the step that it went on from belongs to a branch that was lost. The
ledger knows that step; without it, it is the one before the first line, which may come later. So a
later line of the same step supersedes the earlier one, and lines that were not reached again are
abandoned rather than left standing as if they were the run's. One pass over the log, and one sweep of
the live points per attempt.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rqwen3_pipeline.evidence.readings import number, spelled, whole

CSV_COLUMNS = (
    "step", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_s", "mfu", "submission", "attempt",
    "heldout_loss", "heldout_bits_per_byte",
)  # fmt: skip
"""Columns of loss.csv; an empty cell was not measured at that step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The points that count, and the steps of those that don't."""

    points: tuple[dict[str, Any], ...]
    """Records of the run as it stands, ascending by step."""
    superseded_steps: tuple[int, ...]
    """Steps that a later attempt logged again; its line is the one in `points`."""
    abandoned_steps: tuple[int, ...]
    """Steps logged after the last save of an attempt, which no later attempt has logged again."""

    def values(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of each point that has a number under `key`, finite or not."""
        pairs = ((float(point["step"]), number(point.get(key))) for point in self.points)
        return [(step, value) for step, value in pairs if value is not None]

    def losses(self) -> list[tuple[float, float]]:
        """(step, loss) of each point; a loss of null was not finite, which JSON can't say."""
        pairs = ((float(point["step"]), point.get("loss", math.nan)) for point in self.points)
        return [(step, math.nan if (loss := number(value)) is None else loss) for step, value in pairs]


def effective(
    records: Iterable[dict[str, Any]], kind: str, begun: Mapping[tuple[Any, Any], int] | None = None
) -> Curve:
    """Fold a metrics log into the curve of one kind of line.

    Args:
        records: the log's records in file order.
        kind: `train`, or `heldout`, whose points are told apart by their `source` too.
        begun: the step that each attempt went on from, by submission and attempt, as far as that is known.
    """
    live: dict[tuple[int, str], tuple[int, dict[str, Any]]] = {}
    dropped: set[int] = set()
    identity: tuple[Any, Any] | None = None
    segment, last_train_step, cut_pending = 0, -1, False
    for record in records:
        step, is_train = whole(record.get("step")), record.get("kind") == "train"
        if step is None:
            continue
        seen = (record.get("submission"), record.get("attempt"))
        if seen != identity or (is_train and step <= last_train_step):
            identity, segment, last_train_step, cut_pending = seen, segment + 1, -1, True
        if is_train:
            if cut_pending:
                last_kept = min((begun or {}).get(seen, step), step - 1)
                lost = [key for key, (owner, _) in live.items() if owner < segment and key[0] > last_kept]
                dropped.update(key[0] for key in lost)
                for key in lost:
                    del live[key]
            cut_pending, last_train_step = False, step
        if record.get("kind") == kind:
            key = (step, str(record.get("source", "")))
            if key in live:
                dropped.add(step)
            live[key] = (segment, record)
    points = tuple(record for _, (_, record) in sorted(live.items(), key=lambda item: item[0]))
    reached = {point["step"] for point in points}
    return Curve(
        points=points,
        superseded_steps=tuple(sorted(dropped & reached)),
        abandoned_steps=tuple(sorted(dropped - reached)),
    )


def of_source(curve: Curve, source: str) -> Curve:
    """The held-out curve of one source alone."""
    points = tuple(point for point in curve.points if point.get("source") == source)
    return Curve(points=points, superseded_steps=curve.superseded_steps, abandoned_steps=curve.abandoned_steps)


def thin(points: Sequence[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """At most about `limit` points that look the same when drawn.

    The first and the last point stay, and of each stretch in between the lowest and the highest, so
    that a spike of one step is still seen; so do all points that are not finite.

    Raises:
        ValueError: `limit` is below 4.
    """
    if limit < 4:
        raise ValueError(f"limit = {limit} must be at least 4: the two ends and the extremes of one stretch")
    if len(points) <= limit:
        return list(points)
    kept = {0, len(points) - 1}
    kept.update(i for i, (_, y) in enumerate(points) if not math.isfinite(y))
    stretches = (limit - 2) // 2
    for stretch in range(stretches):
        first = 1 + stretch * (len(points) - 2) // stretches
        last = 1 + (stretch + 1) * (len(points) - 2) // stretches
        inside = [i for i in range(first, last) if math.isfinite(points[i][1])]
        if inside:
            kept.update((min(inside, key=lambda i: points[i][1]), max(inside, key=lambda i: points[i][1])))
    return [points[i] for i in sorted(kept)]


def loss_csv(train: Curve, heldout_all: Curve) -> str:
    """The effective curve as CSV, one row per step that has a line, unthinned."""
    held = {point["step"]: point for point in heldout_all.points}
    trained = {point["step"]: point for point in train.points}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for step in sorted(held.keys() | trained.keys()):
        point, evaluation = trained.get(step, {}), held.get(step, {})
        row = [point.get(column) for column in CSV_COLUMNS[1:9]]
        if point and row[0] is None:
            row[0] = math.nan
        writer.writerow([step, *map(_cell, [*row, evaluation.get("loss"), evaluation.get("bits_per_byte")])])
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return spelled(value)
    return "" if value is None else value
