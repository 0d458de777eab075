"""One life of the trainer in the torture campaign: started, followed by its phase file, stopped, killed.

To hit a phase surely, the process is stopped (SIGSTOP) after a random part of it, and only then what
it last said is read: if the phase is over already, it goes on to the next occurrence.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

POLL_S = 0.0003
STUCK_S = 300.0
SYNCHRONOUS = frozenset(("snapshot", "writing", "hashing", "rename", "sidecar", "prune"))


class Life:
    """A trainer, a child of this process."""

    def __init__(
        self, arguments: list[str], phases: Path, log: Path, typical_s: dict[str, float], *, cold: bool
    ) -> None:
        """Start `python -m model.pretrain`, or with `cold` false fork from here, where torch is imported."""
        self.phases, self.typical_s = phases, typical_s
        self.offset = phases.stat().st_size if phases.exists() else 0
        self.entered: list[tuple[str, float]] = []
        self._main = "start_up"
        self._background: str | None = None
        self._code: int | None = None
        self._begin = time.monotonic()
        if not cold:
            import model.trainer  # noqa: F401  what the child would spend its time on
        self.pid = os.fork()
        if self.pid == 0:
            _become_trainer(arguments, log, cold)

    @property
    def phase(self) -> str:
        """Where it is, by what it said last: the background save if there is one, else the main thread."""
        return self._background or self._main

    def reach(self, phase: str, share: float, occurrence: int = 1) -> bool:
        """Stop it in a phase, after about this share of it; False if it ended before.

        Args:
            phase: the phase's name.
            share: of the phase's usual length; halved each time that this was too late.
            occurrence: which of the occurrences from now on, if that can be had.
        """
        deadline, seen = time.monotonic() + STUCK_S, 0
        if phase == "start_up":
            self.let_run(share * self.typical_s.get("start_up", 0.3))
            return self._stop() and self.phase == "start_up"
        while self._alive():
            if time.monotonic() > deadline:
                self.send("SIGKILL")
                raise SystemExit(f"process {self.pid} did not come to phase {phase} in {STUCK_S:.0f} s")
            before = len(self.entered)
            self._read()
            new = [entered_s for name, entered_s in self.entered[before:] if name == phase]
            seen += len(new)
            if not new or seen < occurrence or self.phase != phase:
                time.sleep(0 if new else POLL_S)
                continue
            wait_s = new[-1] + share * self.typical_s.get(phase, 0.0) - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            if not self._stop():
                return False
            if self.phase == phase:
                return True
            share *= 0.5  # it was over: be quicker next time
            self._continue()
        return False

    def send(self, name: str) -> None:
        """Send a signal, and let the process go on to meet it."""
        if self._code is None:
            os.kill(self.pid, getattr(signal, name))
            self._continue()

    def let_run(self, seconds: float) -> None:
        """Wait, or until it has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._alive():
            time.sleep(0.001)

    def wait_for_end(self, timeout_s: float) -> int:
        """Its exit code, negative for a signal."""
        self._continue()
        end = time.monotonic() + timeout_s
        while self._alive():
            if time.monotonic() > end:
                self.send("SIGKILL")
                raise SystemExit(f"process {self.pid} did not end in {timeout_s:.0f} s")
            time.sleep(0.002)
        self._read()
        assert self._code is not None
        return self._code

    def _alive(self) -> bool:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code is None

    def _stop(self) -> bool:
        """Stop it; False if it has ended."""
        if not self._alive():
            return False
        os.kill(self.pid, signal.SIGSTOP)
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self._code = os.waitstatus_to_exitcode(status)
        self._read()
        return self._code is None

    def _continue(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGCONT)

    def _read(self) -> None:
        """Take in what it said since."""
        try:
            with self.phases.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole, newline, _ = data.rpartition(b"\n")
        self.offset += len(whole) + len(newline)
        for line in whole.splitlines():
            self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        name = line["phase"]
        if line["pid"] != self.pid or name.startswith("signal"):
            return
        if line["within"] is not None and name != "compile":
            return
        if line["background"]:
            before, self._background = self._background, None if name == "saved" else f"background_{name}"
        elif name == "snapshot" and not line["synchronous"]:
            before, self._main = self._main, "background_snapshot"
        else:
            before = self._main
            self._main = f"synchronous_{name}" if name in SYNCHRONOUS else "start_up" if name == "resume" else name
        if self.entered and before != "start_up":
            self._learn(before, line["monotonic_s"])
        elif name not in ("start_up", "resume"):
            self.typical_s["start_up"] = line["monotonic_s"] - self._begin
        self.entered.append((self.phase if not line["background"] else f"background_{name}", line["monotonic_s"]))

    def _learn(self, phase: str | None, ended_s: float) -> None:
        began = next((entered_s for name, entered_s in reversed(self.entered) if name == phase), None)
        if phase is not None and began is not None:
            took_s = ended_s - began
            self.typical_s[phase] = min(took_s, 0.7 * self.typical_s.get(phase, took_s) + 0.3 * took_s)


def _become_trainer(arguments: list[str], log: Path, cold: bool) -> None:
    """In the child: the trainer, and nothing else ever after."""
    code = 70
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        if cold:
            os.execv(sys.executable, [sys.executable, "-m", "model.pretrain", *arguments])
        from model import pretrain

        code = pretrain.main(arguments)
    finally:
        sys.stdout.flush()
        os._exit(code)
