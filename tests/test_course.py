"""course/: every oracle can tell, every lesson has its parts, runs through, and is a notebook.

The tests find the lessons by their names, so a new lesson is tested as soon as it is there.
"""

import re
import subprocess
import sys
from types import SimpleNamespace

import check
import covered
import lesson
import mutants
import numpy as np
import published
import pytest
from conftest import ROOT, environment

COURSE = ROOT / "course"

LESSONS = sorted(path for path in COURSE.glob("[0-9][0-9]_*.py") if path.stem != "05_one_file")
NAMES = [path.stem for path in LESSONS]


def run_lesson(path, timeout=180):
    command = [sys.executable, path]
    tools = dict(capture_output=True, text=True, timeout=timeout, env=environment())
    return subprocess.run(command, **tools)


# --------------------------------------------------------------------- 1. the oracles can tell
@pytest.mark.parametrize("number", check.EXERCISES)
def test_the_oracle_accepts_the_reference_and_refuses_wrong_answers(number):
    assert check.prove(number) == []
    exercise, _ = check.files(number)
    said = check.verdict(exercise.oracle, exercise)
    assert said and said.startswith("not begun"), said


def test_a_learner_is_told_the_line(monkeypatch, tmp_path, capsys):
    (tmp_path / "exercises").mkdir()
    monkeypatch.setattr(lesson, "COURSE", tmp_path)
    exercise = tmp_path / "exercises" / "ex01.py"
    judge = "def oracle(answer):\n    assert answer.f() == 1, 'f() is not 1'\n"
    for body, said in (
        ("return 1", "solved"),
        ("return 2", "AssertionError: f() is not 1"),
        ("return 1 / 0", "ZeroDivisionError: division by zero (line 2)"),
        ("return (", "SyntaxError: '(' was never closed (ex01.py, line 2)"),
    ):
        exercise.write_text(f"def f():\n    {body}\n\n{judge}")
        assert check.check(1) == (said == "solved")
        assert capsys.readouterr().out == f"exercise 1: {said}\n"


def test_an_oracle_that_cannot_tell_is_found_out(monkeypatch):
    def answer():
        raise ValueError("not an assertion")

    exercise = SimpleNamespace(oracle=lambda answer: answer.f())
    solution = SimpleNamespace(
        __file__="", f=lambda: 1, WRONG={"right": dict(f=int), "ends": dict(f=answer)}
    )
    monkeypatch.setattr(check, "files", lambda number: (exercise, solution))
    few, accepted, no_assertion = check.prove(0)
    assert "fewer than three" in few and "is accepted" in accepted and "ValueError" in no_assertion


@pytest.mark.parametrize("argv, code", [(["7"], 1), (["0"], 2), ([], 2), (["--al"], 2)])
def test_exit_codes_of_check(argv, code, capsys):
    assert check.main(argv) == code
    out, err = capsys.readouterr()
    assert out.count("\n") + err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", check.EXERCISES)
def test_an_oracle_is_sharp(number):
    assert check.sharp(number)


def test_mutants_change_what_the_exercise_asks_for_and_nothing_else(tmp_path):
    exercise, solution = tmp_path / "exercise.py", tmp_path / "solution.py"
    exercise.write_text("def f(x):\n    raise NotImplementedError\n\ndef oracle(a):\n    pass\n")
    solution.write_text(
        "def f(x):\n    return g(x) if x < 3 else 0\n\n"
        "def g(x):\n    'Doubles.'\n    return x + x\n\n"
        "def wrong(x):\n    return x - 1\n"
    )
    texts = [text.split(":")[0] for text, _ in mutants.mutants(exercise, solution)]
    # f: return dropped, < turned, 3 and 0; g: return dropped, + turned; wrong: not at all
    assert sorted(texts) == ["line 2, dropped", *["line 2, turned"] * 3] + [
        "line 6, dropped",
        "line 6, turned",
    ]

    def hangs_or_fails(answer):
        while answer.f(2) != 4:  # forever, or an error
            pass
        assert answer.f(9) == 0

    assert mutants.score(exercise, solution, lambda answer: None) == (0, 6)
    mutants.SECONDS, before = 1, mutants.SECONDS
    refused, total = mutants.score(exercise, solution, hangs_or_fails)
    mutants.SECONDS = before
    assert (refused, total) == (4, 6)  # <= 3 and < 4 change nothing that is asked


# ------------------------------------------------------------------------- 2. the lessons run
@pytest.mark.slow
@pytest.mark.parametrize("path", LESSONS, ids=NAMES)
def test_a_lesson_runs_through(path):
    figure = lesson.OUT / f"{path.stem}.png"
    figure.unlink(missing_ok=True)
    done = run_lesson(path)
    if done.returncode == 2 and "run bash run.sh first" in done.stderr:
        pytest.skip("this lesson looks at runs/tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^holds: ", done.stdout, re.MULTILINE)) >= 3
    assert re.search(r"\n  \S.*\n  \S", done.stdout), "no table"
    assert figure.stat().st_size < 60_000


# ------------------------------------------------------------------- 3. the lessons are whole
@pytest.mark.parametrize("path", LESSONS, ids=NAMES)
def test_a_lesson_has_its_parts(path):
    text, number = path.read_text(), int(path.stem[:2])
    title, *cells = [cell.strip() for cell in re.split(r"^# %%", text, flags=re.MULTILINE)][1:]
    assert title.startswith(f"[markdown]\n# # {number}. ")
    title = re.sub(r"\n#? ?", " ", title)
    for part in ("**Question.**", "Core file", "Before: ", "Next: "):
        assert part in title, f"the title cell lacks {part!r}"
    assert re.search(r"Takes \d+ seconds", title)
    sources = title[title.index("Source") : title.index("Core file")]
    cited = re.findall(r"\*([^*]+)\*([^*]*)", sources)
    assert cited, "no source"
    for document, places in cited:
        headings = published.HEADINGS[document].strip().split("\n")
        quoted = re.findall(r'"([^"]+)"', places)
        assert quoted, f"no heading of {document} is named"
        for heading in quoted:
            assert heading in headings, f"{document} has no heading {heading!r}"
    assert re.search(rf"^lesson\.begin\({number}, ", text, re.MULTILINE)
    assert text.count("lesson.holds(") >= 3 and "lesson.table(" in text
    assert f'lesson.save(fig, "{path.stem}")' in text
    assert "## Trap" in text and f"exercises/ex{number:02d}.py" in text
    assert number in check.EXERCISES and f"python course/check.py {number}`" in text
    code = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert all(cells) and len(code) <= 180, f"{len(code)} lines of code; a lesson has 150 or fewer"
    assert not re.search(r"if __name__|import argparse", text, re.MULTILINE)


def test_every_heading_of_the_documents_has_its_place():
    """Cited by a lesson, or listed in covered.py with a file that exists; never in neither."""
    pages = " ".join(re.sub(r"\n# ?", " ", path.read_text()) for path in LESSONS)
    for document, headings in published.HEADINGS.items():
        places = covered.WHERE.get(document, {})
        listed = [h for text in places.values() for h in text.strip().split("\n")]
        uncited = [h for h in headings.strip().split("\n") if f'"{h}"' not in pages]
        assert sorted(uncited) == sorted(listed), document
        for place in places.keys() - {covered.LEFT_OUT, covered.FRAME}:
            assert (ROOT / place).exists(), place


def test_every_exercise_has_a_lesson():
    assert check.EXERCISES == [int(name[:2]) for name in NAMES]


# ----------------------------------------------------------------------------- 4. as a notebook
@pytest.mark.slow
def test_a_lesson_runs_as_a_notebook():
    """Lesson 24, whose ranks are processes that get the notebook's definitions."""
    pytest.importorskip("jupytext")
    pytest.importorskip("ipykernel")
    pytest.importorskip("nbconvert")
    import render

    path = next(iter(COURSE.glob("24_*.py")), LESSONS[0])
    notebook = render.execute(path)
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert printed.count("holds: ") >= 3


# ------------------------------------------------------------------------- what lessons share
SCRIPT = """
import lesson
import torch
import torch.distributed as dist
WORLD = 2

def sum_of_ranks(rank, world, factor):
    x = torch.full((3,), float(factor * (rank + 1)))
    dist.all_reduce(x)
    return x.tolist()

def one_fails(rank, world):
    if rank == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()

def one_hangs(rank, world):
    import time
    time.sleep(60 * rank)

print("a cell that the ranks must not run")
print(lesson.ranks(WORLD, sum_of_ranks, 10))
for fn, timeout_s in ((one_fails, 60), (one_hangs, 4)):
    try:
        lesson.ranks(WORLD, fn, timeout_s=timeout_s)
    except RuntimeError as error:
        print(str(error).splitlines()[0], str(error).splitlines()[-1])
"""


def test_ranks_are_processes_that_get_the_definitions(tmp_path):
    script = tmp_path / "a_lesson.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(COURSE)!r})\n{SCRIPT}")
    done = run_lesson(script, timeout=100)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()  # torch 2.10's gloo prints there too
    assert said.count("a cell that the ranks must not run") == 1
    assert "[[30.0, 30.0, 30.0], [30.0, 30.0, 30.0]]" in said
    assert "rank 1 failed: ValueError: rank 1 has had enough" in said
    assert any(re.match(r"ranks \[(0, )?1\] did not end", line) for line in said)


def test_threads_count_bytes_and_notice_a_deadlock():
    def pass_on(rank, world, send, recv):
        x = np.full(4, rank, np.float32)
        send((rank + 1) % world, x)
        x[:] = -1  # what travels is a copy
        return recv((rank - 1) % world).tolist()

    results, sent = lesson.threads(3, pass_on)
    assert results == [[2.0] * 4, [0.0] * 4, [1.0] * 4] and sent == [16, 16, 16]
    with pytest.raises(AssertionError, match="rank 0 waits for rank 0"):
        lesson.threads(1, lambda rank, world, send, recv: recv(0))


def test_digits_and_bytes_are_what_they_say():
    images, labels = lesson.digits(300, seed=1)
    assert images.shape == (300, 784) and images.dtype == np.float32 and labels.dtype == np.int64
    assert 0 == images.min() and images.max() == 1 and set(labels) == set(range(10))
    assert (lesson.digits(300, seed=1)[0] == images).all()
    # the mean picture of a label has ink where the glyph is: 1 is a column, 0 is a ring
    one, zero = (images[labels == label].mean(0).reshape(28, 28) for label in (1, 0))
    assert one[10:18, 13:16].mean() > 0.6 > 0.4 > zero[14, 20:].mean()
    text = lesson.bytes_of_stdlib(5000)
    assert text.shape == (5000,) and text.dtype == np.int64 and 9 <= text.min() <= text.max() < 256


def test_published_tables_are_whole():
    assert [len(t) for t in (published.TABLE_4_1, published.TABLE_4_2)] == [12, 12]
    assert [len(t) for t in (published.TABLE_7_1, published.TABLE_7_2)] == [8, 8]
    assert len(published.TABLE_9_1) == 46
    questions = [count for _, count in published.MMLU.values()]
    assert len(questions) == 57 and sum(questions) == 14_042
    assert published.MMLU.keys() == published.ALWAYS_A.keys() == published.TABLE_10_2.keys()
    assert {len(row) for row in published.TABLE_10_2.values()} == {len(published.MODELS_10_2)}
