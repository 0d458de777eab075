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
"""Environment variable: where the trainer of each node writes how it ended."""
EXIT_CONTINUE = 75


def report(code: int) -> int:
    """Tell the launcher, if there is one, how the trainer ends; returns the process's exit code.

    A told code ends the process with 0, so that torchrun takes a saved stop for no failure.
    """
    file = os.environ.get(EXIT_CODE_FILE)
    if file is None:
        return code
    if os.environ.get("LOCAL_RANK", "0") == "0":
        Path(file).write_text(str(code), encoding="ascii")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code of the trainer."""
    for number in SIGNALS:
        signal.signal(number, _pass_on)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    given = sys.argv[1:] if arguments is None else arguments
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default; the trainer sets what it uses
    with tempfile.TemporaryDirectory(prefix="rqwen3-") as folder:
        file = Path(folder) / "exit_code"
        os.environ[EXIT_CODE_FILE] = str(file)
        with contextlib.suppress(ChildFailedError):
            torchrun(["--signals-to-handle", "SIGQUIT", *given])  # the others are passed on
        return int(file.read_text(encoding="ascii")) if file.exists() else 1


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Hand a signal to the trainers; with none started yet there is nothing to save."""
    trainers = psutil.Process().children()
    if not trainers:
        sys.exit(EXIT_CONTINUE)
    for trainer in trainers:
        with contextlib.suppress(psutil.NoSuchProcess):
            trainer.send_signal(number)


if __name__ == "__main__":
    sys.exit(main())
