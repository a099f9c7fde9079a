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
from flops import CARDS, mfu
from instruments.run import forecast
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
    lines = {line.split()[0]: line for line in page.splitlines()}
    number = lambda line, after: as_number(lines[line].split(after)[1].split()[0])
    return dict(
        rows=int(lines["step"].split()[1]),
        ranks=int(lines["step"].split("accumulated x ")[1].split()[0]),
        hours=number("time", "estimate: "),
        dollars=number("time", "validation; "),
        disk=number("disk", "disk"),
    )


def test_a_forecast_needs_no_card_and_follows_the_one_that_is_asked_for():
    """The price is of one GPU: eight of them for an eighth of the time cost as much as one."""
    h100 = numbers_of("d12", "--gpu", "H100", "--usd_per_hour", "2")
    assert h100["rows"] == 64 and h100["ranks"] == 1
    assert h100["dollars"] == pytest.approx(2 * h100["hours"], abs=0.02)
    small = numbers_of("d12", "--gpu", "4090")  # 24 GB: fewer rows, and slower
    assert small["rows"] < 32 and small["hours"] > 4 * h100["hours"]
    assert numbers_of("d12", "--gpu", "h200")["hours"] < h100["hours"]
    eight, one = (numbers_of("d24", "--gpu", name) for name in ("8xH100", "H100"))
    assert eight["ranks"] == 8
    assert eight["hours"] == pytest.approx(one["hours"] / 8, rel=0.02)
    assert eight["dollars"] == pytest.approx(one["dollars"], rel=0.02)
    here = forecast.page(config.PRESETS["d12"], replace(forecast.parse_gpus("8xH100"), **ON_CPU))
    assert " hours without validation\n" in here and "$" not in here


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
        with pytest.raises((UsageError, SystemExit)) as error:
            eval.main(["plan", "d12", *words])
        assert getattr(error.value, "exit_code", getattr(error.value, "code", 0)) == 2


def test_train_plans_for_this_machine_and_its_data(small_data, capsys):
    words = ["tiny", "--plan", "--peak_tflops", "1", "--data_dir", str(small_data)]
    given = cli.parse("train.py", "train", words)
    world = forecast.parse_gpus("H100")
    assert forecast.print_plan(given, replace(world, rank=1)) == 0 and not capsys.readouterr().out
    assert forecast.print_plan(given, world) == 0
    out = capsys.readouterr().out
    assert "1 x H100" in out and " x 64 tokens" in out and f"data      {small_data}: " in out
    assert "but the same text teaches little" in out


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
    """Endless bandwidth leaves the matmuls and attention, an endless peak the traffic: the step."""
    decided, timed, model = parts_of_a_step(preset)
    arithmetic = timed(989e12, 1e12)
    traffic = timed(1e30, 3.35)
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


def depths_of(*words: str) -> tuple[dict[int, list[float]], int]:
    """Of each depth its tokens per weight, and the loss; the depth that is named."""
    text = forecast.page_of(["d12", "--gpu", "H100", *words])
    rows = re.findall(r"^ +d(\d+) +\S+ +([\d.]+) +([\d.]+)$", text, re.MULTILINE)
    found = {int(depth): [float(x) for x in cells] for depth, *cells in rows}
    last = r": python prepare_data.py (d(\d+) .*) && torchrun --nproc_per_node=\d train.py \1$"
    return found, int(re.search(last, text)[2])


def test_dollars_buy_tokens_at_each_depth():
    """As many as the run of that depth has for what it costs, and their loss."""
    rows, best = depths_of("--usd", "50", "--usd_per_hour", "2")
    assert list(rows) == list(range(4, 39, 2))  # d40 has no room
    losses = {depth: loss for depth, (_, loss) in rows.items()}
    assert losses[best] == min(losses.values()) and best > 12
    assert depths_of("--usd", "5")[1] < best
    text = forecast.page_of(["d12", "--gpu", "H100", "--usd_per_hour", "1000"])
    dollars, guess = (re.search(f"{x}([\\d.]+)", text)[1] for x in (r"validation; \$", "guess: "))
    rows, _ = depths_of("--usd", dollars, "--usd_per_hour", "1000")
    assert rows[12] == pytest.approx([10.5, float(guess)], abs=0.01)


def test_what_the_law_does_not_speak_of_has_no_loss():
    for words in (("tiny",), ("d12", "--n_head", "12", "--n_kv_head", "12", "--head_dim", "64")):
        assert "a guess" not in forecast.page_of([*words, "--gpu", "H100"])
        with pytest.raises(UsageError, match="--usd 50"):
            forecast.page_of([*words, "--gpu", "H100", "--usd", "50"])
    assert forecast.on_the_dial(config.find_preset("d16"))


@pytest.mark.parametrize("depth", [1, 2, 7, 12, 33, 99])
def test_every_depth_is_a_preset(depth):
    """Whole heads, also of an odd one; whole rows; enough data; and the batch that 10.5 tokens per
    weight ask for, counted in the model itself."""
    preset = find_preset(f"d{depth}")
    assert preset == config.preset_of_depth(depth)
    model, batch = preset.model, preset.train.tokens_per_step
    assert model.n_head * model.head_dim == model.n_embd == 128 * ((depth + 1) // 2)
    assert 0 <= model.n_embd - 64 * depth <= 64 and model.mlp_hidden == 4 * model.n_embd
    assert batch % model.seq_len == 0
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


@pytest.mark.parametrize("word", ["d0", "d100", "D12", "d٣"])
def test_other_words_get_the_nearest_name(word):
    assert find_preset(word) is None
    with pytest.raises(UsageError, match=f"there is no preset {word!r}.*all depths up to"):
        cli.parse("train.py", "train", [word])
    with pytest.raises(UsageError, match="did you mean tiny"):
        cli.parse("train.py", "train", ["tyni"])
