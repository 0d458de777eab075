"""A few steps at full shape, an evaluation and a save, before the run: does it fit, how long is it?

An out-of-memory error, a missing shard or a full disk shows here, in minutes, and not at the first
save. Leaves one file of figures; the scratch checkpoint is removed. Costs `STEPS` steps, one
evaluation and one save.
"""

import shutil
import time
from pathlib import Path

from model import checkpoint, metrics
from model.bits_per_byte import heldout_scores, heldout_streams
from model.config import load_run_config
from model.console import say
from model.files import write_json
from model.generate import load_tokenizer
from model.session import TrainSession, set_threads
from model.shard_format import read_manifest
from model.trainer import EXIT_FINISHED, Submission
from model.windows import TokenWindows

STEPS = 3


def dry_run(submission: Submission, out: Path) -> int:
    """Measure, and write the figures to `out`; returns the exit code.

    Raises:
        RQwen3Error: what would have stopped the real run.
    """
    run = load_run_config(submission.config)
    set_threads()
    manifest = read_manifest(submission.manifest)
    windows = TokenWindows(manifest, run.training.seq_len)
    windows.check(hash_all=submission.verify_data)
    load_tokenizer(manifest.root / manifest.tokenizer_path)
    streams, _ = heldout_streams(manifest, run.training.eval_max_tokens)
    session = TrainSession(run, windows)
    results = [session.train_step() for _ in range(min(STEPS, run.training.max_steps))]
    steps = [result for result in results if result is not None]
    session.close()
    began = time.perf_counter()
    with session.autocast():
        heldout_scores(session.model, streams, run.training.seq_len, run.training.micro_batch_size)
    eval_s = time.perf_counter() - began
    save_s, size_bytes = _scratch_save(submission.run_dir, session)
    figures = {
        "step_s": min(result.seconds for result in steps),
        "save_s": save_s,
        "eval_s": eval_s,
        "peak_memory_gib": metrics.peak_memory_gib(session.device),
        "checkpoint_bytes": size_bytes,
        "loss": steps[0].loss,
        "device": session.device.type,
        "compiled": session.compiled,
    }
    write_json(out, metrics.finite(figures))
    say("dry run: " + ", ".join(f"{key} {value}" for key, value in figures.items()))
    return EXIT_FINISHED


def _scratch_save(run_dir: Path, session: TrainSession) -> tuple[float, int]:
    """Save on the run's own file system under a name that no reader looks at; seconds and bytes."""
    folder = run_dir
    while not folder.exists():
        folder = folder.parent
    scratch = folder / f".dry-run.{run_dir.name}.{time.time_ns()}.tmp"
    try:
        began = time.perf_counter()
        saved = checkpoint.save(scratch / "scratch.pt", session.state(), {})
        return time.perf_counter() - began, saved.sidecar["bytes"]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
