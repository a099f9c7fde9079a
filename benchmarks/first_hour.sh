#!/usr/bin/env bash
# The first thing to run on a rented GPU, as soon as `bash run.sh` has made .venv:
#
#     bash benchmarks/first_hour.sh
#
# Less than 30 minutes on one H100: the machine, the tests that need a GPU, a run that is killed and
# resumed, the speed of the presets, a profile, and levers that only a GPU can judge. Everything goes
# to first_hour/ and first_hour.tar.gz; its RESULTS.md holds tables for benchmarks/RESULTS.md. A part
# that fails or takes too long is reported, and the next one begins. A CPU gets smaller sizes; on a busy
# machine, SLOW=4 before the command gives each part four times as long.
set -uo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || { echo "error: there is no .venv yet; make it: bash run.sh test" >&2; exit 2; }
export PATH="$PWD/.venv/bin:$PATH" PYTHONUNBUFFERED=1
out=first_hour work=first_hour/work
rm -rf "$out" && mkdir -p "$work"

part() { # NAME SECONDS COMMAND...; its output goes to NAME.txt
  local name=$1 limit=$(($2 * ${SLOW:-1})) begin=$SECONDS said=ok code=0
  shift 2
  printf '%-22s %s\n' "$name" "$*"
  timeout --kill-after=20 "$limit" "$@" > "$out/$name.txt" 2>&1 || code=$?
  case $code in
    0) ;;
    124 | 137) said="stopped after $limit s; see $name.txt" ;;
    *) said="failed with exit code $code; see $name.txt" ;;
  esac
  tail -n 3 "$out/$name.txt" | cut -c 1-160 | sed 's/^/    /'
  printf '%-22s %s (%s s)\n' "$name" "$said" $((SECONDS - begin)) | tee -a "$out/parts.txt"
}

speed() { # PRESET ROWS...: tokens per second for each micro-batch
  part "throughput_$1" 220 python benchmarks/throughput.py "$1" --micro_batch "${@:2}" \
    $sizes $eager --results $out/RESULTS.md
}

hour="python benchmarks/first_hour.py"
part environment 30 $hour environment
if grep -q '^GPU *none' "$out/environment.txt"; then
  echo "no GPU: small sizes, and without the tests and the levers that need one" | tee -a "$out/parts.txt"
  preset=tiny eager=--no_compile tokens="--tokens_per_step 1024"
  sizes="$tokens --steps 3"
  export TEST_DEVICE=cpu
else
  preset=d12 eager="" tokens="--tokens_per_step 131072"
  sizes="$tokens --steps 10"
fi
train="$preset --data_dir $work/data $tokens $eager"

part tests 200 python -m pytest -q -rs tests/test_cuda.py
part data 120 python prepare_data.py $preset --source stdlib --data_dir $work/data
part resume 300 $hour resume $train
if [ $preset = d12 ]; then
  speed d12 16 32 64
  speed d20 16 32
  speed smol-135m 32 64
else
  speed tiny 1 2
fi
part profile 120 python train.py $train --run_dir $work/profile --profile
part levers 370 $hour levers $preset $sizes --results $out/RESULTS.md

for run in whole killed; do
  for file in metrics.jsonl report.html; do cp "$work/$run/$file" "$out/${run}_$file"; done
done 2> /dev/null
cp $work/profile/profile/* "$out" 2> /dev/null
tar czf first_hour.tar.gz --exclude="$work" "$out"
echo
cat "$out/parts.txt"
echo "first_hour.tar.gz: all of first_hour/ but data and checkpoints"
