"""train.py killed, starved, poisoned and lied to: real processes, real signals (see faults.py).

Nothing here is mocked but the one thing that breaks.
"""

import contextlib
import random
import re
import signal
import time
from pathlib import Path

import pytest
from conftest import flip, logged, losses, metrics, parameters, read_json, tensor_files
from faults import launch, records, start
from test_checkpoint import assert_same, steps_in

from machinery import checkpoint

STEPS = 24
LONG = ("--steps", STEPS, "--decay", 0)  # a decay would make one more checkpoint
# Sums in another order differ in the last bit; a large learning rate would blow that up to 1e-3.
CALM = (*LONG, "--lr_scale", 0.1)


@pytest.fixture(scope="module")
def whole(small_data, once):
    """whole(world, *args): the folder of an undisturbed run, made once."""

    def made(world=1, *args) -> Path:
        how = args or LONG
        make = lambda folder: start(small_data, folder / "run", *how, world=world).end(0)
        return once(f"whole on {world} {' '.join(map(str, args))}", make) / "run"

    return made


def rows_read(text: str) -> dict[int, str]:
    """position -> name of the row, of everything that a run trained on; none may come twice."""
    found = re.findall(r"^position (\d+): (.*)$", text, re.M)
    assert len(dict(found)) == len(found)
    return {int(p): row for p, row in found}


def assert_same_run(a, b):
    """Losses, and weights and optimizer state at the end, to the bit."""
    assert losses(a) == losses(b)
    assert_same_state(a, b)


def assert_same_state(a, b, step=STEPS):
    state = parameters(a, step)
    assert len(state) > 20
    assert_same(state, parameters(b, step))


def assert_close(a, b):
    one = losses(a)
    two = losses(b)
    assert one.keys() == two.keys()
    assert max(abs(one[s] - two[s]) for s in one) <= 1e-5


def checkpoints(run_dir) -> list[int]:
    return steps_in(Path(run_dir) / "checkpoints")


def leftovers(run_dir) -> list[Path]:
    """Of a folder or a file that was being written (.tmp-*) or deleted (.trash-*)."""
    return [*run_dir.rglob(".t*-*")]


def status(run_dir) -> dict:
    return read_json(Path(run_dir) / "status.json")


def resumed_at(text: str) -> int:
    return int(re.search(r"^resumed at step (\d+) ", text, re.M)[1])


# ------------------------------------------------------------------------- killed at any moment
def test_killed_at_random_steps_it_replays_the_same_bits(whole, small_data, run_dir):
    draw = random.Random(2)
    args = (*LONG, "--save_every", 3)
    for saved in (0, 1):  # before there is a checkpoint, perhaps, and after
        run = start(small_data, run_dir, *args, world=2, spoil=[("slow", 0.05)])
        run.until_step(run.step() + draw.randint(2, 6))
        run.until(lambda saved=saved: len(checkpoints(run_dir)) >= saved).kill().end()
    assert resumed_at(start(small_data, run_dir, *args, world=2).end(0))
    assert_same_run(run_dir, whole(2))
    assert not leftovers(run_dir)


def test_a_kill_between_a_save_and_its_validation_loses_neither(whole, small_data, run_dir):
    """The checkpoint of the last step is there, but not the validation, nor the report."""
    args = [*LONG, "--eval_every", 8, "--save_every", 8]
    for step in (16, STEPS):
        spoil = [("kill_before_validation", step)]
        start(small_data, run_dir, *args, spoil=spoil).end(-signal.SIGKILL)
        assert checkpoints(run_dir)[-1] == step
    start(small_data, run_dir, *args).end(0)
    assert [line["step"] for line in metrics(run_dir, "val_bpb")] == [0, 8, 16, 24]
    for name in ("val_bpb", "full_val_bpb"):
        assert logged(run_dir, name) == logged(whole(1, *args), name) != []
    assert (run_dir / "report.html").exists() and status(run_dir)["state"] == "done"
    assert (run_dir / "checkpoints/best").read_text() == "step_00000024"


# ------------------------------------------------------------------ a model that draws numbers
DROPOUT = ("dropout", 0.1)


def test_dropout_is_the_same_on_two_ranks_and_after_a_stop(whole, small_data, run_dir, tmp_path):
    """Although no random state is saved: the seed of each micro-batch follows from its position.
    There are two, so that a sum over them has only one order."""
    args = [*CALM, "--micro_batch", 4]
    for world in (1, 2):
        start(small_data, tmp_path / str(world), *args, world=world, spoil=[DROPOUT]).end(0)
    assert_same_run(tmp_path / "1", tmp_path / "2")
    assert losses(tmp_path / "1") != losses(whole(1, *CALM))
    spoil = [DROPOUT, ("signal_at", 9, signal.SIGTERM)]
    start(small_data, run_dir, *args, spoil=spoil).end(143)
    # the peak is measured this time, which draws numbers between loading and training
    text = start(small_data, run_dir, *args, "--peak_tflops", 0, spoil=[DROPOUT]).end(0)
    assert resumed_at(text) in (9, 10)
    assert_same_run(run_dir, tmp_path / "1")


# ------------------------------------------------------------------ another number of ranks
def test_resumed_on_another_number_of_ranks(whole, small_data, run_dir):
    """The same rows at each step, and the same losses but for the order of sums."""
    rows = {}
    for world, parallel, stop in [(2, "fsdp", 9), (1, "ddp", 16), (3, "ddp", 99)]:
        args = [*CALM, "--parallel", parallel]
        spoil = [("note_rows",), ("signal_at", stop, signal.SIGTERM, 0)]
        run = start(small_data, run_dir, *args, world=world, spoil=spoil)
        found = rows_read(run.end(143 if stop < STEPS else 0))
        assert not rows.keys() & found.keys()  # nor trained on twice
        rows |= found
    assert len(rows) == STEPS * 8
    assert_close(run_dir, whole(1, *CALM))


def test_weights_of_a_run_begin_a_sharded_one(trained_run, small_data, run_dir):
    begun = ["--parallel", "fsdp", "--steps", 1, "--init_from", trained_run]
    start(small_data, run_dir, *begun, world=2).end(0)
    before, after = (logged(folder, "val_bpb") for folder in (trained_run, run_dir))
    assert after[0] == pytest.approx(before[-1], rel=1e-6) and before[-1] < before[0]


@pytest.mark.slow
def test_two_launchers_make_one_run_and_survive_a_kill(whole, small_data, run_dir):
    args = [*CALM, "--save_every", 4]
    nodes = dict(world=1, nodes=2, GLOO_SOCKET_IFNAME="lo")
    run = launch(small_data, run_dir, *args, **nodes, spoil=[("slow", 0.05)])
    run.until_step(10).kill().end()
    assert checkpoints(run_dir)[-1] >= 4
    text = launch(small_data, run_dir, *args, **nodes).end(0)
    assert resumed_at(text) and "x 2 ranks" in text
    assert losses(run_dir) == losses(whole(2, *CALM))


# ------------------------------------------------------------------ damaged checkpoints
def test_no_damaged_checkpoint_is_used_and_no_run_starts_anew(whole, small_data, run_dir):
    """A flipped byte in all, then in the newest one alone."""
    args = (*LONG, "--save_every", 3)
    start(small_data, run_dir, *args, spoil=[("signal_at", 8, signal.SIGTERM)]).end(143)
    older, newest = sorted((run_dir / "checkpoints").glob("step_*"))
    file = tensor_files(newest)[0]
    flip(file)
    flip(older / "trainer.json", 3)
    for world in (1, 2):
        assert str(newest.parent) in start(small_data, run_dir, *args, world=world).end(4)
    assert len(losses(run_dir)) == 9
    flip(older / "trainer.json", 3)  # as it was
    assert str(newest) in start(small_data, run_dir, *args, "--resume", newest).end(4)
    text = start(small_data, run_dir, *args).end(0)
    assert re.search(rf"warning: .*{newest.name} .*{re.escape(file.name)}", text)
    assert resumed_at(text) == 6
    assert_same_run(run_dir, whole())


# ------------------------------------------------------------------ writing fails
@pytest.mark.parametrize("rank", [0, 1])
def test_saves_by_the_clock(rank, whole, small_data, run_dir):
    """Of the first rank, by which a step takes 3 minutes; the other one's does not matter."""
    spoil = [("wait_for_saves",), ("minutes_pass", 3, rank)]
    args = (*LONG, "--save_minutes", 10, "--log_every", 1000)
    text = start(small_data, run_dir, *args, world=2, spoil=spoil).end(0)
    *by_clock, last = map(int, re.findall(r"^saved .*step_(\d+) in", text, re.M))
    assert last == STEPS and bool(by_clock) == (rank == 0)
    for a, b in zip([0, *by_clock], by_clock):
        assert 4 <= b - a <= 6  # over 10 minutes, and until the ranks agree
    assert losses(run_dir) == losses(whole(2))
    assert rank or len(re.findall(r"^step \d+/", text, re.M)) == STEPS  # a line in 15 s


def test_a_full_disk_is_trained_through_until_the_third_failure(whole, small_data, run_dir):
    args = [*LONG, "--save_every", 2]
    # on the second rank
    spoil = [("wait_for_saves",), ("failing_saves", 6, 9, 1), ("failing_saves", 14, STEPS, 1)]
    text = start(small_data, run_dir, *args, world=2, spoil=spoil).end(6)
    failed = re.findall(r"^warning: .*step (\d+) .*\((\d) in a row\): .*No space left", text, re.M)
    assert failed[:4] == [("6", "1"), ("8", "2"), ("14", "1"), ("16", "2")]
    assert max(losses(run_dir)) == 19  # the ranks agree at the next step
    assert checkpoints(run_dir)[-1] == 12
    assert status(run_dir)["exit_code"] == 6 and not leftovers(run_dir)

    start(small_data, run_dir, *args, world=2).end(0)  # room again
    assert_same_run(run_dir, whole(2))


def test_a_disk_that_is_full_for_metrics_costs_their_lines_alone(whole, small_data, run_dir):
    start(small_data, run_dir, *LONG, spoil=[("full_disk_for_metrics", 5, 9)]).end(0)
    expected = losses(whole())
    assert losses(run_dir) == {s: expected[s] for s in expected if not 5 <= s <= 9}
    assert_same_state(run_dir, whole())


def test_the_final_save_may_not_fail(small_data, run_dir):
    text = start(small_data, run_dir, spoil=[("failing_saves", 12, 12)]).end(6)
    assert "done:" not in text and status(run_dir)["state"] == "failed"


# ------------------------------------------------------------------ signals
@pytest.mark.parametrize(
    "signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_saves_and_says_so(signum, code, small_data, run_dir):
    """test_train.py resumes after one."""
    start(small_data, run_dir, spoil=[("signal_at", 5, signum)]).end(code)
    found = status(run_dir)
    step = found["step"]
    assert found.pop("seconds") and found == dict(state="preempted", step=step, exit_code=code)
    assert checkpoints(run_dir)[-1] == step == len(losses(run_dir))


def test_nohup_means_that_a_terminal_may_close(small_data, run_dir):
    """It sends SIGHUP, and reads no more."""
    spoil = [("ignore", signal.SIGHUP), ("unread",), ("signal_at", 3, signal.SIGHUP)]
    start(small_data, run_dir, spoil=spoil).end(0)
    assert status(run_dir)["state"] == "done" and len(losses(run_dir)) == 12


def test_ctrl_c_without_patience(small_data, run_dir):
    """Three of them at once: no checkpoint of that step, but the status is true."""
    spoil = [("signal_at", 5, signal.SIGINT)] * 3
    said = start(small_data, run_dir, spoil=spoil).end(130)
    assert "Traceback" not in said
    found = status(run_dir)
    assert (found["state"], found["step"], found["exit_code"]) == ("preempted", 5, 130)


def test_sigterm_to_torchrun_stops_both_ranks_at_the_same_step(small_data, run_dir):
    run = launch(small_data, run_dir, spoil=[("hold", 6)])
    run.until_step(6)
    run.processes[0].send_signal(signal.SIGTERM)
    run.end()
    assert run.codes()[0] != 0
    step = status(run_dir)["step"]
    assert status(run_dir)["state"] == "preempted" and checkpoints(run_dir)[-1] == step


# ------------------------------------------------------------------ numbers that are none
@pytest.mark.parametrize("parallel, what", [("ddp", "loss"), ("fsdp", "gradients")])
def test_nan_on_one_rank_is_skipped_on_all_as_often_as_allowed(parallel, what, small_data, run_dir):
    """Of the loss, or of the gradients of a loss that is a number: no weight changes."""
    args = ["--parallel", parallel, "--save_every", 1, "--keep", 99, "--skip_nonfinite"]
    spoil = [("poison", [3, 6, 9], 1, what)]
    for resumes in (False, True):  # the count outlives a restart: one more is one too many
        text = start(small_data, run_dir, *args, 2, world=2, spoil=spoil).end(5)
        assert len(re.findall("error: step 9: .*/checkpoints ", text)) == 2
        assert ("warning: step 6: " in text) != resumes and "replicas" not in text
        assert checkpoints(run_dir) == [*range(1, 9)] and not leftovers(run_dir)
    for step in (3, 6):
        assert_same(parameters(run_dir, step), parameters(run_dir, step - 1))
    start(small_data, run_dir, *args, 3, world=2, spoil=spoil).end(0)
    skipped = metrics(run_dir, "skipped")
    assert [r["step"] for r in skipped if r["step_s"] > 0] == [3, 6, 9]
    assert {*range(1, 13)} - losses(run_dir).keys() == {3, 6, 9}
    # NaN is no JSON; and the picture's mean would never recover from it
    assert "NaN" not in (run_dir / "metrics.jsonl").read_text()


# ------------------------------------------------------------------ killed again and again


@pytest.mark.slow
def test_soak(whole, small_data, run_dir):
    """30 kills: at a random moment, in a step, in a save, or while it starts; each time a run on a
    number of ranks that is drawn as well. It has the losses of one that nobody disturbed."""
    steps = 120
    draw = random.Random(0)
    args = ("--steps", steps, "--lr_scale", 0.1, "--save_every", 2, "--eval_every", 25)
    expected = losses(whole(1, *args))
    for kill in range(30):
        world, parallel = draw.choice([(1, "ddp"), (2, "ddp"), (2, "fsdp")])
        how = dict(world=world, spoil=[("slow", 0.02)])
        run = start(small_data, run_dir, *args, "--parallel", parallel, **how)
        if draw.random() < 0.2:  # while it starts
            time.sleep(draw.uniform(0, 0.8))
        else:
            goal = min(run.step() + draw.randint(1, 8), steps - 1)
            run.until(lambda run=run, goal=goal: run.step() >= goal or not run.alive())
            time.sleep(draw.uniform(0, 0.05))
        signum = draw.choice([signal.SIGKILL, signal.SIGTERM])
        run.kill(signum, draw.choice([None, [draw.randrange(world)]]))
        with contextlib.suppress(AssertionError):  # the rest ends by itself, or is ended, as by
            run.end(timeout_s=10)  # a launcher
        run.kill().end()
        for path in checkpoint.checkpoints(run_dir / "checkpoints"):
            assert checkpoint.why_invalid(path) is None, f"kill {kill}: {path}"
        for record in records(run_dir):
            assert "loss" not in record or abs(record["loss"] - expected[record["step"]]) <= 1e-5
    start(small_data, run_dir, *args).end(0)
    assert not leftovers(run_dir)
    assert_close(run_dir, whole(1, *args))
