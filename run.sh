#!/usr/bin/env bash
# `bash run.sh [PRESET]` sets up, prepares text, trains a GPT (default: tiny) and prints samples.
# `bash run.sh test` sets up and runs the tests; `bash run.sh lesson 3` runs a lesson of course/.
# Run again, each does only what is missing.
set -euo pipefail
cd "$(dirname "$0")"

python=${PYTHON:-python3}
stamp=.venv/requirements.sha256
wanted=$(cat requirements.txt | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
  echo "$wanted" > "$stamp"
fi
export PATH="$PWD/.venv/bin:$PATH"

if [ "${1:-}" = test ]; then
  shift
  exec python -m pytest -n 2 "$@"  # two at a time
fi
if [ "${1:-}" = lesson ]; then
  exec python "course/$(printf %02d "${2:?which lesson? try: bash run.sh lesson 3}")"_*.py
fi
preset=${1:-tiny}
python prepare_data.py "$preset"
torchrun train.py "$preset"
python eval.py loss "$preset"
python eval.py sample "$preset" < /dev/null  # the prompts of the preset
echo "checkpoints  $(ls -d "runs/$preset"/checkpoints/step_* | tail -n 1)"
echo "metrics      runs/$preset/metrics.jsonl"
echo "report       runs/$preset/report.html"
