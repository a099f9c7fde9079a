"""train.py as a whole: the same losses however it is launched, a resume that leaves no trace."""

import json
import math
import re
import shutil
import signal
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import faults
import pytest
import torch
from conftest import SMALL, logged, look, losses, metrics, read_json, run, starts, train_here
from data_helpers import prepare_tiny
from test_checkpoint import rehash
from test_counted import assert_same
from test_faults import assert_same_state, checkpoints, status

import eval as eval_program
import session
import train
from bits_per_byte import score_text
from config import UsageError
from data import RowLoader, order_of
from instruments.pages import report
from machinery import build, disk, log, screen
from machinery.checkpoint import Checkpointer as Saver
from machinery.shards import Manifest
from machinery.trained import EvalConfig


def fork(data, run_dir, *args, **kwargs) -> str:
    """Train in processes that need no start (see faults.py); what they print."""
    return faults.start(data, run_dir, *args, **kwargs).end(0)


OFTEN = ("--eval_every", 4)  # as conftest's trained_run


def test_what_a_run_prints_and_writes(trained_run, small_data, tmp_path):
    """By plain `python`, as a user does; and the losses are those of a run in this process."""
    run_dir = tmp_path / "run"
    done = run("train.py", "tiny", *SMALL, "--data_dir", small_data, "--run_dir", run_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(run_dir) == losses(trained_run)
    out = done.stdout
    (line,) = re.findall(r"^step 12/12 .*$", out, re.M)
    said = dict(words.rsplit(" ", 1) for words in line.split(" | "))
    step = metrics(run_dir, "loss")[-1]
    for name, key in (("loss", "loss"), ("bpb", "bpb"), ("lr", "lr"), ("|g|", "norm")):
        assert float(said[name]) == pytest.approx(step[key], abs=0.01)
    assert "tok/s" in line and "mfu" in line and "left" in line
    of = Manifest.load(starts(run_dir)[0]["data_dir"]).rows("val")
    for words in (f"step 0 .* 16 of {of} ", f"step 12 .* 16 of {of} ", f"done: .* {of} of {of} "):
        assert re.search(rf"^{words}rows: [\d.]+ nats/token, [\d.]+ bpb", out, re.M), words
    for name in ("checkpoints/step_00000012", "metrics.jsonl", "report.html"):
        assert (run_dir / name).exists() and name.split("/")[0] in out
    assert status(run_dir)["state"] == "done"
    records = metrics(run_dir)
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 13))
    assert records[-1]["tokens"] == 12 * 512 and records[-1]["val_rows"] == of
    assert losses(run_dir)[1] == pytest.approx(math.log(512), rel=0.02)
    first, last = logged(run_dir, "val_bpb")
    assert last < first


def test_a_number_of_your_own_needs_one_line(small_data, tmp_path):
    """In add_gradients: it is added up over micro-batches and ranks, logged, and printed."""
    mine = 'yours["begins"] += (inputs == run.manifest.bos_id).sum()'
    place = '# Your own number: yours["name"]'
    spoil = [faults.edited(tmp_path / "mine", "train.py", place, f"{mine}  {place}")]
    text = fork(small_data, tmp_path / "run", "--micro_batch", 2, world=2, spoil=spoil)
    manifest = Manifest.load(small_data)
    loader = RowLoader(manifest, order_of(manifest), 8)
    begins = [int((loader.next_batch()[0] == manifest.bos_id).sum()) for _ in range(12)]
    steps = metrics(tmp_path / "run", "loss")
    assert [r["begins"] for r in steps] == begins and min(begins) >= 8
    for step, number in enumerate(begins, 1):
        assert re.search(rf"^step {step}/12 .* \| begins {number}\b", text, re.M)


def test_a_step_has_the_measures_of_a_validation_on_its_rows(tmp_path):
    """Special tokens, targets where documents are short, left out of the bits per byte in both."""
    (tmp_path / "texts").mkdir()
    for i in range(300):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"Note {i} of {i % 7}: the sky is {i}. " * 2)
    prepare_tiny(tmp_path / "data", "--source", f"files:{tmp_path / 'texts'}")
    train_here(tmp_path / "data", tmp_path / "run", "--save_every", 1, "--keep", 12, "--steps", 4)
    manifest = Manifest.load(tmp_path / "data")
    special = 0
    size = torch.from_numpy(manifest.token_bytes())
    of_steps = {r["step"]: r for r in metrics(tmp_path / "run", "loss")}
    for step in range(1, 4):
        checkpoint = str(tmp_path / "run" / "checkpoints" / f"step_{step:08d}")
        config = EvalConfig("", checkpoint, device="cpu", dtype="fp32")
        model = eval_program.load_model(config).model
        with closing(RowLoader(manifest, order_of(manifest), 8, position=8 * step)) as loader:
            batch = *loader.next_batch(), [0] * 8
        special += int((size[batch[1]] == 0).sum())
        loss, bpb, _ = score_text(model, [batch], size)
        found = of_steps[step + 1]
        assert (found["loss"], found["bpb"]) == pytest.approx((loss, bpb), rel=1e-6)
    assert special > 0


def test_interrupted_and_resumed_equals_uninterrupted(trained_run, small_data, tmp_path):
    run_dir = tmp_path / "run"
    faults.start(small_data, run_dir, spoil=[("signal_at", 5, signal.SIGTERM)]).end(143)
    stopped = status(run_dir)
    assert stopped["state"] == "preempted" and 5 < stopped["step"] < 9
    out = fork(small_data, run_dir)
    assert f"resumed at step {stopped['step']}" in out
    assert "with micro-batches of 8 rows" in out  # the checkpoint's, printed
    assert losses(run_dir) == losses(trained_run)
    assert_same_state(trained_run, run_dir, 12)
    before = {p: p.stat().st_mtime_ns for p in run_dir.rglob("*") if p.is_file()}
    again = fork(small_data, run_dir)
    assert "is finished (12 steps)" in again
    changed = {p.name for p, t in before.items() if p.exists() and p.stat().st_mtime_ns != t}
    assert changed <= {".lock", "config.json", "tokenizer.json"}


def test_adamw_cosine_and_clipping_run_too(small_data, tmp_path, monkeypatch):
    step = torch.optim.AdamW.step
    clipped = []

    def noting(optimizer):
        squares = [p.grad.square().sum() for g in optimizer.param_groups for p in g["params"]]
        clipped.append(float(sum(squares) ** 0.5))
        step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", noting)
    stock = "--mlp swiglu --tie_embeddings --n_kv_head 1 --dtype fp16 --extras".split() + [""]
    other = "--optimizer adamw --lr 0.003 --schedule cosine --decay 0.8 --grad_clip 0.5".split()
    train_here(small_data, tmp_path / "run", *other, *stock)
    values = list(losses(tmp_path / "run").values())
    assert values[-1] < values[0] - 0.05
    norms = logged(tmp_path / "run", "norm")
    assert clipped == pytest.approx([min(norm, 0.5) for norm in norms], rel=1e-4)
    assert max(norms) > 0.6  # there was something to clip


def test_a_mixture_is_drawn_by_its_weights_and_another_in_the_decay(tmp_path, capsys):
    folder = tmp_path / "data"
    sources = []
    for name, word in (("low", "calm"), ("high", "storm")):
        (tmp_path / name).mkdir()
        for i in range(12):
            (tmp_path / name / f"{i}.txt").write_text(f"{i} {word} and {word} again, {i}. " * 90)
        sources.append(f"{name}=files:{tmp_path / name}")
    prepare_tiny(folder, "--source", *sources)
    mixture = ("--mixture", "low=3", "high=1", "--decay_mixture", "high=1", "--decay", 0.5)
    train_here(folder, tmp_path / "run", *mixture)
    manifest = Manifest.load(folder)
    rows = {name: manifest.rows("train", i) for i, name in enumerate(manifest.sources)}
    drawn = {"low": 36, "high": 12 + 48}  # of 12 steps x 8 rows, 6 steps in decay
    said = re.search(r"([\d.]+) epochs of (\w+);", capsys.readouterr().out)
    epochs, name = max((drawn[name] / rows[name], name) for name in rows)
    assert said[2] == name and float(said[1]) == pytest.approx(epochs, abs=0.01)
    faults.start(folder, tmp_path / "two", *mixture, world=2).end(0)
    one, two = (logged(tmp_path / name, "val_bpb_by_source")[-1] for name in ("run", "two"))
    assert one == pytest.approx(two, rel=1e-4) and one["low"] > 1.05 * one["high"]
    with pytest.raises(UsageError, match="nosuch"):
        train_here(folder, tmp_path / "other", "--mixture", "nosuch=1")


def test_the_trial_step_moves_no_bit(small_data, tmp_path, monkeypatch):
    """Nor does it leave a gradient."""
    compile_step = build.compile_step
    seen = []

    def state(model, optimizers):
        slots = [slots for o in optimizers for slots in o.state.values()]
        tensors = [*model.parameters(), *(t for slot in slots for t in slot.values())]
        return [t.detach().clone() for t in tensors]

    def noting(model, optimizers, *args):
        before = state(model, optimizers)
        done = compile_step(model, optimizers, *args)
        seen.append((before, state(model, optimizers)))
        assert all(p.grad is None for p in model.parameters())
        return done

    monkeypatch.setattr(build, "compile_step", noting)
    train_here(small_data, tmp_path, "--steps", 4)
    ((before, after),) = seen
    assert len(before) > 20 and all(torch.equal(a, b) for a, b in zip(before, after))


@pytest.mark.timing
def test_speed_and_mfu_are_what_a_wall_clock_says(small_data, tmp_path):
    """2 ranks, 8 micro-batches a step, a validation in the middle: within 3%."""
    peak = ("--peak_tflops", 0.01)
    args = (*peak, "--micro_batch", 1, "--tokens_per_step", 1024, "--steps", 60)
    often = ["--eval_every", 30, "--eval_tokens", 8192]
    fork(small_data, tmp_path / "run", *args, *often, world=2)
    steps = metrics(tmp_path / "run", "loss")

    def apart(begin: int, end: int) -> float:
        """Of the seconds that the meter counted from one step to another, and a clock's."""
        first, last = steps[begin], steps[end]
        pauses = ("eval_s", "save_s", "report_s")
        paused_s = sum(last.get(name, 0) - first.get(name, 0) for name in pauses)
        wall_s = last["time"] - first["time"] - paused_s
        return abs(sum(r["step_s"] for r in steps[begin + 1 : end + 1]) / wall_s - 1)

    # A step's own time is noted after it is measured: a pause between the two spoils one stamp.
    assert min(apart(5 + i, 54 + i) for i in range(5)) < 0.03
    last = steps[58]
    assert last["eval_s"] > steps[9]["eval_s"] > 0  # there was a pause to leave out
    full = last["tokens_per_s"] * starts(tmp_path / "run")[0]["flops_per_token"] / (2 * 0.01e12)
    assert last["mfu_causal"] < last["mfu_full"] == pytest.approx(full)


@pytest.mark.slow
def test_fsdp_compiled_gives_the_losses_of_one_rank(trained_run, small_data, tmp_path):
    args = [a for a in SMALL if a != "--no_compile"] + ["--parallel", "fsdp", *map(str, OFTEN)]
    folders = ["--data_dir", small_data, "--run_dir", tmp_path / "run"]
    result = run("train.py", "tiny", *args, *folders, nproc=2, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "compiling" in result.stdout and "does not work" not in result.stdout
    assert_same(trained_run, tmp_path / "run", 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, said", [("bf16", "bfloat16"), ("fp16", "float16")])
def test_compiled_on_two_threads_it_resumes_to_the_same_bits(dtype, said, small_data, tmp_path):
    drop = ("--no_compile", "--dtype", "fp32")
    args = [a for a in SMALL if a not in drop] + ["--dtype", dtype, "--data_dir", small_data]
    for name, more in (
        ("whole", ("--save_every", 6)),
        ("resumed", ("--resume", tmp_path / "whole/checkpoints/step_00000006")),
    ):
        folder = ("--run_dir", tmp_path / name)
        result = run("train.py", "tiny", *args, *folder, *more, timeout=300, OMP_NUM_THREADS="2")
        assert result.returncode == 0, result.stdout + result.stderr
        assert f" {said}" in result.stdout and "2 threads" in result.stdout
        assert "compiling" in result.stdout and "does not work" not in result.stdout
    whole = losses(tmp_path / "whole")
    resumed = losses(tmp_path / "resumed")
    assert resumed == {step: loss for step, loss in whole.items() if step > 6} and len(resumed) == 6
    assert_same_state(tmp_path / "whole", tmp_path / "resumed", 12)


def test_weights_of_another_model_are_refused(trained_run, small_data, tmp_path, capsys):
    """Or tokenizer, by the names of what differs. Rows of another length are no obstacle, and
    longer ones may want another base of the rotary frequencies: that is only said."""
    weights = ("--init_from", trained_run / "checkpoints" / "step_00000012")
    for name, value in (("nope_every", 2), ("logit_softcap", 5.0)):
        with pytest.raises(UsageError, match=f"step_00000012 .*{name} .* {value} "):
            train_here(small_data, tmp_path / name, *weights, f"--{name}", value)
    source = ("--source", f"files:{small_data.parent / 'texts'}")
    prepare_tiny(tmp_path / "other", *source)
    short = ("--row_len", 33, "--tokenizer", small_data / "tokenizer.json")
    prepare_tiny(tmp_path / "short", *source, *short)
    with pytest.raises(UsageError, match="tokenizer_sha256"):
        train_here(tmp_path / "other", tmp_path / "a", *weights)
    train_here(tmp_path / "short", tmp_path / "b", *weights)
    assert "(seq_len is 64 there and 32 here)" in capsys.readouterr().out
    train_here(small_data, tmp_path / "c", *weights, "--rope_theta", 500_000.0, "--steps", 1)
    assert "(rope_theta is 100000.0 there and 500000.0 here)" in capsys.readouterr().out
    first = logged(tmp_path / "b", "val_loss")[0]
    trained = logged(trained_run, "val_loss")
    assert first < (trained[0] + trained[-1]) / 2  # of shorter rows: as good as trained, about


def test_a_run_made_longer_is_the_run_planned_that_way(small_data, tmp_path):
    """From the checkpoint that every run keeps where its learning rate begins to fall."""
    options = ("--weight_decay", 0.1, "--no_compile")
    planned, short, longer = (tmp_path / name for name in ("planned", "short", "longer"))
    train_here(small_data, planned, *options, "--steps", 24)
    train_here(small_data, short, *options, "--save_every", 3)
    assert checkpoints(short) == [4, 9, 12]  # 65% of 12 steps decay
    with pytest.raises(UsageError, match="steps .*12 .*24 "):
        train_here(small_data, short, *options, "--steps", 24)
    with pytest.raises(UsageError, match="step[_ ]0*4 "):
        last = short / "checkpoints" / "step_00000012"
        train_here(small_data, longer, *options, "--steps", 24, "--resume", last)

    stable = short / "checkpoints" / "step_00000004"
    train_here(small_data, longer, *options, "--steps", 24, "--resume", stable)
    wanted = {s: loss for s, loss in losses(planned).items() if s > 4}
    assert losses(longer) == wanted and len(metrics(longer)) > len(wanted)
    written = metrics(longer)
    train_here(small_data, longer, *options, "--steps", 24, "--resume", stable)
    assert metrics(longer) == written  # not begun again: it is finished
    assert_same_state(planned, longer, 24)
    # A run that was stopped in time becomes longer in its own folder.
    shutil.rmtree(longer)
    shutil.rmtree(short / "checkpoints" / "step_00000009")
    shutil.rmtree(short / "checkpoints" / "step_00000012")
    train_here(small_data, short, *options, "--steps", 24)
    assert_same_state(planned, short, 24)


def test_the_best_validation_is_saved_and_kept(small_data, tmp_path, monkeypatch):
    """By the clock alone no checkpoint would fall on it."""
    bpb = iter([4.0, 3.0, 2.9, 2.8, 2.0, 2.5, 2.6, 0.1])  # the last: of other rows, all of them
    monkeypatch.setattr(train, "score_text", lambda *args, **options: (1.0, next(bpb), {}))
    train_here(small_data, tmp_path, "--eval_every", 2, "--save_every", 3)
    assert (tmp_path / "checkpoints" / "best").read_text() == "step_00000008"
    assert checkpoints(tmp_path) == [4, 8, 9, 12]  # at 4 the decay begins


def test_another_configuration_in_the_same_folder_is_refused(own_run, small_data):
    for option, value in (("lr_scale", 3.0), ("steps", 20)):
        with pytest.raises(UsageError, match=f"{option} .* {value} "):
            train_here(small_data, own_run, f"--{option}", value)
    older = own_run / "checkpoints" / "step_00000008"  # refused only once the model is built
    with pytest.raises(UsageError, match="step_00000008"):
        train_here(small_data, own_run, "--resume", older)
    assert log.is_done(own_run)  # a mistaken command does not make it a failed run


def test_weights_to_begin_with_are_read_and_hashed_once(
    trained_run, small_data, tmp_path, monkeypatch
):
    newest = trained_run / "checkpoints" / "step_00000012"
    honest = disk.sha256_of
    hashed = []

    def noting(path):
        hashed.append(Path(path))
        return honest(path)

    monkeypatch.setattr(disk, "sha256_of", noting)
    for where in (trained_run, newest):
        hashed.clear()
        train_here(small_data, tmp_path / where.name, "--init_from", where, "--steps", 1)
        weights = [path for path in hashed if newest in path.parents and path.parent != newest]
        assert sorted(weights) == sorted(newest.glob("dcp/*"))


def test_figures_of_another_text_are_not_the_best(own_run, small_data, capsys, monkeypatch):
    """After a resume with another --eval_tokens; half a line is no matter, nor --init_from."""
    shutil.rmtree(own_run / "checkpoints" / "step_00000012")
    with open(own_run / "metrics.jsonl", "a") as file:
        file.write('{"step": 17')
    file = own_run / "checkpoints" / "step_00000008" / "trainer.json"
    record = read_json(file)
    assert record["best_bpb"] > 1
    record["dtype"] = "torch.float16"  # on another card
    rehash(file.parent, **{"trainer.json": json.dumps(record).encode()})
    resume = session.resume
    best = []

    def noting(state, preset, plan, log, progress):
        plan = resume(state, preset, plan, log, progress)
        best.append(progress.best_bpb)
        return plan

    monkeypatch.setattr(session, "resume", noting)
    train_here(small_data, own_run, "--eval_tokens", 64, "--init_from", file.parent)
    assert best == [math.inf]
    out = capsys.readouterr().out
    assert f"{file.parent} is not read" in out
    assert "computed in torch.float32 from here on, in torch.float16 before" in out
    assert "resumed at step 8" in out and re.search(r"done: 12 steps, .* since step 8;", out)
    assert {*logged(own_run, "val_rows")[:-1]} == {16, 1}
    assert "warning: the data or eval_tokens" in look(capsys, "compare", own_run, own_run)


def test_time_left_has_every_validation_that_will_come():
    asked = []
    meter = SimpleNamespace(eta_s=lambda tokens, **counts: asked.append(counts["eval"]))
    plan = SimpleNamespace(steps=2206, tokens_per_step=1)
    for step, every in ((1, 250), (1999, 250), (2000, 250), (2205, 0), (2205, 2206)):
        preset = SimpleNamespace(run=SimpleNamespace(eval_every=every))
        screen.time_left_s(SimpleNamespace(plan=plan, preset=preset, meter=meter), step)
    assert asked == [9, 2, 1, 1, 1]


def test_a_disk_that_is_full_for_the_status_does_not_hide_the_error():
    with pytest.raises(KeyError):
        with log.Log(Path("/dev/full"), is_first=True).outcome(SimpleNamespace(step=3)):
            raise KeyError


def test_where_the_time_of_a_run_went(small_data, tmp_path, monkeypatch, capsys):
    """By a clock on which each validation, page and wait for the last save takes an hour."""
    hours = []
    clock = lambda: time.perf_counter() + 3600 * len(hours)
    monkeypatch.setattr(build.flops, "Meter", partial(build.flops.Meter, clock=clock))
    monkeypatch.setattr(RowLoader, "pop_wait_s", lambda loader: 0.5)
    pauses = (train, "score_text"), (train, "reads_future"), (report, "write"), (Saver, "join")
    for place, name in pauses:
        honest = getattr(place, name)
        late = lambda *args, do=honest, **more: hours.append(1) or do(*args, **more)
        monkeypatch.setattr(place, name, late)
    train_here(small_data, tmp_path, "--steps", 4, "--eval_every", 2)
    assert [s // 3600 for s in status(tmp_path)["seconds"].values()][:4] == [0, 0, 5, 3]
    assert re.search(", eval 5h00m, report 3h00m, save .*; validation", capsys.readouterr().out)
    assert set(logged(tmp_path, "data_wait_ms")) == {500.0}
