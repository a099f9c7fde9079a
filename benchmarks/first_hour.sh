#!/usr/bin/env bash
# The first ten minutes on a rented GPU: does everything work, and how fast is it?
#
#   bash benchmarks/first_hour.sh                          ten minutes
#   bash benchmarks/first_hour.sh --minutes 60             more presets, a longer comparison
#   bash benchmarks/first_hour.sh --peer /tmp/nanochat     beside nanochat, from a checkout of it
#
# Runs the parts at the end of this file, in order of their value. Each has a limit, and is left out
# where too little time remains; one that fails or hangs is reported, and the next one begins.
#   --only PART ...   some of them
#   --slow 4          limits four times as long, on a busy machine
#   --out FOLDER      in place of first_hour/: gets RESULTS.md, with all tables and the list of
#                     parts, for benchmarks/RESULTS.md, in logs/ what each part printed, and
#                     the profile's trace.json.gz, for https://ui.perfetto.dev
# A CPU gets smaller sizes, which test the parts and not the CPU. nanochat is faster if the package
# `kernels` is there (peer.py). The Python is that of .venv, which `bash run.sh` makes; where there
# is none, python3, which then needs the packages of requirements.txt.
set -uo pipefail
parts="data tests warm warm_peer speed profile learn speed_more speed_d20 speed_smol-135m"
reserve=15      # seconds of all the time: to end a part, and for what it then reports
room_for_all=70 # GB of a GPU; with less, nothing on it runs at the same time

# ------------------------------------------------------------------------------- what was asked for
fail() {
  echo "error: $1" >&2
  exit 2
}

root=$(cd "$(dirname "$0")/.." && pwd)
minutes=10 slow=1 peer="" out=$root/first_hour only=""
while [ $# -gt 0 ]; do
  case $1 in
    --minutes | --slow | --peer | --out | --only) [ $# -gt 1 ] || fail "$1 needs a value" ;;
  esac
  case $1 in
    --minutes) minutes=$2 ;;
    --slow) slow=$2 ;;
    --peer) peer=$2 ;;
    --out) out=$2 ;;
    --only)
      while [ $# -gt 1 ] && [[ $2 != --* ]]; do
        [[ " $parts " == *" $2 "* ]] || fail "--only $2: no such part; there are $parts"
        only="$only $2"
        shift
      done
      shift
      continue
      ;;
    -h | --help)
      sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
      exit
      ;;
    *) fail "$1: no such option; there are --minutes, --peer, --only, --slow and --out" ;;
  esac
  shift 2
done

python=$root/.venv/bin/python
[ -x "$python" ] || python=$(command -v python3) || fail "there is no python3; install it"
command -v timeout > /dev/null || fail "there is no timeout; install coreutils"
[[ $slow =~ ^[1-9][0-9]*$ ]] || fail "--slow $slow is no whole number"
[[ $minutes =~ ^[0-9]+\.?[0-9]*$ ]] || fail "--minutes $minutes is no number"
seconds=$(awk "BEGIN { print int(60 * $minutes) }")
[ "$seconds" -gt 0 ] || fail "--minutes $minutes is no time"
if [ -n "$peer" ]; then
  remedy="git clone https://github.com/karpathy/nanochat, and give that folder"
  [ -f "$peer/nanochat/gpt.py" ] || fail "--peer $peer: no nanochat/gpt.py is in it; $remedy"
  peer=$(cd "$peer" && pwd)
fi
if [ -e "$out" ] && [ ! -e "$out/.lock" ] && [ -n "$(ls -A "$out")" ]; then
  fail "$out holds other files; give --out a new folder"
fi
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
results=$out/RESULTS.md work=$out/unfinished ended=$out/unfinished/parts.txt
exec 9>> "$out/.lock"
flock -n 9 || fail "$out is in use by another first_hour.sh; stop it, or give another --out"
[ ! -e "$results" ] || mv "$results" "$out/RESULTS.$(date -r "$results" +%s).md"
rm -rf "$work" "$out/logs"
mkdir "$work" "$out/logs"
touch "$ended"
ends=$((SECONDS + seconds))
cd "$root" || exit 2

# ------------------------------------------------------------------------------ a part, and its end
report() { # NAME WORDS
  printf '%-15s %s; %d s left\n' "$1" "$2" $((ends - SECONDS)) | tee -a "$ended"
}

limit() { # MOST: seconds for a part that may have so many
  local rest=$((ends - SECONDS - reserve))
  echo $((slow * $1 < rest ? slow * $1 : rest))
}

run() { # NAME LIMIT COMMAND ...: within the limit; then say how it ended
  local name=$1 limit=$2 log=$out/logs/$1.txt begun=$SECONDS stopped="" pid code took last
  shift 2
  timeout --kill-after=10 "$limit" "$@" > "$log" 2>&1 < /dev/null &
  pid=$!
  trap 'stopped=yes; kill "$pid"; wait "$pid"' TERM HUP
  printf '%-15s begins\n' "$name"
  wait "$pid"
  code=$?
  took=$((SECONDS - begun))
  kill -KILL -- "-$pid" # what it has left running: `timeout` makes a group of its processes
  last=$(grep '[^[:space:]]' "$log" | tail -n 3 | cut -c 1-120)
  last=${last:-no output}
  echo "$last"
  last=${last##*$'\n'}
  if [ -n "$stopped" ]; then
    report "$name" "interrupted"
  elif [ "$code" -eq 0 ]; then
    report "$name" "ok ($took s)"
  elif [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
    report "$name" "failed: stopped after $took s: $last"
  else
    report "$name" "failed: exit code $code: $last"
  fi
} 2> /dev/null # the shell's own words on processes that it has killed

begin() { # NAME MOST LEAST NEEDED COMMAND ...: run it, if it is asked for and can be, beside others
  local name=$1 most=$2 least=$3 needed=$4
  shift 4
  [[ -z $only || " $only " == *" $name "* ]] || return
  if [ ! -e "$needed" ]; then
    report "$name" "left out: there is no $(basename "$needed")"
  elif [ $((ends - SECONDS - reserve)) -lt "$least" ]; then
    report "$name" "left out: no time"
  else
    run "$name" "$(limit "$most")" "$@" &
    [ -n "$together" ] || wait
  fi
}

part() { # as begin, and wait for its end
  begin "$@"
  wait
}

close() { # end what still runs, and write the list of parts at the end of the results
  local code=$?
  # shellcheck disable=SC2046 # a list of numbers
  kill $(jobs -p) 2> /dev/null
  wait
  printf '\n## Parts\n\n' >> "$results"
  sed 's/^/    /' "$ended" >> "$results"
  ! grep -q ' failed: ' "$ended" || [ "$code" -ne 0 ] || code=1
  cp "$work/profile/profile/trace.json.gz" "$out" 2> /dev/null
  rm -rf "$work"
  printf '\nall of it: %s\n' "$results"
  exit "$code"
}
trap close EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# -------------------------------------------------------------------------------------- the machine
unset RANK WORLD_SIZE LOCAL_RANK # this is no job of torchrun
export PYTHONUNBUFFERED=1 WANDB_MODE=disabled MPLCONFIGDIR=$work/mpl
export TORCHINDUCTOR_CACHE_DIR=$work/inductor TRITON_CACHE_DIR=$work/triton
run environment "$(limit 90)" "$python" benchmarks/machine.py --results "$results" &
wait
if ! grep -q '^environment .* ok' "$ended"; then
  echo "error: the programs do not run here; what they need is installed by: bash run.sh test" >&2
  exit 1
fi
cat "$out/logs/environment.txt"
if grep -q '^- expandable segments: do not work' "$results"; then
  export PYTORCH_ALLOC_CONF=expandable_segments:False
fi
memory=$(sed -nE 's/^- memory: .* ([0-9]+)[.0-9]* GB free$/\1/p' "$results") # of a GPU
together=yes
if [ -n "$memory" ]; then
  [ "$memory" -ge "$room_for_all" ] || together=""
  preset=d12 small=d6 tests=(tests/test_cuda.py)
  text=(code=stdlib+site) amount=(--tokens 80M --val_fraction 0.015)
  step=(--tokens_per_step 131072) measured=(--steps 8) rows=(64 16) learned=(--steps 400)
else
  echo "torch finds no GPU: small sizes, which say nothing about speed"
  export TEST_DEVICE=cpu
  preset=tiny small=tiny tests=(tests/test_cuda.py -k pinned)
  text=(code=files:machinery) amount=(--vocab_size 1024 --val_fraction 0.1)
  step=(--tokens_per_step 1024 --no_compile) rows=(1) learned=(--steps 4)
  measured=("${step[@]}" --steps 2 --warmup 1)
fi
[ ! -d prose ] || text+=("prose=files:$root/prose/*.txt") # made by prose.sh

# ------------------------- the parts: seconds at most, seconds at least, a file that it needs, and
# the command. Those that `begin` run at the same time: none of them is timed, and the first steps
# fill the compiler's caches.
pytest=("$python" -m pytest -q -rs -n 3 -p no:cacheprovider)
throughput=("$python" benchmarks/throughput.py)
speed_of_both=("$python" benchmarks/peer.py speed "$preset" --peer "$peer")
data=(--data_dir "$work/rows" "${step[@]}")
ready=$work/rows/manifest.json
first=("${step[@]}" --steps 1 --warmup 1 --results "")
timed=("${measured[@]}" --results "$results")

begin data 150 15 . nice -n 5 "$python" prepare_data.py "$preset" --data_dir "$work/rows" \
  --source "${text[@]}" "${amount[@]}"
begin tests 170 15 . "${pytest[@]}" "${tests[@]}"
if [ -n "$memory" ]; then
  begin warm 150 15 . "${throughput[@]}" "$preset" "${first[@]}"
  [ -z "$peer" ] || begin warm_peer 150 15 . "${speed_of_both[@]}" --sides nanochat "${first[@]}"
fi
wait
# Triton's choices on a busy GPU: to be made again
[ ! -d "$work/inductor" ] || find "$work/inductor" -name '*.best_config' -delete

if [ -n "$peer" ]; then
  part speed 240 15 . "${speed_of_both[@]}" "${timed[@]}"
else
  part speed 120 15 . "${throughput[@]}" "$preset" "${timed[@]}"
fi
part profile 100 40 "$ready" "$python" train.py "$preset" "${data[@]}" \
  --run_dir "$work/profile" --profile
if grep -q "where the time goes" "$out/logs/profile.txt" 2> /dev/null; then
  printf '\n## Profile\n\n' >> "$results"
  sed -n "s|$work/profile/profile/||; /where the time goes/,\$s|^|    |p" \
    "$out/logs/profile.txt" >> "$results"
fi
if [ -n "$peer" ]; then
  part learn 200 120 "$ready" "$python" benchmarks/peer.py learn "$small" --peer "$peer" \
    "${data[@]}" "${learned[@]}" --results "$results"
fi
part speed_more 160 60 . "${throughput[@]}" "$preset" --micro_batch "${rows[@]}" "${timed[@]}"
if [ -n "$memory" ]; then
  for preset in d20 smol-135m; do
    part "speed_$preset" 300 120 . "${throughput[@]}" "$preset" "${step[@]}" "${timed[@]}"
  done
fi
