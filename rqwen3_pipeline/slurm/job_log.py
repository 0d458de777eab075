"""What SLURM itself writes into a job's output.

Where memory is accounted rather than confined to a control group, a job that took too much ends FAILED,
killed like any other: only slurmstepd's line in its output says why.
"""

import re
from pathlib import Path

_MEMORY = re.compile(
    r"^slurmstepd(?:-\S+)?: (?:error: )?(.*(?:exceeded (?:\w+ )?memory limit|oom[-_ ]kill|out-of-memory handler).*)$",
    re.IGNORECASE | re.MULTILINE,
)
TAIL_BYTES = 64 * 1024


def memory_kill(log: Path) -> str:
    """The first line to say that the job, or some of it, was killed for its memory; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            found = _MEMORY.findall(file.read().decode("utf-8", errors="replace"))
    except OSError:
        return ""
    return found[0].strip() if found else ""
