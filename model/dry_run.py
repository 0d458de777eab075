"""The command `--dry-run`: does a run fit, and how long is it? Asked before it is submitted.

A missing shard or a tokenizer that can't be read shows here too. Leaves one file of figures; the
scratch checkpoint is removed. Costs `STEPS` steps, one evaluation and one save.
"""

from pathlib import Path

from model import dry_step, metrics
from model.bits_per_byte import heldout_streams
from model.config import load_run_config
from model.console import say
from model.files import write_json
from model.generate import load_tokenizer
from model.preemption import StopWatch
from model.session import TrainSession, set_threads
from model.shard_format import read_manifest
from model.submission import Submission
from model.trainer import EXIT_CONTINUE, EXIT_FINISHED
from model.windows import TokenWindows

STEPS = 3


def dry_run(submission: Submission, out: Path, stop: StopWatch) -> int:
    """Measure, and write the figures to `out`, which a stop prevents; returns the exit code.

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
    measured = dry_step.measure(session, streams, submission.run_dir, steps=STEPS, should_stop=stop.should_stop)
    if measured is None:
        return EXIT_CONTINUE
    figures = {**measured, "device": session.device.type, "compiled": session.compiled}
    write_json(out, metrics.finite(figures))
    say("dry run: " + ", ".join(f"{key} {value}" for key, value in figures.items()))
    return EXIT_FINISHED
