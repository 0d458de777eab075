#!/bin/bash
# A job of the RQwen3 pipeline, written by rqwen3: dagster:1234abcd
set -eo pipefail

say() { printf '[%(%F %T)T] job %s on %s: %s\n' -1 "${SLURM_JOB_ID:-none}" "${HOSTNAME:-?}" "$*"; }

export RQWEN3_STOP_FILE='/home/ann/my runs/attempt-1.stop'
interrupted=0
worker=
watcher=
warned() {  # the trainer polls the file; its content tells a cancelled run from one that goes on
  interrupted=1
  say "SIG$1: asking the program to save and stop"
  : >>"$RQWEN3_STOP_FILE" || :
  if [ "$1" = TERM ] && [ -n "$watcher" ]; then kill -USR2 "$watcher" 2>/dev/null || :; fi
}
trap 'warned USR1' USR1
trap 'warned TERM' TERM
export RQWEN3_HOME='/home/ann/my runs'

set +e  # what a module system does inside is its own affair
source /home/ann/env.sh
status=$?
set -e
if [ "$status" -ne 0 ]; then
  say /home/ann/env.sh "failed with exit code $status. Mend it; to try it on this host:" 'bash /home/ann/env.sh'
  exit 78
fi
export PYTHONPATH=/home/ann/code/0123${PYTHONPATH:+:$PYTHONPATH}
cd -- '/home/ann/my runs'
limit_s=600
save_budget_s=600
program=(/venv/bin/python -m dagster api execute_run '{"it'"'"'s": "json"}')

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
  grep -lszxF -- "RQWEN3_STOP_FILE=$RQWEN3_STOP_FILE" "${all[@]}" | of_this_job | tr -dc '0-9\n' || :
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
say "efficiency: elapsed ${SECONDS} s, CPU ${cpu_s} s ($used % of $cpus), peak memory $((peak_kib / 1024)) MiB;" \
  "exit code $code"
exit "$code"
