"""How sharp are the oracles? `python course/check.py --mutants [N ...]`

Each reference is changed in one place at a time: a statement dropped, a comparison or a sign
turned, a number one larger. The oracle should refuse the change. Some changes change nothing (a
bound that is never reached), so it need not refuse all; what it accepts is printed, for a look.
"""

import ast
import copy
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

WANTED = 0.8  # of the mutants refused
SECONDS, BYTES = 10, 8 << 30  # what a mutant may take before it counts as refused
TURNED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.USub: ast.UAdd,
}


def asked_for(exercise: Path) -> list[str]:
    """The names that an exercise leaves empty: functions and methods that raise
    NotImplementedError, by their outermost name."""
    tree = ast.parse(exercise.read_text())
    empty = "raise NotImplementedError"
    return [node.name for node in tree.body if hasattr(node, "name") and empty in ast.unparse(node)]


def used_by(tree: ast.Module, names: list[str]) -> list[ast.stmt]:
    """The definitions that the named ones use, directly or not."""
    found = {node.name: node for node in tree.body if hasattr(node, "name")}
    names = [name for name in names if name in found]
    for name in names:
        words = {node.id for node in ast.walk(found[name]) if isinstance(node, ast.Name)}
        names += [word for word in found if word in words and word not in names]
    return [found[name] for name in names]


def changes(node: ast.AST) -> Iterator[tuple[str, int]]:
    """The changes that can be made at a node itself: (kind, which)."""
    for field in ("body", "orelse"):
        statements = getattr(node, field, None)
        for i, statement in enumerate(statements if isinstance(statements, list) else ()):
            text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            definition = isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.Pass))
            if (
                not text
                and not definition
                and not isinstance(statement, (ast.Import, ast.ImportFrom))
            ):
                yield field, i
    for i, op in enumerate(getattr(node, "ops", ())):
        if type(op) in TURNED:
            yield "ops", i
    if type(getattr(node, "op", None)) in TURNED:
        yield "op", 0
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "value", 0
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "not", 0


def apply(node: ast.AST, kind: str, i: int) -> None:
    if kind in ("body", "orelse"):
        getattr(node, kind)[i] = ast.copy_location(ast.Pass(), getattr(node, kind)[i])
    elif kind == "ops":
        node.ops[i] = TURNED[type(node.ops[i])]()
    elif kind == "op":
        node.op = TURNED[type(node.op)]()
    elif kind == "value":
        node.value = node.value + 1 if abs(node.value) < 1000 else 2 * node.value
    else:
        node.value = not node.value


def mutants(exercise: Path, solution: Path) -> Iterator[tuple[str, ast.Module]]:
    """-> (line and text of the change, the changed module)."""
    tree = ast.parse(solution.read_text())
    lines = solution.read_text().splitlines()
    places = [
        (node, change)
        for definition in used_by(tree, asked_for(exercise))
        for node in ast.walk(definition)
        for change in changes(node)
    ]
    for node, (kind, i) in places:
        memo: dict = {}
        changed = copy.deepcopy(tree, memo)
        at = getattr(node, kind)[i] if kind in ("body", "orelse") else node
        what = "dropped" if kind in ("body", "orelse") else "turned"
        apply(memo[id(node)], kind, i)
        yield f"line {at.lineno}, {what}: {lines[at.lineno - 1].strip()}", changed


def survives(oracle, module: ast.Module, path: Path) -> bool:
    """Judge a mutant in a process of its own, with a limit of time and of memory."""
    child = os.fork()
    if child == 0:
        refused = 1
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1), os.dup2(null, 2)
            signal.alarm(SECONDS)
            with suppress(ValueError, OSError):  # macOS has no such limit
                resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
            answer = ModuleType("mutant")
            exec(compile(module, str(path), "exec"), vars(answer))
            oracle(answer)
            refused = 0
        finally:
            os._exit(refused)
    return os.waitpid(child, 0)[1] == 0


def score(exercise: Path, solution: Path, oracle) -> tuple[int, int]:
    """-> mutants refused, mutants; prints those that are accepted."""
    refused = total = 0
    for text, module in mutants(exercise, solution):
        total += 1
        if survives(oracle, module, solution):
            print(f"  accepted: {text}")
        else:
            refused += 1
    return refused, total
