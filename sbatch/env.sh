# shellcheck shell=bash
# The environment of every job: modules, virtual environment, caches. It checks, and says what it found.
#
#   source "$RQWEN3_PROJECT/sbatch/env.sh" || exit
#
# Set before submitting, where the defaults don't fit:
#   RQWEN3_PROJECT   the checkout; the one that this file lies in by default
#   RQWEN3_MODULES   modules to load, as "cuda/12.4 python/3.12"; none by default
#   RQWEN3_VENV      the virtual environment; $RQWEN3_PROJECT/.venv by default
#   RQWEN3_SCRATCH   a fast folder for caches; else $SCRATCH, $SLURM_TMPDIR, $TMPDIR or /tmp, whichever can be written
#
# Costs the module system's time and two starts of Python.

_rqwen3_say() { printf 'env: %s\n' "$*"; }

_rqwen3_refuse() {
  printf 'env: error: %s\n' "$*" >&2
  return 1
}

# Module systems read unset variables and run commands that fail: no strict mode while they work.
_rqwen3_modules() {
  local options=$- failed=0 each
  set +eu
  if ! command -v module >/dev/null; then
    for each in /etc/profile.d/modules.sh /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh; do
      # shellcheck disable=SC1090
      [[ -r $each ]] && source "$each"
    done
  fi
  if command -v module >/dev/null; then
    for each in $RQWEN3_MODULES; do
      module load "$each" || failed=1
      # Some module systems answer 0 to a name they don't know: what counts is whether it is loaded now.
      [[ :${LOADEDMODULES:-}: == *":$each"[:/]* ]] || failed=1
    done
  else
    failed=2
  fi
  [[ $options == *e* ]] && set -e
  [[ $options == *u* ]] && set -u
  case $failed in
    0) _rqwen3_say "modules ${LOADEDMODULES:-}" ;;
    1) _rqwen3_refuse "RQWEN3_MODULES=\"$RQWEN3_MODULES\": not all could be loaded. See what there is: module avail" ;;
    2) _rqwen3_refuse "RQWEN3_MODULES is set, but this host has no module command. Unset it, or ask the site." ;;
  esac
}

_rqwen3_scratch() {
  local each
  for each in "${RQWEN3_SCRATCH:-}" "${SCRATCH:-}" "${SLURM_TMPDIR:-}" "${TMPDIR:-}" /tmp; do
    if [[ -n $each && -d $each && -w $each ]]; then
      printf '%s' "$each"
      return
    fi
  done
  return 1
}

_rqwen3_environment() {
  local python version scratch cache
  export RQWEN3_PROJECT=${RQWEN3_PROJECT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
  [[ -f $RQWEN3_PROJECT/model/pretrain.py ]] ||
    _rqwen3_refuse "RQWEN3_PROJECT=$RQWEN3_PROJECT is no checkout of this project. Submit from the checkout, or set it." || return
  if [[ -n ${RQWEN3_MODULES:-} ]]; then _rqwen3_modules || return; fi
  export VIRTUAL_ENV=${RQWEN3_VENV:-$RQWEN3_PROJECT/.venv}
  python=$VIRTUAL_ENV/bin/python
  version=$("$python" -c 'import platform; print(platform.python_version())') ||
    _rqwen3_refuse "$python does not run on $HOSTNAME. Make it anew: cd $(printf %q "$RQWEN3_PROJECT") && make install" || return
  scratch=$(_rqwen3_scratch) || _rqwen3_refuse "no folder for caches can be written on $HOSTNAME; set RQWEN3_SCRATCH." || return
  cache=$scratch/rqwen3-cache-$(id -un)
  mkdir -p "$cache" && chmod 700 "$cache" ||
    _rqwen3_refuse "$cache is not ours to write on $HOSTNAME; set RQWEN3_SCRATCH to another folder." || return
  export PATH=$VIRTUAL_ENV/bin:$PATH PYTHONUNBUFFERED=1
  export PYTHONPATH=$RQWEN3_PROJECT${PYTHONPATH:+:$PYTHONPATH}
  export HF_HOME=${HF_HOME:-$cache/huggingface}
  export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
  export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton}
  export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-$cache/cuda}
  if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}; fi
  _rqwen3_say "$HOSTNAME, job ${SLURM_JOB_ID:-none} (${SLURM_JOB_NAME:-none}), partition ${SLURM_JOB_PARTITION:-none}"
  _rqwen3_say "project $RQWEN3_PROJECT, Python $version of $VIRTUAL_ENV"
  _rqwen3_say "caches in $cache, $(df -Ph "$cache" | awk 'NR == 2 {print $4}') free; CPUs $(nproc), GPUs ${CUDA_VISIBLE_DEVICES:-none}"
  if command -v nvidia-smi >/dev/null; then nvidia-smi -L 2>&1 | sed 's/^/env: /' || true; fi
}

_rqwen3_environment
