"""When to stop: signals, a stop file, the deadline, the parent's death. It only ever sets a flag.

The trainer asks between micro-batches, drops partial gradients, and saves at its own pace; a handler
that saved by itself could tear the state. Asking costs a clock reading, and every `POLL_S` seconds
one `stat` of the stop file and one `getppid`. Free of torch, so that the handlers can be in place
before torch is imported.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from model import phases

POLL_S = 0.5
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
MARGIN = 1.5
"""The lead is at least this many times the longest save seen; other work is begun if this many times its
longest duration is left before it."""


@dataclass(kw_only=True, slots=True)
class StopWatch:
    """Collects the reasons to stop; the first one stays."""

    time_limit_s: float | None = None
    """Seconds from `started` to the end of the job."""
    lead_s: float = 300.0
    """Configured seconds before that end at which to begin saving."""
    stop_file: Path | None = None
    """Stop when this file is there."""
    parent: int | None = None
    """Stop when the parent is no longer this process."""
    clock: Callable[[], float] = time.monotonic
    """Seconds; replaced in tests."""
    started: float = field(default_factory=time.monotonic)
    """When the job began, on that clock."""
    reason: str | None = None
    """`SIGTERM`, `SIGUSR1`, `SIGINT`, `stop_file`, `deadline` or `parent_gone`, once there is one."""
    save_s: float = 0.0
    """Longest save measured so far."""
    agree: Callable[[str | None], str | None] = lambda reason: reason
    """Makes one process's reason that of all that train together; each must ask equally often."""
    _next_poll: float = 0.0

    def install(self) -> None:
        """Let the signals set the flag. Any number of them may come, at any time."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def ignore(self) -> None:
        """Let no signal disturb the exit any more, whose code is settled."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        phases.enter(f"signal {signal.Signals(number).name}")
        self.stop(signal.Signals(number).name)

    def stop(self, reason: str) -> None:
        """Set the flag."""
        if self.reason is None:
            self.reason = reason

    def lead(self) -> float:
        """Seconds before the end of the job at which the save begins."""
        limit_s = float("inf") if self.time_limit_s is None else self.time_limit_s
        return max(min(self.lead_s, limit_s / 3), MARGIN * self.save_s)

    def seconds_left(self) -> float:
        """Seconds until the save must begin; infinite without a limit."""
        if self.time_limit_s is None:
            return float("inf")
        return self.started + self.time_limit_s - self.lead() - self.clock()

    def has_time_for(self, seconds: float) -> bool:
        """Whether work that took so long before can end before the save must begin."""
        return self.seconds_left() > MARGIN * seconds

    def should_stop(self) -> bool:
        """Whether there is a reason to stop, looked for anew, here or in another process of the run."""
        self.noticed()
        agreed = self.agree(self.reason)
        if agreed is None:
            return False  # what came meanwhile, to this process alone, is agreed on when they are asked next
        self.stop(agreed)
        return True

    def noticed(self) -> bool:
        """Whether this process has a reason to stop, looked for anew."""
        if self.reason is None and self.seconds_left() <= 0:
            self.stop("deadline")
        now = self.clock()
        if self.reason is None and now >= self._next_poll:
            self._next_poll = now + POLL_S
            if self.stop_file is not None and self.stop_file.exists():
                self.stop("stop_file")
            elif self.parent is not None and os.getppid() != self.parent:
                self.stop("parent_gone")
        return self.reason is not None
