"""A run is watched while it trains: report.html and a sample at each validation. None of it changes
or stops a run, or counts as training time."""

import re
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import SMALL, losses, metrics, parameters, run

import train
from instruments import report
from machinery.log import read_jsonl

ARGS = [*SMALL, "--eval_every", "4", "--peak_tflops", "1", "--n_layer", "1"]


def begin(small_data, run_dir, *more) -> int:
    return train.main(
        ["tiny", *ARGS, "--data_dir", str(small_data), "--run_dir", str(run_dir), *more]
    )


@pytest.fixture(scope="module")
def watched(small_data, tmp_path_factory):
    """A run, the pages that it wrote on its way, and what was on the screen."""
    run_dir, pages, lines = tmp_path_factory.mktemp("watch") / "run", [], []
    honest, screen = report.write, train.Log.print

    def write(folder, *args):
        path = honest(folder, *args)
        pages.append(path.read_text())
        return path

    def say(self, text):
        lines.append(text)
        screen(self, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write", write)
        patch.setattr(train.Log, "print", say)
        patch.setattr(report, "SHARE", 1e9)  # however fast the steps are
        assert begin(small_data, run_dir) == 0
    return SimpleNamespace(run_dir=run_dir, pages=pages, lines=lines)


def test_the_page_of_a_run_tells_how_far_it_is(watched):
    at = [re.search(r"<b>steps</b><span>(\d+) of 12", page)[1] for page in watched.pages]
    assert at == ["0", "4", "8", "12"]
    for page, step in zip(watched.pages, (0, 4, 8, 12)):
        assert ("the run goes on" in page) == ("<span>running<" in page) == (step < 12)
        when = re.search(r"<b>written</b><span>(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", page)[1]
        assert abs(time.time() - time.mktime(time.strptime(when, "%Y-%m-%d %H:%M:%S"))) < 3600
        assert page.count("<pre>") == step // 4 + 1 and f"at step {step}," in page


def test_what_it_writes_is_kept_and_said_in_a_line(watched):
    samples = read_jsonl(watched.run_dir / "samples.jsonl")
    assert [(r["step"], r["prompt"], r["live"]) for r in samples] == [
        (step, "def", True) for step in (0, 4, 8, 12)
    ]
    for r in samples:
        assert r["text"].startswith("def") and len(r["text"]) > 10
        (line,) = (x for x in watched.lines if x.startswith(f"step {r['step']} | it writes"))
        assert line == f"step {r['step']} | it writes {r['text'][:72]!r}" and "\n" not in line


def test_it_changes_no_bit_and_is_no_training_time(watched, small_data, tmp_path, monkeypatch):
    honest = report.update

    def dice(run, step):  # a report that draws random numbers, and takes its time
        torch.rand(1)
        time.sleep(0.3)
        return honest(run, step)

    monkeypatch.setattr(report, "update", dice)
    assert begin(small_data, tmp_path / "slow") == 0
    monkeypatch.setattr(train, "report", lambda *args: "")
    assert begin(small_data, tmp_path / "blind") == 0
    assert not (tmp_path / "blind" / "samples.jsonl").exists()
    for other in ("slow", "blind"):
        assert losses(tmp_path / other) == losses(watched.run_dir)
        ours, theirs = (parameters(path, 12) for path in (watched.run_dir, tmp_path / other))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    steps = [r for r in metrics(tmp_path / "slow") if "loss" in r]
    assert steps[-1]["report_s"] >= 0.9  # of the validations before the steps 1, 5 and 9
    counted = sum(r["step_s"] for r in steps[1:])
    assert counted <= steps[-1]["time"] - steps[0]["time"] - 0.6 + 0.05


@pytest.mark.parametrize("fault", ["page", "sample"])
def test_no_fault_of_it_stops_a_run(fault, small_data, tmp_path, monkeypatch, capsys):
    name = {"page": "draw_curves", "sample": "draw"}[fault]
    monkeypatch.setattr(report, name, lambda *args: 1 / 0)
    assert begin(small_data, tmp_path / "run", "--steps", "5") == 0
    out = capsys.readouterr().out
    assert out.count("report      none: ZeroDivisionError") >= 2 and "done: 5 steps" in out


def test_pages_take_at_most_a_twentieth_of_the_time(small_data, tmp_path, monkeypatch):
    """A page that takes 3 s every 10 s: not at each validation."""
    now, written = [0.0], []

    def write(folder):
        written.append(now[0])
        now[0] += 3.0

    monkeypatch.setattr(report, "write", write)
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    plan = SimpleNamespace(sharded=True, steps=1000, tokens_before=lambda step: step)
    watched = SimpleNamespace(log=SimpleNamespace(run_dir=tmp_path), plan=plan)
    for step in range(0, 1000, 10):
        assert "sharded" in report.update(watched, step)
        now[0] += 10
    assert written[:2] == [0.0, 13.0]  # the first page has no curves, and does not count
    assert 3 * len(written[1:]) <= now[0] / 20 + 3
    before = len(written)
    assert report.update(watched, 1000) and len(written) == before  # train.py writes the last one


def test_the_samples_of_a_long_run_are_thinned():
    live = [dict(step=n, tokens=n, prompt="def", text="", live=True) for n in range(0, 1000, 7)]
    by_hand = [dict(step=n, tokens=n, prompt="a", text="") for n in range(20)]
    found = report.thinned([*live, *live[-3:], *by_hand])
    shown = [r["step"] for r in found if r.get("live")]
    assert len(shown) <= 12 and shown[0] == live[-1]["step"] and len({*shown}) == len(shown)
    assert [r for r in found if not r.get("live")] == by_hand
    assert report.thinned(live[:12])[::-1] == live[:12] and report.thinned([]) == []


def test_a_resumed_run_has_one_sample_a_step(watched, small_data, tmp_path):
    run_dir = shutil.copytree(watched.run_dir, tmp_path / "again")
    for path in (run_dir / "checkpoints").glob("step_00000012"):
        shutil.rmtree(path)
    (run_dir / "status.json").unlink()
    assert begin(small_data, run_dir) == 0
    steps = [r["step"] for r in report.Run(run_dir).samples]
    assert steps == [0, 4, 8, 12]


@pytest.mark.slow
def test_sharded_weights_are_not_sampled_and_that_is_said(small_data, tmp_path):
    where = ["--data_dir", small_data, "--run_dir", tmp_path / "run", "--parallel", "fsdp"]
    result = run("train.py", "tiny", *ARGS, *where, nproc=2)
    assert result.returncode == 0, result.stderr
    assert "step 4 | no samples of sharded weights while it trains" in result.stdout
    assert "steps: 12 of 12" in (tmp_path / "run" / "report.md").read_text()
    assert not (tmp_path / "run" / "samples.jsonl").exists()


@pytest.mark.slow
def test_with_two_ranks_the_first_one_writes(watched, small_data, tmp_path):
    where = ["--data_dir", small_data, "--run_dir", tmp_path / "run", "--parallel", "ddp"]
    result = run("train.py", "tiny", *ARGS, *where, nproc=2)
    assert result.returncode == 0, result.stderr
    assert [r["step"] for r in read_jsonl(tmp_path / "run" / "samples.jsonl")] == [0, 4, 8, 12]
    assert result.stdout.count("it writes") == 4
