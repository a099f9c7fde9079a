"""benchmarks/: chains of runs, a law that finds what it was made from."""

import itertools
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import environment, printed

pytest.importorskip("scipy")

import law
import runs
import scaling
from config import UsageError, find_preset
from machinery import cli
from machinery.formats import read_lines
from optim import decay_begins


class Job:
    """A run of some code in place of train.py."""

    def __init__(self, folder, name: str, code: str):
        self.run_dir = folder / name
        self.log = folder / f"{name}.log"
        self.command = [sys.executable, "-c", "import os, signal, time\n" + code]


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """The names of the runs that have a row, when it is called."""
    monkeypatch.setattr(scaling, "ROWS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(scaling, "read_run", lambda job: dict(bpb=1, of=job.run_dir.name))
    return lambda: [row["of"] for row in read_lines(scaling.ROWS, dict)]


def test_a_run_that_fails_costs_those_of_its_chain_and_no_more(tmp_path, rows, capsys):
    fails = Job(tmp_path, "fails", "print('x' * 9000); raise SystemExit('no luck')")
    chains = [[fails, Job(tmp_path, "never", "")], [], [Job(tmp_path, name, "") for name in "abc"]]
    assert not scaling.make_all(chains, 2)
    assert rows() == [*"abc"]
    assert f"fails: exit code 1: no luck ({fails.log})\n" in capsys.readouterr().out
    assert not (tmp_path / "never.log").exists()
    assert scaling.make_all(chains[1:], 1) and rows() == [*"abcabc"]


def test_every_run_has_options_that_train_py_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "RUNS", str(tmp_path))
    for *others, before, last in scaling.grid():
        assert len({job.run_dir for job in (*others, before, last)}) == len(others) + 2
        assert "--resume" not in last.command  # there is nothing to go on from
        before.branch.mkdir(parents=True)
        assert last.command[-2:] == ["--resume", str(before.branch)]
        preset = cli.parse("train.py", "train", last.command[2:])
        assert preset.model == replace(find_preset("tiny").model, **last.shape)
        assert preset.train.steps * preset.train.tokens_per_step == last.tokens
        begins = decay_begins(preset.train.steps // 2, preset.train.decay)
        assert before.branch.name == f"step_{begins:08d}"
    command = [sys.executable, scaling.__file__, "grid"]
    assert (
        subprocess.run(command, env=environment(), check=False).returncode == UsageError.exit_code
    )


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


def test_the_forecast_has_the_law():
    forecast = pytest.importorskip("instruments.run.forecast")
    fitted = law.Law(read_lines(law.HERE / "PUBLISHED.jsonl", dict))
    file = forecast.LAW
    close = {name: pytest.approx(file[name], rel=1e-3) for name in (*"EAaBb", "factor")}
    assert law.as_file(fitted) == file | close
    guess = math.exp(fitted.log_loss(fitted.p, 4e8, 5e9, 1))
    assert forecast.predict(4e8, 5e9) == pytest.approx(guess, rel=1e-4)


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
