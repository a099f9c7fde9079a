"""benchmarks/scaling.py, law.py and tried.py: a law finds what it was made from and knows how sure
it is, the verdict by hand, chains of runs, and ideas that change nothing where they are neutral."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
pytest.importorskip("scipy")
import law
import scaling

from config import UsageError
from instruments.run import forecast
from machinery.log import read_jsonl

TRUE = dict(E=0.7, A=30.0, a=0.3, B=900.0, b=0.4)


def rows_of(noise: float, seed: int = 0, text: str = "", factor: float = 1.0) -> list[dict]:
    """Runs of a world in which the law is true."""
    rng, rows = np.random.default_rng(seed), []
    for n in (1e6, 3e6, 1e7, 3e7):
        for d in (1e7, 4e7, 1.6e8, 6.4e8):
            loss = factor * (TRUE["E"] + TRUE["A"] * n ** -TRUE["a"] + TRUE["B"] * d ** -TRUE["b"])
            row = dict(weights=n, tokens=d, bpb=loss * math.exp(noise * rng.standard_normal()))
            rows.append(row | ({"text": text} if text else {}))
    return rows


def test_the_law_finds_the_constants_of_a_world_in_which_it_holds():
    fitted = law.Law(rows_of(0.0), draws=0)
    for found, true in zip(fitted.constants(), TRUE.values()):
        assert found == pytest.approx(true, rel=0.02)


def test_a_text_has_its_factor():
    rows = rows_of(0.0, text="one") + rows_of(0.0, text="other", factor=0.9)
    fitted = law.Law(rows, draws=0)
    assert math.exp(fitted.p[5]) == pytest.approx(0.9, abs=0.001)
    one, other = (fitted.log_loss(fitted.p, 2e7, 2e8, text) for text in (0, 1))
    assert math.exp(other - one) == pytest.approx(0.9, abs=0.001)


def test_an_interval_holds_at_least_as_often_as_it_says_and_is_of_use():
    """A run twice as large in both, in 12 worlds with 1% of luck: 90% is meant; fewer than 9 of 12
    would happen once in 40 times."""
    inside, widths = 0, []
    for seed in range(12):
        fitted = law.Law(rows_of(0.01, seed), draws=30)
        luck = 0.01 * np.random.default_rng(100 + seed).standard_normal()
        n, d = 6e7, 1.28e9
        truth = TRUE["E"] + TRUE["A"] * n ** -TRUE["a"] + TRUE["B"] * d ** -TRUE["b"]
        _, low, high = fitted.predict(n, d)
        inside += low <= truth * math.exp(luck) <= high
        widths.append(high / low - 1)
    assert inside >= 9 and np.mean(widths) < 0.2


def test_the_best_size_is_where_the_law_is_lowest():
    fitted = law.Law(rows_of(0.0), draws=0)
    N, D = law.best_size(fitted, 1e17)
    assert 6 * N * D == pytest.approx(1e17)
    for other in (N / 1.5, N * 1.5):
        at_other = fitted.log_loss(fitted.p, other, 1e17 / 6 / other)
        assert fitted.log_loss(fitted.p, N, D) < at_other


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([8.0, 6.0, 5.0, 4.5], "worse"),
        ([8.0, 6.0, 4.0, 3.0], "worse, fades"),
        ([8.0, 4.0, 2.0, 0.5], "no difference (luck: 1.4%)"),
        ([0.0, -2.0, -3.0, -4.0], "better"),
        ([0.0, 0.0, 0.0, -4.0], "better at the last only"),
        ([5.0, math.nan, math.nan, math.nan], "not all runs are made"),
    ],
)
def test_the_verdict(changes, said):
    assert law.verdict(changes, [0.5] * 4)[1] == said


def test_steps_to_a_loss_lie_on_the_line_between_two_runs():
    runs = [(2048 * 100, 1.4), (2048 * 400, 1.0)]
    assert law.steps_to(runs, 1.4) == pytest.approx(100) and law.steps_to(runs, 0.98) is None
    assert 400 < law.steps_to(runs, 0.995) < 410
    assert law.steps_to(runs, (1.4 * 1.0) ** 0.5) == pytest.approx(200)


# ---------------------------------------------------------------- the runs


class FakeJob(scaling.Job):
    """Its command writes what a run would, or fails."""

    @property
    def command(self):
        if self.name == "fails":
            return [sys.executable, "-c", "raise SystemExit('no luck')"]
        record = json.dumps(dict(full_val_bpb=1.0 + self.tokens / 1e9, step_s=2.0))
        after = str(self.after.run_dir / "metrics.jsonl") if self.after else "/dev/null"
        code = (
            f"import pathlib; p = pathlib.Path({str(self.run_dir)!r}); p.mkdir()\n"
            f"open({after!r}); (p / 'metrics.jsonl').write_text({record!r} + chr(10))"
        )
        return [sys.executable, "-c", code]


@pytest.fixture
def somewhere(tmp_path, small_data, monkeypatch):
    monkeypatch.setattr(scaling, "ROWS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(scaling, "RUNS", str(tmp_path / "runs"))
    return str(small_data)


def fake_chain(name, data, horizons=(2**18, 2**19)):
    job, jobs = None, []
    for tokens in horizons:
        job = FakeJob(name, "", "", 2, tokens, data=data, after=job)
        jobs.append(job)
    return jobs


def test_a_run_is_made_once_and_after_the_shorter_one(somewhere):
    jobs = fake_chain("base", somewhere)
    assert scaling.run(jobs, at_once=2) == 0
    rows = read_jsonl(scaling.ROWS, bool)
    assert [row["tokens"] for row in rows] == [2**18, 2**19]
    assert {row["seconds"] for row in rows} == {2.0} and rows[0]["weights"] > 12 * 2 * 128**2
    assert scaling.run(jobs, at_once=2) == 0 and len(read_jsonl(scaling.ROWS, bool)) == 2


def test_rows_of_another_machine_or_text_do_not_count(somewhere):
    jobs = fake_chain("base", somewhere)
    scaling.run(jobs, at_once=1)
    rows = read_jsonl(scaling.ROWS, bool)
    assert all(scaling.has_row(job, rows) for job in jobs)
    for fact in ("machine", "fingerprint"):
        others = [row | {fact: "another"} for row in rows]
        assert not any(scaling.has_row(job, others) for job in jobs)
        assert law.newest(others + rows) == rows and law.newest(rows + others) == others


def test_a_run_that_fails_costs_those_that_go_on_from_it_and_no_more(somewhere, capsys):
    jobs = fake_chain("fails", somewhere) + fake_chain("base", somewhere)
    assert scaling.run(jobs, at_once=1) == 2
    assert {row["name"] for row in read_jsonl(scaling.ROWS, bool)} == {"base"}
    assert "failed with exit code 1: no luck" in capsys.readouterr().out


def test_every_run_has_options_that_train_py_takes():
    jobs = [job for part in scaling.PARTS.values() for job in part()]
    folders = {job.run_dir for job in jobs}
    assert len(folders) == len({json.dumps(job.key) for job in jobs})
    for job in jobs:
        train = job.preset.train
        tokens = train.steps * train.tokens_per_step
        assert job.tokens - train.tokens_per_step < tokens <= job.tokens
        if job.after:  # up to there the two runs are one
            kept = int(job.command[-1].rpartition("_")[2])
            assert 0 < kept <= job.after.preset.train.steps
            assert job.command[-1].startswith(str(job.after.run_dir))


def test_a_part_that_does_not_exist_is_one_sentence():
    for words in ([], ["grid", "nothing"], ["2"]):
        with pytest.raises(UsageError, match="give one or more of grid"):
            scaling.main(words)


@pytest.mark.parametrize("idea", ["smear", "scales", "backout", "nanochat", "head_gates"])
def test_an_idea_changes_nothing_where_it_is_neutral_and_something_where_it_is_not(idea):
    """In a process of its own, as an idea takes the place of a part of model.py."""
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "benchmarks")!r}]
import torch, model, tried
from config import GPTConfig
config = GPTConfig(
    seq_len=24, vocab_size=64, n_layer=3, n_embd=48, n_head=2, n_kv_head=2, head_dim=24,
    mlp_hidden=96, extras=("key_offset", "value_embeds"),
)
torch.manual_seed(0)
usual = model.GPT(config)
usual.init_weights()
for p in usual.parameters():
    p.data += 0.1 * torch.randn_like(p)
tried.try_out({idea!r})
changed = model.GPT(config)
changed.init_weights()
changed.load_state_dict(usual.state_dict(), strict=False)
new = dict(item for item in changed.named_parameters() if model.kind_of(item[0]) in tried.NEW)
begun = [p.clone() for p in new.values()]
for name, p in new.items():
    p.data.fill_(1.0 if name == "residual" else 0.0)
idx = torch.randint(0, 64, (2, 25))
loss = lambda m: m(idx[:, :-1], idx[:, 1:])
assert new and abs(loss(changed) - loss(usual)) < 1e-5, (loss(changed), loss(usual))
for p, value in zip(new.values(), begun):
    p.data = value + 0.05
assert abs(loss(changed) - loss(usual)) > 1e-4
loss(changed).backward()
assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in changed.parameters())
assert sum(map(len, changed.param_groups().values())) == len(list(changed.parameters()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- what a dollar buys


def test_the_forecast_has_the_law_of_the_published_runs():
    fitted, found = law.Law(read_jsonl(law.HERE / "PUBLISHED.jsonl", bool), draws=0), forecast.law()
    for name, value in zip("EAaBb", fitted.constants()):
        assert found[name] == pytest.approx(value, rel=1e-3)
    assert found["runs"] == len(fitted.rows) and found["text"] == fitted.texts[1]
    N, D = law.shape_of("d20")
    guess, low, high = forecast.predict(N, D)
    assert low < guess < high < 1.03 * guess
    assert guess == pytest.approx(math.exp(fitted.log_loss(fitted.p, N, D, 1)), rel=1e-4)
