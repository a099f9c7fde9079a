#!/usr/bin/env bash
# The first thing to run on a rented GPU: ten minutes, or as many as are given.
#
#     bash benchmarks/first_hour.sh [--minutes 60] [--peer A_CHECKOUT_OF_NANOCHAT]
#
# What it does is in first_hour.py. The Python is that of .venv, which `bash run.sh` makes; where
# there is none, python3, which then needs the packages of requirements.txt.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$root/.venv/bin/python
if [ ! -x "$python" ]; then
  python=$(command -v python3) || { echo "error: there is no python3; install it" >&2; exit 2; }
fi
exec "$python" "$root/benchmarks/first_hour.py" "$@"
