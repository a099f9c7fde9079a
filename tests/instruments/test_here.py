"""instruments/run/choice.py and law.py: what `eval.py plan --here` times, chooses and prints."""

import shlex
from dataclasses import replace

import pytest
import torch
from conftest import logged, look
from plans import small_world
from torch.utils.flop_counter import FlopCounterMode

import config
import eval
import optim
from config import UsageError
from instruments.run import choice, forecast, law
from machinery import cli
from model import GPT


def machine(name: str = "tiny", tokens: int = 10**9, memory: int = 8 * 10**9, peak=None):
    preset = cli.parse("train.py", "train", [name])
    return choice.Place(preset, tokens, 348, small_world(memory_bytes=memory), peak)


def timed_at(on: choice.Place, rate: float) -> list[choice.Timed]:
    """As if every model ran at the same FLOP/s, and all else took equally long."""
    presets = [choice.of_depth(on.preset, depth, 1) for depth in choice.TIMED[on.text]]
    flops = [law.built(preset.model).flops_per_token() for preset in presets]
    return [choice.Timed(each, rate, start=40.0, row=0.02) for each in flops]


@pytest.mark.parametrize("name", ["tiny", "tiny-stock", "d12", "d12-stock"])
def test_the_command_asks_for_the_run_that_was_planned(name):
    on = machine(name)
    for depth in (1, 2, 5, 12):
        for tokens in (1e6, 2.9e6, 3e6, 5e7):
            run = choice.of_depth(on.preset, depth, tokens)
            found = cli.parse("train.py", "train", choice.words_of(run))
            assert (found.model, found.train) == (run.model, run.train)
            took = run.train.steps * run.train.tokens_per_step
            assert abs(took - tokens) < run.train.tokens_per_step or run.train.steps == 1
    assert choice.of_depth(on.preset, 4 if "tiny" in name else 12, 2.048e6).model == on.preset.model


def test_tiny_itself_is_one_of_the_runs_and_longer_ones_have_larger_batches():
    on = machine()
    usual = on.preset.train
    assert choice.of_depth(on.preset, 4, usual.steps * usual.tokens_per_step).train == usual
    batch = lambda tokens: choice.of_depth(on.preset, 4, tokens).train.tokens_per_step
    assert [batch(x) for x in (1, 2e6, 4e6, 16e6, 64e6)] == [2048, 2048, 8192, 8192, 32768]
    long_rows = replace(on.preset, model=replace(on.preset.model, seq_len=3000))
    assert choice.of_depth(long_rows, 4, 2e6).train.tokens_per_step == 3000  # whole rows


def test_a_run_takes_its_time_and_no_other_depth_ends_lower():
    """By an obvious sum, on a machine that runs each model at a power of its FLOPs, and scores it
    at another. More time, a deeper model."""
    on = machine()
    rate_of = lambda flops: 1.5e8 * flops**0.5
    row_of = lambda flops: 1e-5 * flops**0.5
    timed = [
        each._replace(rate=rate_of(each.flops), row=row_of(each.flops)) for each in timed_at(on, 1)
    ]
    deep = []
    for minutes in (5, 480):
        best = choice.best_run(on, timed, minutes)
        assert 0.98 * 60 * minutes < best.seconds <= 60 * minutes * 1.001
        train = best.preset.train
        evals = train.steps / best.preset.run.eval_every + 2
        rows = 80 * evals + 348
        flops = law.built(best.preset.model).flops_per_token()
        seconds = train.steps * choice.work(best.preset) / rate_of(flops) + rows * row_of(flops)
        assert best.seconds == pytest.approx(40 + seconds, rel=1e-3)
        for depth in choice.DEPTHS:
            other = choice.run_of(on, timed, depth, 60 * minutes)
            assert other is None or other.loss >= best.loss
        deep.append(best.preset.model.n_layer)
    assert deep[0] < deep[1]


def test_the_work_of_a_step_has_muons_matmuls():
    """Counted by torch in the step of the optimizer itself."""
    preset = machine().preset
    model = GPT(preset.model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with FlopCounterMode(display=False) as counter:
        for each in optim.build(model.param_groups(), preset.train, preset.model.n_embd):
            each.step()  # AdamW has no matmul
    of_model = preset.train.tokens_per_step * model.flops_per_token()
    assert choice.work(preset) - of_model == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_limits_of_time_text_memory_and_peak():
    def best(minutes: float, rate: float, **limits):
        on = machine(**limits)
        return choice.best_run(on, timed_at(on, rate), minutes)

    week = 7 * 24 * 60
    few = best(week, 3e11, tokens=9 * 10**6)
    assert few.epochs == pytest.approx(choice.EPOCHS, rel=0.01) and few.seconds < 60 * week
    weights = law.weights_of("stdlib", few.preset.model)
    assert weights * config.TOKENS_PER_WEIGHT < choice.EPOCHS * 9 * 10**6
    # less text than any model could use: the smallest is left
    assert best(60, 3e11, tokens=10**5).preset.model.n_layer == 2
    with pytest.raises(UsageError, match="0.9 minutes are too few"):
        best(0.9, 3e11)
    fits = best(week, 3e13, memory=10**9)
    assert fits.plan.save_bytes < 5e8 < best(week, 3e13).plan.save_bytes
    assert best(60, 3e13, peak=2e11).mfu == pytest.approx(choice.MOST, rel=0.15)


def test_a_text_that_is_read_again_is_worth_less_each_time():
    worth = [law.worth(epochs * 1e6, 1e6) / 1e6 for epochs in (0.5, 1, 2, 4, 16, 100)]
    assert worth[:2] == [0.5, 1] and 1.9 < worth[2] < 2 and 3.7 < worth[3] < 4
    assert worth == sorted(worth) and worth[-1] < 1 + law.REREAD


def test_the_law_may_be_further_off_outside_of_its_runs():
    for text, fitted in law.LAWS.items():
        least, most = fitted["weights"]
        tokens = fitted["tokens"][1]
        off = [
            law.margin(text, x, tokens) - fitted["off"] for x in (least, most, least / 2, 4 * most)
        ]
        assert off == pytest.approx([0, 0, fitted["beyond"], 2 * fitted["beyond"]])


@pytest.fixture
def machines(tmp_path, monkeypatch):
    monkeypatch.setattr(forecast, "MACHINES", tmp_path / "machines.md")
    forecast.MACHINES.write_text("# Machines\n\n| a | `train.py x` | 1 | 2 |\n")
    return lambda: forecast.MACHINES.read_text().splitlines()


def test_a_line_is_begun_completed_and_never_doubled(machines):
    forecast.save("CPU", "python train.py x", planned="9K, 1.0 to 1.1")
    assert machines()[-1] == "| CPU | `train.py x` | 9K, 1.0 to 1.1 | - |"
    forecast.save("CPU", "train.py x", planned="8K")
    forecast.save("CPU", "train.py x", found="1.05")
    assert machines()[-1] == "| CPU | `train.py x` | 8K | 1.05 |"
    forecast.save("GPU", "train.py x", found="1.0")
    assert machines()[2] == "| a | `train.py x` | 1 | 2 |" and len(machines()) == 5


WRONG = """--here --minutes 0
--here --minutes soon
--here --minutes 1e9
--here --save
--here --device cuda
--here --device mps
--here --gpu H100
--here --n_layer 7
--here --no-compile
biatron-345m --here
tiny-chat --here
--minutes 60"""


def test_what_is_asked_wrongly_is_refused_before_anything_is_timed(small_data, monkeypatch):
    monkeypatch.setattr(choice, "time_run", lambda *_: pytest.fail("was timed"))
    for words in WRONG.splitlines():
        with pytest.raises((UsageError, SystemExit)):
            eval.main(["plan", *words.split(), "--data_dir", str(small_data)])


@pytest.mark.slow
def test_this_machine_is_timed_and_the_run_is_one_that_it_can_make(
    small_data, tmp_path, monkeypatch, machines, capsys
):
    """Eagerly, in four steps, on one thread: what is timed are real runs of train.py."""
    monkeypatch.setattr(choice, "STEPS", 4)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    text = look(capsys, "plan", "--here", "--data_dir", small_data, "--minutes", 5, "--save")
    command = text.splitlines()[-1].strip()
    assert command.startswith("python train.py tiny ") and "byte of text like stdlib" in text
    preset = cli.parse("train.py", "train", shlex.split(command)[2:])
    assert preset.run.data_dir == str(small_data) and preset.run.run_dir == "runs/tiny_5m"
    assert f"`{command.removeprefix('python ')}`" in machines()[-1]


def test_a_run_that_fails_says_why(small_data, monkeypatch):
    monkeypatch.setattr(choice, "STEPS", -1)
    preset = cli.parse("train.py", "train", ["tiny", "--data_dir", str(small_data)])
    with pytest.raises(UsageError, match="--steps"):
        choice.time_run(machine()._replace(preset=preset), 2, 1e6)


def test_a_finished_run_fills_in_its_line(trained_run, machines):
    from instruments.pages.run_folder import RunFolder

    line = forecast.save_result(RunFolder(trained_run))
    (bpb,) = logged(trained_run, "full_val_bpb")
    assert f" | - | {bpb:.3f} bits per byte after " in line
    assert line in machines() and " | `train.py " in line
