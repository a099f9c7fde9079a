"""Check an exercise: `python course/check.py 7`; `--all` shows which are solved.

course/exercises/exNN.py holds the function to write and the oracle that judges it; the reference
is in course/solutions (look when you are done). `--solutions [N ...]` proves the oracles: each
accepts its reference and refuses the wrong answers beside it, with an assertion that says why.
`--mutants [N ...]` changes the references in one place at a time, and counts what is refused.
Exit codes: 0 solved (or proven), 1 not yet, 2 no such exercise.
"""

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace

import lesson  # puts the project on the path

EXERCISES = sorted(int(path.stem[2:]) for path in (lesson.COURSE / "exercises").glob("ex*.py"))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def files(number: int) -> tuple[ModuleType, ModuleType]:
    """-> the exercise, its solution."""
    name = f"ex{number:02d}.py"
    return tuple(load(lesson.COURSE / folder / name) for folder in ("exercises", "solutions"))


def verdict(oracle, answer) -> str | None:
    """None if the oracle accepts the answer, else what it says; any error is a refusal."""
    try:
        oracle(answer)
    except NotImplementedError as error:
        return f"not begun: {error}"
    except AssertionError as error:
        return f"AssertionError: {error}"
    except Exception as error:  # in the answer: its last line there
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if Path(f.filename) == Path(answer.__file__)]
        return f"{type(error).__name__}: {error} (line {lines[-1] if lines else '?'})"
    return None


def check(number: int) -> bool:
    try:
        exercise = load(lesson.COURSE / "exercises" / f"ex{number:02d}.py")
        said = verdict(exercise.oracle, exercise)
    except SyntaxError as error:
        said = f"SyntaxError: {error}"
    except Exception:  # in the file itself, before anything is checked
        said = traceback.format_exc(limit=-1).partition("\n")[2].rstrip()
    print(f"exercise {number}: {said or 'solved'}")
    return said is None


def prove(number: int) -> list[str]:
    """What is wrong with the oracle of an exercise; [] if it can tell right from wrong."""
    exercise, solution = files(number)
    oracle, problems = exercise.oracle, []
    if said := verdict(oracle, solution):
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


def sharp(number: int) -> bool:
    """Are most one-place changes of the reference refused?"""
    import mutants

    exercise, _ = files(number)
    paths = [lesson.COURSE / folder / f"ex{number:02d}.py" for folder in ("exercises", "solutions")]
    refused, total = mutants.score(*paths, exercise.oracle)
    print(f"exercise {number}: {refused} of {total} mutants refused")
    return refused >= mutants.WANTED * total > 0


def main(argv: list[str]) -> int:
    modes = {"--all": check, "--solutions": lambda number: not prove(number), "--mutants": sharp}
    mode = argv[0] if argv and argv[0] in modes else None
    words = argv[1:] if mode else argv
    known = {str(number): number for number in EXERCISES}
    unknown = [word for word in words if word not in known]
    if unknown or not argv:
        asked = f"there is no exercise {unknown[0]}" if unknown else "which exercise?"
        options = ", ".join([*known, *modes])
        print(f"{asked}; try one of {options}", file=sys.stderr)
        return 2
    numbers = [known[word] for word in words] or EXERCISES
    return 0 if all([modes[mode or "--all"](number) for number in numbers]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
