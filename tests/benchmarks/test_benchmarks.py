"""benchmarks/: runs side by side, a law that finds what it was made from."""

import itertools
import json
import math
import re
import shlex
import sys

import pytest
from conftest import printed

pytest.importorskip("scipy")

import law
import runs
import scaling
from config import UsageError, find_preset
from machinery import cli
from machinery.formats import read_lines


class Job:
    """A run of some code in place of train.py; `here` is its file."""

    def __init__(self, folder, name: str, code: str, after=None):
        self.run_dir = folder / name
        self.after = after
        self.file = folder / f"{name}.done"
        code = f"import pathlib; here = pathlib.Path({str(self.file)!r})\n{code}"
        self.command = [sys.executable, "-c", code]


def test_a_run_that_fails_costs_those_that_go_on_from_it_and_no_more(tmp_path, capsys):
    fails = Job(tmp_path, "fails", "raise SystemExit('no luck')")
    first = Job(tmp_path, "first", "here.touch()")
    then = Job(tmp_path, "then", "assert here.with_name('first.done').exists()", after=first)
    never = Job(tmp_path, "never", "", after=fails)
    jobs = [fails, never, first, then]
    file = tmp_path / "rows.jsonl"
    row_of = lambda job: dict(bpb=1, of=job.run_dir.name)
    assert runs.side_by_side(jobs, [{}] * 2, file, row_of) == 2  # have failed
    assert {row["of"] for row in read_lines(file, dict)} == {"first", "then"}
    assert "no luck" in capsys.readouterr().out


def test_a_row_is_of_this_machine_and_text(tmp_path, small_data, monkeypatch):
    monkeypatch.setattr(scaling, "RUNS", str(tmp_path / "runs"))
    job = scaling.Job("base", "", 2, 2**18, data=str(small_data))
    job.run_dir.mkdir(parents=True)
    records = '{"full_val_bpb": 1.5, "step_s": 2.0}\n{"step_s": 1.0}\n'
    (job.run_dir / "metrics.jsonl").write_text(records)
    row = scaling.read_run(job)
    assert (row["bpb"], row["seconds"]) == (1.5, 3.0)
    assert row["weights"] == 12 * 2 * 128**2 + 128 * 512 + 12 * 2  # blocks, head, gates
    assert scaling.has_row(job, [row])
    for fact in ("machine", "fingerprint"):
        other = row | {fact: "another"}
        assert not scaling.has_row(job, [other])
        assert law.newest([other, row]) == [row] and law.newest([row, other]) == [other]


def test_every_run_has_options_that_train_py_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "RUNS", str(tmp_path))
    jobs = [*scaling.grid()]
    assert len({job.run_dir for job in jobs}) == len({json.dumps(job.key) for job in jobs})
    for job in {(job.name, job.depth): job for job in jobs}.values():  # the longest of each chain
        train = job.preset.train
        assert 0 <= job.tokens - train.steps * train.tokens_per_step < train.tokens_per_step
        assert "--resume" not in job.command  # there is nothing to go on from
        job.after.branch.mkdir(parents=True)
        assert job.command[-2:] == ["--resume", str(job.after.branch)]
        assert 0 < int(job.after.branch.name[5:]) <= job.after.preset.train.steps  # one until there
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
