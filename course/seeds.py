"""Are the claims and the numbers of a lesson luck? `python course/seeds.py 11 [8 ...]`

Each lesson runs with three other seeds everywhere (10, 20, 30 more; `--seeds 6`: six), its claims
reporting instead of stopping; this prints those that did not hold, and how the lesson's numbers in
golden.json came out. `all` means every lesson; `yours` and `train` the commands of golden.json that
run these programs. With `--record` the lesson's own seeds are among them, and what was seen is
written into golden.json. Exit codes: 0 all claims held, 1 some did not, 2 no such lesson.

golden.json has the numbers that pages and lessons state and that a seed, a machine or the text (the
library of your Python) changes. For each run: the unit; a pattern for what the program prints; the
places that state the number, with marks: <the number>, then <its spread>; and what was seen, from
which a spread follows. Exact counts, sums on given numbers and times have no place there; nor have
the bounds in claims, which each run checks.
"""

import argparse
import ast
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

import lesson
from lesson import COURSE

from machinery.ranks import cpu_name

GOLDEN = COURSE / "golden.json"
REPORT = """import pathlib, lesson
lesson.OUT = pathlib.Path(__file__).parent
lesson.holds = lambda claim, text: print("holds:" if claim else "fails:", text)
lesson.arithmetic = lambda claim, text: print("arithmetic:" if claim else "fails:", text)
"""


class Reseed(ast.NodeTransformer):
    """Every seed larger by `more`: of torch.manual_seed(0), np.random.default_rng(seed), ..."""

    def __init__(self, more: int):
        self.more = more

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        seeded = name in ("manual_seed", "default_rng", "Random") and node.args
        if seeded and not isinstance(node.args[0], (ast.List, ast.Tuple)):
            node.args[0] = ast.BinOp(node.args[0], ast.Add(), ast.Constant(self.more))
        return node


def tried(run: str, more: int) -> tuple[list[str], str]:
    """Run a lesson, or a command, with other seeds -> the claims that did not hold, or the error
    that ended it; what it printed."""
    words = shlex.split(run.format(seed=more))
    with tempfile.TemporaryDirectory() as folder:
        if len(words) == 1:
            tree = Reseed(more).visit(ast.parse((COURSE / run).read_text()))
            words[0] = Path(folder, Path(run).name)
            words[0].write_text(REPORT + ast.unparse(ast.fix_missing_locations(tree)))
        env = os.environ | {"PYTHONPATH": str(COURSE), "OMP_NUM_THREADS": "1"}
        tools = dict(cwd=COURSE.parent, env=env, capture_output=True, text=True)
        done = subprocess.run([sys.executable, *words], **tools)
    claims = [line for line in done.stdout.splitlines() if line.startswith("fails: ")]
    return claims + done.stderr.splitlines()[-1:] * (done.returncode != 0), done.stdout


def golden() -> dict[str, list[dict]]:
    """The numbers of each run."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def printed(number: dict, output: str) -> float | None:
    found = re.search(number["printed"], output, re.MULTILINE)
    return float(found[1].replace(",", "")) if found else None


def spread(number: dict) -> tuple[float, float]:
    values = [one["value"] for one in number["seen"]]
    if not values:
        return math.nan, math.nan
    return min(values), max(values)


def record(run: str, more: int, output: str) -> None:
    """Add what was seen, in the place of what the same seed gave here before."""
    known = golden()
    here = dict(seed=more, machine=f"{cpu_name()}, 1 thread", torch=version("torch"))
    here["python"] = platform.python_version()
    for number in known.get(run, []):
        seen = [one for one in number["seen"] if not here.items() <= one.items()]
        new = here | dict(date=f"{date.today()}", value=printed(number, output))
        if new["value"] is not None:
            number["seen"] = sorted([*seen, new], key=lambda one: one["seed"])
    text = json.dumps(known, indent=1, ensure_ascii=False)
    text = re.sub(r'\{\s+"seed"[^}]*\}', lambda one: " ".join(one[0].split()), text)
    GOLDEN.write_text(text + "\n", encoding="utf-8")


def main() -> int:
    known = {f"{int(path.stem[:2])}": [f"{path.relative_to(COURSE)}"] for path in lesson.pages()}
    known["all"] = [run for runs in known.values() for run in runs]
    for name in ("yours", "train"):
        known[name] = [run for run in golden() if f"{name}.py " in run]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lessons", nargs="+", choices=known, metavar="LESSON")
    parser.add_argument("--seeds", type=int, default=3, help="how many others (3)")
    parser.add_argument("--record", action="store_true", help="into golden.json")
    args = parser.parse_args()
    others = range(10, 10 * args.seeds + 1, 10)
    some_failed = False
    for run in (run for word in args.lessons for run in known[word]):
        for more in (0, *others) if args.record else others:
            said, output = tried(run, more)
            print(f"{run}, seeds + {more}: {'; '.join(said) or 'all held'}", flush=True)
            some_failed |= bool(said)
            for number in golden().get(run, []):
                low, high = spread(number)
                value = printed(number, output)
                place = "inside" if value is not None and low <= value <= high else "OUTSIDE"
                print(f"  {number['said'][0]}: {value}, {place} {low:g} to {high:g}", flush=True)
            if args.record:
                record(run, more, output)
    return int(some_failed)


if __name__ == "__main__":
    sys.exit(main())
