"""Progress for a person: bars on a terminal, plain lines in a log.

A log gets a line when a tenth more is done, at most every two seconds, when half a minute has passed
without one, and at the end; never a carriage return.
"""

import sys
import time
from types import TracebackType
from typing import Any, Self

LINE_EVERY_S = 30.0
LINE_AT_MOST_EVERY_S = 2.0


class Progress:
    """Counts pieces of work towards `total`, on standard error."""

    def __init__(self, label: str, total: int, unit: str = "") -> None:
        self.label, self.total, self.unit = label, max(total, 0), unit
        self.done, self.note = 0, ""
        self._started = self._last_line = time.monotonic()
        self._last_tenth = 0
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self.total, desc=label, unit=unit or "it", leave=False, dynamic_ncols=True)

    def to(self, done: int, note: str = "") -> None:
        """Set how much is done, with a short note on the latest piece."""
        advance, self.done, self.note = done - self.done, done, note
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(advance)
            return
        tenth = 10 * done // self.total if self.total else 10
        silent_s = time.monotonic() - self._last_line
        due = silent_s > (LINE_AT_MOST_EVERY_S if tenth > self._last_tenth else LINE_EVERY_S)
        if due or self.done == self.total:
            self._last_tenth, self._last_line = tenth, time.monotonic()
            self._line()

    def advance(self, note: str = "") -> None:
        """One piece more."""
        self.to(self.done + 1, note)

    def _line(self) -> None:
        elapsed_s = time.monotonic() - self._started
        print(
            f"  {self.label}: {self.done:,}/{self.total:,} {self.unit} after {elapsed_s:.0f} s {self.note}".rstrip(),
            file=sys.stderr,
            flush=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
