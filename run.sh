#!/usr/bin/env bash
# bash run.sh [PRESET [OPTIONS]]   set up, prepare text, train a GPT (default: tiny), print samples,
#                                  write a page that holds it; the options are train.py's:
#                                  run.sh d12 --mirror s3://BUCKET/runs
# bash run.sh lesson 7             run a lesson of course/
# bash run.sh test [PYTEST'S]      run the tests
# bash run.sh eval                 install requirements-eval.txt; also store, scaling, cluster, course
# Run again, each does only what is missing. Everything is installed in .venv, in this folder.
set -euo pipefail
# What a shell or a cluster's modules export, by which cd, Python or pip would go elsewhere.
unset CDPATH PYTHONPATH PYTHONHOME PYTHONSAFEPATH PIP_USER PIP_TARGET PIP_PREFIX
file=$(readlink -f -- "$0")
builtin cd -- "${file%/*}/"

first=${1:-tiny}
if [[ $first == -h || $first == --help ]]; then
  sed -n '2,/^set /s/^# //p' run.sh
  exit
fi
if [[ $first == -* || " $*" == *" --run"[-_]"dir"* || " $*" == *" --name"* || " $* " == *" --plan "* ]]
then
  echo "error: run.sh takes a preset, then options of train.py except --run_dir, --name, --plan; for" \
    "'$*' run the programs by hand (README.md; python eval.py plan d12 needs no data)" >&2
  exit 2
fi
if [ "$first" = lesson ]; then
  number=${2:-}
  lesson=
  for padded in "$number" "0$number" "room/$number"; do
    lesson+=$(compgen -G "course/${padded}_*.py" || true)
  done
  if ! [[ $number =~ ^[0-9]+$ && $lesson ]]; then
    echo "error: which lesson? There is none called '$number'; bash run.sh lesson 7. There are" \
      course/[0-9]*.py course/room/[0-9]*.py >&2
    exit 2
  fi
fi

# A preset that there is not is refused before anything is installed, by any Python that there is:
# this needs none of its packages.
case $first in
  eval | store | scaling | cluster | course | lesson | test) ;;
  *)
    for python in .venv/bin/python "${PYTHON:-python3}"; do
      status=0
      said=$("$python" -c '
import sys
from machinery import cli
cli.run(lambda words: cli.preset_called(words[0]) and None)
' "$first" 2>&1) || status=$?
      if [[ $status == 2 && $said == "error: there is no preset"* ]]; then
        echo "$said; or lesson N, test, eval, store, scaling, cluster, course" >&2
        exit 2
      fi
      if [ $status = 0 ]; then break; fi
    done
    ;;
esac

# PyPI's torch 2.13 is built for CUDA 13: it needs driver 580, and has no kernels for a V100. Its
# last torch for CUDA 12 is 2.10: it needs driver 525, and runs on a V100, but on no older GPU. A
# build from elsewhere (2.13.0+cu126, 2.13.0+cpu) is the user's choice, and is kept.
torch=torch==2.13.0
of_first_gpu() {
  { timeout 20 nvidia-smi --query-gpu="$1" --format=csv,noheader 2> /dev/null || true; } | sed -n 1p
}
driver=$(of_first_gpu driver_version) capability=$(of_first_gpu compute_cap)  # 7.0 is a V100
build=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))' \
  2> /dev/null) || build=
if [[ $driver =~ ^([0-9]+)\. && $build != *+* ]]; then
  major=${BASH_REMATCH[1]}
  if [ "$major" -lt 525 ]; then
    echo "error: driver $driver is too old for CUDA 12; install 525 or newer, preferably 580" >&2
    exit 2
  elif [[ $capability =~ ^[1-6]\. ]]; then
    echo "error: PyPI's torch has no kernels for this GPU, of compute capability $capability; install" \
      "a build for CUDA 12.6 into .venv first (docs/install.md)" >&2
    exit 2
  elif [[ $major -lt 580 || $capability =~ ^7\.[0-4]$ ]]; then
    echo "driver $driver, compute capability ${capability:-unknown}: torch 2.10 for CUDA 12 instead of" \
      "2.13 for CUDA 13"
    torch=torch==2.10.0
  fi
fi

# has REQUIREMENTS: whether .venv's own Python has them all. Only it can say so: the system may have
# replaced it since by another release, for which nothing was installed.
has() {
  .venv/bin/python -c '
import sys
from importlib.metadata import version
from pip._vendor.packaging.requirements import Requirement
for line in filter(None, (line.partition("#")[0].strip() for line in sys.argv[1].splitlines())):
    wanted = Requirement(line)
    if wanted.marker is None or wanted.marker.evaluate():
        assert version(wanted.name) in wanted.specifier
' "$1" 2> /dev/null
}

# A Python in .venv, 3.10 or newer, with pip. It may be gone, or another one than it was.
make_venv() {
  local python=${PYTHON:-python3} version fits='import sys; sys.exit(sys.version_info < (3, 10))'
  if { .venv/bin/python -c "$fits" &&
    { .venv/bin/python -m pip --version || .venv/bin/python -m ensurepip; }; } &> /dev/null; then
    return
  fi
  PATH=${PATH//"$PWD/.venv/bin:"/}  # it may be active
  if ! command -v "$python" > /dev/null; then
    echo "error: there is no $python; install Python 3.10 or newer, or PYTHON=PATH bash run.sh" >&2
    exit 2
  fi
  "$python" -c "$fits" 2> /dev/null || {
    version=$("$python" --version 2>&1) || true  # Python 2 prints it on stderr
    echo "error: $python is not Python 3.10 or newer (${version%%$'\n'*}); PYTHON=python3.12 bash run.sh" >&2
    exit 2
  }
  rm -f .venv/bin/python*  # links, which venv would leave as they are
  "$python" -m venv .venv || {  # keeps the packages that are there
    echo "error: $python cannot make .venv; install its module venv (Debian: python3-venv)" >&2
    exit 2
  }
}

# add NAME SECONDS: to the line `time` at the end, whose last part is what remains
spent= known=0
add() {
  if [ "$2" -gt 0 ]; then
    spent+="$1 $2 s, "
    known=$((known + $2))
  fi
}

# about WHAT HOW_LONG: said before a wait; for how long is known of tiny alone
about() {
  if [[ $first == tiny* ]]; then echo "$1, about $2 ..."; else echo "$1 ..."; fi
}

# install FILE: its packages into .venv, unless they are there
install() {
  local wanted cudnn= quiet=--quiet begun=$SECONDS
  wanted=$(sed "s/^torch==2.13.0/$torch/" "$1")
  if [[ $wanted == *torch==2.10.0* ]]; then  # which pins an older one, whose attention it avoids
    cudnn=nvidia-cudnn-cu12==9.15.1.9
  fi
  if has "$wanted"$'\n'"$cudnn"; then return; fi
  make_venv
  if [ -t 1 ]; then quiet=; fi  # a terminal shows pip's progress bars
  echo "installing $1 into .venv, a minute or more (PyTorch takes some GB) ..."
  .venv/bin/python -m pip install $quiet --disable-pip-version-check -r <(echo "$wanted")
  if [ "$cudnn" ]; then .venv/bin/python -m pip install --quiet --no-deps -r <(echo "$cudnn"); fi
  add install $((SECONDS - begun))
}
install requirements.txt
# Has the folder been moved or copied, what pip wrote into .venv/bin names the old one.
old=$(unset VIRTUAL_ENV; set +eu; . .venv/bin/activate 2> /dev/null; echo "$VIRTUAL_ENV")
if [[ $old && ! $old -ef .venv && -w .venv/bin ]]; then
  for file in $(grep -lIF "$old" .venv/bin/*); do
    text=$(< "$file")
    printf '%s\n' "${text//"$old"/"$PWD/.venv"}" > "$file"
  done
fi
export PATH="$PWD/.venv/bin:$PATH"

case $first in
  eval | store | scaling | cluster) install "requirements-$first.txt"; exit ;;
  course) install course/requirements.txt; exit ;;
  lesson)
    sed -n '/^# \*\*Question/,/^#$/s/^# *//p' "$lesson"
    python "$lesson"
    exercise=course/exercises/ex$(basename "$lesson" | cut -c 1-2).py
    echo "The text: $lesson"
    if [ -f "$exercise" ]; then echo "Exercise: $exercise, then python course/check.py $number"; fi
    exit
    ;;
  test)
    shift
    if [ $# -gt 0 ]; then exec python -m pytest -n 4 --dist worksteal "$@"; fi
    trap 'exit 130' INT  # else only what runs would end
    failed=0  # all run, whatever fails
    python -m pytest -n 4 --dist worksteal || failed=1  # most wait for programs: 4 on two cores
    timing=(python -m pytest -n 0 -m timing)  # these measure: alone, and if need be once more
    "${timing[@]}" --cache-clear || "${timing[@]}" --last-failed || failed=1
    exit $failed
    ;;
esac
preset=$first run=runs/$first
shift $(($# > 0))
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then exec python train.py "$preset" --help; fi
if [[ "$*" =~ (s3|gs):// ]]; then install requirements-store.txt; fi  # docs/store.md
if [[ ! " $*" =~ " --data"[-_]"dir"[=\ ] ]]; then
  manifest=data/$preset/manifest.json
  if [ ! -f "$manifest" ]; then about "preparing the text" "ten seconds"; fi
  before=$(cksum "$manifest" 2> /dev/null) || true
  begun=$SECONDS
  python prepare_data.py "$preset"
  if [ "$before" != "$(cksum "$manifest" 2> /dev/null)" ]; then add prepare $((SECONDS - begun)); fi
fi
before=$(cksum "$run/status.json" 2> /dev/null) || true
python train.py "$preset" "$@"
if ! grep -qs '"state": "done"' "$run/status.json"; then exit; fi  # with --profile, nothing is trained
if [ "$before" != "$(cksum "$run/status.json")" ]; then
  while read -r name seconds; do add "$name" "$seconds"; done < <(python -c '
import json, sys
names = dict(start="compile", steps="train", eval="validate")
for name, seconds in json.load(open(sys.argv[1]))["seconds"].items():
    print(names.get(name, name), round(seconds))
' "$run/status.json")
fi
if [[ ! $run/page.html -nt $run/status.json ]]; then  # trained since it was written
  about "samples, and the page that holds the model" "half a minute"
  python eval.py sample "$preset" < /dev/null  # the prompts of the preset
  python export.py "$preset" --page || true  # it says why not: gpt.js lacks a part of your model.py
fi
echo "checkpoints  $(ls -d "$run"/checkpoints/step_* | tail -n 1)"
echo "metrics      $run/metrics.jsonl"
echo "report       $run/report.html"
if [[ $run/page.html -nt $run/status.json ]]; then echo "page         $run/page.html"; fi
if [ "$spent" ]; then echo "time         ${spent}samples and page $((SECONDS - known)) s"; fi
case $first in
  tiny) echo "next         bash run.sh tiny-chat; or .venv/bin/python eval.py look; or bash run.sh lesson 1" ;;
  tiny-chat) echo "next         open runs/tiny-chat/page.html in a browser" ;;
esac
