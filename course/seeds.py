"""Are the claims of a lesson luck? `python course/seeds.py 7 [8 ...]`

Each lesson runs with three other seeds everywhere (10, 20, 30 more), its claims reporting instead
of stopping; this prints those that did not hold. Exit codes: 0 all held, 1 some did not, 2 no such
lesson.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

COURSE = Path(__file__).resolve().parent
MORE = (10, 20, 30)
REPORT = """import pathlib, lesson
lesson.OUT = pathlib.Path.cwd()
lesson.holds = lambda claim, text: print("holds:" if claim else "fails:", text)
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


def failed(path: Path, more: int) -> list[str]:
    """Run a lesson with other seeds -> the claims that did not hold, or the error that ended it."""
    tree = ast.fix_missing_locations(Reseed(more).visit(ast.parse(path.read_text())))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, path.name).write_text(REPORT + ast.unparse(tree))
        env = os.environ | {"PYTHONPATH": str(COURSE), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, path.name]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    claims = [line for line in done.stdout.splitlines() if line.startswith("fails: ")]
    return claims + done.stderr.splitlines()[-1:] * (done.returncode != 0)


def main() -> int:
    known = {int(path.stem[:2]): path for path in sorted(COURSE.glob("[0-9][0-9]_*.py"))}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lessons", type=int, nargs="+", choices=known, metavar="LESSON")
    some_failed = False
    for number in parser.parse_args().lessons:
        for more in MORE:
            said = failed(known[number], more)
            print(f"lesson {number}, seeds + {more}: {'; '.join(said) or 'all held'}", flush=True)
            some_failed |= bool(said)
    return int(some_failed)


if __name__ == "__main__":
    sys.exit(main())
