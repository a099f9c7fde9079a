"""benchmarks/: runs beside each other, a law that finds what it was made from."""

import itertools
import math
import re
import shlex
import sys
from types import SimpleNamespace

import pytest
from conftest import printed, read_lines

pytest.importorskip("scipy")

import law
import runs
import scaling
from config import UsageError, find_preset
from instruments.run import law as of_plan
from machinery import cli


def job_of(folder, name: str, code: str = ""):
    """A run of some code in place of train.py."""
    facts = dict(run_dir=folder / name, log=folder / f"{name}.log")
    return SimpleNamespace(command=[sys.executable, "-c", code], **facts)


def test_a_run_that_fails_costs_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scaling, "ROWS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(scaling, "read_run", lambda job: dict(bpb=1, of=job.run_dir.name))
    fails = job_of(tmp_path, "fails", "print('x' * 9000); raise SystemExit('no luck')")
    jobs = [fails, *(job_of(tmp_path, name) for name in "abc")]
    assert not scaling.make_all(jobs, 2)
    assert f"fails: exit code 1: no luck ({fails.log})\n" in capsys.readouterr().out
    assert scaling.make_all(jobs[1:], 1)
    made = [row["of"] for row in read_lines(scaling.ROWS)]
    assert sorted(made[:3]) == made[3:] == [*"abc"]


def test_every_run_has_options_that_train_py_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "RUNS", str(tmp_path))
    jobs = scaling.grid()
    assert len({job.run_dir for job in jobs}) == len(jobs)
    for job in jobs:
        preset = cli.parse("train.py", "train", job.command[2:])
        assert (preset.model, preset.train) == (job.preset.model, job.preset.train)
        assert preset.train.steps * preset.train.tokens_per_step == job.tokens
    pytest.raises(UsageError, scaling.main, ["grid"])


def test_each_change_that_is_an_option_is_one_of_train_py():
    page = (runs.ROOT / "benchmarks" / "RECIPE.md").read_text(encoding="utf-8")
    changes = re.findall(r"referee\.py -- (.*?)`", page)
    presets = [cli.parse("train.py", "train", shlex.split(f"tiny {words}")) for words in changes]
    found = {(preset.model, preset.train) for preset in presets}
    tiny = find_preset("tiny")
    assert len(found) >= 5 and (tiny.model, tiny.train) not in found


TRUE = dict(E=0.7, A=30.0, a=0.3, B=900.0, b=0.4)


def rows_of(text: str, factor: float = 1.0) -> list[dict]:
    rows = []
    for n, d in itertools.product((1e6, 3e6, 1e7, 3e7), (1e7, 4e7, 1.6e8, 6.4e8)):
        bpb = TRUE["E"] + TRUE["A"] * n ** -TRUE["a"] + TRUE["B"] * d ** -TRUE["b"]
        rows.append(dict(weights=n, tokens=d, bpb=factor * bpb, text=text))
    return rows


def test_the_law_finds_the_constants_of_a_world_in_which_it_holds():
    """And that another text is easier by a factor."""
    fitted = law.Law(rows_of("one") + rows_of("other", 0.9))
    assert fitted.constants() == pytest.approx([*TRUE.values()], rel=0.02)
    assert law.as_file(fitted)["factor"] == pytest.approx(0.9, abs=0.001)
    assert law.beyond(rows_of("one")) < 0.01  # as twice the tokens follow from the rest


def test_a_law_that_does_not_hold_further_on_says_so():
    rows = rows_of("one")
    for row in rows:
        row["bpb"] *= 1.1 if row["tokens"] == 6.4e8 else 1  # the most
    assert law.beyond(rows) == pytest.approx(math.log(1.1), abs=0.01)


def test_the_plan_has_the_laws():
    for text, fitted in law.both().items():
        file = of_plan.LAWS[text]
        for key, value in law.as_file(fitted).items():
            assert value == pytest.approx(file[key], rel=0.02 if key == "off" else 1e-3), key
        guess = math.exp(fitted.log_loss(fitted.p, 4e6, 5e6, len(fitted.texts) - 1))
        assert of_plan.predict(text, 4e6, 5e6) == pytest.approx(guess, rel=1e-4)


@pytest.mark.slow
def test_one_row_for_each_preset_that_works(tmp_path):
    """Three rows of tiny in a step, 2 at a time; the other's rows are longer, and do not fit."""
    results = tmp_path / "RESULTS.md"
    words = "tiny d12 --no_compile --micro_batch 2 --tokens_per_step 1536 --steps 2 "
    words += "--warmup 1 --device cpu --results"
    said = printed("benchmarks/throughput.py", *words.split(), results, timeout=600)
    row = r"\| tiny +\| 2 x 2 +\| (bfloat16|float32) +\| [\d,]+ +\| [\d,]+ +\| n/a +\| n/a"
    assert len(re.findall(row, results.read_text())) == 1 and "1536" in said
    assert 0 < float(re.search(r"([\d.]+)% of [\d.]+T", said)[1]) < 100
