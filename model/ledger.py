"""Records of ended submissions: one line of `ledger.jsonl` each, a killed one's written by its successor.

The record of a submission that could say goodbye comes from itself; that of a killed one is made from
what it left behind: the lock, its metrics, and the newest checkpoint that is whole (read once to verify it).
Not every step is logged, so such a record gives the least and the most that may be lost. The lock's token
ties a record to the process that it tells of: none gets two.
"""

import errno
from pathlib import Path
from typing import Any

import torch

from model import checkpoint, metrics
from model.checkpoint import SavedCheckpoint
from model.config import TrainConfig
from model.errors import EXIT_CODES, DiskSpaceError, OutOfMemory, RQwen3Error, TrainingError
from model.files import FULL, append_jsonl, read_jsonl

NO_MEMORY = "DefaultCPUAllocator"
"""In the message of the plain RuntimeError with which torch says that the machine's memory is used up."""


def failure_reason(error: BaseException) -> str:
    """The ledger's word for what ended a submission, by the error or what caused it.

    Returns:
        `out_of_memory`, `disk_full`, `non_finite`, or `error` for everything else.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OutOfMemory | torch.OutOfMemoryError | MemoryError):
            return "out_of_memory"
        if isinstance(seen, OSError) and seen.errno == errno.ENOMEM:
            return "out_of_memory"
        if isinstance(seen, RuntimeError) and NO_MEMORY in str(seen):
            return "out_of_memory"
        if isinstance(seen, DiskSpaceError) or (isinstance(seen, OSError) and seen.errno in FULL):
            return "disk_full"
        if isinstance(seen, TrainingError):
            return "non_finite"
        seen = seen.__cause__
    return "error"


def exit_code_of(error: BaseException) -> int:
    """What the trainer ends with: the code of the ledger's word, else the error's own."""
    own = error.exit_code if isinstance(error, RQwen3Error) else RQwen3Error.exit_code
    return EXIT_CODES.get(failure_reason(error), own)


def extent(
    from_step: int | None, to_step: int | None, saved_step: int, tokens_per_step: int, most_step: int | None
) -> dict[str, Any]:
    """How far a submission came, as its record says it.

    Args:
        from_step: where it began; None if it ended before it had loaded anything, and so trained and lost nothing.
        to_step: the last step that it is known to have made; None as above.
        saved_step: the newest checkpoint when it ended.
        tokens_per_step: of the run.
        most_step: the last step that it can have made; None where that is not known.
    """
    steps = {"from_step": from_step, "to_step": to_step, "saved_step": saved_step}
    if from_step is None or to_step is None:
        return {**steps, "tokens": 0, "lost_steps": 0, "lost_steps_at_most": 0}
    return {
        **steps,
        "tokens": (to_step - from_step) * tokens_per_step,
        "lost_steps": to_step - saved_step,
        "lost_steps_at_most": None if most_step is None else most_step - saved_step,
    }


def settle(run_dir: Path, holders: list[dict[str, Any]], config: TrainConfig) -> None:
    """Write the records that dead trainers could not write, and say what was lost; one that wrote its own gets none.

    Args:
        run_dir: the experiment's folder.
        holders: what their locks said, oldest first.
        config: of the run.
    """
    path = run_dir / "ledger.jsonl"
    told = {record["token"] for record in read_jsonl(path) if record.get("token")}
    unheard = [holder for holder in holders if holder.get("token") not in told]
    saved = checkpoint.newest_good(run_dir / "checkpoints", lambda message: None) if unheard else None
    for holder in unheard:
        record = _killed_record(run_dir, holder, saved, config)
        append_jsonl(path, record)
        checkpoint.warn(_what_was_lost(record))


def _killed_record(
    run_dir: Path, holder: dict[str, Any], saved: SavedCheckpoint | None, config: TrainConfig
) -> dict[str, Any]:
    """The ledger record of a holder that vanished without writing one, from lock and metrics.

    One that could write nothing but into its lock, since the disk was full, has left the reason there.
    """
    submission, attempt = int(holder.get("submission") or 0), int(holder.get("attempt") or 0)
    from_step, saved_step = holder.get("from_step"), saved.step if saved else 0
    to_step = most_step = None
    if from_step is not None:
        logged = metrics.last_train_step(run_dir, submission, attempt, since=str(holder.get("started") or ""))
        to_step = max(logged or from_step, saved_step)
        most_step = _next_logged(to_step, holder.get("log_every_steps"), config.max_steps)
    return {
        **metrics.bare_provenance(),
        "submission": submission,
        "attempt": attempt,
        "token": holder.get("token"),
        **extent(from_step, to_step, saved_step, config.tokens_per_step, most_step),
        "stop_reason": holder.get("stop_reason") or "killed",
        "exit_code": holder.get("exit_code"),
        "seconds": None,
        "job_id": holder.get("job_id"),
        "host": holder.get("host"),
        "pid": holder.get("pid"),
        "started": holder.get("started"),
        "ended": None,
        "checkpoint": saved.summary() if saved else None,
        "error": holder.get("error") or "the process vanished without a record: SIGKILL, out of memory, or a lost node",
    }


def _next_logged(step: int, every_steps: int | None, max_steps: int) -> int | None:
    """The step whose line would have come next; None where an older trainer's lock does not say how often one does."""
    if every_steps is None:
        return None
    return min(1 if step == 0 else (step // every_steps + 1) * every_steps, max_steps)


def _what_was_lost(record: dict[str, Any]) -> str:
    who = f"submission {record['submission']} (process {record['pid']} on {record['host']}) was killed"
    least, most = record["lost_steps"], record["lost_steps_at_most"]
    if record["from_step"] is None:
        return f"{who} before it had loaded anything; nothing is lost."
    steps = f"at least {least}" if most is None else str(least) if most == least else f"{least} to {most}"
    return f"{who}; {steps} steps after step {record['saved_step']} are lost and made again."
