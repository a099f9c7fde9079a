"""course/: every oracle can tell, every lesson has its parts, runs through, and is a notebook; two
lessons compute what the project does.

The tests find the lessons by their names, so a new lesson is tested as soon as it is there.
"""

import doctest
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import check
import judging
import lesson
import mutants
import numpy as np
import pytest
import seeds
import torch
from conftest import ROOT, environment, losses
from table import read_table
from tokens import count_tokens

COURSE = ROOT / "course"
LESSONS = lesson.pages()
NAMES = [path.stem for path in LESSONS]


# --------------------------------------------------------------------- 1. the oracles can tell
LONG = {1, 3, 9, 17, 26, 27}  # over 1.5 seconds
ORACLES = [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in judging.EXERCISES]


@pytest.mark.parametrize("number", ORACLES)
def test_the_oracle_accepts_the_reference_and_refuses_wrong_answers(number, monkeypatch):
    """Each for its own reason, on a slow machine too: the 20 seconds are for learners."""
    for name in ("CPU_S", "WALL_S"):
        monkeypatch.setattr(judging, name, 1000)
    assert check.prove(number) == []
    exercise, _ = judging.files(number)
    said = judging.verdict(exercise.oracle, exercise)
    assert said and said.startswith("not begun"), said


JUDGE = """
def oracle(answer):
    for n in (1, 2):
        got = answer.f([n, n], k=n)
        assert got[0] + sum([0, 1]) == n + 1, f"{got[0]} is not {n}"


def below(x):
    return [*x]
"""


@pytest.fixture
def told(monkeypatch, tmp_path, capsys):
    """A function: the body of an exercise's f -> what check.py says of it, without its number."""
    (tmp_path / "exercises").mkdir()
    monkeypatch.setattr(lesson, "COURSE", tmp_path)
    exercise = tmp_path / "exercises" / "ex01.py"

    def tell(body, judge=JUDGE):
        exercise.write_text(f"def f(x, k=0):\n    {body}\n\n{judge}")
        solved = check.check(1)
        said = capsys.readouterr().out
        assert said.startswith("exercise 1: ") and solved == said.endswith(": solved\n")
        return said.removeprefix("exercise 1: ").removesuffix("\n")

    return tell


TOLD = r"""
return [*x] => solved
return [7] => 7 is not 1: f(x=[1, 1], k=1)
return x / 0 => TypeError | (line 2: return x / 0): f(x=[1, 1], k=1)
the input as it was given, though the function has emptied it by then:
return [x.pop(), x.pop(), x.pop()] => IndexError | f(x=[1, 1], k=1)
assert k < 2; return [*x] => AssertionError | f(x=[2, 2], k=2)
an answer of another kind, which fails in the judge: no line of the judge's:
return None => None | `return` | f(x=[1, 1], k=1)
return 7 => can do nothing with 7 | TypeError | f(x=[1, 1], k=1)
return ( => SyntaxError | ex01.py, line 2
raise NotImplementedError('write f') => not begun | write f
raise SystemExit(0) => SystemExit: 0 | f(x=[1, 1], k=1)
import os; os._exit(0) => before the judge
return [*x]\n\n\ndel f => not begun | there is no f
return [*x]\n\n\n1 / 0 => ZeroDivisionError | line 5: 1 / 0 | the file itself
each side has names of its own:
return [*x]\n\n\ndef sum(x):\n    return 7 => solved
return below(x) => solved
return x\n\n\ndef below(x):\n    return 7 => below | lines 5 and 15 | rename
what no exercise allows:
x[1] = 3; return [*x] => the argument x was changed: f(x=[1, 1], k=1)
return x => shares memory with the argument x: f(x=[1, 1], k=1)
return [x[0], [], x] => shares memory with the argument x
return (n for n in x) => generator | f(x=[1, 1], k=1)
return map(int, x) => map | f(x=[1, 1], k=1)
K[:] = x; return K\n\n\nK = [] => it changed what an earlier call had returned, f(x=[1, 1], k=1)
return KEPT[k]\n\n\nKEPT = {1: [1], 2: [2, [1]]} => solved
return [x[0], KEPT]\n\n\nKEPT = [0] => shares memory with that of f(x=[1, 1], k=1)
tensors of 16 bits, of which numpy has none:
return [x[0], K[2 * k :][:4]]\n\n\nimport torch\nK = torch.zeros(8).bfloat16() => shares memory with
return [x[0], K[k][:4]]\n\n\nimport torch\nK = torch.zeros(3, 8).bfloat16() => solved
N[0] += 1; return [*x, N[0] > 2]\n\n\nN = [0] => before it was | made again
return f(x, k + 1) if k < 300 else [*x] => RecursionError | line 2 | made again
import random; random.seed(0); return [*x] => Python's global generator is not
import numpy; numpy.random.rand(); return [*x] => numpy's global generator is not
import torch; torch.rand(1); return [*x] => torch's global generator is not
import torch; torch.set_grad_enabled(False); return [*x] => records gradients is not
import numpy; numpy.seterr(all='ignore'); return [*x] => geterr() is not
import sys; sys.setrecursionlimit(5000); return [*x] => calls within calls is not
"""


HONEST = """
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass
class Pair:
    both: list[int]


class Result(NamedTuple):
    first: int
    again: int


def oracle(answer):
    assert answer.f([1, 2]) == (1, 2)


def f(x):
    return Result(*Pair(x).both)


open(__file__ + ".tried", "a").write(str(f([3, 4])))
"""


def test_an_answer_may_have_any_form(told):
    """Annotations that are strings, a NamedTuple as the result, and a trial below the judge."""
    path = lesson.COURSE / "exercises/ex01.py"
    path.write_text(HONEST)
    assert check.check(1)
    assert Path(f"{path}.tried").read_text() == "Result(first=3, again=4)"  # once


LENDS = """
def oracle(answer):
    import time
    import torch
    table = torch.zeros(2)
    leaf = torch.zeros(2, requires_grad=True)

    def row(edit=None):
        return edit(table).sum() if edit else table

    assert answer.f(leaf, answer.lent(row)) is None
"""


LENT = """
k(); k(edit=lambda z: z + 1) => solved
k()[0] = 1 => what row returned was changed
k(edit=lambda z: z.add_(1)) => what row gave to <lambda> was changed
x.requires_grad_(False) => the argument x was changed
"""


ARRAYS = """
def oracle(answer):
    import numpy as np
    import torch
    from subject import same
    answer.may("f", change="k", whole="x")
    for x in (np.arange(6).reshape(2, 3) + 1, torch.arange(6).reshape(2, 3) + 1):
        same(answer.f(x, np.zeros(3)), x + 300.0, "f", 1e-6)
"""


OF_ARRAYS = """
k[0] = 1; return x + 300.0 => solved
return [7] => f is [7], and should be of type ndarray: f(x=array [[1, 2, 3], [4, 5, 6]], int64,
return x + 300 => f is of int64, and should be of float64
return x[0] + 300.0 => f is of shape (3,), and should be of (2, 3)
return (x > 1) * x * x + 300.0 => f[1, 2] is 336, and should be 306; 6 of 6 wrong
return (x / (x != 2)) + 300.0 => f[0, 1] is inf, and should be 302; 1 of 6 wrong
y = x * 0; y.reshape(-1)[:] = x.reshape(-1); return y + 300.0 => another layout
return x * 100 / 100 + 300.0 => whole numbers of a small type
"""


TABLES = ((JUDGE, TOLD), (LENDS, LENT), (ARRAYS, OF_ARRAYS))


@pytest.mark.parametrize(
    "judge, body, named", [(judge, *row) for judge, table in TABLES for row in read_table(table)]
)
def test_a_learner_is_told_the_call_and_the_line(told, judge, body, named):
    """What an oracle lends stays its own, and arrays come in other layouts and types."""
    said = told(body, judge)
    assert all(name in said for name in named), said


def test_without_assertions_nothing_is_judged():
    command = [sys.executable, "-O", COURSE / "check.py", "14"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout and "-O" in done.stderr


@pytest.mark.timing
def test_a_judge_ends_by_itself(told, monkeypatch):
    monkeypatch.setattr(judging, "CPU_S", 0.3)
    monkeypatch.setattr(judging, "WALL_S", 3)
    endless = r"not done after \d+ seconds \(line 2: while True:\): f\(x=\[1, 1\], k=1\)"
    assert re.match(endless, told("while True:\n        if k > 9:\n            k = 1"))
    assert re.match("too slow.* 0 calls", told("return x", "def oracle(a):\n    while True: pass"))
    slow = "def oracle(a):\n    while a.f([1]): pass"
    assert re.match("too slow: 0.3 .* the last one f", told("return [sum(range(9999))]", slow))
    assert "(line 2: " in told("import time; time.sleep(99)")


OWN_WORK = """
def oracle(answer):
    import signal
    left = lambda: signal.getitimer(signal.ITIMER_PROF)[0]
    assert answer.unmeasured(left) == 0 < left()
    answer.f([1])
"""


def test_a_judges_own_work_takes_none_of_the_answers_seconds(told):
    assert told("return [*x]", OWN_WORK) == "solved"


def test_an_oracle_that_cannot_tell_is_found_out(monkeypatch):
    exercise = SimpleNamespace(oracle=lambda answer: answer.f())
    wrong = {"right": dict(f=int), "ends": dict(f=lambda: int("not an assertion"))}
    solution = SimpleNamespace(__file__="", f=int, WRONG=wrong)
    monkeypatch.setattr(check, "files", lambda number: (exercise, solution))
    few, accepted, no_assertion = check.prove(0)
    assert "fewer than three" in few and "is accepted" in accepted and "ValueError" in no_assertion


def test_mutants_change_what_the_exercise_asks_for_and_nothing_else(tmp_path):
    exercise = tmp_path / "exercise.py"
    solution = tmp_path / "solution.py"
    exercise.write_text(
        "def f(x):\n    raise NotImplementedError\n\ndef oracle(a):\n    assert a.f(2) == 4\n"
    )
    solution.write_text(
        "def f(x):\n    return g(x) if x < 3 else 0\n\n"
        "def g(x):\n    'Doubles.'\n    return x + x\n\n"
        "from edits import edits\nedit = edits(__file__)\n\n"
        "def wrong(x):\n    return x - 1\n"
    )
    made = [*mutants.mutants(solution)]
    of_f = ["`0` -> `1`", "`3` -> `4`", "`x < 3` -> `x <= 3`"]
    of_g = ["`x + x` -> `x - x`", "dropped", "dropped"]
    assert sorted(text.rpartition(": ")[2] for text, _ in made) == sorted(of_f + of_g)
    kept = [text for text, module in made if mutants.accepted(exercise, solution, module)]
    assert sorted(text.rpartition(": ")[2] for text in kept) == of_f


# ------------------------------------------------------------------------- 2. the lessons run
@pytest.mark.slow
@pytest.mark.parametrize("path", LESSONS, ids=NAMES)
def test_a_lesson_runs_through(path, trained_run):
    figure = lesson.OUT / f"{path.stem}.svg"
    figure.unlink(missing_ok=True)
    tools = dict(capture_output=True, text=True, timeout=1200, env=environment())
    runs = [trained_run.name] if path.stem == "25_rates" else []  # it measures runs as well
    cwd = trained_run.parent if runs else None
    done = subprocess.run([sys.executable, path, *runs], cwd=cwd, **tools)
    assert done.stdout.count("the noise scale of run\n") == len(runs)
    if done.returncode == 2 and "run bash run.sh first" in done.stderr:
        pytest.skip("this lesson looks at runs/tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    wide = [line for line in done.stdout.splitlines() if len(line) > lesson.WIDTH]
    assert not wide, "wider than a terminal:\n" + "\n".join(wide)
    assert len(re.findall(r"^holds: ", done.stdout, re.MULTILINE)) >= 3
    assert re.search(r"\n  +\S.*\n  +\S", done.stdout), "no table"
    assert figure.stat().st_size < 500_000
    for number in seeds.golden().get(f"{path.relative_to(COURSE)}", []):
        low, high = seeds.spread(number)
        value = seeds.printed(number, done.stdout)
        far = 3 * (high - low)  # another machine is another draw, and few were seen
        near = low - far <= value <= high + far
        assert near, f"{number['said'][0]}: here {value:g}, seen {low:g} to {high:g}"


def test_a_claim_that_hangs_on_its_seed_is_told(tmp_path):
    path = tmp_path / "07_fake.py"
    same = "np.random.default_rng(3).random() == np.random.default_rng([3]).random()"  # not [13]
    path.write_text(f"import lesson\nimport numpy as np\nlesson.holds({same}, 'by luck')\n1 / 0")
    claims, printed = seeds.tried(str(path), 10)
    assert claims == ["fails: by luck", "ZeroDivisionError: division by zero"]
    assert printed == "fails: by luck\n"


# ------------------------------------------------------------------- 3. the lessons are whole
def test_each_lesson_has_its_parts():
    """Sources, a picture, an exercise; that it has claims and a table is seen when it runs."""
    wrong = []
    for path in LESSONS:
        text = path.read_text()
        number = int(path.stem[:2])
        parts = dict(
            begins=re.search(rf"^lesson\.begin\({number}, ", text, re.MULTILINE),
            sources=re.search(r"\n# Sources?: [^%]*\bCore(\n#)? files?:", text),
            picture=f'lesson.save(fig, "{path.stem}")' in text,
            exercise=f"exercises/ex{number:02d}.py" in text,
            length=count_tokens(path) <= 2810,
        )
        wrong += [f"{path.stem}: {name}" for name, there in parts.items() if not there]
    assert not wrong
    assert judging.EXERCISES == [int(name[:2]) for name in NAMES]


@pytest.mark.parametrize("pages", ["README.md room/README.md", "README.pt.md"])
def test_the_first_pages_list_the_lessons_and_labs(pages):
    listed = []
    links = set()
    for page in (COURSE / name for name in pages.split()):
        text = page.read_text(encoding="utf-8")
        links |= {(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+)\)", text)}
        listed += re.findall(r"^\| (\d+) \| \[[^]]+\]\((?:room/)?(\d\d)_", text, re.MULTILINE)
    assert all(link.exists() for link in links) and {*COURSE.glob("labs/lab*.md")} <= links
    assert [(int(number), int(file)) for number, file in listed] == [
        (n, n) for n in judging.EXERCISES
    ]


def test_the_examples_of_the_page_of_idioms_are_true():
    failed, tried = doctest.testfile(str(COURSE / "idioms.md"), module_relative=False)
    assert tried > 10 and not failed


# ---------------------------------------------------- what lessons build is what the project has
SIZES = """tiny --n_layer 1 --n_embd 64 --n_head 2 --n_kv_head 2 --head_dim 32 --mlp_hidden 128
    --device cpu --steps 20 --warmup 2 --eval_tokens 2048 --peak_tflops 1"""


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_one_file_run_has_the_losses_of_train(compiled, small_data, run_dir):
    """Of 20 steps of a small model, but for the order of sums. It is made of four files of ours."""
    import train
    from machinery import cli
    from tokenizer import Tokenizer

    path = COURSE / "one_file.py"
    names = re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
    assert {n for n in names if (ROOT / f"{n}.py").exists()} == {"model", "optim", "data", "config"}
    words = [*SIZES.split(), "--compile" if compiled else "--no_compile"]
    words += ["--data_dir", str(small_data), "--run_dir", str(run_dir)]
    try:
        assert train.main(words) == 0
        one_file = judging.load(path)
        bare = one_file.train(cli.parse("train.py", "train", words), small_data, 20, compiled, 1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [*losses(run_dir).values()] == pytest.approx(bare, rel=1e-6) and len(bare) == 20
    assert bare[-1] < bare[0] - 1
    sizes = Tokenizer.load(small_data / "tokenizer.json").token_bytes.tolist()
    assert [*map(len, one_file.read_tokens(small_data))] == sizes


@torch.no_grad()
def test_the_gpt_of_lesson_5_is_that_of_model_py():
    """With plain options: the same loss on the same weights, and initial values of the same size.
    The lesson's definitions run, not its cells."""
    from config import GPTConfig
    from model import GPT

    theirs = lesson.names_of(5)
    torch.manual_seed(0)
    small = theirs.GPT(width=64, blocks=3, heads=4, base=100.0)
    shape = dict(n_layer=3, n_head=4, n_kv_head=4, head_dim=16, n_embd=64, mlp_hidden=256)
    plain = dict(qk_norm=False, embed_norm=False, logit_softcap=0.0, rope_theta=100.0)
    ours = GPT(GPTConfig(seq_len=64, vocab_size=256, **shape, **plain))
    ours.init_weights()
    for name, weight in small.state_dict().items():
        begins = ours.state_dict()[name].std()
        torch.testing.assert_close(weight.std(), begins, rtol=0.1, atol=0, msg=name)
        weight.normal_(0, weight.size(1) ** -0.5)  # all at work: none at 0
    ours.load_state_dict(small.state_dict())
    pieces = torch.randint(256, (4, 65))
    bits = float(theirs.bits(small, pieces))
    assert abs(bits * math.log(2) - float(ours(pieces[:, :-1], pieces[:, 1:]))) < 1e-5


# ----------------------------------------------------------------------------- 4. as a notebook
@pytest.mark.slow
def test_a_lesson_runs_as_a_notebook():
    """Lesson 28, whose ranks are processes that get the notebook's definitions."""
    for name in ("jupytext", "ipykernel", "nbconvert"):
        pytest.importorskip(name)
    import render

    notebook = render.execute(lesson.page(28))
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert printed.count("holds: ") >= 3


# ------------------------------------------------------------------------- what lessons share
def test_threads_count_bytes_and_notice_a_deadlock():
    def pass_on(rank, world, send, recv):
        x = np.full(4, rank, np.float32)
        send((rank + 1) % world, x)
        x[:] = -1  # what travels is a copy
        return recv((rank - 1) % world).tolist()

    results, sent = lesson.threads(3, pass_on)
    assert results == [[2.0] * 4, [0.0] * 4, [1.0] * 4] and sent == [16, 16, 16]
    with pytest.raises(AssertionError, match="rank . waits for rank . forever"):
        lesson.threads(3, lambda rank, world, send, recv: rank and recv(3 - rank))
    with pytest.raises(ZeroDivisionError):  # not that the others wait for it
        lesson.threads(3, lambda rank, world, send, recv: recv(0) if rank else 1 / 0)
