"""Runs the model's programs as child processes; the two halves of the project meet only in files."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from model.errors import EXIT_CODES, DiskSpaceError, RQwen3Error
from model.files import FULL

TAIL_LINES = 20


class ProgramFailedError(RQwen3Error):
    """A child process ended with an exit code that means failure."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def run_program(
    module: str,
    arguments: Sequence[str | Path],
    log: Path,
    *,
    ok: Sequence[int] = (0,),
    while_running: Callable[[], None] | None = None,
    poll_s: float = 0.5,
) -> int:
    """Run `python -m module arguments…` with its output appended to `log`, and wait for it.

    When this process is interrupted the child is asked to stop (SIGTERM) and awaited, so that a
    trainer saves before its parent goes. Further interrupts don't end that wait.

    Args:
        module: dotted name of a module of `model`.
        arguments: its command line.
        log: takes standard output and error, line by line.
        ok: exit codes that are no failure.
        while_running: called every `poll_s` seconds.
        poll_s: seconds between calls.

    Returns:
        The exit code, one of `ok`.

    Raises:
        ProgramFailedError: any other exit code; the message begins with what the program said last, and holds the
            log's tail.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", module, *map(str, arguments)]
    begin = log.stat().st_size if log.exists() else 0
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            while True:
                try:
                    code = child.wait(timeout=poll_s)
                    break
                except subprocess.TimeoutExpired:
                    if while_running is not None:
                        while_running()
        except BaseException:
            child.send_signal(signal.SIGTERM)
            _await(child)
            raise
    if code not in ok:
        end = tail(log, begin)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        said = last_words(end)
        raise ProgramFailedError(f"python -m {module} {how}{f': {said}' if said else ''}\n{log}:\n{end}", code)
    return code


def run_here(module: str, arguments: Sequence[str | Path]) -> int:
    """Run `python -m module arguments…` with its output where this process' is, and return its exit code.

    In a session of its own: Ctrl-C reaches this process alone, which ends the program and says so.
    """
    arrived: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: arrived.append(number))  # until there is a child to end
    try:
        child = subprocess.Popen([sys.executable, "-m", module, *map(str, arguments)], start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        if arrived and callable(before):
            before(signal.SIGINT, None)
        return child.wait()
    except BaseException:
        child.terminate()
        _await(child)
        raise


def failure_code(error: BaseException) -> int:
    """A program's exit code, or the one with which the trainer would have told of such an error; else 1."""
    code = getattr(error, "code", None)
    if isinstance(code, int):
        return code
    if isinstance(error, DiskSpaceError) or (isinstance(error, OSError) and error.errno in FULL):
        return EXIT_CODES["disk_full"]
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return EXIT_CODES["out_of_memory"]
    return RQwen3Error.exit_code


def last_words(said: str) -> str:
    """Of what a program printed the line that tells why it failed: its last `error: …`, else the last of all."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]


def _await(child: "subprocess.Popen[bytes]") -> None:
    """Wait for a child that is saving, however often this process is told to end meanwhile."""
    while True:
        try:
            child.wait()
            return
        except BaseException:
            continue


def tail(log: Path, begin: int = 0) -> str:
    """The last lines of a log, from byte `begin` on."""
    with log.open("rb") as file:
        file.seek(begin)
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])
