"""Whether SLURM's warning before the time limit can reach a job script's program; tried on a real slurmctld.

`--signal=B:…` goes to the batch shell alone. A shell that waits for a program in its foreground dies of the
signal, and SLURM then kills the program, unsaved and silently: so the program must be in the background, with a
trap and a `wait`, or take the shell's place by `exec`. Without `B:` the signal goes to job steps, which only
`srun` makes. `signal_problems` reads a script for that; it knows programs by `PROGRAMS`.
"""

import re
import shlex
from collections.abc import Sequence

PROGRAMS = ("model.pretrain", "execute_run", '"${program[@]}"')
"""Words by which a command is known to be the one that must save."""


def signal_problems(script: str, options: Sequence[str] = ()) -> list[str]:
    """Why the warning would be lost, one sentence each; empty when it arrives.

    Args:
        script: the text of the job script.
        options: sbatch's command line, which wins over the script's `#SBATCH` lines.
    """
    signal = _signal(script, options)
    if signal is None:
        return ["no --signal: the first the program hears is SIGTERM at the time limit, KillWait before its end"]
    lines = _commands(script)
    commands = [line for line in lines if not re.match(r"\w+=\(", line)]
    programs = [line for line in commands if any(word in line for word in PROGRAMS)]
    if not programs:
        return [f"no program is started: none of {', '.join(PROGRAMS)}"]
    name = signal.rpartition("B:")[2].split("@")[0].removeprefix("SIG")
    problems: list[str] = []
    for line in programs:
        if "B:" not in signal:
            if not re.match(r"(exec )?srun\b", line):
                problems.append(f"--signal={signal} goes to the steps of srun, and this is none: {line}")
        elif line.startswith("exec "):
            continue
        elif not line.endswith("&"):
            problems.append(f"--signal={signal} kills the shell that waits in the foreground for: {line}")
        else:
            problems += _background_problems(lines, name, line)
    return problems


def _background_problems(lines: list[str], name: str, line: str) -> list[str]:
    problems: list[str] = []
    before = lines[: lines.index(line)]
    if not any(_traps(other, name) for other in before):
        problems.append(f"no trap for {name} is set before: {line}")
    if not any(re.search(r"\bwait\b", other) for other in lines[lines.index(line) :]):
        problems.append(f"the shell does not wait for: {line}")
    return problems


def _traps(line: str, name: str) -> bool:
    """Whether the line traps the signal with a handler that does something."""
    try:
        words = shlex.split(line)
    except ValueError:
        return False
    if len(words) < 3 or words[0] != "trap" or words[1] in ("", "-", ":", "true"):
        return False
    return name in [word.removeprefix("SIG") for word in words[2:]]


def _signal(script: str, options: Sequence[str]) -> str | None:
    given = [line.split(maxsplit=1)[1] for line in script.splitlines() if line.startswith("#SBATCH ")]
    found = [match[1] for option in (*given, *options) if (match := re.match(r"--signal[= ](\S+)", option))]
    return found[-1] if found else None


def _commands(script: str) -> list[str]:
    """The script's lines without comments and indentation, continued lines joined."""
    joined = re.sub(r"\\\n\s*", " ", script)
    lines = [re.sub(r"(^|\s)#.*$", "", line).strip() for line in joined.splitlines()]
    return [line for line in lines if line]
