"""Workers: processes that make one piece at a time, forked from one that has imported all they need.

That one, the fork server, is spawned: a process of its own, with one thread of Python's. Forking from it
takes milliseconds, where starting a worker anew costs half a second of CPU and the tokenizer's
vocabulary another second and a half; what it has loaded, its workers share. Each worker has a pipe of
its own, so it is known which piece a killed one had: that piece gets an error, and a new worker takes
the next. The server and its workers end at once when their parent does, however it ends.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from model.errors import CorpusError, RQwen3Error
from rqwen3_pipeline.corpus.pieces import Item, Outcome, Task, work
from rqwen3_pipeline.corpus.tokenizer import load_encoder
from rqwen3_pipeline.settings import RunRoot

GARBAGE_EVERY = 100_000
"""New containers between two searches for cycles in a worker: its columns and lists of texts have none."""
ATTEMPTS = 3
"""Fork servers that may be killed one after another before the build gives up."""


def _serve_forks(connection: Connection) -> None:
    """Fork workers, load a tokenizer for them, and say how they ended, until told to end or the parent is gone."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # one core a worker: the pool of workers is the parallelism
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says what is to become of it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with contextlib.suppress(EOFError, OSError):
        while (message := connection.recv()) is not None:
            wish, about = message
            if wish == "worker":
                _fork(connection, recv_handle(connection), interrupted)
            elif wish == "load":
                with contextlib.suppress(RQwen3Error, OSError):  # the worker that needs it says what is wrong with it
                    load_encoder(about).load()
            elif wish == "ended":
                connection.send(_ended(about))
    os._exit(0)


def _fork(connection: Connection, handle: int, interrupted: Any) -> None:
    """Fork a worker whose pipe is `handle`, and tell its process id.

    Args:
        connection: to the parent.
        handle: file descriptor of the worker's pipe; closed here.
        interrupted: the worker's handler of SIGINT.
    """
    gc.freeze()  # else the worker's first search for cycles copies what it shares
    pid = os.fork()
    if pid:
        os.close(handle)
        connection.send(pid)
        return
    code = 1
    try:
        signal.signal(signal.SIGINT, interrupted)
        connection.close()
        _worker(Connection(handle))
        code = 0
    except EOFError:  # the parent is gone
        pass
    except Exception:  # told here, and to the parent by the exit code
        traceback.print_exc()
    finally:
        os._exit(code)


def _ended(pid: int) -> int | None:
    """How a worker ended, once it has; None for one that another server forked."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


def _worker(connection: Connection) -> None:
    """A worker's life: a task and an item in, an outcome out, until None or until the parent is gone.

    The task comes with the first item of a stage only; None stands for the one before.
    """
    gc.set_threshold(GARBAGE_EVERY)
    parent = multiprocessing.parent_process()  # of the fork server
    if parent is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    task: Task | None = None
    while (message := connection.recv()) is not None:
        new_task, item = message
        task = new_task or task
        if task is not None:
            connection.send(work(task, item))


@dataclass(slots=True)
class _Worker:
    """A process, its pipe, and what it is at."""

    pid: int
    connection: Connection
    task: Task | None = None
    item: Item = ("", "")
    began: float = 0.0


@contextlib.contextmanager
def _uninterrupted() -> Generator[None, None, None]:
    """Hold SIGINT back until the end, and restore this thread's mask.

    A mask alone does not: another thread takes the signal, and Python's handler runs in the main one all the same.
    """
    handler, came = signal.getsignal(signal.SIGINT), threading.Event()
    hold = handler is not None and threading.current_thread() is threading.main_thread()
    if hold:
        signal.signal(signal.SIGINT, lambda number, frame: came.set())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if hold:
            signal.signal(signal.SIGINT, handler)
        if came.is_set():
            signal.raise_signal(signal.SIGINT)


class Pool:
    """Workers, started when first needed or before; a context manager, used for any number of stages."""

    def __init__(self, workers: int) -> None:
        """Prepare; nothing is started yet."""
        self._workers = workers
        self._context = multiprocessing.get_context("spawn")
        self._server: Any = None
        self._wishes: Any = None
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._busy:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGTERM)
        self._dismiss(self._busy)
        self._dismiss(self._idle)
        if self._server is not None:
            with contextlib.suppress(OSError):  # it is dead already
                self._wishes.send(None)
            self._server.join()
            self._wishes.close()

    def start(self) -> None:
        """Start the fork server, if none is there: it imports what workers need while this process goes on."""
        if self._server is None or not self._server.is_alive():
            wishes, theirs = self._context.Pipe()
            server = self._context.Process(target=_serve_forks, args=(theirs,), daemon=True)
            with _uninterrupted():
                resource_tracker.ensure_running()  # which would unblock the signal
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # in the server, until it has its handler
                server.start()
                self._wishes, self._server = wishes, server
            theirs.close()

    def load_tokenizer(self, root: RunRoot, before: int = 0) -> None:
        """Have the fork server load a run root's tokenizer, for those workers that are new after that.

        Args:
            root: the run root.
            before: workers that are to be there before, at the most, so as to do other things meanwhile; `renew`
                replaces them.
        """
        self.start()
        while len(self._idle) + len(self._busy) < min(self._workers, before):
            self._idle.append(self._fork())
        with contextlib.suppress(OSError):
            self._wishes.send(("load", root))

    def renew(self) -> None:
        """Replace the workers, none of which may be at work, by new ones as they are needed."""
        self._dismiss(self._idle)

    def run(self, task: Task, items: Sequence[Item], done: Callable[[Outcome], None]) -> None:
        """Make all items of a stage; `done` is told of each as it ends."""
        waiting = deque(items)
        while waiting or self._busy:
            while waiting and len(self._busy) < self._workers:
                self._give(task, waiting.popleft())
            ready = wait([worker.connection for worker in self._busy])
            for worker in [worker for worker in self._busy if worker.connection in ready]:
                done(self._take(worker))

    def _give(self, task: Task, item: Item) -> None:
        worker = self._idle.pop() if self._idle else self._fork()
        message = (None if worker.task is task else task, item)
        worker.task, worker.item, worker.began = task, item, time.monotonic()
        self._busy.append(worker)
        with contextlib.suppress(OSError):  # it died while idle: its pipe is at the end, which _take reports
            worker.connection.send(message)

    def _fork(self) -> _Worker:
        """A new worker, from a new fork server if the old one was killed."""
        for _ in range(ATTEMPTS):
            self.start()
            ours, theirs = self._context.Pipe()  # anew each time: a worker may be there that was not told of
            try:
                self._wishes.send(("worker", None))
                send_handle(self._wishes, theirs.fileno(), self._server.pid)
                return _Worker(pid=self._wishes.recv(), connection=ours)
            except (EOFError, OSError):
                self._server.join()
                ours.close()
            finally:
                theirs.close()
        raise CorpusError(
            f"the process that starts the workers ended by {_how(self._server.exitcode)}, {ATTEMPTS} times (9 is "
            "often the memory limit). Run again, with --workers 1 if memory is short."
        )

    def _take(self, worker: _Worker) -> Outcome:
        self._busy.remove(worker)
        try:
            outcome: Outcome = worker.connection.recv()
        except (EOFError, OSError):
            return self._lost(worker)
        self._idle.append(worker)
        return outcome

    def _dismiss(self, workers: list[_Worker]) -> None:
        """Let workers go, and wait until they are gone."""
        for worker in workers:
            with contextlib.suppress(OSError):  # it is dead already
                worker.connection.send(None)
        for worker in workers:
            with contextlib.suppress(EOFError, OSError):
                while True:  # its pipe is at the end when it is gone, whoever started it
                    worker.connection.recv()
            self._code(worker)
            worker.connection.close()
        workers.clear()

    def _code(self, worker: _Worker) -> int | None:
        """How a worker that ends ended, once it has; None if the fork server that knew is dead."""
        try:
            self._wishes.send(("ended", worker.pid))
            return self._wishes.recv()
        except (EOFError, OSError):
            return None

    def _lost(self, worker: _Worker) -> Outcome:
        worker.connection.close()
        return Outcome(
            stage=worker.task.stage if worker.task else "",
            source=worker.item[0],
            key=worker.item[1],
            report=None,
            error=f"the worker process ended by {_how(self._code(worker))} (9 is often the memory limit). "
            "Run again, with fewer workers if memory was short.",
            seconds=time.monotonic() - worker.began,
            skipped=False,
        )


def _how(code: int | None) -> str:
    """In words, how a process ended."""
    return "an unknown cause" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
