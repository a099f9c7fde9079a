"""instruments/run/forecast.py: what `eval.py plan` adds up and prints; and dN, a preset of every
depth, by one rule."""

import re
from dataclasses import replace

import pytest
import torch

import config
import eval
import prepare_data
from config import UsageError, find_preset
from instruments.run import forecast, law
from machinery import cli, plan, trained
from model import GPT


def test_a_card_has_the_memory_that_programs_find_on_it():
    """Its "total capacity", in GiB, in the out-of-memory messages that people post."""
    for name, gib in (("NVIDIA H100 80GB HBM3", 79.2), ("NVIDIA GeForce RTX 4090", 23.64)):
        memory = forecast.parse_gpus(name).memory_bytes
        assert memory / 2**30 == pytest.approx(gib, rel=0.01), name


ON_CPU = dict(device=torch.device("cpu"), dtype=torch.float32, device_name="cpu")
as_number = lambda text: float(text.strip("$,%").replace(",", ""))


def numbers_of(preset: str, *argv: str) -> dict:
    """What the page says, as numbers."""
    page = forecast.page_of([preset, *argv])
    number = lambda before: as_number(re.search(rf"{before} *(\S+)", page)[1])
    return dict(
        rows=number(r"\nstep "),
        ranks=number("accumulated x"),
        hours=number(r"\ntime +an estimate:"),
        dollars=number("validation;"),
        disk=number(r"\ndisk"),
    )


def test_a_forecast_needs_no_card_and_follows_the_one_that_is_asked_for():
    """The price is of one GPU: eight of them for an eighth of the time cost as much as one."""
    h100 = numbers_of("d12", "--gpu", "H100", "--usd_per_hour", "2")
    assert h100["rows"] == 64
    # measured: 537K (benchmarks/RESULTS.md)
    assert " 535K tok/s" in forecast.page_of(["d12", "--gpu", "H100"])
    assert h100["dollars"] == pytest.approx(2 * h100["hours"], abs=0.02)
    small = numbers_of("d12", "--gpu", "4090")  # 24 GB: fewer rows, and slower
    assert small["rows"] < 32 and small["hours"] > 4 * h100["hours"]
    assert numbers_of("d12", "--gpu", "b200")["hours"] < h100["hours"]
    eight, one = (numbers_of("d24", "--gpu", name) for name in ("8xH100", "H100"))
    assert eight["ranks"] == 8
    assert eight["hours"] == pytest.approx(one["hours"] / 8, rel=0.02)
    assert eight["dollars"] == pytest.approx(one["dollars"], rel=0.02)
    here = forecast.page(config.PRESETS["d12"], replace(forecast.parse_gpus("8xH100"), **ON_CPU))
    assert "plan --here" in here and "hours" not in here and "$" not in here


def test_an_fsdp_plan_leaves_room_for_the_tables_that_are_whole_during_a_step():
    # 6 rows without their room
    assert numbers_of("d24", "--gpu", "8x4090", "--vocab_size", "49152")["rows"] == 4


def test_a_token_takes_two_bytes_of_the_disk_and_four_in_a_large_vocabulary():
    tokens = 1000 * config.PRESETS["d12"].train.tokens_per_step
    for vocab_size, size in ((65_536, 2), (131_072, 4)):
        options = ("--gpu", "H100", "--steps", "1000", "--vocab_size", str(vocab_size))
        assert numbers_of("d12", *options)["disk"] == pytest.approx(size * tokens / 1e9, abs=0.01)


def test_the_options_of_train_are_read_and_others_refused():
    assert numbers_of("d12", "--gpu", "H100", "--micro_batch", "4")["rows"] == 4
    cards = [f"--gpu {x}".split() for x in ("H1000", "0xL4", "8x", "H100 --usd 5 --usd_per_hour 0")]
    for words in (*cards, ["--gpus", "H100"], ["--usd", "-1"], ["--steps", "x"]):
        with pytest.raises((UsageError, SystemExit)):
            eval.main(["plan", "d12", *words])


def test_train_plans_for_this_machine_and_its_data(small_data, capsys):
    words = ["tiny", "--plan", "--peak_tflops", "1", "--data_dir", str(small_data)]
    given = cli.parse("train.py", "train", words)
    world = forecast.parse_gpus("H100")
    forecast.print_plan(given, replace(world, rank=1))
    assert not capsys.readouterr().out
    forecast.print_plan(given, world)
    out = capsys.readouterr().out
    assert "1 x H100" in out and " x 64 tokens" in out and f"data      {small_data}: " in out
    assert "but the same text teaches little" in out


def best_for(*words: str) -> tuple[int, float, float, float]:
    """Of the run that is named as the best: depth, billions of tokens, hours, bits per byte."""
    text = forecast.page_of(["d12", "--gpu", "H100", *words])
    last = r"prepare_data.py (d(\d+) --tokens (\S+)B) && torchrun --nproc_per_node=1 train.py \1$"
    _, depth, tokens = re.search(last, text).groups()
    hours = re.search(r"([\d,.]+) hours", text)[1]
    guess = re.search(r"guess: (\S+)", text)[1]
    return int(depth), float(tokens), as_number(hours), float(guess)


def test_dollars_buy_the_depth_that_ends_lowest():
    """By trying all that fit, at the share of the peak that is assumed."""
    depth, tokens, hours, guess = best_for("--usd", "50", "--usd_per_hour", "2")
    assert hours == pytest.approx(25, rel=0.01)
    losses = {}
    for other in range(1, 31):
        model = config.preset_of_depth(other).model
        bought = forecast.SHARE * 989e12 * 25 * 3600 / law.built(model).flops_per_token()
        losses[other] = law.predict("ClimbMix", law.weights_of("ClimbMix", model), bought)
        if other == depth:
            assert tokens * 1e9 == pytest.approx(bought, rel=0.02)
    assert losses[depth] == min(losses.values()) == pytest.approx(guess, abs=1e-3)
    assert best_for("--usd", "5")[0] < depth


def test_what_the_law_does_not_speak_of_has_no_loss():
    for words in (("tiny",), ("d12", "--n_head", "12", "--n_kv_head", "12", "--head_dim", "64")):
        assert "a guess" not in forecast.page_of([*words, "--gpu", "H100"])
        with pytest.raises(UsageError, match="--usd 50"):
            forecast.page_of([*words, "--gpu", "H100", "--usd", "50"])


@pytest.mark.parametrize("depth", [1, 7, 12, 99])
def test_every_depth_is_a_preset(depth):
    """Whole heads, also of an odd one; whole rows; enough data; and the batch that 10.5 tokens per
    weight ask for, counted in the model itself."""
    preset = find_preset(f"d{depth}")
    model, batch = preset.model, preset.train.tokens_per_step
    assert model.n_head * model.head_dim == model.n_embd == 128 * ((depth + 1) // 2)
    assert model.mlp_hidden == 4 * model.n_embd and batch % model.seq_len == 0
    with torch.device("meta"):
        groups = GPT(model).param_groups()
    params = {kind: sum(p.numel() for p in ps) for kind, ps in groups.items()}
    weights = params["matrix"] + params["head"]
    exact = 2**19 * (weights / 110_100_480) ** 0.383
    assert 2**-0.51 < batch / exact < 2**0.51
    trained_on = plan.steps_for(preset.train, params) * batch
    assert trained_on <= cli.count(preset.data.tokens) <= 1.03 * trained_on
    held_out = cli.count(preset.data.tokens) * preset.data.val_fraction
    assert held_out == pytest.approx(1e7, rel=0.05) or depth > 26 or depth < 4
    rule = 0.28 * min(1, (batch / 2**19) ** 0.5 * 110_100_480 / weights)
    assert preset.train.weight_decay == pytest.approx(rule, abs=6e-4)


def test_all_programs_take_any_depth(monkeypatch):
    prepared = []
    monkeypatch.setattr(prepare_data, "prepare", prepared.append)
    assert prepare_data.main(["d16"]) == 0 and prepared[0].data_dir == "data/d16"
    assert (prepared[0].vocab_size, prepared[0].row_len) == (32_768, 2049)
    assert prepared[0].tokens == "2.52B"
    assert trained.find_model("d16") == dict(run_dir="runs/d16")  # eval.py and export.py
    with pytest.raises(UsageError, match=r"no checkpoint at /.*runs/d17.*train.py d17"):
        trained.load_model(trained.EvalConfig(**trained.find_model("d17")), None)
    with pytest.raises(UsageError, match="did you mean tiny"):
        cli.parse("train.py", "train", ["tyni"])


@pytest.mark.parametrize("word", ["d0", "D12", "d٣"])
def test_other_words_get_the_nearest_name(word):
    with pytest.raises(UsageError, match=f"there is no preset {word!r}.*all depths up to"):
        cli.parse("train.py", "train", [word])
