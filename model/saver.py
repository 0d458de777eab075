"""Saving while training goes on: from a snapshot in memory, by a thread, one checkpoint at a time.

The thread writes, reads back and hashes without the interpreter's lock; training waits only for the
snapshot (see `model.snapshot`), and not at all differently otherwise: its bits are the same. Where
memory does not allow a copy, and when the run stops, the save is made in the foreground. A save that
fails in the background is told at the next step, where one more is tried in the foreground; if that
fails too, the run ends in words, with all older checkpoints whole.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model import checkpoint, phases, snapshot
from model.checkpoint import SavedCheckpoint
from model.config import TrainConfig
from model.errors import RQwen3Error


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """What a save cost."""

    saved: SavedCheckpoint
    """The checkpoint, verified."""
    in_background: bool
    """Whether training went on meanwhile."""
    stall_s: float
    """Seconds that training stood still for it."""
    seconds: float
    """Seconds from its begin until it was verified and retention was done."""
    removed: list[int]
    """Steps whose checkpoints retention let go."""

    def record(self) -> dict[str, Any]:
        """The line for `metrics.jsonl`."""
        return {
            "step": self.saved.step,
            "bytes": self.saved.sidecar["bytes"],
            "background": self.in_background,
            "stall_s": self.stall_s,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        """The line for the console."""
        note = f"; removed {', '.join(f'step_{step}' for step in self.removed)}" if self.removed else ""
        where = "in the background" if self.in_background else "in the foreground"
        size_mib = self.saved.sidecar["bytes"] / 2**20
        return (
            f"saved {self.saved.path} ({size_mib:,.1f} MiB in {self.seconds:.1f} s {where}, "
            f"training stood still for {self.stall_s:.2f} s){note}"
        )


class Saver:
    """Writes the checkpoints of one submission."""

    def __init__(self, folder: Path, config: TrainConfig, told: Callable[[SaveReport], None]) -> None:
        """Save in `folder`, with the retention of `config`; every save that ended well is `told`."""
        self.folder, self.config, self.told = folder, config, told
        self.saved: SavedCheckpoint | None = None
        self._thread: threading.Thread | None = None
        self._outcome: SaveReport | BaseException | None = None

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint that is known to be good."""
        return self.saved.step if self.saved else 0

    def save(self, state: dict[str, Any], sidecar: dict[str, Any], *, began: float, background: bool) -> None:
        """Save; returns when the checkpoint is verified, or in the background when its snapshot is taken.

        Args:
            state: the six entries.
            sidecar: what the sidecar says beside them.
            began: when the training stopped for it, `time.monotonic`.
            background: go on training if memory allows a copy.

        Raises:
            CheckpointError: a save in the foreground failed; older checkpoints are whole.
            DiskSpaceError: there is no room for it.
        """
        why = self.wait()
        if why is not None:
            checkpoint.warn(f"{why} Trying again while training waits.")
        copied = None
        if background and why is None:
            copied = snapshot.take(state) if snapshot.fits_in_memory(state) else None
            if copied is None:
                checkpoint.warn("too little free main memory for a copy of the state: saving while training waits.")
        if copied is None:
            self._book(self._write(state, sidecar, began, None))
            return
        arguments = (copied, sidecar, began, time.monotonic() - began)
        thread = threading.Thread(target=self._work, args=arguments, name="checkpoint")
        try:
            thread.start()
        except RuntimeError as error:  # no memory for one more, or no more are allowed
            checkpoint.warn(f"{error}: saving while training waits.")
            self._book(self._write(copied, sidecar, began, None))
            return
        self._thread = thread

    def look(self) -> str | None:
        """Book a background save if it has ended; says once, in words, why it failed, if it did."""
        return None if self._thread is None or self._thread.is_alive() else self.wait()

    def wait(self) -> str | None:
        """The same, after waiting for it to end."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, SaveReport):
            self._book(outcome)
            return None
        return str(outcome) if isinstance(outcome, RQwen3Error) else f"a save in the background failed: {outcome!r}."

    def _work(self, state: dict[str, Any], sidecar: dict[str, Any], began: float, stall_s: float) -> None:
        try:
            self._outcome = self._write(state, sidecar, began, stall_s)
        except BaseException as error:
            self._outcome = error
        phases.enter("saved", state["step"])

    def _write(self, state: dict[str, Any], sidecar: dict[str, Any], began: float, stall_s: float | None) -> SaveReport:
        saved = checkpoint.save(checkpoint.step_path(self.folder, int(state["step"])), state, sidecar)
        try:
            removed = checkpoint.prune(self.folder, self.config, saved)
        except OSError as error:
            checkpoint.warn(f"{self.folder}: old checkpoints could not be removed ({error}).")
            removed = []
        seconds = time.monotonic() - began
        return SaveReport(
            saved=saved,
            in_background=stall_s is not None,
            stall_s=seconds if stall_s is None else stall_s,
            seconds=seconds,
            removed=removed,
        )

    def _book(self, report: SaveReport) -> None:
        self.saved = report.saved
        self.told(report)
