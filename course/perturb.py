"""Can the claims of a lesson fail? `python course/perturb.py 7 [8 ...] [--runs 40]`

A lesson is run again and again, each time with one change: a sign or a comparison turned, a
statement dropped, a number made larger or smaller. The change is made where the claims get their
values from (the nearest place first), never in a claim, in what is printed, or in a figure. The
claims report instead of stopping. For each `holds` this prints the first change that made it false,
or that none did; such a claim deserves a look: true of any numbers, perhaps, or merely hard to
break with the runs that were allowed.

A claim that gets its values without calling anything but Python's own sums is told as well: a sum
on given numbers is printed by `lesson.arithmetic`, not by `lesson.holds`.

And are they luck? `python course/perturb.py --seeds 3 7 [8 ...]` runs a lesson with three other
seeds everywhere (10, 20, 30 more), and prints the claims that did not hold each time.
Exit codes: 0 every claim was broken (held, with --seeds), 1 some were not, 2 no such lesson.
"""

import ast
import copy
import inspect
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import lesson  # puts the project on the path
import mutants

RUNS = 40  # changes tried in a lesson
SLACK_S = 60  # what a changed lesson may take beyond three times its own seconds
BYTES = 12 << 30  # of addresses
SHOWS = {"table", "save", "figure", "begin", "arithmetic"}  # of lesson: not to be changed


def of_lesson(node: ast.AST) -> str:
    """The name of a call of a function of lesson.py, or nothing."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return function.attr if function.value.id == "lesson" else ""
    return ""


def words(*nodes: ast.AST) -> set[str]:
    return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}


def given(statement: ast.stmt) -> set[str]:
    """The names that a statement gives a value to, or may change: x = .., x += .., x.append(..)"""
    names = {statement.name} if hasattr(statement, "name") else set()
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return names
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        target = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func.value
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            target = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names |= words(*node.args)  # fill(x) may change x
        while isinstance(target, (ast.Attribute, ast.Subscript)):
            target = target.value
        if isinstance(target, ast.Name):
            names.add(target.id)
    return names


@dataclass
class Claim:
    site: int  # the number of its call of lesson.holds, from the top
    line: int
    node: ast.Call
    texts: set[str] = field(default_factory=set)  # as printed; a loop prints several
    broken_by: str = ""
    near: deque = field(default_factory=deque)  # the changes to try, nearest first
    tries: int = 0
    sum_only: bool = False


class Script:
    """A lesson's source, its claims, and the changes that can be made to it."""

    def __init__(self, path: Path):
        self.path, self.tree = path, ast.parse(path.read_text())
        self.lines = path.read_text().splitlines()
        imports = [s for s in self.tree.body if isinstance(s, (ast.Import, ast.ImportFrom))]
        names = {a.asname or a.name.partition(".")[0] for s in imports for a in s.names}
        self.imported = names - {"lesson", "published", "math"}  # what may measure something
        calls = [n for n in ast.walk(self.tree) if of_lesson(n) == "holds"]
        calls.sort(key=lambda node: (node.lineno, node.col_offset))
        self.claims = [Claim(i, node.lineno, node) for i, node in enumerate(calls)]
        for claim in self.claims:
            claim.near = deque(self._nearest(claim))

    def _nearest(self, claim: Claim) -> list[tuple[ast.AST, str, int]]:
        """Changes in the statements that the claim depends on: a round of one of each, nearest
        statement first, then the next round."""
        wanted, seen, statements = words(claim.node.args[0]), set(), []
        while wanted - seen:
            new, wanted = wanted - seen, set()
            seen |= new
            for s in reversed(self.tree.body):  # those just above the claim first
                if s.lineno <= claim.line and given(s) & new and s not in statements:
                    wanted |= words(s)
                    statements.append(s)
        used = words(claim.node.args[0], *(s for s in statements))
        claim.sum_only = not used & self.imported and not any(
            isinstance(s, (ast.FunctionDef, ast.ClassDef)) for s in statements
        )
        queues = []
        for statement in statements:
            if isinstance(statement, (ast.Import, ast.ImportFrom)) or inlined(statement, claim):
                continue
            found = list(changeable(statement))
            found.sort(key=lambda c: "op ops tenth value not body orelse".split().index(c[1]))
            thirds = [found[i::3] for i in range(3)]  # not all of one kind in a row
            queues.append(deque(change for third in thirds for change in third))
        return [q.popleft() for _ in range(max(map(len, queues), default=0)) for q in queues if q]

    def changed(self, change: tuple[ast.AST, str, int]) -> tuple[str, str]:
        """-> the source with the change, what was changed."""
        node, kind, i = change
        memo: dict = {}
        tree = copy.deepcopy(self.tree, memo)
        if kind == "tenth":
            value = memo[id(node)].value
            memo[id(node)].value = value // 10 if type(value) is int else value / 10
        else:
            mutants.apply(memo[id(node)], kind, i)
        statement = kind in ("body", "orelse")
        at = getattr(node, kind)[i] if statement else node
        what = "dropped"
        if not statement:
            what = f"`{ast.unparse(node)}` -> `{ast.unparse(memo[id(node)])}`"
        return ast.unparse(tree), f"line {at.lineno}: {self.lines[at.lineno - 1].strip()}: {what}"


def inlined(statement: ast.stmt, claim: Claim) -> bool:
    """A claim that stands in a line of its own above: `fits = a < b`, then `holds(fits, ...)`."""
    logical = (ast.Compare, ast.BoolOp, ast.UnaryOp)
    return isinstance(statement, ast.Assign) and isinstance(statement.value, logical)


def changeable(statement: ast.stmt) -> Iterator[tuple[ast.AST, str, int]]:
    """The places to change in a statement, without claims and what is printed."""
    waiting = deque([statement])
    while waiting:
        node = waiting.popleft()
        printed = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
        if printed or of_lesson(node) in SHOWS | {"holds"}:
            continue
        for kind, i in mutants.changes(node):
            target = getattr(node, kind)[i] if kind in ("body", "orelse") else None
            if isinstance(target, ast.Expr) and of_lesson(target.value) in SHOWS | {"holds"}:
                continue
            yield node, kind, i
            if kind == "value":
                yield node, "tenth", i
        waiting.extend(ast.iter_child_nodes(node))


def report(source: str, path: Path, out: Path) -> None:
    """In a child: run the source, its claims reporting -> out: [(site, holds, text)] as pickle."""
    tree = ast.parse(source)
    calls = [n for n in ast.walk(tree) if of_lesson(n) == "holds"]
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    spans = [(n.lineno, n.end_lineno) for n in calls]
    said = []

    def holds(claim: bool, text: str) -> None:
        line = inspect.currentframe().f_back.f_lineno
        sites = [i for i, (first, last) in enumerate(spans) if first <= line <= last]
        said.append((sites[0], bool(claim), text))
        out.write_bytes(pickle.dumps(said))

    lesson.holds = holds
    lesson.begin = lesson.save = lesson.table = lesson.arithmetic = lambda *a, **k: None
    names = {"__name__": "__main__", "__file__": str(path)}
    path.write_text(source)  # where lesson.ranks finds the definitions
    for statement in tree.body:
        with suppress(Exception):  # the claims further down may do without it
            exec(compile(ast.Module([statement], []), str(path), "exec"), names)


def run(source: str, name: str, wall_s: float) -> tuple[list[tuple[int, bool, str]], float]:
    """Run a source in a child -> (what its claims said, CPU seconds)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "said")
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                os.setsid()  # its own children end with it
                os.chdir(folder)
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1), os.dup2(null, 2)
                with suppress(ValueError, OSError):  # macOS has no such limit
                    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
                report(source, Path(folder, name), out)
            finally:
                os._exit(0)
        deadline = time.monotonic() + wall_s
        while (done := os.wait4(child, os.WNOHANG))[0] == 0:
            time.sleep(0.02)
            if time.monotonic() > deadline:
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # what it left running
        said = pickle.loads(out.read_bytes()) if out.exists() else []
        return said, done[2].ru_utime + done[2].ru_stime


def perturb(path: Path, runs: int = RUNS) -> list[Claim]:
    """Run a lesson with up to `runs` changes -> its claims, each with the change that broke it."""
    script = Script(path)
    began = time.monotonic()
    said, cpu_s = run(ast.unparse(script.tree), path.name, 1200)
    wall_s = time.monotonic() - began
    for site, held, text in said:
        script.claims[site].texts.add(text)
        assert held, f"{path.name}: does not hold unchanged: {text}"
    unsaid = [c.line for c in script.claims if not c.texts]
    print(f"{path.name}: {len(script.claims)} claims, {cpu_s:.0f} s a run", flush=True)
    if unsaid:
        print(f"  did not speak: the claims of lines {unsaid}")
    tried: set[int] = set()
    left = runs
    while left and (open_ := [c for c in script.claims if not c.broken_by and c.near]):
        claim = min(open_, key=lambda c: c.tries)
        change = claim.near.popleft()
        key = id(change[0]), change[1:]
        if key in tried:
            continue
        tried.add(key)
        claim.tries += 1
        left -= 1
        source, what = script.changed(change)
        for site, held, _ in run(source, path.name, 3 * wall_s + SLACK_S)[0]:
            if not held and not script.claims[site].broken_by:
                script.claims[site].broken_by = what
    for claim in script.claims:
        text = " / ".join(sorted(claim.texts)[:2])
        sums = "  [a sum on given numbers?]" if claim.sum_only else ""
        print(f"  line {claim.line}, {text}{sums}")
        unbroken = f"NOTHING BROKE IT ({claim.tries} tries of its own)"
        print(f"    {claim.broken_by or unbroken}", flush=True)
    broken = sum(bool(claim.broken_by) for claim in script.claims)
    print(
        f"{path.name}: {broken} of {len(script.claims)} claims broken, {runs - left} changes tried"
    )
    return script.claims


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


def luck(path: Path, seeds: int) -> list[str]:
    """Run a lesson with other seeds -> its claims that did not hold each time."""
    fell, said = {}, set()
    for i in range(1, seeds + 1):
        tree = Reseed(10 * i).visit(ast.parse(path.read_text()))
        claims, cpu_s = run(ast.unparse(tree), path.name, 1200)
        said.add(len({site for site, _, _ in claims}))
        for site, held, text in claims:
            if not held:
                fell.setdefault((site, text), []).append(i)
    print(
        f"{path.name}: {max(said)} claims, {cpu_s:.0f} s a run, with {seeds} other seeds",
        flush=True,
    )
    if len(said) > 1:
        print(f"  not all of them spoke each time: {sorted(said)}")
    for (_, text), which in fell.items():
        print(f"  failed {len(which)} of {seeds} times: {text}", flush=True)
    return [text for _, text in fell]


def option(argv: list[str], name: str, default: int) -> int:
    """The number after an option, which is taken out of argv."""
    if name not in argv:
        return default
    at = argv.index(name)
    value = int(argv[at + 1])
    del argv[at : at + 2]
    return value


def main(argv: list[str]) -> int:
    argv = list(argv)
    runs, seeds = option(argv, "--runs", RUNS), option(argv, "--seeds", 0)
    known = {str(int(p.stem[:2])): p for p in sorted(lesson.COURSE.glob("[0-9][0-9]_*.py"))}
    unknown = [word for word in argv if word.lstrip("0") not in known]
    if unknown or not argv:
        print(f"which lesson? try one of {', '.join(known)}", file=sys.stderr)
        return 2
    paths = [known[word.lstrip("0")] for word in argv]
    if any("torch" in path.read_text() for path in paths):
        import torch  # noqa: F401  once, before the children are made
    if seeds:
        return int(any([luck(path, seeds) for path in paths]))
    claims = [claim for path in paths for claim in perturb(path, runs)]
    return int(not all(claim.broken_by for claim in claims))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
