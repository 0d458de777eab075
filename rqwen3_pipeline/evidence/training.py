"""The training run in figures: from the copy of its config, its metrics, its ledger and its samples."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config import RunConfig
from rqwen3_pipeline.evidence.curves import Curve, effective, of_source
from rqwen3_pipeline.evidence.readings import Figure, Reader, figure, finite, number, whole
from rqwen3_pipeline.experiment_files import saved_step, went_on_from
from rqwen3_pipeline.settings import SOURCES

MFU_CONVENTION = (
    "model FLOPs per second over the device's dense peak in the precision used; FLOPs per token are "
    "6·(N − embedding) + 12·L·H·hd·T, attention counted in full, recomputation not"
)
SUBMISSION_KEYS = (
    *("submission", "attempt", "from_step", "to_step", "saved_step", "stop_reason", "exit_code", "seconds"),
    *("lost_steps", "tokens", "job_id", "host", "gpu", "started", "ended", "commit", "versions", "checkpoint", "error"),
)
"""What the report takes over from the ledger."""
GIVEN_CONFIG = "the profile's TOML file"
"""What backs a figure of the configuration before the run has its own copy."""
END_LINES = 20
"""Logged lines that the smoothed end loss averages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logs:
    """The logs of one experiment, read once."""

    folder: Path
    """The experiment's folder."""
    train: Curve
    """Effective training points."""
    heldout: Curve
    """Effective held-out points of all sources."""
    ledger: tuple[dict[str, Any], ...]
    """One record per ended attempt, in file order."""
    samples: tuple[dict[str, Any], ...]
    """Samples ascending by step, the last one written for each."""

    def heldout_sources(self) -> list[str]:
        """Sources with held-out points: `all` first, then in the manifest's order."""
        names = {str(point.get("source")) for point in self.heldout.points}
        places = {name: place for place, name in enumerate(("all", *SOURCES))}
        return sorted(names, key=lambda name: (places.get(name, len(places)), name))


def read_logs(reader: Reader, folder: Path) -> Logs:
    """Read an experiment's logs; missing ones are empty."""
    metrics, ledger = (reader.lines(folder / name) for name in ("metrics.jsonl", "ledger.jsonl"))
    begun = went_on_from(folder, ledger)
    samples = {
        step: record
        for record in reader.lines(folder / "samples.jsonl")
        if (step := whole(record.get("step"))) is not None
    }
    return Logs(
        folder=folder,
        train=effective(metrics, "train", begun),
        heldout=effective(metrics, "heldout", begun),
        ledger=tuple(ledger),
        samples=tuple(samples[step] for step in sorted(samples)),
    )


def steps_kept(logs: Logs) -> int:
    """Steps behind the newest model that was kept: by its checkpoints, else by what the ledger says was saved."""
    recorded = [step for record in logs.ledger if (step := whole(record.get("saved_step"))) is not None]
    return max([saved_step(logs.folder) or 0, *recorded])


def training_evidence(reader: Reader, run: RunConfig, logs: Logs) -> dict[str, Any]:
    """Every figure of the training run; those that nothing backs yet have the value None."""
    metrics, ledger = (reader.name(logs.folder / name) for name in ("metrics.jsonl", "ledger.jsonl"))
    copied = logs.folder / "config.toml"
    config = reader.name(copied) if copied.is_file() else GIVEN_CONFIG
    training, kept = run.training, steps_kept(logs)
    reached = logs.train.points[-1]["step"] if logs.train.points else None
    seconds = sum(finite(record.get("seconds")) or 0.0 for record in logs.ledger)
    return {
        "parameters": figure(run.model.parameters(), config, how="counted from [model]'s shape"),
        "embedding_rows": figure(run.model.vocab_size, config, how="rows of the embedding; the rest has no text"),
        "steps_wanted": figure(training.max_steps, config),
        "steps_reached": figure(reached, metrics),
        "steps_kept": figure(kept, f"{reader.name(logs.folder)}/checkpoints", ledger),
        "tokens_kept": figure(
            kept * training.tokens_per_step,
            config,
            how=f"{kept:,} steps × {training.tokens_per_step:,} tokens a step",
        ),
        "tokens_per_step": figure(training.tokens_per_step, config),
        **_submission_figures(logs, ledger, seconds),
        **_loss_figures(run, logs, metrics, config),
        **_speed_figures(run, logs, (metrics, ledger, config), seconds),
        "heldout": _heldout_figures(logs, metrics),
        "curve": {
            "file": metrics,
            "lines": len(logs.train.points),
            "superseded": step_ranges(logs.train.superseded_steps),
            "superseded_lines": len(logs.train.superseded_steps),
            "abandoned": step_ranges(logs.train.abandoned_steps),
            "abandoned_lines": len(logs.train.abandoned_steps),
        },
        "ledger": [_submission(record, ledger) for record in logs.ledger],
        "samples": [
            {"step": s["step"], "prompt": str(s.get("prompt", "")), "text": str(s.get("text", ""))}
            for s in logs.samples
        ],
        "samples_file": reader.name(logs.folder / "samples.jsonl"),
    }


def step_ranges(steps: Sequence[int]) -> list[list[int]]:
    """Steps as [first, last] pairs; steps at most as far apart as the closest pair run together."""
    if not steps:
        return []
    stride = min((b - a for a, b in itertools.pairwise(steps)), default=1)
    ranges = [[steps[0], steps[0]]]
    for step in steps[1:]:
        if step - ranges[-1][1] <= stride:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return ranges


def lost_at_most(record: dict[str, Any]) -> int | None:
    """The most steps that an attempt can have lost; None where its record does not tell.

    A record without that figure is an older trainer's: one that wrote it itself, at its end, knew exactly.
    """
    exact = record.get("lost_steps") if record.get("ended") else None
    return whole(record.get("lost_steps_at_most", exact))


def _submission_figures(logs: Logs, ledger: str, seconds: float) -> dict[str, Figure]:
    lost = [whole(record.get("lost_steps")) for record in logs.ledger]
    most = [lost_at_most(record) for record in logs.ledger]
    return {
        "submissions": figure(len({record.get("submission") for record in logs.ledger}), ledger),
        "attempts": figure(len(logs.ledger), ledger),
        "seconds": figure(seconds if logs.ledger else None, ledger, how="sum over all attempts"),
        "lost_steps": figure(
            sum(steps for steps in lost if steps is not None) if logs.ledger else None,
            ledger,
            how="steps that were done and then done again, or not kept, since a kill came before the next save; "
            "the least, of a killed attempt up to its last logged step",
        ),
        "lost_steps_at_most": figure(
            sum(steps for steps in most if steps is not None) if most and None not in most else None,
            ledger,
            how="the most: up to the step that a killed attempt would have logged next",
        ),
    }


def _loss_figures(run: RunConfig, logs: Logs, metrics: str, config: str) -> dict[str, Figure]:
    """Start and end of the loss, and what the start is compared with."""
    uniform = math.log(run.model.vocab_size)
    figures = {
        "uniform_loss": figure(uniform, config, how=f"ln {run.model.vocab_size:,}"),
        "start_step": figure(None, metrics),
        "start_loss": figure(None, metrics),
        "start_gap": figure(None, metrics, config),
        "start_logit_std": figure(None, metrics),
        "end_loss": figure(None, metrics),
        "end_loss_mean": figure(None, metrics),
        "perplexity": figure(None, metrics),
        "not_finite_lines": figure(None, metrics),
        "skipped_steps": figure(None, metrics),
    }
    losses = logs.train.losses()
    if not losses:
        return figures
    (first_step, first), (_, last) = losses[0], losses[-1]
    tail = [loss for _, loss in losses[-END_LINES:] if math.isfinite(loss)]
    figures["start_step"] = figure(int(first_step), metrics)
    figures["start_loss"] = figure(first, metrics)
    figures["start_gap"] = figure(first - uniform, metrics, config, how="start loss − ln V")
    figures["start_logit_std"] = figure(finite(logs.train.points[0].get("logit_std")), metrics)
    figures["end_loss"] = figure(last, metrics)
    figures["end_loss_mean"] = figure(
        statistics.fmean(tail) if tail else None, metrics, how=f"mean of the last {len(tail)} lines"
    )
    figures["perplexity"] = figure(math.exp(min(last, 700.0)), metrics, how="e to the end loss")
    skipped = [point.get("skipped") is True for point in logs.train.points]
    bad = [left_out or not math.isfinite(loss) for left_out, (_, loss) in zip(skipped, losses, strict=True)]
    figures["not_finite_lines"] = figure(sum(bad), metrics, how="lines whose loss or gradient was not finite")
    figures["skipped_steps"] = figure(
        sum(skipped), metrics, how="updates left out for that; each has a line, whatever training.log_every_steps says"
    )
    return figures


def _speed_figures(run: RunConfig, logs: Logs, files: tuple[str, str, str], seconds: float) -> dict[str, Figure]:
    metrics, ledger, config = files
    rates = [rate for _, rate in logs.train.values("tokens_per_s") if math.isfinite(rate)]
    shares = [share for _, share in logs.train.values("mfu") if math.isfinite(share)]
    memory = [gib for _, gib in logs.train.values("memory_gib") if math.isfinite(gib)]
    tokens = sum(whole(record.get("tokens")) or 0 for record in logs.ledger)
    why_not = "the log holds none: on a CPU there is no peak to compare with" if rates else "nothing is logged yet"
    return {
        "tokens_per_s": figure(statistics.median(rates) if rates else None, metrics, how="median of the logged lines"),
        "tokens_per_s_overall": figure(
            tokens / seconds if tokens and seconds else None,
            ledger,
            how="tokens of all attempts over their seconds: with start, evaluations, saves and lost steps",
        ),
        "mfu": figure(
            statistics.median(shares) if shares else None,
            metrics,
            how=f"median of the logged lines; {MFU_CONVENTION}" if shares else why_not,
        ),
        "flops_per_token": figure(
            run.model.flops_per_token(run.training.seq_len), config, how="6·(N − embedding) + 12·L·H·hd·T"
        ),
        "peak_memory_gib": figure(max(memory, default=None), metrics, how="largest of the logged lines"),
    }


def _heldout_figures(logs: Logs, metrics: str) -> list[dict[str, Any]]:
    """First and last held-out evaluation of each source."""
    rows: list[dict[str, Any]] = []
    for source in logs.heldout_sources():
        points = of_source(logs.heldout, source).points
        first, last = points[0], points[-1]
        rows.append(
            {
                "source": source,
                "first_step": first["step"],
                "first_loss": number(first.get("loss")),
                "first_bits_per_byte": number(first.get("bits_per_byte")),
                "step": last["step"],
                "loss": number(last.get("loss")),
                "loss_stderr": number(last.get("loss_stderr")),
                "bits_per_byte": number(last.get("bits_per_byte")),
                "tokens": whole(last.get("tokens")),
                "text_bytes": whole(last.get("text_bytes")),
                "from": [metrics],
            }
        )
    return rows


def _submission(record: dict[str, Any], ledger: str) -> dict[str, Any]:
    tokens, seconds = whole(record.get("tokens")), finite(record.get("seconds"))
    rate = tokens / seconds if tokens and seconds else None
    told = {key: record.get(key) for key in SUBMISSION_KEYS}
    return {**told, "lost_steps_at_most": lost_at_most(record), "tokens_per_s": rate, "from": [ledger]}
