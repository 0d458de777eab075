"""Records of ended submissions: one line of `ledger.jsonl` each, a killed one's written by its successor.

The record of a submission that could say goodbye comes from itself; that of a killed one is made from
what it left behind: the lock, its metrics, and the newest checkpoint that is whole (read once to verify it).
"""

import errno
from pathlib import Path
from typing import Any

import torch

from model import checkpoint, metrics
from model.errors import EXIT_CODES, DiskSpaceError, OutOfMemory, RQwen3Error, TrainingError
from model.files import FULL

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


def killed_record(run_dir: Path, holder: dict[str, Any], tokens_per_step: int) -> dict[str, Any]:
    """The ledger record of a holder that vanished without writing one, from lock and metrics.

    One that could write nothing but into its lock, since the disk was full, has left the reason there.
    """
    submission, attempt = int(holder.get("submission") or 0), int(holder.get("attempt") or 0)
    from_step = int(holder.get("from_step") or 0)
    to_step = metrics.last_train_step(run_dir, submission, attempt) or from_step
    saved = checkpoint.newest_good(run_dir / "checkpoints", lambda message: None)
    saved_step = saved.step if saved else 0
    to_step = max(to_step, saved_step)
    return {
        **metrics.bare_provenance(),
        "submission": submission,
        "attempt": attempt,
        "from_step": from_step,
        "to_step": to_step,
        "saved_step": saved_step,
        "stop_reason": holder.get("stop_reason") or "killed",
        "exit_code": holder.get("exit_code"),
        "tokens": (to_step - from_step) * tokens_per_step,
        "seconds": None,
        "lost_steps": to_step - saved_step,
        "job_id": holder.get("job_id"),
        "host": holder.get("host"),
        "pid": holder.get("pid"),
        "started": holder.get("started"),
        "ended": None,
        "checkpoint": saved.summary() if saved else None,
        "error": holder.get("error") or "the process vanished without a record: SIGKILL, out of memory, or a lost node",
    }
