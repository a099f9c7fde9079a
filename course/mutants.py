"""How sharp are the oracles? `python course/check.py --mutants [N ...]`

Each reference is changed in one place at a time: a statement dropped, a comparison or a sign
turned, a number one larger. The oracle should refuse the change. What it accepts is printed:

      accepted, line 12: while space and held: `space and held` -> `space or held`

Some changes change nothing (a bound that is never reached). The solution file explains those, each
under its text without the line's number, so that an edit elsewhere does not matter:

    EQUIVALENT = {"while space and held: `space and held` -> `space or held`": "some are held"}

Of the changes that are not explained, WANTED must be refused; an explanation of something that is
refused, or that is no change at all, counts as a fault.
"""

import ast
import copy
import dataclasses
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import judging

WANTED = 0.97  # of the mutants that are not explained
SPARE_S = 1  # a mutant may compute for this long, and three times as long as the reference
PAIRS = {  # turned into each other
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.In: ast.NotIn,
    ast.Is: ast.IsNot,
    ast.Add: ast.Sub,
    ast.And: ast.Or,
}
TURNED = {
    **PAIRS,
    **{new: old for old, new in PAIRS.items()},
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.USub: ast.UAdd,
}

KEPT = (ast.FunctionDef, ast.ClassDef, ast.Pass, ast.Import, ast.ImportFrom)  # are not dropped


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
            if not text and not isinstance(statement, KEPT):
                yield field, i
    for i, op in enumerate(getattr(node, "ops", ())):
        if type(op) in TURNED:
            yield "ops", i
    if type(getattr(node, "op", None)) in TURNED:
        yield "op", 0
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):  # or a bool
        yield "value", 0


def apply(node: ast.AST, kind: str, i: int) -> None:
    if kind in ("body", "orelse"):
        getattr(node, kind)[i] = ast.copy_location(ast.Pass(), getattr(node, kind)[i])
    elif kind == "ops":
        node.ops[i] = TURNED[type(node.ops[i])]()
    elif kind == "op":
        node.op = TURNED[type(node.op)]()
    elif isinstance(node.value, bool):
        node.value = not node.value
    else:
        node.value = node.value + 1 if abs(node.value) < 1000 else 2 * node.value


def mutants(exercise: Path, solution: Path) -> Iterator[tuple[int, str, ast.Module]]:
    """-> (line, text of the change, the changed module)."""
    tree = ast.parse(solution.read_text())
    lines = solution.read_text().splitlines()
    seen: dict[str, int] = {}
    places = [
        (node, change)
        for definition in used_by(tree, asked_for(exercise))
        for node in ast.walk(definition)
        for change in changes(node)
    ]
    for node, (kind, i) in places:
        memo: dict = {}
        changed = copy.deepcopy(tree, memo)
        statement = kind in ("body", "orelse")
        at = getattr(node, kind)[i] if statement else node
        apply(memo[id(node)], kind, i)
        what = "dropped"
        if not statement:
            what = f"`{ast.unparse(node)}` -> `{ast.unparse(memo[id(node)])}`"
        text = f"{lines[at.lineno - 1].strip()}: {what}"
        seen[text] = seen.get(text, 0) + 1
        yield at.lineno, text if seen[text] == 1 else f"{text} ({seen[text]})", changed


def survives(oracle, module: ast.Module, path: Path, cpu_s: float) -> tuple[bool, float]:
    """Judge a mutant in a process of its own, as check.py does an answer; beyond the limits it
    counts as refused. -> accepted, CPU seconds."""

    def judge(path: Path) -> str | None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1), os.dup2(1, 2)
        answer = ModuleType("mutant")
        answer.__file__ = str(path)
        exec(compile(module, str(path), "exec"), vars(answer))
        return judging.verdict(oracle, answer, cpu_s)

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = judging.apart(path, judge, cpu_s)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return said is None, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@dataclasses.dataclass
class Score:
    total: int = 0
    refused: int = 0
    explained: int = 0  # accepted, and EQUIVALENT says why
    stale: int = 0  # explanations of what is refused, or is no mutant

    @property
    def passes(self) -> bool:
        return self.refused >= WANTED * (self.total - self.explained) > 0 and not self.stale

    def __str__(self) -> str:
        said = f"{self.refused} of {self.total} mutants refused, {self.explained} explained"
        return said + (f", {self.stale} explanations of nothing" if self.stale else "")


def score(exercise: Path, solution: Path, oracle, same: dict[str, str] | None = None) -> Score:
    """Count the mutants that the oracle refuses; print those that it accepts and none explains."""
    result = Score()
    same = dict(same or {})
    _, needed = survives(oracle, ast.parse(solution.read_text()), solution, judging.CPU_S)
    for line, text, module in mutants(exercise, solution):
        result.total += 1
        if not survives(oracle, module, solution, 3 * needed + SPARE_S)[0]:
            result.refused += 1
        elif same.pop(text, None):
            result.explained += 1
        else:
            print(f"  accepted, line {line}: {text}")
    for text in same:
        print(f"  explained in EQUIVALENT, but refused or no mutant: {text}")
    result.stale = len(same)
    return result
