"""`--minutes`: the number of steps follows from the speed, and the run is that of so many steps.

No test here looks at a clock: what a step takes is given (faults.steps_take).
"""

import random
import signal
from dataclasses import replace
from types import SimpleNamespace

import faults
import pytest
from conftest import logged, losses, read_json, train_here
from plans import small_preset, small_world
from test_faults import assert_same_state, checkpoints, status

import train
from config import UsageError
from machinery import plan
from optim import decay_begins, lr_at

MINUTES = ("--steps", 0, "--minutes", 0.08)  # 24 steps of 0.2 s, of which the last 16 decay
AT_SPEED = ("steps_take", 60.0, 0.2)  # the first step counts for nothing


def fork(data, run_dir, *args, code: int = 0, spoil=(AT_SPEED,), **how) -> str:
    return faults.start(data, run_dir, *args, spoil=list(spoil), **how).end(code)


def trainer(run_dir, step: int) -> dict:
    return read_json(run_dir / "checkpoints" / f"step_{step:08d}" / "trainer.json")


def expected(seconds: dict[int, float], minutes: float, decay: float) -> tuple[int, int]:
    """(the step after which the number of steps is fixed, that number), if the steps that are timed
    take so many seconds. A step's time is known when the next one has been taken."""
    for step in range(1, 10**6):
        timed = [s for n, s in seconds.items() if n < step]
        if len(timed) >= 3:
            fitting = round(60 * minutes / (sum(timed) / len(timed)))
            if decay_begins(fitting, decay) <= step:
                enough = range(fitting, 20 * (fitting + step))
                return step, next(n for n in enough if decay_begins(n, decay) >= step)


@pytest.fixture(scope="module")
def planned(small_data, once):
    """The run of 24 steps that was planned that way."""
    make = lambda folder: fork(small_data, folder / "run", "--steps", 24, spoil=())
    return once("planned_24", make) / "run"


def test_the_run_is_that_of_as_many_steps(planned, small_data, tmp_path):
    """To the last bit; what is printed before the number is known has no false one."""
    run_dir = tmp_path / "run"
    text = fork(small_data, run_dir, *MINUTES, "--keep", 1)
    assert "run       as many steps of 512 tokens as fit into 0.08 minutes\n" in text
    assert "disk      at least 4 checkpoints" in text and " epochs" not in text
    assert "\nstep 1/? | " in text and " | 5s left\n" in text
    assert "\nstep 5/24 | " in text and text.count("/?") == 4
    assert text.count("step 8: the number of steps is fixed from here on: 24, which take 5s") == 1
    assert losses(run_dir) == losses(planned)
    assert_same_state(planned, run_dir, 24)
    c = read_json(run_dir / "config.json")
    how = c["schedule"], c["warmup"], c["decay"], c["final_lr"]
    rates = [lr_at(step, 24, *how) for step in range(24)]
    assert logged(run_dir, "lr") == logged(planned, "lr") == rates and len({*rates}) > 6
    assert checkpoints(run_dir) == [8, 24] and trainer(run_dir, 8)["steps"] == 24
    assert (c["steps"], c["minutes"]) == (0, 0.08)  # what this machine's speed has no part in
    assert "tokens in 24 steps" in (run_dir / "report.html").read_text()
    assert "is finished (24 steps)" in fork(small_data, run_dir, *MINUTES)

    with pytest.raises(UsageError, match="minutes is 0.08 there and 0.1 here; "):
        train_here(small_data, run_dir, *MINUTES[:-1], 0.1)
    with pytest.raises(UsageError, match="steps is 24 there and 32 here; .*step[_ ]0*8 "):
        train_here(small_data, run_dir, "--steps", 32)
    stable = run_dir / "checkpoints" / "step_00000008"
    train_here(small_data, tmp_path / "longer", "--steps", 32, "--resume", stable)
    assert max(losses(tmp_path / "longer")) == 32


def test_killed_before_or_after_the_number_is_fixed(planned, small_data, tmp_path):
    """The minutes are those of all processes together; once fixed, no speed changes the number."""
    run_dir = tmp_path / "run"
    for step in (4, 6, 11):
        spoil = [AT_SPEED, ("signal_at", step, signal.SIGTERM)]
        fork(small_data, run_dir, *MINUTES, code=143, spoil=spoil)
        assert status(run_dir)["step"] == step + 1
    assert trainer(run_dir, 12)["steps"] == 24
    text = fork(small_data, run_dir, *MINUTES, "--keep", 1, spoil=[("steps_take", 1.0, 9.0)])
    assert "fixed" not in text and "/?" not in text
    assert checkpoints(run_dir) == [8, 12, 24]  # the decay, what was resumed, the end
    assert losses(run_dir) == losses(planned)
    assert_same_state(planned, run_dir, 24)

    slower = tmp_path / "slower"
    minutes = (*MINUTES[:-1], 0.2)
    spoil = [AT_SPEED, ("signal_at", 5, signal.SIGTERM)]
    fork(small_data, slower, *minutes, code=143, spoil=spoil)
    fork(small_data, slower, *minutes, spoil=[("steps_take", 60.0, 0.4)])
    seconds = {n: 0.2 if n < 7 else 0.4 for n in range(2, 100) if n != 7}
    step, steps = expected(seconds, 0.2, 0.65)
    assert 8 < step < 21 and steps < 60  # which it would have been at the first speed
    assert checkpoints(slower)[-2:] == [step, steps] and max(losses(slower)) == steps


def test_the_first_rank_decides_for_all(planned, small_data, tmp_path):
    """By the second one's clock no step fits."""
    fork(small_data, tmp_path / "run", *MINUTES, world=2)
    assert losses(tmp_path / "run") == pytest.approx(losses(planned), rel=1e-5)


def steps_of(minutes: float, decay: float, seconds) -> tuple[int, int, list[int]]:
    """What fit_to_minutes makes of the seconds that the steps take, one after another: when the
    number is fixed, the number, and what was planned after each step."""
    train_config = small_preset(minutes=minutes, decay=decay).train
    preset = replace(small_preset(), train=train_config)
    fixed = []
    run = SimpleNamespace(
        preset=preset,
        plan=plan.make_plan(preset, small_world()),
        progress=SimpleNamespace(step=0, timed_steps=0, mean_s=0.0),
        checkpoints=SimpleNamespace(keep_step=0),
        log=SimpleNamespace(print=fixed.append),
    )
    planned = []
    timed = []
    while run.progress.step < min(run.plan.steps, 9_999):  # it may have no end
        run.progress.step += 1
        run.progress.timed_steps = len(timed)
        run.progress.mean_s = sum(timed) / max(1, len(timed))
        train.fit_to_minutes(run)
        planned.append(run.plan.steps)
        if run.progress.step > 1:
            timed.append(seconds(run.progress.step))
    assert len(fixed) == 1
    return run.checkpoints.keep_step, run.plan.steps, planned


@pytest.mark.parametrize("decay", [0.0, 0.2, 0.65, 0.8, 0.9])
def test_the_number_is_what_fits(decay):
    """Until it is fixed no step has been taken in the decay of a run of the number that was planned
    then: nothing has depended on it."""
    dice = random.Random(1)
    for case in range(30):
        minutes = dice.uniform(0.01, 3.0)
        drift = dice.choice([0.0, 0.01, -0.002])
        each = {n: dice.uniform(0.3, 0.5) * max(0.1, 1 + drift * n) for n in range(2, 10_000)}
        step, steps, planned = steps_of(minutes, decay, each.get)
        assert (step, steps) == expected(each, minutes, decay), case
        assert planned[step - 1 :] == [steps] * (steps - step + 1) and len(planned) == steps
        assert decay_begins(steps, decay) == step
        assert all(decay_begins(n, decay) > i for i, n in enumerate(planned[: step - 1], 1))


@pytest.mark.parametrize("decay", [0.0, 0.65, 0.9])
def test_a_step_longer_than_the_whole_time_comes_to_an_end(decay):
    step, steps, _ = steps_of(0.001, decay, lambda n: 1e4)
    assert step == 5 and decay_begins(steps, decay) == 5 > decay_begins(steps - 1, decay)
    assert steps_of(1e-30, decay, lambda n: 1e4)[:2] == (step, steps)


@pytest.mark.parametrize(
    "wrong", [dict(schedule="cosine"), dict(decay=0.95), dict(decay_mixture=("a=1",))]
)
def test_what_depends_on_the_number_from_the_first_step_is_refused(wrong):
    with pytest.raises(UsageError, match=r"--minutes 3 needs --schedule wsd, .*0.9 or less"):
        small_preset(minutes=3.0, **wrong)
