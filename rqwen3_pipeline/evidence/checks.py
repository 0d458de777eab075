"""The report's checks: each holds, does not hold, or is pending because a file is not there yet.

A check compares figures that different programs wrote, so that it can fail. Nothing is judged whose
files are missing: pending is not passed.
"""

import math
from typing import Any

from model.config import RunConfig
from model.config_build import read_toml
from model.errors import ConfigError
from rqwen3_pipeline.evidence.readings import Reader, finite, table_of
from rqwen3_pipeline.evidence.training import Logs
from rqwen3_pipeline.experiment_files import CheckpointFile

START_TOLERANCE = 0.05
"""Nats between the start loss and its prediction, when the logits' deviation was recorded."""
START_LARGEST_GAP = 0.5
"""Nats above ln V that a fresh model may start with otherwise: logits with a deviation of 1."""


def check(key: str, says: str, holds: bool | None, seen: str, *files: str) -> dict[str, Any]:
    """One check: what it claims, whether that holds (None: pending), what was seen, from which files."""
    return {"key": key, "says": says, "holds": holds, "seen": seen, "from": list(files)}


def corpus_checks(corpus: dict[str, Any]) -> list[dict[str, Any]]:
    """What must hold of the corpus."""
    rows, shards = corpus["sources"], corpus["shards"]
    counted = [row for row in rows if row["rows"] is not None]
    leaks = [row["source"] for row in counted if row["rows"] != row["kept"] + sum(row["dropped"].values())]
    folded = [row for row in rows if row["survivors"] is not None and row["documents"] is not None]
    lost = [
        f"{row['source']}: {row['survivors']:,} survived, {tokenized:,} tokenized"
        for row in folded
        if row["survivors"] != (tokenized := row["documents"] + (row["heldout_documents"] or 0))
    ]
    complete = bool(rows) and len(counted) == len(rows)
    return [
        check(
            "funnel",
            "Every row of the raw files was either kept or dropped for a named reason.",
            (not leaks) if complete else None,
            f"Rows are unaccounted for in {', '.join(leaks)}." if leaks else f"{len(counted)} of {len(rows)} sources.",
            "filtered/",
        ),
        check(
            "documents",
            "Every document that survived deduplication was tokenized, for training or held out.",
            (not lost) if folded and len(folded) == len(rows) else None,
            "; ".join(lost) or f"{len(folded)} of {len(rows)} sources compared.",
            "survivors/",
            "manifest.json",
        ),
        check(
            "shards",
            "Every shard of the manifest is there with four bytes for each of its tokens.",
            None if shards is None else not shards["bad"] and shards["count"] > 0,
            "No manifest yet." if shards is None else "; ".join(shards["bad"][:5]) or f"{shards['count']} shards.",
            "manifest.json",
        ),
    ]


def training_checks(reader: Reader, run: RunConfig, logs: Logs, training: dict[str, Any]) -> list[dict[str, Any]]:
    """What must hold of the training run."""
    metrics, ledger = (reader.name(logs.folder / name) for name in ("metrics.jsonl", "ledger.jsonl"))
    kept, wanted = training["steps_kept"]["value"], training["steps_wanted"]["value"]
    start, end = finite(training["start_loss"]["value"]), finite(training["end_loss"]["value"])
    bad = training["not_finite_lines"]["value"]
    return [
        check(
            "finished",
            "The run has done all its steps, and they were saved.",
            True if kept >= wanted else None,
            f"{kept:,} of {wanted:,} steps.",
            f"{reader.name(logs.folder)}/checkpoints",
            ledger,
        ),
        _config_check(reader, run, logs),
        _start_check(training, metrics),
        check(
            "learned",
            "The loss fell.",
            None if start is None or end is None or len(logs.train.points) < 2 else end < start,
            "No losses yet." if start is None or end is None else f"From {start:.4f} to {end:.4f}.",
            metrics,
        ),
        check(
            "finite",
            "No logged loss of the kept run is infinite or not a number, and no update was skipped for one.",
            None if bad is None else bad == 0,
            "No losses yet." if bad is None else _seen_of_losses(logs, bad),
            metrics,
        ),
        _tokens_check(run, logs, metrics),
        _chain_check(logs, ledger),
        _heldout_check(training, metrics),
    ]


def _seen_of_losses(logs: Logs, bad: int) -> str:
    points = logs.train.points
    return (
        f"{bad} of {len(points):,} logged lines, of {points[-1]['step']:,} steps; "
        "the trainer logs every step whose update it skips."
    )


def _config_check(reader: Reader, run: RunConfig, logs: Logs) -> dict[str, Any]:
    path = logs.folder / "config.toml"
    says = "The run's own copy of the config is the config that this report was asked for."
    if not path.is_file():
        return check("config", says, None, "The run has no copy yet.", reader.name(path))
    try:
        copied = read_toml(path)
    except ConfigError as error:
        return check("config", says, False, str(error).replace(f"{reader.root}/", ""), reader.name(path))
    differing = [name for name in sorted({*copied, *run.sections}) if copied.get(name) != run.sections.get(name)]
    seen = f"Sections that differ: {', '.join(differing)}." if differing else "The same, section by section."
    return check("config", says, not differing, seen, reader.name(path))


def _start_check(training: dict[str, Any], metrics: str) -> dict[str, Any]:
    """Step 1's loss is that of the untrained model, which should know nothing, and be sure of nothing."""
    gap, deviation = finite(training["start_gap"]["value"]), training["start_logit_std"]["value"]
    uniform, step = training["uniform_loss"]["value"], training["start_step"]["value"]
    if deviation is not None:
        says = f"The start loss is ln V + s²/2 within {START_TOLERANCE}, with s as recorded."
        holds = None if gap is None else abs(gap - deviation**2 / 2) <= START_TOLERANCE
    else:
        says = (
            f"The start loss is ln V, or up to {START_LARGEST_GAP} above it: the prediction is ln V + s²/2, "
            "but s, the standard deviation of the logits, was not recorded."
        )
        holds = None if gap is None else -START_TOLERANCE <= gap <= START_LARGEST_GAP
    if gap is None:
        return check("start", says, None if step is None else False, f"ln V is {uniform:.4f}; no loss.", metrics)
    if step != 1:
        return check("start", says, None, f"The first logged line is of step {step}, not of step 1.", metrics)
    fits = f"; s = {math.sqrt(2 * gap):.3f} would explain the difference" if gap > 0 and deviation is None else ""
    return check("start", says, holds, f"{uniform + gap:.4f}, which is ln V {gap:+.4f}{fits}.", metrics)


def _tokens_check(run: RunConfig, logs: Logs, metrics: str) -> dict[str, Any]:
    says = "The tokens that the trainer counted are its steps times the tokens of a step."
    last = logs.train.points[-1] if logs.train.points else {}
    if finite(last.get("tokens")) is None:
        return check("tokens", says, None, "No count yet.", metrics)
    expected = last["step"] * run.training.tokens_per_step
    seen = f"{last['tokens']:,} at step {last['step']:,}; {expected:,} expected."
    return check("tokens", says, last["tokens"] == expected, seen, metrics)


def _chain_check(logs: Logs, ledger: str) -> dict[str, Any]:
    says = "Every submission began where the last save before it ended."
    saved, breaks = 0, list[str]()
    for record in logs.ledger:
        if record.get("from_step") is None:  # it ended before it had loaded anything
            continue
        if record["from_step"] != saved:
            breaks.append(
                f"submission {record.get('submission')}, attempt {record.get('attempt')}, began at step "
                f"{record['from_step']}; {saved} was saved"
            )
        saved = record["saved_step"] if record.get("saved_step") is not None else saved
    holds = not breaks if logs.ledger else None
    return check("chain", says, holds, "; ".join(breaks) or f"Attempts in the ledger: {len(logs.ledger)}.", ledger)


def _heldout_check(training: dict[str, Any], metrics: str) -> dict[str, Any]:
    says = "Bits per byte follow from loss, tokens and bytes: loss · tokens / (bytes · ln 2), within 0.5 %."
    wrong, compared = list[str](), 0
    for row in training["heldout"]:
        loss, stated, size_bytes = finite(row["loss"]), finite(row["bits_per_byte"]), row["text_bytes"]
        if loss is None or stated is None or not row["tokens"] or not size_bytes:
            continue
        compared += 1
        expected = loss * row["tokens"] / (size_bytes * math.log(2))
        if abs(stated - expected) > 0.005 * expected:
            wrong.append(f"{row['source']}: {stated:.4f} stated, {expected:.4f} expected")
    seen = "; ".join(wrong) or f"{compared} held-out figures compared."
    return check("bits_per_byte", says, not wrong if compared else None, seen, metrics)


def receipt_checks(
    receipts: dict[str, Any],
    manifest: dict[str, Any] | None,
    final: CheckpointFile | None,
    scores: dict[str, Any] | None,
) -> list[dict[str, Any]]:
    """What must hold between the bytes that lie there and what was written about them."""
    by_what = {receipt["what"]: receipt for receipt in receipts["files"]}
    model, tokenizer = by_what.get("final checkpoint"), by_what.get("tokenizer")
    sidecar = (final.sidecar if final is not None else None) or {}
    made_with = table_of((manifest or {}).get("tokenizer")).get("sha256")
    scored = table_of((scores or {}).get("checkpoint")).get("sha256")
    lock, locked = by_what.get("lock of the sources"), (manifest or {}).get("lock_sha256")
    return [
        _same("lock", "The manifest was made from this lock of the sources.", lock, locked),
        _same("tokenizer", "The manifest was made with this tokenizer.", tokenizer, made_with),
        _same(
            "final",
            "The final checkpoint's bytes are those that its sidecar states.",
            model,
            sidecar.get("sha256"),
            required=True,
        ),
        _same(
            "trained_on",
            "The final checkpoint was trained on the corpus of this manifest.",
            by_what.get("manifest") if model else None,
            sidecar.get("data_fingerprint"),
        ),
        _same("scored", "The scores are those of this final checkpoint.", model, scored),
    ]


def _same(key: str, says: str, receipt: dict[str, Any] | None, stated: Any, required: bool = False) -> dict[str, Any]:
    """Compare a file's hash with the one stated elsewhere; a statement that is `required` may not be missing."""
    if receipt is None:
        return check(key, says, None, "The file is not there yet.")
    if stated is None:
        return check(key, says, False if required else None, "No hash is stated to compare with.", receipt["file"])
    equal = stated == receipt["sha256"]
    seen = f"{receipt['sha256'][:16]}…" if equal else f"{receipt['sha256'][:16]}… is not {str(stated)[:16]}…"
    return check(key, says, equal, seen, receipt["file"])
