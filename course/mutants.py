"""Which small changes of the reference does a judge accept? For authors of exercises:

    python course/mutants.py 11

Each reference is changed in one place at a time: a statement dropped, a comparison or a sign
turned, a number one larger. The oracle should refuse the change. What it accepts is printed:

      accepted, line 12: while space and held: `space and held` -> `space or held`

Some changes change nothing (a bound that is never reached), and some break nothing that the text
says; each of the others is a rule without a case.
"""

import ast
import copy
import os
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import judging

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


def mutants(solution: Path) -> Iterator[tuple[str, ast.Module]]:
    """-> (text of the change, the changed module). Wrong answers, behind the reference, stay."""
    tree = ast.parse(solution.read_text())
    lines = solution.read_text().splitlines()
    reference = takewhile(lambda node: "edits(__file__)" not in ast.unparse(node), tree.body)
    places = [
        (node, change)
        for definition in reference
        if hasattr(definition, "name")
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
        yield f"line {at.lineno}: {lines[at.lineno - 1].strip()}: {what}", changed


def accepted(exercise: Path, solution: Path, module: ast.Module) -> bool:
    """Is a mutant, judged in a process of its own as check.py does an answer, called right?"""

    def judge(path: Path) -> str | None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1), os.dup2(1, 2)
        answer = ModuleType("mutant")
        answer.__file__ = str(path)
        exec(compile(module, str(path), "exec"), vars(answer))
        return judging.verdict(judging.load(exercise).oracle, answer)

    return judging.apart(solution, judge) is None


def main(words: list[str]) -> None:
    for number in map(int, words):
        folders = (judging.lesson.COURSE / folder for folder in ("exercises", "solutions"))
        paths = [folder / f"ex{number:02d}.py" for folder in folders]
        refused = 0
        for text, module in mutants(paths[1]):
            if accepted(*paths, module):
                print(f"  accepted, {text}")
            else:
                refused += 1
        print(f"exercise {number}: {refused} small changes of the reference are refused")


if __name__ == "__main__":
    judging.CPU_S = 5  # beyond it a mutant counts as refused
    main(sys.argv[1:])
