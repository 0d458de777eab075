"""A step at full shape, an evaluation and a save, thrown away: does it fit, and how long does it take?

The first act on hardware that a run has not seen yet, before anything is loaded, so that an
out-of-memory, or a disk that can't be written, shows in the first minutes with the memory plan beside
it. It works on the freshly initialised model, which is then made anew; random generators are put
back. Costs a step, an evaluation, a save, and an initialisation. Its measures are the first estimate
of whether an evaluation or a save still fits before a deadline.
"""

import math
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from model import checkpoint, metrics, phases
from model.bits_per_byte import HeldoutStream, heldout_scores
from model.config import RunConfig
from model.errors import OutOfMemory, RQwen3Error, TrainingError
from model.files import append_jsonl, read_jsonl, sweep_dead, temporary_path
from model.ledger import failure_reason
from model.memory import GIB, plan_memory
from model.session import TrainSession, pick_device

RECORD = "dry_steps.jsonl"


def hardware(session: TrainSession) -> dict[str, Any]:
    """What a dry step speaks for: the device, and the shape at which it was used."""
    config, cuda = session.config, session.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(session.device) if cuda else f"cpu {platform.machine()}",
        "memory_gib": round(device_memory_bytes(session.device) / GIB),
        "torch": torch.__version__,
        "compiled": session.compiled,
        "recompute": config.recompute,
        "micro_batch_size": config.micro_batch_size,
        "seq_len": config.seq_len,
        "eval_max_tokens": config.eval_max_tokens,
    }


def device_memory_bytes(device: torch.device) -> int:
    """Memory of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemTotal:"))


def known(run_dir: Path, what: dict[str, Any]) -> dict[str, Any] | None:
    """The measures of an earlier dry step of this run on such hardware, the newest; None if there was none."""
    found = [record for record in read_jsonl(run_dir / RECORD) if record.get("hardware") == what]
    return found[-1]["measured"] if found else None


def take(
    session: TrainSession, streams: list[HeldoutStream], run_dir: Path, should_stop: Callable[[], bool]
) -> dict[str, Any] | None:
    """Make a dry step if this run has none on such hardware, and record it.

    Args:
        session: at step 0, nothing loaded; it is left as it was.
        streams: the held-out documents.
        run_dir: folder of the experiment, where the scratch checkpoint is written and removed.
        should_stop: asked between micro-batches, in the evaluation, and before the save.

    Returns:
        The measures, of now or of before; None if it was told to stop.

    Raises:
        OutOfMemory: it does not fit; the message holds the plan.
        TrainingError: the loss of the fresh model is not finite.
        CheckpointError, DiskSpaceError: the scratch checkpoint can't be written.
    """
    what = hardware(session)
    before = session.team.first_does(lambda: known(run_dir, what))
    if before is not None:
        return before
    random_state = session.random_state()
    try:
        with phases.within("dry_step"):
            measured = measure(session, streams, run_dir, steps=1, should_stop=should_stop)
    finally:
        session.reset()
        session.restore_random_state(random_state)
    if measured is not None and session.team.first:
        append_jsonl(run_dir / RECORD, metrics.finite({"hardware": what, "measured": measured, "time": metrics.now()}))
    return measured


def measure(
    session: TrainSession,
    streams: list[HeldoutStream],
    run_dir: Path,
    *,
    steps: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Train some steps, evaluate and save to a scratch name; seconds and bytes, None if told to stop.

    Raises:
        OutOfMemory, TrainingError, CheckpointError, DiskSpaceError: as `take` does.
    """
    try:
        results = [session.train_step(should_stop) for _ in range(min(steps, session.config.max_steps))]
        trained = [result for result in results if result is not None]
        session.close()
        began = time.perf_counter()
        if len(trained) < len(results) or evaluate(session, streams, should_stop) is None or should_stop():
            return None
        eval_s = time.perf_counter() - began
        save_s, size_bytes = _scratch_save(run_dir, session)
    except Exception as error:
        told = in_words(session.run, error, "in the dry step")
        if told is error:
            raise
        raise told from error
    if not math.isfinite(trained[0].loss):
        raise TrainingError(
            f"the loss of the fresh model is {trained[0].loss} in the dry step; nothing was trained. "
            "Look for extreme values in [model] and [training], or for a broken device."
        )
    return {
        "step_s": min(result.seconds for result in trained),
        "eval_s": eval_s,
        "save_s": save_s,
        "peak_memory_gib": metrics.peak_memory_gib(session.device),
        "checkpoint_bytes": size_bytes,
        "loss": trained[0].loss,
    }


def evaluate(
    session: TrainSession, streams: list[HeldoutStream], should_stop: Callable[[], bool]
) -> dict[str, dict[str, Any]] | None:
    """Held-out scores of the model as it stands, at the run's own shape; None if told to stop."""
    with session.autocast():
        return heldout_scores(
            session.model,
            streams,
            session.config.seq_len,
            session.config.micro_batch_size,
            should_stop,
            session.team,
        )


def in_words(run: RunConfig, error: BaseException, when: str) -> BaseException:
    """`OutOfMemory` where device or machine refused memory in any of their ways; else the error itself."""
    refused = not isinstance(error, RQwen3Error) and failure_reason(error) == "out_of_memory"
    return _out_of_memory(run, pick_device(run.training.device), error, when) if refused else error


def _out_of_memory(run: RunConfig, device: torch.device, error: BaseException, when: str) -> OutOfMemory:
    """The error to raise: what was seen, the plan, and what would need less."""
    plan, training = plan_memory(run.model, run.training, cuda=device.type == "cuda"), run.training
    parts = ("weights", "gradients", "moments", "casts", "activations", "head", "context")
    listing = ", ".join(f"{part} {getattr(plan, f'{part}_bytes') / GIB:.2f}" for part in parts)
    smaller = [size for size in range(1, training.micro_batch_size) if training.sequences_per_step % size == 0]
    ways = [] if training.recompute else ["training.recompute = true"]
    if smaller:
        accumulation = training.sequences_per_step // smaller[-1]
        ways.insert(0, f"micro_batch_size = {smaller[-1]} with accumulation = {accumulation} (the same step)")
    seen = str(error).splitlines()[0] if str(error) else type(error).__name__
    less = ", or by ".join(ways) or "a shorter training.seq_len"
    return OutOfMemory(
        f"out of memory {when} on {device.type} ({device_memory_bytes(device) / GIB:.2f} GiB): {seen} The plan, in "
        f"GiB: {listing}; peak {plan.peak_gib:.2f}. If that should fit, another process holds memory there. Less is "
        f"taken by {less}; see: rqwen3 plan --help"
    )


def _scratch_save(run_dir: Path, session: TrainSession) -> tuple[float, int]:
    """Save on the run's own file system under a name that no reader looks at; seconds and bytes.

    The sidecar is a real one, so that what can't be written of it shows here.
    """
    folder = run_dir
    while not folder.exists():
        folder = folder.parent
    name = folder / f"dry-run.{run_dir.name}"
    sweep_dead(name)
    scratch = temporary_path(name)
    try:
        began = time.perf_counter()
        state, sidecar = session.state(), {**metrics.provenance(session.device), **session.sidecar()}
        saved = session.team.first_does(lambda: checkpoint.save(scratch / "scratch.pt", state, sidecar))
        return time.perf_counter() - began, saved.sidecar["bytes"]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
