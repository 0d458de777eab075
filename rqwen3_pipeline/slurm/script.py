"""The batch script: bash that starts one program, passes on SLURM's warning, and leaves nothing behind.

The program runs as a child and the shell waits, since a shell that is busy with a foreground program
dies of the warning signal and takes the program with it, unsaved. The shell itself takes the warning
(`--signal=B:…`) and leaves a file that the trainer looks for. SLURM's own TERM reaches every process,
so the shell only repeats it to a program that has not ended some time later. What outlives the
program (a trainer whose parent was killed, which saves) is told to end and awaited. Costs a shell of
4 MiB, and a look at /proc every ten seconds for the peak of memory.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from model.errors import ConfigError
from rqwen3_pipeline.slurm.options import JobOptions, check_option

__all__ = ["JobOptions", "check_option", "render"]

STOP_FILE, DEADLINE = "RQWEN3_STOP_FILE", "RQWEN3_DEADLINE"
"""Set by a job's script: where it leaves the wish to stop, and when the job ends, in seconds since 1970."""
CANCEL = "cancel"
"""What a stop file says when the run is to end; it is empty when only the job's time is up."""

_ENVIRONMENT = """
set +e  # what a module system does inside is its own affair
source {file}
status=$?
set -e
if [ "$status" -ne 0 ]; then
  say {file} "failed with exit code $status. Mend it; to try it on this host:" {command}
  exit 78
fi
"""

_HEAD = """#!/bin/bash
# A job of the RQwen3 pipeline, written by rqwen3: {title}
set -eo pipefail

say() {{ printf '[%(%F %T)T] job %s on %s: %s\\n' -1 "${{SLURM_JOB_ID:-none}}" "${{HOSTNAME:-?}}" "$*"; }}

export RQWEN3_STOP_FILE={stop_file}
interrupted=0
worker=
watcher=
warned() {{  # the trainer polls the file; its content tells a cancelled run from one that goes on
  interrupted=1
  say "SIG$1: asking the program to save and stop"
  : >>"$RQWEN3_STOP_FILE" || :
  if [ "$1" = TERM ] && [ -n "$watcher" ]; then kill -USR2 "$watcher" 2>/dev/null || :; fi
}}
trap 'warned USR1' USR1
trap 'warned TERM' TERM
"""

_BODY = """
set -u
export PYTHONUNBUFFERED=1
exec {never}<> <(:)  # a pipe nobody writes to: to wait without starting a process
pause() { read -rt "$1" -u "$never" _ || :; }

# When the job ends, in seconds since 1970: SLURM's word, else this moment and the limit that was asked for.
ends=${SLURM_JOB_END_TIME:-}
for try in 1 2 3; do
  if [ -n "$ends" ] || [ -z "${SLURM_JOB_ID:-}" ]; then break; fi
  ends=$(TZ=UTC timeout 20 squeue -h -j "$SLURM_JOB_ID" -o %e 2>/dev/null) || ends=
  if [ -n "$ends" ]; then ends=$(date -u -d "$ends" +%s 2>/dev/null) || ends=; fi
  if [ -z "$ends" ]; then pause 5; fi
done
if [ -z "$ends" ] && [ -n "$limit_s" ]; then ends=$(($(date +%s) + limit_s)); fi
if [ -n "$ends" ]; then export RQWEN3_DEADLINE=$ends; fi

resident_kib() {  # of a process and its descendants, into $total
  local line child
  while read -r line; do
    case $line in VmRSS:*) line=${line//[!0-9]/}; total=$((total + line)) ;; esac
  done 2>/dev/null <"/proc/$1/status" || :
  local children=()
  read -ra children 2>/dev/null <"/proc/$1/task/$1/children" || :
  for child in ${children[@]+"${children[@]}"}; do resident_kib "$child"; done
}
watch() {  # notes the peak of memory; repeats a TERM that did not reach the program
  local peak=0 total due= naps=0
  trap '' USR1 TERM
  trap 'due=$((SECONDS + 20))' USR2
  while kill -0 "$1" 2>/dev/null; do
    total=0
    resident_kib "$1"
    if [ "$total" -gt "$peak" ]; then peak=$total; echo "$peak" >"$RQWEN3_STOP_FILE.peak_kib"; fi
    if [ -n "$due" ] && [ "$SECONDS" -ge "$due" ]; then due=; kill -TERM "$1" 2>/dev/null || :; fi
    naps=$((naps + 1))
    if [ "$naps" -lt 20 ] || [ -n "$due" ]; then pause 1; else pause 10; fi
  done
}
of_this_job() {  # another job of the same run may be the one that trains
  if [ -z "${SLURM_JOB_ID:-}" ]; then cat; else xargs -r grep -lszxF -- "SLURM_JOB_ID=$SLURM_JOB_ID"; fi
}
left_behind() {  # processes that carry this job's mark; listed before grep starts, which carries it too
  local all=(/proc/[0-9]*/environ)
  grep -lszxF -- "RQWEN3_STOP_FILE=$RQWEN3_STOP_FILE" "${all[@]}" | of_this_job | tr -dc '0-9\\n' || :
}

say "starting; ends ${ends:+at $(date -d "@$ends" '+%F %T')}"
"${program[@]}" &
worker=$!
watch "$worker" &
watcher=$!
disown "$watcher"
code=0
while :; do
  interrupted=0
  wait "$worker" && code=0 || code=$?
  if [ "$interrupted" -eq 0 ] || ! kill -0 "$worker" 2>/dev/null; then break; fi
done
wait "$worker" && code=0 || code=$?  # the signal that woke the loop may have come with the end
kill -KILL "$watcher" 2>/dev/null || :

left=$(left_behind)
if [ -n "$left" ]; then
  pause 1
  left=$(left_behind)
fi
if [ -n "$left" ]; then
  say "ended with exit code $code; awaiting what it left behind:" $left
  : >>"$RQWEN3_STOP_FILE"
  kill -TERM $left 2>/dev/null || :
  until=$((SECONDS + save_budget_s))
  while [ -n "$left" ] && [ "$SECONDS" -lt "$until" ]; do pause 1; left=$(left_behind); done
  if [ -n "$left" ]; then say "still there after $save_budget_s s, killed:" $left; kill -KILL $left 2>/dev/null || :; fi
fi

times >"$RQWEN3_STOP_FILE.times"  # into a file: a pipe would be a new shell, which has used nothing
cpu_s=$(awk 'NR == 2 { gsub(/[ms]/, " "); print int($1 * 60 + $2 + $3 * 60 + $4 + 0.5) }' "$RQWEN3_STOP_FILE.times")
peak_kib=$(cat "$RQWEN3_STOP_FILE.peak_kib" 2>/dev/null || echo 0)
rm -f "$RQWEN3_STOP_FILE.times" "$RQWEN3_STOP_FILE.peak_kib"
cpus=${SLURM_CPUS_ON_NODE:-1}
used=$((100 * cpu_s / (cpus * (SECONDS > 0 ? SECONDS : 1))))
say "efficiency: elapsed ${SECONDS} s, CPU ${cpu_s} s ($used % of $cpus), peak memory $((peak_kib / 1024)) MiB;" \\
  "exit code $code"
exit "$code"
"""


def render(
    program: Sequence[str],
    options: JobOptions,
    *,
    stop_file: Path,
    env_file: Path | None = None,
    folder: Path | None = None,
    code: Path | None = None,
    environment: Mapping[str, str] | None = None,
    save_budget_s: int = 600,
) -> str:
    """The script of one job.

    Args:
        program: what to run, as an argument list.
        options: of the job; its time limit and comment go into the script.
        stop_file: what the shell leaves when SLURM warns; `RQWEN3_STOP_FILE` in the environment.
        env_file: sourced first: modules, environments, caches. It must end with exit code 0.
        folder: the working folder. It should hold no packages: Python looks there first.
        code: folder of the sources to run, put first on PYTHONPATH.
        environment: further variables, set before `env_file` is sourced.
        save_budget_s: how long what outlives the program may take to save.

    Raises:
        ConfigError: a variable's name is unusable.
    """
    exports = dict(environment or {})
    for name in exports:
        if not name.isidentifier() or not name.isascii():
            raise ConfigError(f"{name!r} is no name of an environment variable.")
    lines = [_HEAD.format(title=options.comment or options.job_name, stop_file=shlex.quote(str(stop_file)))]
    lines += [f"export {name}={shlex.quote(value)}\n" for name, value in exports.items()]
    if env_file is not None:
        quoted = shlex.quote(str(env_file))
        lines.append(_ENVIRONMENT.format(file=quoted, command=shlex.quote(f"bash {quoted}")))
    if code is not None:
        lines.append(f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}\n")
    if folder is not None:
        lines.append(f"cd -- {shlex.quote(str(folder))}\n")
    limit_s = options.time_limit_s
    lines.append(f"limit_s={int(limit_s) if limit_s else ''}\nsave_budget_s={int(save_budget_s)}\n")
    lines.append("program=(" + " ".join(map(shlex.quote, program)) + ")\n")
    return "".join(lines) + _BODY
