"""torchrun with the trainer's own signals and exit codes: several GPUs, several nodes.

    python -m model.launch --nproc-per-node 4 -m model.pretrain --config FILE …

Every option is torchrun's (`torchrun --help`). torchrun alone trains just as well, but it turns every
exit code but 0 into 1, dies of SIGUSR1, which job scripts send before the clock cuts a job, and kills
its children 30 seconds after a signal, in the midst of a large save. Here signals are passed on to the
trainers, which save and end when they are ready. Costs one waiting process a node.
"""

import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

import psutil

from model.preemption import SIGNALS

EXIT_CODE_FILE = "RQWEN3_EXIT_CODE_FILE"
"""Environment variable: where the trainers of a node write how they ended, a line each."""
EXIT_CONTINUE = 75
GOOD = (0, EXIT_CONTINUE)


def report(code: int) -> int:
    """Tell the launcher, if there is one, how the trainer ends; returns the process's exit code.

    A saved stop ends the process with 0, so that torchrun takes it for no failure.
    """
    file = os.environ.get(EXIT_CODE_FILE)
    if file is None:
        return code
    with contextlib.suppress(OSError), Path(file).open("a", encoding="ascii") as told:
        told.write(f"{code}\n")
    return 0 if code in GOOD else code


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code of the trainers, of the first that failed if one did."""
    for number in SIGNALS:
        signal.signal(number, _pass_on)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    given = sys.argv[1:] if arguments is None else arguments
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default; the trainer sets what it uses
    with tempfile.TemporaryDirectory(prefix="rqwen3-") as folder:
        file = Path(folder) / "exit_code"
        os.environ[EXIT_CODE_FILE] = str(file)
        try:
            torchrun(["--signals-to-handle", "SIGQUIT", *given])  # the others are passed on
        except ChildFailedError:
            return next((code for code in _told(file) if code not in GOOD), 1)
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # the code is settled
        return next(reversed(_told(file)), 1)


def _told(file: Path) -> list[int]:
    """How trainers of this node ended, in the order in which they did."""
    return [int(line) for line in file.read_text(encoding="ascii").split()] if file.is_file() else []


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Hand a signal to the trainers; with none started yet there is nothing to save, and ended ones have said how."""
    trainers = psutil.Process().children()
    if not trainers:
        told = _told(Path(os.environ.get(EXIT_CODE_FILE, "")))
        sys.exit(next((code for code in told if code not in GOOD), told[-1] if told else EXIT_CONTINUE))
    for trainer in trainers:
        with contextlib.suppress(psutil.NoSuchProcess):
            trainer.send_signal(number)


if __name__ == "__main__":
    sys.exit(main())
