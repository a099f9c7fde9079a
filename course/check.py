"""Check an exercise: `python course/check.py 11`; `--all` shows which are solved.

course/exercises/exNN.py holds the function to write and the oracle that judges it; the reference
is in course/solutions (look when you are done). An answer is judged in a process of its own: an
endless loop ends after CPU_S seconds, and an error names the call and your line.
`--solutions [N ...]` proves the oracles: each accepts its reference and refuses the wrong answers
beside it, with an assertion that says why. (If you write an exercise, see mutants.py as well.)
An answer runs in the judge's process. So it can read the expected value from the judge's frame, run
the file in course/solutions, or put an oracle of its own at the end of the exercise. These are
cheats, they work in every exercise, and nothing is done about them: they deceive nobody else.
Exit codes: 0 solved (or proven), 1 not yet, 2 no such exercise.
"""

import ast
import sys
from types import SimpleNamespace

from judging import EXERCISES, apart, examine, files, verdict  # first: it limits torch's threads
import lesson
from worth import worth


def check(number: int) -> bool:
    path = lesson.COURSE / "exercises" / f"ex{number:02d}.py"
    try:
        ast.parse(path.read_text("utf-8-sig"), path.name)
        said = apart(path, examine)
    except (SyntaxError, UnicodeDecodeError) as error:
        said = f"{type(error).__name__}: {error}"
    print(f"exercise {number}: {said or 'solved'}")
    return said is None


# ------------------------------------------------------------------------- proofs of the oracles
def prove(number: int) -> list[str]:
    """What is wrong with the oracle of an exercise; [] if it can tell right from wrong."""
    exercise, solution = files(number)
    oracle = exercise.oracle
    problems = []
    said = verdict(oracle, solution)
    if said:
        problems.append(f"the reference is refused: {said}")
    if len(solution.WRONG) < 3:
        problems.append("fewer than three wrong answers")
    for name, parts in solution.WRONG.items():
        said = verdict(oracle, SimpleNamespace(**(vars(solution) | parts))) or "is accepted"
        kind, _, reason = said.partition(": ")
        print(f"  {name}: {reason or said}")
        if kind != "AssertionError" or not reason:
            problems.append(f"{name!r} should fail an assertion that says why, but {said}")
    print(f"exercise {number}: {'; '.join(problems) or 'the oracle tells right from wrong'}")
    return problems


def main(argv: list[str]) -> int:
    modes = {"--all": check, "--solutions": lambda number: not prove(number)}
    mode = argv[0] if argv and argv[0] in modes else None
    words = argv[1:] if mode else argv
    known = {str(number): number for number in EXERCISES}
    unknown = [word for word in words if word.lstrip("0") not in known]
    if unknown or not argv:
        asked = f"there is no exercise {unknown[0]}" if unknown else "which exercise?"
        options = ", ".join([*known, *modes])
        print(f"{asked}; try one of {options}", file=sys.stderr)
        return 2
    numbers = [known[word.lstrip("0")] for word in words] or EXERCISES
    paths = [path for n in numbers for path in lesson.COURSE.glob(f"*/ex{n:02d}.py")]
    if any("torch" in path.read_text() for path in paths):
        import torch  # noqa: F401  once, before the children are made
    passed = all([modes[mode or "--all"](number) for number in numbers])
    if passed and mode is None:
        for number in numbers:
            line = worth(number)
            if line:
                print(f"  {line}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
