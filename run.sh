#!/usr/bin/env bash
# `bash run.sh [PRESET [OPTIONS]]` sets up, prepares text, trains a GPT (default: tiny) and prints
# samples; the options are train.py's: `bash run.sh d12 --mirror s3://BUCKET/runs`.
# `bash run.sh test` sets up and runs the tests; `bash run.sh lesson 7` runs a lesson of course/.
# Run again, each does only what is missing.
set -euo pipefail
cd "$(dirname "$0")"

python=${PYTHON:-python3}
wanted=$(cat requirements.txt)
# PyPI's torch 2.13 is built for CUDA 13, which wants driver 580; its last one for CUDA 12, which wants
# 525, is 2.10. A build from elsewhere (2.13.0+cu126, 2.13.0+cpu) is the user's choice, and stays.
query="nvidia-smi --query-gpu=driver_version --format=csv,noheader"
driver=$(timeout 20 $query 2> /dev/null) || driver=
driver=${driver%%$'\n'*}  # of the first GPU
chosen=$(compgen -G ".venv/lib/python3*/site-packages/torch-*+*.dist-info") || chosen=
if [[ $driver =~ ^([0-9]+)\. && ${BASH_REMATCH[1]} -lt 580 && -z $chosen ]]; then
  if [ "${BASH_REMATCH[1]}" -lt 525 ]; then
    echo "error: driver $driver is too old for CUDA 12; install 525 or newer, preferably 580" >&2
    exit 2
  fi
  echo "driver $driver is older than 580: torch 2.10 for CUDA 12 instead of 2.13 for CUDA 13"
  wanted=${wanted/torch==2.13.0/torch==2.10.0}
fi
stamp=.venv/requirements.txt
if [ "$(cat "$stamp" 2> /dev/null || true)" != "$wanted" ]; then
  if ! .venv/bin/python -m pip --version > /dev/null 2>&1; then  # no .venv yet, or one without pip
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
      echo "error: $("$python" --version) is older than 3.10; PYTHON=python3.12 bash run.sh" >&2
      exit 2
    }
    "$python" -m venv .venv  # keeps the packages that are there
  fi
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r <(echo "$wanted")
  if [[ $wanted == *torch==2.10.0* ]]; then  # torch asks for an older cuDNN, and avoids its attention
    .venv/bin/python -m pip install --quiet --no-deps -r <(echo nvidia-cudnn-cu12==9.15.1.9)
  fi
  echo "$wanted" > "$stamp"
fi
export PATH="$PWD/.venv/bin:$PATH"

if [ "${1:-}" = test ]; then
  shift
  if [ $# -gt 0 ]; then exec python -m pytest -n 4 --dist worksteal "$@"; fi
  python -m pytest -n 4 --dist worksteal  # most tests wait for programs, so 4 on two cores
  exec python -m pytest -n 0 -m timing  # these measure, so they run alone
fi
if [ "${1:-}" = lesson ]; then
  number=${2:?which lesson? try: bash run.sh lesson 7}
  lesson=$(compgen -G "course/${number}_*.py" || compgen -G "course/0${number}_*.py") || lesson=
  [[ $number =~ ^[0-9]+$ && $lesson ]] ||
    { echo "error: lesson $number: give the number of a file in course/, as in 7" >&2; exit 2; }
  exec python "$lesson"
fi
preset=${1:-tiny}
if [[ $preset == -* || " $*" == *" --run_dir"* ]]; then
  echo "error: run.sh takes a preset, then options of train.py but --run_dir; for '$*' run the" \
    "programs by hand (README.md)" >&2
  exit 2
fi
shift $(($# > 0))
if [[ "$*" =~ (s3|gs):// ]]; then  # a store: docs/store.md
  python -m pip install --quiet --disable-pip-version-check -r requirements-store.txt
fi
if [[ ! " $*" =~ " --data_dir"[=\ ] ]]; then
  python prepare_data.py "$preset"
fi
torchrun --standalone train.py "$preset" "$@"
python eval.py loss "$preset"
python eval.py sample "$preset" < /dev/null  # the prompts of the preset
echo "checkpoints  $(ls -d "runs/$preset"/checkpoints/step_* | tail -n 1)"
echo "metrics      runs/$preset/metrics.jsonl"
echo "report       runs/$preset/report.html"
