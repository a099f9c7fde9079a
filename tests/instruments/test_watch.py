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
from instruments.pages import report, watch
from instruments.pages.records import Run
from machinery.log import read_jsonl
from machinery.shards import Manifest

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
        assert ("still running" in page) == ("<span>running<" in page) == (step < 12)
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
    monkeypatch.setattr(train, "write_report", lambda *args: "")
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


def test_no_fault_of_it_stops_a_run(small_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "draw", lambda *args: 1 / 0)
    assert begin(small_data, tmp_path / "run", "--steps", "5") == 0
    assert capsys.readouterr().out.count("ZeroDivisionError") == 3


def test_pages_take_at_most_a_twentieth_of_the_time(small_data, tmp_path, monkeypatch):
    """A page that takes 3 s every 10 s: not at each validation."""
    now, written = [0.0], []

    def write(folder):
        written.append(now[0])
        now[0] += 3.0

    monkeypatch.setattr(report, "write", write)
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    plan = SimpleNamespace(sharded=True, steps=1000, tokens_per_step=1)
    watched = SimpleNamespace(log=SimpleNamespace(run_dir=tmp_path), plan=plan)
    for step in range(0, 1000, 10):
        assert "sharded" in report.update(watched, step)
        now[0] += 10
    assert written[:2] == [0.0, 13.0]  # the first page has no curves, and does not count
    assert 3 * len(written[1:]) <= now[0] / 20 + 3
    before = len(written)
    assert report.update(watched, 1000) and len(written) == before  # train.py writes the last one


def test_a_resumed_run_has_one_sample_a_step(watched, small_data, tmp_path):
    run_dir = shutil.copytree(watched.run_dir, tmp_path / "again")
    for path in (run_dir / "checkpoints").glob("step_00000012"):
        shutil.rmtree(path)
    (run_dir / "status.json").unlink()
    assert begin(small_data, run_dir) == 0
    steps = [r["step"] for r in Run(run_dir).samples]
    assert steps == [0, 4, 8, 12]


@pytest.mark.slow
def test_sharded_weights_are_not_sampled_and_that_is_said(small_data, tmp_path):
    where = ["--data_dir", small_data, "--run_dir", tmp_path / "run", "--parallel", "fsdp"]
    result = run("train.py", "tiny", *ARGS, *where, nproc=2)
    assert result.returncode == 0, result.stderr
    assert "step 4 | no samples of sharded weights while it trains" in result.stdout
    assert "12 of 12" in (tmp_path / "run" / "report.html").read_text()
    assert not (tmp_path / "run" / "samples.jsonl").exists()


# ---------------------------------------------------------------------------- the watch on speed


def step(n: int, seconds: float = 1.0, tokens: int = 100, **seen) -> dict:
    seen = dict(wait_s=0.0, saving=False) | seen
    return dict(step=n, tokens=n * tokens, time=float(n), step_s=seconds, watch=seen)


def test_a_slow_step_is_counted_with_its_cause():
    steps = [step(n) for n in range(1, 101)]
    steps[0]["step_s"] = 90.0  # compiles
    steps[9] |= step(10, 2.5, wait_s=1.4)
    steps[19] |= step(20, 2.5, saving=True)
    steps[29] |= step(30, 9.0, wait_s=6.0)
    steps[39] |= step(40, 3.0, wait_s=0.5)  # a wait that explains a quarter of it
    steps[49] |= step(50, 1.9, wait_s=0.9)  # not over twice the median
    found = dict(watch.rows_of([steps]))
    assert found["slow steps"] == (
        "4 of 99 steps took over twice the median, 2 of them waiting for data, 1 while saving; "
        "the 95th percentile is 1.90 x the median"
    )
    assert found["longest wait for data"] == "6.00 s, in step 30"


def test_shorter_steps_and_a_restart_are_no_slow_steps():
    """Half of the tokens in half of the time; and the first step of each process compiles."""
    steps = [step(n, 0.5, 50) for n in range(1, 41)]
    steps += [step(n, 1.0) | dict(tokens=2000 + (n - 40) * 100) for n in range(41, 101)]
    steps[70]["step_s"] = 60.0
    assert dict(watch.rows_of([steps[:70], steps[70:]]))["slow steps"].startswith("0 of 98 steps")
    assert dict(watch.rows_of([steps]))["slow steps"].startswith("1 of 99 steps")
    without = [{k: v for k, v in r.items() if k != "watch"} for r in steps]
    assert watch.rows_of([without]) == watch.rows_of([steps[:1]]) == []


def test_a_slow_disk_is_seen(small_data, tmp_path, monkeypatch):
    """From the 100th row on, four reads take 0.7 s each: a batch waits for them."""
    honest, reads = Manifest.row, []

    def row(self, split, source, i):
        reads.append(i) if split == "train" else None
        if split == "train" and 100 < len(reads) <= 104:
            time.sleep(0.7)
        return honest(self, split, source, i)

    monkeypatch.setattr(Manifest, "row", row)
    more = ["--steps", "24", "--micro_batch", "2", "--eval_every", "0"]
    assert begin(small_data, tmp_path / "run", *more) == 0
    text = (tmp_path / "run" / "report.html").read_text()
    n, k = map(int, re.search(r"(\d+) of 23 steps took .*, (\d+) of them waiting", text).groups())
    assert n >= k >= 1
    assert float(re.search(r"wait for data</b><span>([\d.]+) s", text)[1]) > 0.5


def test_steps_taken_while_a_checkpoint_is_written_are_known(small_data, tmp_path, monkeypatch):
    from machinery import checkpoint

    honest = checkpoint._publish

    def slow(*args):
        time.sleep(0.5)
        return honest(*args)

    monkeypatch.setattr(checkpoint, "_publish", slow)
    more = "--steps 30 --save_every 10 --eval_every 0".split()
    assert begin(small_data, tmp_path / "run", *more) == 0
    steps = [r for r in metrics(tmp_path / "run") if "loss" in r]
    saving = [r["step"] for r in steps if r["watch"]["saving"]]
    assert saving and 11 in saving and not set(saving) & set(range(1, 11)), saving
