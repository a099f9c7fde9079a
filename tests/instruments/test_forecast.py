"""instruments/run/forecast.py: what `eval.py plan` adds up and prints."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import config
import eval
from config import UsageError
from flops import CARDS, find_card, find_peak, mfu
from instruments.run import forecast
from machinery import cli, plan


def test_a_card_has_the_memory_that_programs_find_on_it():
    """Its "total capacity", in GiB, in the out-of-memory messages that people post."""
    posted = {
        "NVIDIA H100 80GB HBM3": 79.2,
        "NVIDIA A100-SXM4-40GB": 39.5,
        "NVIDIA A100-SXM4-80GB": 79.25,
        "NVIDIA GeForce RTX 4090": 23.64,
    }
    for name, gib in posted.items():
        memory = forecast.parse_gpus(name).memory_bytes
        assert memory / 2**30 == pytest.approx(gib, rel=0.01), name
    assert find_card("NVIDIA H100 PCIe").memory_tb_s < find_card("NVIDIA H100 NVL").memory_tb_s


def numbers_of(preset: str, *argv: str) -> dict:
    """What the page says, as numbers."""
    page = forecast.page_of([preset, *argv])
    lines = {line.split()[0]: line for line in page.splitlines()}
    number = lambda line, after: float(lines[line].split(after)[1].split()[0].strip("$,%"))
    return dict(
        rows=int(lines["step"].split()[1]),
        ranks=int(lines["step"].split("accumulated x ")[1].split()[0]),
        hours=number("time", "estimate: "),
        dollars=number("time", "validation; "),
        mfu=number("speed", "tok/s, "),
        disk=number("disk", "disk"),
    )


def test_a_forecast_needs_no_card_and_follows_the_one_that_is_asked_for():
    """The price is of one GPU: eight of them for an eighth of the time cost as much as one."""
    h100 = numbers_of("d12", "--gpu", "H100", "--usd_per_hour", "2")
    assert h100["rows"] == 32 and h100["ranks"] == 1
    assert h100["dollars"] == pytest.approx(2 * h100["hours"], abs=0.02)
    small = numbers_of("d12", "--gpu", "4090")  # 24 GB: fewer rows, and slower
    assert small["rows"] < 32 and small["hours"] > 4 * h100["hours"]
    assert numbers_of("d12", "--gpu", "h200")["hours"] < h100["hours"]
    eight, one = (numbers_of("d24", "--gpu", name) for name in ("8xH100", "H100"))
    assert eight["ranks"] == 8
    assert eight["hours"] == pytest.approx(one["hours"] / 8, rel=0.02)
    assert eight["dollars"] == pytest.approx(one["dollars"], rel=0.02)
    on_cpu = SimpleNamespace(device=torch.device("cpu"), world_size=4)
    assert forecast.cost(3.0, 2.0, on_cpu).startswith("$6.00 ")


def test_an_fsdp_plan_leaves_room_for_the_tables_that_are_whole_during_a_step():
    wide = ("--vocab_size", "49152")  # 8 rows without their room
    assert numbers_of("d24", "--gpu", "8x4090", *wide)["rows"] == 6


def test_a_datasheet_tells_the_peak_of_bf16_only():
    card = forecast.parse_gpus("H100")
    fp32 = replace(card, dtype=torch.float32)
    assert find_peak(card) == 989e12 and find_peak(fp32) is None
    assert find_peak(fp32, tflops=67.0) == 67e12


def test_a_token_takes_two_bytes_of_the_disk_and_four_in_a_large_vocabulary():
    tokens = 1000 * config.PRESETS["d12"].train.tokens_per_step
    for vocab_size, size in ((65_536, 2), (131_072, 4)):
        options = ("--gpu", "H100", "--steps", "1000", "--vocab_size", str(vocab_size))
        assert numbers_of("d12", *options)["disk"] == pytest.approx(size * tokens / 1e9, abs=0.01)


@pytest.mark.parametrize("asked", ["H1000", "0xH100", "8x"])
def test_a_forecast_of_an_unknown_card_names_the_known_ones(asked):
    with pytest.raises(UsageError) as error:
        eval.main(["plan", "d12", "--gpu", asked])
    assert asked in str(error.value) and "GB200" in str(error.value)


def test_validation_costs_what_it_scores():
    """d12 holds out about 1.2M tokens, fewer than --eval_tokens asks for; and all of it at the
    end. A preset that does not say how much it prepares is charged what it asks for."""
    d12, tiny = (config.PRESETS[name] for name in ("d12", "tiny"))
    held_out = 1.2e9 / 999  # one part in a thousand of the text
    assert forecast.validated(d12, 2206) == pytest.approx(
        (2 + 2205 // 250 + 1) * held_out, rel=0.03
    )
    few = replace(d12, run=replace(d12.run, eval_tokens=1000))
    assert forecast.validated(few, 2206) == pytest.approx(10 * 1000 + held_out, rel=0.03)
    rare = replace(tiny, run=replace(tiny.run, eval_every=0))
    assert forecast.validated(rare, 1000) == 3 * 40_960
    share = forecast.estimate(d12, forecast.parse_gpus("H100"), 989e12).validation
    assert 0.002 < share < 0.006


def test_the_options_of_train_are_read_and_others_refused():
    assert numbers_of("d12", "--gpu", "H100", "--micro_batch", "4")["rows"] == 4
    for words in (["--gpus", "H100"], ["--usd", "-1"], ["--steps", "x"]):
        with pytest.raises((UsageError, SystemExit)) as error:
            eval.main(["plan", "d12", *words])
        assert getattr(error.value, "exit_code", getattr(error.value, "code", 0)) == 2


def test_train_plans_for_this_machine(capsys):
    given = cli.parse("train.py", "train", ["tiny", "--plan", "--peak_tflops", "1"])
    world = forecast.parse_gpus("H100")
    assert forecast.show(given, replace(world, rank=1)) == 0 and not capsys.readouterr().out
    assert forecast.show(given, world) == 0
    assert "1 x H100" in capsys.readouterr().out


# ------------------------------------------------------------------- the sum of a step


def parts_of_a_step(preset: str) -> tuple:
    """The decisions for an H100; a function: peak, TB/s -> seconds of a step; the model."""
    model = config.PRESETS[preset].model
    decided = plan.make_plan(config.PRESETS[preset], forecast.parse_gpus("H100"))
    timed = lambda peak, tb_s: forecast.step_s(
        decided, model, CARDS["H100"]._replace(memory_tb_s=tb_s), peak
    )
    return decided, timed, model


@pytest.mark.parametrize("preset", ["d12", "biatron-345m"])
def test_a_forecast_adds_up_arithmetic_and_traffic(preset):
    """With endless bandwidth the matmuls and the attention are left, with an endless peak the
    traffic; together they are the step."""
    decided, timed, model = parts_of_a_step(preset)
    arithmetic, traffic = timed(989e12, 1e12), timed(1e30, 3.35)
    assert timed(989e12, 3.35) == pytest.approx(arithmetic + traffic)
    needed = decided.tokens_per_step * forecast.built(model).flops_per_token(causal=True) / 989e12
    assert 1.3 * needed < arithmetic < 2.5 * needed  # no kernel reaches the peak
    assert timed(2 * 989e12, 1e12) == pytest.approx(arithmetic / 2)
    assert timed(1e30, 6.7) == pytest.approx(traffic / 2)


def test_a_forecast_counts_the_micro_batches_that_are_taken():
    """256 rows by 3 are 86 micro-batches, the last with one row that counts: as long as 258."""
    decided, _, model = parts_of_a_step("d12")
    some = replace(decided, micro_batch=3)
    full = replace(some, tokens_per_step=258 * decided.seq_len)
    assert some.rows_per_step == 256 and some.grad_accum == full.grad_accum == 86
    seconds = [forecast.step_s(each, model, CARDS["H100"], 989e12) for each in (some, full)]
    assert seconds[0] == seconds[1]


def test_a_forecast_is_near_what_was_published():
    """nanochat's model of this shape reached 49.5% on one GPU: see the claims in test_flops.py."""
    decided, timed, model = parts_of_a_step("d20")
    tokens_per_s = decided.tokens_per_step / timed(989e12, 3.35)
    assert mfu(tokens_per_s, forecast.built(model).flops_per_token(), 989e12) == pytest.approx(
        0.495, rel=0.1
    )


# ------------------------------------------------------------------- what a dollar buys


def depths_of(*words: str) -> tuple[str, dict[str, list[str]], str]:
    """The page, the cells of each depth, the depth that it names."""
    text = forecast.page_of([*words, "--gpu", "H100"])
    rows = [line.split() for line in text.splitlines()]
    rows = {row[0]: row for row in rows if re.fullmatch(r"d\d+", row[0])}
    return text, rows, text.splitlines()[-1].split()[1]


def test_dollars_buy_tokens_at_each_depth():
    _, rows, best = depths_of("d12", "--usd", "50", "--usd_per_hour", "2")
    assert len(rows) > 4 and {row[3] for row in rows.values()} == {"25.00"}  # hours
    losses = {depth: float(row[4]) for depth, row in rows.items()}
    assert losses[best] <= min(losses.values()) + forecast.ALIKE
    assert all(losses[d] > losses[best] for d in losses if int(d[1:]) < int(best[1:]))
    _, _, poor = depths_of("d12", "--usd", "5")
    assert int(poor[1:]) < int(best[1:])


@pytest.mark.parametrize("usd", [2, 50, 2000])
def test_the_best_depth_is_found_where_the_formula_looks(usd, monkeypatch):
    """The same as if all depths were planned."""
    named = depths_of("d12", "--usd", str(usd))[2]
    monkeypatch.setattr(forecast, "AROUND", 60)
    assert depths_of("d12", "--usd", str(usd))[2] == named


def test_without_a_budget_it_is_what_the_run_costs():
    text, rows, _ = depths_of("d12")
    cost, guess = (text.split(after)[1].split()[0] for after in ("validation; ", "a guess: "))
    assert f"{cost} buys" in text
    assert rows["d12"][4] == guess and rows["d12"][2] == "10.5"


def test_what_the_law_does_not_speak_of_has_no_loss():
    for words in (("tiny",), ("d12", "--n_head", "12", "--n_kv_head", "12", "--head_dim", "64")):
        assert "a guess" not in depths_of(*words)[0]
        with pytest.raises(UsageError) as error:
            depths_of(*words, "--usd", "50")
        assert "--usd 50" in str(error.value)
    assert forecast.on_the_dial(config.find_preset("d16"))
