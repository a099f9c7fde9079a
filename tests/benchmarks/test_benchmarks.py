"""benchmarks/ablate.py: the verdict by hand, the table, and which runs are made: side by side, not
twice, after a kill, after a failure."""

import json
import math
import random
import re
import sys
import time

import pytest
from conftest import ROOT, SMALL

sys.path.insert(0, str(ROOT / "benchmarks"))
import ablate

# Stands in for train.py where only the rules for making runs are tested.
QUICK = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--run_dir") + 1])
folder.mkdir(exist_ok=True)
if "1e30" in sys.argv:
    sys.exit("error: the loss is not finite")
begin = time.time()
time.sleep(0.5)
rows = [dict(tokens=t, val_bpb=3 - t / 1024) for t in (0, 1024, 2048)]
rows += [dict(tokens=2048, tokens_per_s=7.0, begin=begin, end=time.time())]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


@pytest.fixture
def ablation(small_data, tmp_path, monkeypatch):
    """ablate.main on runs of a few steps of 512 tokens; returns its exit code."""
    monkeypatch.setattr(ablate.signal, "signal", lambda *args: None)
    monkeypatch.setattr(ablate, "find_device", lambda argv: ("cpu", "fp32", False))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*args, extras="key_offset", steps=4):
        base = f"{' '.join(SMALL)} --data_dir {small_data} --extras {extras} --steps {steps}"
        base += f" --eval_every {steps // 2} --save_every {max(1, steps // 10)}"
        where = ["--runs_dir", str(tmp_path / "runs"), "--results", str(tmp_path / "RESULTS.md")]
        return ablate.main(["tiny", "--base", base, *where, *args])

    return run


@pytest.fixture
def quick(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(QUICK)
    monkeypatch.setattr(ablate, "ROOT", tmp_path)


def lines_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "RESULTS.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------- the statistics


def test_the_verdict_by_hand():
    base = {0: 1.10, 1: 1.20, 2: 1.30}
    # differences -0.08, -0.10, -0.12: mean -0.10, deviations 0.02, 0, -0.02, so that
    # sd = sqrt((0.0004 + 0 + 0.0004) / 2) = 0.02, and 0.10 > 2 x 0.02
    mean, sd, word = ablate.verdict(base, {0: 1.02, 1: 1.10, 2: 1.18})
    assert (mean, sd, word) == (pytest.approx(-0.10), pytest.approx(0.02), "better")
    assert ablate.verdict(base, {0: 1.22, 1: 1.30, 2: 1.38})[2] == "worse"
    # differences -0.02, -0.10, -0.03: mean -0.05, sd 0.0436: not above 0.0872, although the
    # mean's own standard error, 0.0252, is passed
    mean, sd, word = ablate.verdict(base, {0: 1.08, 1: 1.10, 2: 1.27})
    assert mean == pytest.approx(-0.05) and sd == pytest.approx(0.04359, abs=1e-5)
    assert word == "within 2 sd" and abs(mean) > 1.9 * sd / math.sqrt(3)
    # by seed: the same numbers for other seeds are another verdict
    assert ablate.verdict(base, {2: 1.02, 1: 1.10, 0: 1.18})[2] == "within 2 sd"
    assert ablate.verdict(base, base)[2] == "within 2 sd"  # no spread, no difference


def test_few_seeds_have_no_verdict():
    word = "no verdict: 2 of 3 seeds"
    assert ablate.verdict({0: 2.0, 1: 2.0, 5: 2.0}, {0: 1.0, 1: 1.0, 7: 1.0})[2] == word
    mean, sd, word = ablate.verdict({0: 2.0}, {0: 1.5})
    assert mean == -0.5 and math.isnan(sd) and word == "no verdict: 1 of 3 seeds"
    assert math.isnan(ablate.verdict({}, {0: 1.5})[0])


def test_how_often_chance_passes_is_as_the_docstring_says():
    """A change that does nothing, many times, with three and with five seeds."""
    rng = random.Random(0)
    draw = lambda n: {seed: rng.gauss(0, 1) for seed in range(n)}
    for n, share in ((3, 0.074), (5, 0.0115)):
        words = [ablate.verdict(draw(n), draw(n))[2] for _ in range(4000)]
        passes = sum(word in ("better", "worse") for word in words)
        assert passes / 4000 == pytest.approx(share, rel=0.3)


def row(name, changed, seed, bpb, **more) -> dict:
    val = [[0, 3.0], [1000, 2.0], [2000, 1.5], [4000, bpb]]
    facts = dict(preset="tiny", base_options="--steps 4", device="cpu", torch="2", commit="abc")
    facts |= dict(date="2026-01-01", at_once=1, tokens_per_s=100.0 + seed, options="--lr 1")
    facts |= dict(base={"lr": 1.0, "data_fingerprint": "f00d", "dtype": "fp32"}, val=val)
    return facts | dict(name=name, changed=changed, seed=seed) | more


def test_the_table():
    rows = [row("low lr", {"lr": 0.1}, seed, 1.3 - 0.1 * seed) for seed in (0, 1, 2)]
    rows += [row("base", {}, seed, 1.4 - 0.1 * seed + 0.01 * seed) for seed in (0, 1, 2)]
    rows += [row("low lr", {"lr": 0.1}, 2, 1.05, commit="def")]  # again: the newer counts
    text = ablate.render(rows)
    cells = [
        [c.strip() for c in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith(("| base", "| low"))
    ]
    assert cells[0][:5] == ["base", "0 1 2", "2.0000", "1.5000", "1.3100 ± 0.0900"]
    # 1.3, 1.2, 1.05 - 1.4, 1.31, 1.22 = -0.1, -0.11, -0.17: mean -0.1267, sd 0.0379
    assert cells[1][5:7] == ["-0.1267 ± 0.0379", "better"]
    assert cells[1][7:] == ["101", "abc def", "2026-01-01"]
    assert "- low lr: `--lr 1`" in text and "bpb at 1K" in text and "data f00d" in text
    assert "| n/a ± n/a  |" in ablate.render(rows[:1])  # without a base
    # another base or device is another table; a field added since, at its default, is not
    others = [
        row("base", {}, 0, 1, device="H100"),
        row("base", {}, 0, 1, base={"lr": 2.0} | rows[0]["base"] | {"seq_len": 9}),
    ]
    others += [row("base", {}, 3, 1.2, base=rows[0]["base"] | {"warmup": 40})]
    assert ablate.render(rows + others).count("\n## ") == 3


def test_a_gpu_has_one_run_at_a_time(monkeypatch):
    config = ablate.AblateConfig(at_once=2)
    assert ablate.find_slots(config, is_cuda=False) == [{"OMP_NUM_THREADS": "1"}] * 2
    monkeypatch.setattr(ablate.torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert ablate.find_slots(config, is_cuda=True) == [{"CUDA_VISIBLE_DEVICES": "0"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6")
    slots = ablate.find_slots(ablate.AblateConfig(), is_cuda=True)
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["3", "5", "6"]


# ---------------------------------------------------------------- the runs

CHANGES = [
    "--change",
    "values: --extras value_embeds key_offset",
    "--change",
    "diverges: --optimizer adamw --lr 1e30",
]


def test_side_by_side_and_a_failure_costs_its_own_line(ablation, quick, tmp_path, capsys):
    assert ablation(*CHANGES, "--seeds", "0", "3", "--at_once", "2") == 1
    out = capsys.readouterr().out
    assert len(re.findall(r"diverges, seed [03]: failed .* 1: error: the loss is not", out)) == 2
    rows = lines_of(tmp_path)
    assert sorted((r["name"], r["seed"]) for r in rows) == [
        ("base", 0),
        ("base", 3),
        ("values", 0),
        ("values", 3),
    ]
    assert rows[0]["val"] == [[0, 3.0], [1024, 2.0], [2048, 1.0]] and rows[0]["tokens_per_s"] == 7
    both = next(r for r in rows if r["name"] == "values")
    assert both["changed"] == {"extras": ["key_offset", "value_embeds"]}
    assert "seed" not in both["base"]
    assert all(r["commit"] and r["torch"] and r["date"] and r["at_once"] == 2 for r in rows)
    times = [
        json.loads(path.read_text().splitlines()[-1])
        for path in tmp_path.glob("runs/*/metrics.jsonl")
    ]
    at_once = [sum(a["begin"] <= b["begin"] < a["end"] for a in times) for b in times]
    assert max(at_once) == 2
    assert "diverges" not in (tmp_path / "RESULTS.md").read_text()


def test_a_run_is_not_made_twice(ablation, quick, tmp_path, capsys):
    values = CHANGES[:2]
    assert ablation(*values, "--seeds", "0") == 0
    rows = lines_of(tmp_path)
    assert len(rows) == 2 and "has been run" not in capsys.readouterr().out
    # said otherwise it is the same run
    same = ["--change", "values: --extras key_offset value_embeds --warmup 2", "--seeds", "0"]
    assert ablation(*same) == 0
    assert lines_of(tmp_path) == rows and capsys.readouterr().out.count("has been run") == 2
    # another seed is another run
    assert ablation(*values, "--seeds", "0", "1") == 0
    assert len(lines_of(tmp_path)) == 4 and capsys.readouterr().out.count("has been run") == 2
    # against another base it is not run again either, but stands in that table too
    swap = ["--change", "no values: --extras key_offset", "--seeds", "0"]
    assert ablation(*swap, extras="value_embeds key_offset") == 0
    assert capsys.readouterr().out.count("has been run") == 2 and len(lines_of(tmp_path)) == 6
    assert (tmp_path / "RESULTS.md").read_text().count("\n## ") == 2
    assert len(list(tmp_path.glob("runs/*.log"))) == 4
    assert ablation(*swap, extras="value_embeds key_offset") == 0  # and there only once
    assert len(lines_of(tmp_path)) == 6
    # unless asked
    assert ablation(*values, "--seeds", "0", "--again") == 0
    assert len(lines_of(tmp_path)) == 8 and len(list(tmp_path.glob("runs/*.log"))) == 6


@pytest.mark.slow
def test_real_runs_go_on_after_a_kill(ablation, tmp_path, monkeypatch, capsys):
    """With train.py itself: stopped after the base's first checkpoint, then the same command."""
    monkeypatch.undo()
    monkeypatch.setattr(ablate.signal, "signal", lambda *args: None)
    args = ["--change", "values: --extras value_embeds", "--seeds", "5"]
    honest = time.sleep

    def stop(seconds):
        honest(seconds)
        if list(tmp_path.glob("runs/base*/checkpoints/step_*/MANIFEST.json")):
            sys.exit(143)

    monkeypatch.setattr(ablate.time, "sleep", stop)
    with pytest.raises(SystemExit):
        ablation(*args, steps=200)
    (log,) = tmp_path.glob("runs/*.log")
    assert "stopped by SIGTERM" in log.read_text() and not (tmp_path / "RESULTS.jsonl").exists()
    monkeypatch.setattr(ablate.time, "sleep", honest)
    assert ablation(*args, steps=200) == 0
    assert "resumed at step" in log.read_text()
    rows = lines_of(tmp_path)
    assert [r["name"] for r in rows] == ["base", "values"]
    for r in rows:
        assert [tokens for tokens, _ in r["val"]] == [0, 51_200, 102_400]
        assert r["val"][0][1] > r["val"][-1][1] > 1 and r["tokens_per_s"] > 0
        assert r["device"] == "cpu" and r["base"]["dtype"] == "fp32"
    assert rows[0]["val"][-1][1] != rows[1]["val"][-1][1]
    table = (tmp_path / "RESULTS.md").read_text()
    assert re.search(r"\| values +\| 5 +\| .*no verdict: 1 of 3 seeds", table)


@pytest.mark.parametrize(
    "args, words",
    [
        ([], "give one --change"),
        (["--change", "a --lr 1"], 'is not "NAME: --OPTION VALUE ..."'),
        (["--change", "base: --lr 1"], "NAME not being base"),
        (["--change", "a: --warmup 2"], "leaves the base as it is"),
        (["--change", "a: --steps 9"], "'a' trains on 4,608 tokens, the base on 2,048"),
        (["--change", "a: --warmup 1", "--seeds", "1", "1"], "give each seed once"),
        (["--change", "a: --warmup 1", "--at_once", "-1"], "must be 0 or more, --threads"),
    ],
)
def test_mistakes_are_refused_before_the_first_run(args, words, ablation, tmp_path, capsys):
    with pytest.raises((ablate.UsageError, SystemExit)) as caught:
        ablation(*args)
    told = capsys.readouterr().err if caught.type is SystemExit else str(caught.value)  # by tyro
    assert words in told and getattr(caught.value, "exit_code", caught.value.args[0]) == 2
    assert not (tmp_path / "runs").exists()
