"""A run is watched while it trains: report.html and a sample at each validation. None of it changes
or stops a run, or counts as training time."""

import re
import shutil
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import SMALL, losses, metrics, run, train_here
from test_faults import assert_same_state

import flops
import train
from instruments.pages import report
from instruments.pages.records import slow_steps
from instruments.talk.sample import find_prompts
from machinery import checkpoint
from machinery.formats import Watch, read_lines
from machinery.log import Log
from machinery.shards import Manifest

OFTEN = "--save_every 4 --keep 9 --eval_every 4".split()  # as conftest's trained_run


def begin(small_data, run_dir, *more) -> int:
    return train_here(small_data, run_dir, *OFTEN, *more)


def test_a_page_and_a_sample_at_each_validation(small_data, tmp_path, monkeypatch, capsys):
    """Which are no training time: by the meter's clock, each page takes 1,000 seconds."""
    pages = []
    honest = report.write
    clock = time.perf_counter

    def write(folder):
        path = honest(folder)
        pages.append(path.read_text())
        return path

    monkeypatch.setattr(report, "write", write)
    drawn = report.continuations
    models = []

    def draw(model, *args):
        assert not model.training  # or a dropout of yours would be in it
        models.append(model)
        return drawn(model, *args)

    monkeypatch.setattr(report, "continuations", draw)
    later = partial(flops.Meter, clock=lambda: clock() + 1000 * len(pages))
    monkeypatch.setattr(flops, "Meter", later)
    assert begin(small_data, tmp_path / "run") == 0
    steps = metrics(tmp_path / "run", "loss")
    assert max(r["step_s"] for r in steps) < 1000 <= steps[0]["report_s"]
    assert steps[-1]["report_s"] >= 3000
    for page, step in zip(pages, (0, 4, 8, 12), strict=True):
        assert f" tokens in {step}{' of 12' * (step < 12)} steps" in page
        assert (">running<" in page) == (step < 12)
        assert page.count("<pre>") == step // 4 + 1
    assert len(models) == 4 and models[-1].training
    lines = capsys.readouterr().out.splitlines()
    samples = read_lines(tmp_path / "run" / "samples.jsonl", dict)
    prompt = find_prompts((), "run", Manifest.load(small_data))[0]  # of its held-out text
    assert [(r["step"], r["prompt"]) for r in samples] == [(n, prompt) for n in (0, 4, 8, 12)]
    for r in samples:
        assert r["text"].startswith(prompt) and len(r["text"]) > 10
        assert lines.count(f"step {r['step']} | it writes {r['text'][:72]!r}") == 1


def test_it_changes_no_bit(trained_run, small_data, tmp_path, monkeypatch):
    honest = report.update

    def dice(run, step):  # a report that draws random numbers
        torch.rand(1)
        return honest(run, step)

    monkeypatch.setattr(report, "update", dice)
    assert begin(small_data, tmp_path / "dice") == 0
    monkeypatch.setattr(train, "write_report", lambda *args, **options: "")
    assert begin(small_data, tmp_path / "blind") == 0
    assert not (tmp_path / "blind" / "samples.jsonl").exists()
    for other in ("dice", "blind"):
        assert losses(tmp_path / other) == losses(trained_run)
        assert_same_state(tmp_path / other, trained_run, 12)


@pytest.mark.parametrize("part", ["continuations", "write"])
def test_no_fault_of_it_stops_a_run(part, small_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, part, lambda *args: 1 / 0)
    assert begin(small_data, tmp_path / "run", "--steps", "5") == 0
    assert capsys.readouterr().out.count("ZeroDivisionError") == 3


def test_a_resumed_run_keeps_the_samples_that_still_hold(own_run, small_data):
    shutil.rmtree(own_run / "checkpoints" / "step_00000012")
    (own_run / "status.json").unlink()
    assert begin(small_data, own_run) == 0
    steps = [r["step"] for r in read_lines(own_run / "samples.jsonl", dict)]
    assert steps == sorted(steps) and {*steps} == {0, 4, 8, 12}  # a page shows one of each


@pytest.mark.slow
def test_sharded_weights_are_not_sampled_and_that_is_said(small_data, tmp_path):
    where = ["--data_dir", small_data, "--run_dir", tmp_path / "run", "--parallel", "fsdp"]
    result = run("train.py", "tiny", *SMALL, *OFTEN, *where, nproc=2)
    assert result.returncode == 0, result.stderr
    assert "step 4 | no samples of sharded weights while it trains" in result.stdout
    assert " tokens in 12 steps" in (tmp_path / "run" / "report.html").read_text()
    assert not (tmp_path / "run" / "samples.jsonl").exists()


@dataclass
class OneStep:
    """What slow_steps reads of a StepLine."""

    step: int
    step_s: float
    watch: Watch | None


def step(n: int, seconds: float = 1.0, wait_s=0.0, saving=False) -> OneStep:
    return OneStep(n, seconds, Watch(wait_s=wait_s, saving=saving))


def test_a_slow_step_is_counted_with_its_cause():
    """And the first step of each process compiles."""
    steps = [step(n) for n in range(1, 101)]
    odd = [step(1, 90.0), step(10, 2.5, wait_s=1.4), step(20, 2.5, saving=True)]
    odd += [step(30, 9.0, wait_s=6.0), step(40, 3.0, wait_s=0.5)]  # a quarter of what it took more
    odd += [step(50, 1.9, wait_s=0.9), step(71, 60.0)]  # the first: not over twice the median
    for r in odd:
        steps[r.step - 1] = r

    def told(*processes) -> list[int]:
        rows = dict(slow_steps([SimpleNamespace(own=own) for own in processes]))
        assert rows["longest wait for data"] == "6.00 s, in step 30"
        return list(map(int, re.findall(r"\d+", rows["slow steps"])))

    assert told(steps[:70], steps[70:]) == [4, 98, 2, 1]
    assert told(steps) == [5, 99, 2, 1]
    without = [replace(r, watch=None) for r in steps]
    for own in (without, steps[:1]):
        assert slow_steps([SimpleNamespace(own=own)]) == []


def test_steps_taken_while_a_checkpoint_is_written_are_known(small_data, tmp_path, monkeypatch):
    publish = checkpoint._publish
    write = Log.write
    twelve = threading.Event()

    def wait(*args):
        assert twelve.wait(60)
        return publish(*args)

    def log(self, line, **more):
        if line.step == 12:
            twelve.set()
        return write(self, line, **more)

    monkeypatch.setattr(checkpoint, "_publish", wait)
    monkeypatch.setattr(Log, "write", log)
    more = "--steps 14 --save_every 0 --eval_every 0".split()  # saved before the decay begins
    assert begin(small_data, tmp_path / "run", *more) == 0
    steps = metrics(tmp_path / "run", "loss")
    saving = [r["step"] for r in steps if r["watch"]["saving"]]
    assert 1 < saving[0] < 12 and {*range(saving[0], 13)} <= {*saving}
