"""Train: one submission of a run, from its newest good checkpoint to the end, or to the clock.

    python -m model.pretrain --config configs/smoke.toml

needs neither Dagster nor SLURM, only the corpus (`rqwen3 --profile smoke corpus build`).

On several GPUs or nodes: python -m model.launch, or torchrun, with the same words behind its own.
Exit codes: 0 finished, 75 saved and to be continued, 73 another holds the lock; 65 the numbers are not
finite, 71 out of memory, 74 the disk is full; others failed. The handlers of signals are in place before
torch is imported, which takes seconds.
"""

import argparse
import contextlib
import errno
import os
import sys
from pathlib import Path
from typing import NoReturn

from model import phases
from model.errors import OtherRankError, RQwen3Error
from model.launch import report
from model.preemption import StopWatch

PARENT, RANK = os.getppid(), os.environ.get("RANK", "0")
NO_WRITING = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM))
"""What a full or read-only disk, a used-up quota, or somebody else's folder answers."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m model.pretrain", description="Train one submission of a run.")
    parser.add_argument("--config", type=Path, required=True, help="the run's TOML file")
    parser.add_argument("--manifest", type=Path, help="manifest.json of the corpus [in var/<the config's name>]")
    parser.add_argument("--run-dir", type=Path, help="folder of the experiment [in experiments/ beside it]")
    parser.add_argument("--submission", type=int, default=1, help="number of this slice of the run, from 1")
    parser.add_argument("--attempt", type=int, default=1, help="number of the attempt at it, from 1")
    parser.add_argument("--time-limit-s", type=float, help="seconds until the job ends, counted from now")
    parser.add_argument("--stop-file", type=Path, help="save and stop when this file is there")
    parser.add_argument("--watch-parent", action="store_true", help="save and stop when the parent process is gone")
    parser.add_argument("--job-alive-command", help="called with a job id: exit code 0 alive, 1 gone, else unknown")
    parser.add_argument("--until-step", type=int, help="save and stop after this step")
    parser.add_argument("--verify-data", action="store_true", help="hash every shard before the first step")
    parser.add_argument("--accept-other-data", action="store_true", help="go on with another manifest than before")
    parser.add_argument(
        "--phases", type=Path, metavar="FILE", help="append a line for each phase entered: where it hangs"
    )
    parser.add_argument("--dry-run", type=Path, metavar="OUT.json", help="measure a few full steps instead of training")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = parse(arguments)
    stop = StopWatch(
        time_limit_s=options.time_limit_s,
        stop_file=options.stop_file,
        parent=PARENT if options.watch_parent else None,
    )
    stop.install()
    try:
        phases.announce_to(options.phases)
        phases.enter("start_up")
        return _train(options, stop)
    except RQwen3Error as error:
        if RANK == "0" or not isinstance(error, OtherRankError):
            _complain(str(error))
        return _exit_code(error)
    except OSError as error:
        if error.errno not in NO_WRITING:
            raise
        where = error.filename or options.run_dir
        _complain(
            f"{where}: {error.strerror}. What was saved before is whole. "
            "Make room, or make the folder writable, and start the trainer again."
        )
        return _exit_code(error)
    finally:
        stop.ignore()


def _train(options: argparse.Namespace, stop: StopWatch) -> int:
    from model.config import load_run_config
    from model.dry_run import dry_run
    from model.metrics import Attempt
    from model.submission import Submission
    from model.trainer import run_submission

    run = load_run_config(options.config)
    stop.lead_s = run.training.lead_s
    home = Path(os.environ.get("RQWEN3_HOME") or Path("var", options.config.stem))
    manifest = options.manifest or home / "manifest.json"
    run_dir = options.run_dir or manifest.parent / "experiments" / run.name
    submission = Submission(
        config=options.config.absolute(),
        manifest=manifest.absolute(),
        run_dir=run_dir.absolute(),
        attempt=Attempt(submission=options.submission, attempt=options.attempt),
        until_step=options.until_step,
        job_alive_command=options.job_alive_command,
        verify_data=options.verify_data,
        accept_other_data=options.accept_other_data,
    )
    if options.dry_run is not None:
        return dry_run(submission, options.dry_run, stop)
    return run_submission(submission, stop)


def _complain(words: str) -> None:
    """Say why it ends; on a full disk, which takes no words, the exit code says it alone."""
    with contextlib.suppress(OSError):
        print(f"error: {words}" if RANK == "0" else f"error: rank {RANK}: {words}", file=sys.stderr, flush=True)


def _exit_code(error: BaseException) -> int:
    from model.ledger import exit_code_of

    return exit_code_of(error)


def _leave(code: int) -> NoReturn:
    """End at once: everything is saved, and torch's threads have aborted the interpreter's teardown now and then."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(report(main()))
