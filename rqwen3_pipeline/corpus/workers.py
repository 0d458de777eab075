"""Workers: spawned processes that make one piece at a time.

Each has a pipe of its own, so it is known which piece a killed one had: that piece gets an error, and
a new worker takes the next. They end at once when their parent does, however it ends. Starting one
costs about a second, loading what the stages import.
"""

import contextlib
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from rqwen3_pipeline.corpus.pieces import Item, Outcome, Task, work


def _worker(connection: Connection) -> None:
    """A worker's life: a task and an item in, an outcome out, until None or until the parent is gone.

    The task comes with the first item of a stage only; None stands for the one before.
    """
    os.environ["RAYON_NUM_THREADS"] = "1"  # one core a worker: the pool of workers is the parallelism
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
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

    process: Any
    connection: Connection
    task: Task | None = None
    item: Item = ("", "")
    began: float = 0.0


class Pool:
    """Spawned workers, started when first needed or before; a context manager, used for any number of stages."""

    def __init__(self, workers: int) -> None:
        """Prepare; nothing is started yet."""
        self._workers = workers
        self._context = multiprocessing.get_context("spawn")
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._busy:
            worker.process.terminate()
        for worker in self._idle:
            with contextlib.suppress(OSError):  # it is dead already
                worker.connection.send(None)
        for worker in self._idle + self._busy:
            worker.process.join()
            worker.connection.close()

    def start(self, most: int) -> None:
        """Start the workers, `most` of them at most: they load what they need while this process does other things."""
        while len(self._idle) + len(self._busy) < min(self._workers, most):
            self._idle.append(self._start())

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
        worker = self._idle.pop() if self._idle else self._start()
        message = (None if worker.task is task else task, item)
        worker.task, worker.item, worker.began = task, item, time.monotonic()
        self._busy.append(worker)
        with contextlib.suppress(OSError):  # it died while idle: its pipe is at the end, which _take reports
            worker.connection.send(message)

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_worker, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process=process, connection=ours)

    def _take(self, worker: _Worker) -> Outcome:
        self._busy.remove(worker)
        try:
            outcome: Outcome = worker.connection.recv()
        except (EOFError, OSError):
            return self._lost(worker)
        self._idle.append(worker)
        return outcome

    def _lost(self, worker: _Worker) -> Outcome:
        worker.connection.close()
        worker.process.join()
        code = worker.process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return Outcome(
            stage=worker.task.stage if worker.task else "",
            source=worker.item[0],
            key=worker.item[1],
            report=None,
            error=f"the worker process ended by {how} (9 is often the memory limit). "
            "Run again, with fewer workers if memory was short.",
            seconds=time.monotonic() - worker.began,
            skipped=False,
        )
