#!/bin/bash
# Says whether a SLURM job lives, for the trainer's lock: exit code 0 alive, 1 gone, 2 not known.
#
#   sbatch/job_alive.sh JOB_ID
#
# SLURM out of reach is "not known", never "gone".
set -u
if answer=$(timeout 60 squeue --noheader --states=all --jobs="$1" --format=%T 2>&1); then
  case $answer in
    '' | BOOT_FAIL | CANCELLED | COMPLETED | DEADLINE | FAILED | NODE_FAIL | OUT_OF_MEMORY | PREEMPTED | REVOKED | TIMEOUT) exit 1 ;;
    *) exit 0 ;;
  esac
fi
[[ $answer == *"Invalid job id"* ]] && exit 1
printf '%s\n' "$answer" >&2
exit 2
