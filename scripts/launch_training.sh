#!/usr/bin/env bash
# Start a training script with one process per GPU of this machine; see --help.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: launch_training.sh [NUM_GPUS] [SCRIPT] [ARGS ...]

Start a training script with one process per GPU of this machine; several processes under torchrun, which then ends
with the exit code of the processes, and with their message last.

  NUM_GPUS  number of GPUs (default: all, or those of CUDA_VISIBLE_DEVICES); with 0, or without GPUs, one process on the
            CPU; with --device cpu among ARGS, the number of processes on the CPU
  SCRIPT    finetune.py or train_mixer.py (default: finetune.py)
  ARGS      the script's flags; --batch-size is per process

  launch_training.sh --dataset my.csv --target-cols hisco_1 --language en --save-path out
  launch_training.sh 4 train_mixer.py --train-data a.csv --val-data v.csv --save-dir out

PYTHON names the Python to use (default: that of the active environment, else of .venv, else python3).
HELP
}

fail() {
  echo "error: $1" >&2
  exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

find_python() {
  local environment
  for environment in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}" "$root/.venv"; do
    if [[ -n $environment && -x $environment/bin/python ]]; then
      echo "$environment/bin/python"
      return
    fi
  done
  echo python3
}

count_gpus() {
  local listed visible=() count=0
  if listed=$(nvidia-smi -L 2>/dev/null); then
    count=$(grep -c '^GPU ' <<<"$listed" || true)
  fi
  if ((count > 0)) && [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    IFS=, read -r -a visible <<<"$CUDA_VISIBLE_DEVICES"
    if [[ ${visible[0]:-} == -* || ${visible[0]:-} == NoDevFiles ]]; then
      visible=()
    fi
    count=${#visible[@]}
    if [[ ${visible[0]:-} == MIG-* ]]; then # of parts of a GPU, CUDA uses only the first
      count=1
    fi
  fi
  echo "$count"
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  usage
  exit
fi

num_gpus=
if [[ ${1:-} =~ ^[0-9]+$ ]]; then
  num_gpus=$((10#$1))
  shift
fi
script=$root/finetune.py
if [[ ${1:-} == *.py ]]; then
  script=$1
  if [[ ! -f $script && $script != */* ]]; then
    script=$root/$script
  fi
  [[ -f $script ]] || fail "there is no script $1; name finetune.py or train_mixer.py."
  shift
elif [[ $# -gt 0 && $1 != -* ]]; then
  fail "'$1' is neither a number of GPUs, nor a script, nor a flag. See $(basename "$0") --help."
fi

on_cpu=
previous=
for arg in "$@"; do
  if [[ $arg == --device=cpu || ($arg == cpu && $previous == --device) ]]; then
    on_cpu=yes
  fi
  previous=$arg
done

available=$(count_gpus)
processes=${num_gpus:-$available}
if [[ -n $on_cpu ]]; then
  processes=${num_gpus:-1}
elif ((processes > available)); then
  fail "there are $available GPUs, not $processes. Ask for fewer, or add --device cpu for processes on the CPU."
fi
if [[ -n $on_cpu ]]; then
  devices="the CPU (--device cpu)"
elif ((available == 0)); then
  devices="the CPU (there is no NVIDIA GPU)"
elif ((processes == 0)); then
  devices="the CPU (as asked)"
  export CUDA_VISIBLE_DEVICES=
elif [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
  devices="GPUs $(cut -d, -f"1-$processes" <<<"$CUDA_VISIBLE_DEVICES")"
else
  devices="GPUs $(seq -s, 0 $((processes - 1)))"
fi
processes=$((processes > 0 ? processes : 1))

python=${PYTHON:-$(find_python)}
if ((processes == 1)); then # needs no torchrun, but counts as launched
  command=(env RANK=0 WORLD_SIZE=1 "$python" "$script" "$@")
else
  command=("$python" "$root/scripts/launch.py" --standalone "--nproc_per_node=$processes" "$script" --distributed "$@")
  cores=$(getconf _NPROCESSORS_ONLN)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
  # torchrun forwards these signals; at others it ends, and its processes do not save
  export TORCHELASTIC_SIGNALS_TO_HANDLE=${TORCHELASTIC_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}
fi

echo "script     $(basename "$script")"
echo "processes  $processes on $devices"
printf 'command   '
printf ' %q' "${command[@]}"
printf '\n\n'
exec "${command[@]}"
