"""train.py as a whole: the same losses however it is launched, a resume that leaves no trace."""

import json
import math
import re
import shutil
import signal
import time
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import SMALL, logged, look, losses, metrics, printed, read_json, starts, train_here
from data_helpers import prepare_tiny, write_texts
from faults import edited, start
from test_checkpoint import rehash
from test_counted import assert_same
from test_faults import assert_same_state, checkpoints, rows_read, status

import eval as eval_program
import train
from bits_per_byte import score_text
from config import UsageError
from data import RowLoader, order_of
from instruments.pages import report
from machinery import build, disk, log, screen
from machinery.checkpoint import Checkpointer as Saver
from machinery.shards import Manifest
from machinery.trained import EvalConfig


def test_what_a_run_prints_and_writes(trained_run, small_data, run_dir):
    """By plain `python`, as a user does; and the losses are those of a run in this process."""
    out = printed("train.py", "tiny", *SMALL, "--data_dir", small_data, "--run_dir", run_dir)
    assert losses(run_dir) == losses(trained_run)
    assert losses(run_dir)[1] == pytest.approx(math.log(512), rel=0.02)
    (line,) = re.findall(r"^step 12/12 .* tok/s \| mfu .* left$", out, re.M)
    said = dict(words.rsplit(" ", 1) for words in line.split(" | "))
    step = metrics(run_dir, "loss")[-1]
    for name, key in (("loss", "loss"), ("bpb", "bpb"), ("lr", "lr"), ("|g|", "norm")):
        assert float(said[name]) == pytest.approx(step[key], abs=0.01)
    of = Manifest.load(small_data).rows("val")
    for words in (f"step 0 .* 16 of {of} ", f"step 12 .* 16 of {of} ", f"done: .* {of} of {of} "):
        assert re.search(rf"^{words}rows: [\d.]+ nats/token, [\d.]+ bpb", out, re.M), words
    for name in ("checkpoints/step_00000012", "metrics.jsonl", "report.html"):
        assert (run_dir / name).exists() and name.split("/")[0] in out
    last = metrics(run_dir)[-1]
    assert (last["tokens"], last["val_rows"]) == (12 * 512, of)


def test_a_number_of_your_own_needs_one_line(small_data, run_dir, tmp_path):
    """In add_gradients: it is added up over micro-batches and ranks, logged, and printed."""
    mine = 'yours["begins"] += (inputs == run.manifest.bos_id).sum()'
    place = '# Your own number: yours["name"]'
    spoil = [edited(tmp_path / "mine", "train.py", place, f"{mine}  {place}")]
    text = start(small_data, run_dir, "--micro_batch", 2, world=2, spoil=spoil).end(0)
    manifest = Manifest.load(small_data)
    with closing(RowLoader(manifest, order_of(manifest), 8)) as loader:
        begins = [int((loader.next_batch()[0] == manifest.bos_id).sum()) for _ in range(12)]
    assert logged(run_dir, "begins") == begins and min(begins) >= 8
    assert re.findall(r"^step .* \| begins (\d+)", text, re.M) == [*map(str, begins)]


def test_a_step_has_the_measures_of_a_validation_on_its_rows(trained_run, small_data):
    """Special tokens, targets where documents are short, left out of the bits per byte in both."""
    manifest = Manifest.load(small_data)
    size = torch.from_numpy(manifest.token_bytes())
    special = 0
    for step in (4, 8):
        checkpoint = str(trained_run / "checkpoints" / f"step_{step:08d}")
        config = EvalConfig("", checkpoint, device="cpu", dtype="fp32")
        with closing(RowLoader(manifest, order_of(manifest), 8, position=8 * step)) as loader:
            batch = *loader.next_batch(), [0] * 8
        special += int((size[batch[1]] == 0).sum())
        loss, bpb, _ = score_text(eval_program.load_model(config).model, [batch], size)
        found = metrics(trained_run, "loss")[step]  # of the next one
        assert (found["loss"], found["bpb"]) == pytest.approx((loss, bpb), rel=1e-6)
    assert special > 0


def test_interrupted_and_resumed_equals_uninterrupted(trained_run, small_data, run_dir):
    start(small_data, run_dir, spoil=[("signal_at", 5, signal.SIGTERM)]).end(143)
    out = start(small_data, run_dir).end(0)
    assert re.search(r"resumed at step [678] ", out)
    assert "with micro-batches of 8 rows" in out  # the checkpoint's, printed
    assert losses(run_dir) == losses(trained_run)
    assert_same_state(trained_run, run_dir, 12)
    before = {p: p.stat().st_mtime_ns for p in run_dir.rglob("*") if p.is_file()}
    assert "is finished (12 steps)" in start(small_data, run_dir).end(0)
    changed = {p.name for p, t in before.items() if p.exists() and p.stat().st_mtime_ns != t}
    assert changed <= {".lock", "config.json", "tokenizer.json"}


def test_adamw_cosine_and_clipping_run_too(small_data, run_dir, monkeypatch):
    step = torch.optim.AdamW.step
    clipped = []

    def noting(optimizer):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        clipped.append(torch.nn.utils.get_total_norm(gradients).item())
        step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", noting)
    stock = "--mlp swiglu --tie_embeddings --n_kv_head 1 --dtype fp16 --extras".split() + [""]
    other = "--optimizer adamw --lr 0.003 --schedule cosine --decay 0.8 --grad_clip 0.5".split()
    train_here(small_data, run_dir, *other, *stock)
    assert losses(run_dir)[12] < losses(run_dir)[1] - 0.05
    norms = logged(run_dir, "norm")
    assert clipped == pytest.approx([min(norm, 0.5) for norm in norms], rel=1e-4)
    assert max(norms) > 0.6  # there was something to clip


def test_a_mixture_is_drawn_by_its_weights_and_another_in_the_decay(run_dir, tmp_path):
    sources = [f"{name}=files:{write_texts(tmp_path / name)}" for name in ("low", "high")]
    prepare_tiny(tmp_path / "data", "--source", *sources)
    mixture = ("--mixture", "low=3", "high=1", "--decay_mixture", "high=1", "--decay", 0.5)
    text = start(tmp_path / "data", run_dir, *mixture, spoil=[("note_rows",)]).end(0)
    names = [row.split("/")[1] for row in rows_read(text).values()]
    assert Counter(names[:48]) == {"low": 36, "high": 12}
    assert Counter(names[48:]) == {"high": 48}
    epochs = 60 / Manifest.load(tmp_path / "data").rows("train", 1)
    assert f"{epochs:.2f} epochs of high;" in text
    assert logged(run_dir, "val_bpb_by_source")[-1].keys() == {"low", "high"}


@pytest.mark.timing
def test_speed_and_mfu_are_what_a_wall_clock_says(small_data, run_dir):
    """2 ranks, 8 micro-batches a step, a validation in the middle: within 3%."""
    args = "--peak_tflops 0.01 --micro_batch 1 --tokens_per_step 1024 --steps 60".split()
    often = ["--eval_every", 30, "--eval_tokens", 8192]
    start(small_data, run_dir, *args, *often, world=2).end(0)
    steps = metrics(run_dir, "loss")

    def seconds(step):
        """When it ended, by a clock that stands still in pauses."""
        return step["time"] - sum(step.get(name, 0) for name in ("eval_s", "save_s", "report_s"))

    # A step's own time is noted after it is measured: a pause between the two spoils one stamp.
    shares = []
    for i in range(5, 10):
        measured = sum(r["step_s"] for r in steps[i + 1 : i + 50])
        shares.append(measured / (seconds(steps[i + 49]) - seconds(steps[i])))
    assert min(abs(share - 1) for share in shares) < 0.03
    last = steps[58]
    assert last["eval_s"] > steps[9]["eval_s"] > 0  # there was a pause to leave out
    full = last["tokens_per_s"] * starts(run_dir)[0]["flops_per_token"] / (2 * 0.01e12)
    assert last["mfu_causal"] < last["mfu_full"] == pytest.approx(full)


COMPILED = [arg for arg in SMALL if arg != "--no_compile"]


@pytest.mark.slow
@pytest.mark.parametrize("nproc, more", [(2, ()), (2, ["--recompute"]), (0, ["--recompute"])])
def test_compiled_it_has_the_losses_of_an_eager_rank(nproc, more, trained_run, small_data, run_dir):
    """Whole on one rank; block by block where FSDP gathers weights in between."""
    args = [*COMPILED, "--eval_every", 4, *["--parallel", "fsdp"] * (nproc > 1), *more]
    folders = ["--data_dir", small_data, "--run_dir", run_dir]
    said = printed("train.py", "tiny", *args, *folders, nproc=nproc, timeout=300)
    assert "compiling" in said and "does not work" not in said
    assert_same(trained_run, run_dir, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, name", [("bf16", "bfloat16"), ("fp16", "float16")])
def test_compiled_on_two_threads_it_resumes_to_the_same_bits(dtype, name, small_data, tmp_path):
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    for run_dir, more in (
        (whole, ("--save_every", 6)),
        (resumed, ("--resume", whole / "checkpoints/step_00000006")),
    ):
        args = [*COMPILED, "--dtype", dtype, "--data_dir", small_data, "--run_dir", run_dir, *more]
        said = printed("train.py", "tiny", *args, timeout=300, OMP_NUM_THREADS="2")
        assert f" {name}" in said and "2 threads" in said
        assert "compiling" in said and "does not work" not in said
    assert losses(resumed) == {step: losses(whole)[step] for step in range(7, 13)}
    assert_same_state(whole, resumed, 12)


def test_weights_of_another_model_are_refused(trained_run, small_data, run_dir, tmp_path, capsys):
    """Or tokenizer, by the names of what differs. Rows of another length are no obstacle, and
    longer ones may want another base of the rotary frequencies: that is only said."""
    weights = ("--init_from", trained_run / "checkpoints" / "step_00000012")
    with pytest.raises(UsageError, match="step_00000012 .*nope_every .* 2 "):
        train_here(small_data, run_dir, *weights, "--nope_every", 2)
    source = ("--source", f"files:{small_data.parent / 'texts'}")
    prepare_tiny(tmp_path / "other", *source)
    short = ("--row_len", 33, "--tokenizer", small_data / "tokenizer.json")
    prepare_tiny(tmp_path / "short", *source, *short)
    with pytest.raises(UsageError, match="tokenizer_sha256"):
        train_here(tmp_path / "other", run_dir, *weights)
    train_here(tmp_path / "short", run_dir, *weights, "--rope_theta", 500_000.0, "--steps", 1)
    said = capsys.readouterr().out
    assert "rope_theta is 100000.0 there and 500000.0 here; seq_len is 64 there and 32 here" in said


def test_a_run_made_longer_is_the_run_planned_that_way(small_data, tmp_path):
    """From the checkpoint that every run keeps where its learning rate begins to fall."""
    options = ("--weight_decay", 0.1)
    more = (*options, "--steps", 24)
    planned, short, longer = (tmp_path / name for name in ("planned", "short", "longer"))
    train_here(small_data, planned, *more)
    train_here(small_data, short, *options, "--save_every", 3)
    assert checkpoints(short) == [4, 9, 12]  # 65% of 12 steps decay
    with pytest.raises(UsageError, match="steps .*12 .*24 "):
        train_here(small_data, short, *more)
    with pytest.raises(UsageError, match="step[_ ]0*4 "):
        last = short / "checkpoints" / "step_00000012"
        train_here(small_data, longer, *more, "--resume", last)

    stable = short / "checkpoints" / "step_00000004"
    train_here(small_data, longer, *more, "--resume", stable)
    assert losses(longer) == {s: loss for s, loss in losses(planned).items() if s > 4}
    written = metrics(longer)
    train_here(small_data, longer, *more, "--resume", stable)
    assert metrics(longer) == written  # not begun again: it is finished
    assert_same_state(planned, longer, 24)
    # A run that was stopped in time becomes longer in its own folder.
    shutil.rmtree(longer)
    for step in ("step_00000009", "step_00000012"):
        shutil.rmtree(short / "checkpoints" / step)
    train_here(small_data, short, *more)
    assert_same_state(planned, short, 24)


def test_the_best_validation_is_saved_and_kept(small_data, tmp_path, monkeypatch):
    """By the clock alone no checkpoint would fall on it."""
    bpb = iter([4.0, 3.0, 2.9, 2.8, 2.0, 2.5, 2.6, 0.1])  # the last: of other rows, all of them
    monkeypatch.setattr(train, "score_text", lambda *args, **options: (1.0, next(bpb), {}))
    train_here(small_data, tmp_path, "--eval_every", 2, "--save_every", 3)
    assert (tmp_path / "checkpoints" / "best").read_text() == "step_00000008"
    assert checkpoints(tmp_path) == [4, 8, 9, 12]  # at 4 the decay begins


def test_another_configuration_in_the_same_folder_is_refused(own_run, small_data):
    with pytest.raises(UsageError, match="lr_scale .* 3.0 "):
        train_here(small_data, own_run, "--lr_scale", 3.0)
    older = own_run / "checkpoints" / "step_00000008"  # refused only once the model is built
    with pytest.raises(UsageError, match="step_00000008"):
        train_here(small_data, own_run, "--resume", older)
    assert log.is_done(own_run)  # a mistaken command does not make it a failed run


def test_weights_to_begin_with_are_read_and_hashed_once(
    trained_run, small_data, run_dir, monkeypatch
):
    newest = trained_run / "checkpoints" / "step_00000012"
    hashing = mock.Mock(wraps=disk.sha256_of)
    monkeypatch.setattr(disk, "sha256_of", hashing)
    train_here(small_data, run_dir, "--init_from", trained_run, "--steps", 1)
    hashed = [Path(call.args[0]) for call in hashing.call_args_list]
    assert sorted(p for p in hashed if p.parent == newest / "dcp") == sorted(newest.glob("dcp/*"))


def test_figures_of_another_text_are_not_the_best(own_run, small_data, capsys):
    """After a resume with another --eval_tokens; half a line is no matter, nor --init_from."""
    shutil.rmtree(own_run / "checkpoints" / "step_00000012")
    with open(own_run / "metrics.jsonl", "a") as file:
        file.write('{"step": 17')
    file = own_run / "checkpoints" / "step_00000008" / "trainer.json"
    record = read_json(file)
    record |= dict(best_bpb=0.001, dtype="torch.float16")  # on another card
    rehash(file.parent, **{"trainer.json": json.dumps(record).encode()})
    train_here(small_data, own_run, "--eval_tokens", 64, "--init_from", file.parent)
    out = capsys.readouterr().out
    assert re.search(r"^step 12 .* \(best\)$", out, re.M)
    assert f"{file.parent} is not read" in out
    assert "computed in torch.float32 from here on, in torch.float16 before" in out
    assert "resumed at step 8" in out and re.search(r"done: 12 steps, .* since step 8;", out)
    assert {*logged(own_run, "val_rows")[:-1]} == {16, 1}
    assert "warning: the data or eval_tokens" in look(capsys, "compare", own_run, own_run)


@pytest.mark.parametrize(
    "step, every, left", [(1, 250, 9), (1999, 250, 2), (2000, 250, 1), (2205, 0, 1)]
)
def test_time_left_has_every_validation_that_will_come(step, every, left):
    meter = SimpleNamespace(eta_s=lambda tokens, **counts: counts["eval"])
    plan = SimpleNamespace(steps=2206, tokens_per_step=1)
    preset = SimpleNamespace(run=SimpleNamespace(eval_every=every))
    run = SimpleNamespace(plan=plan, preset=preset, meter=meter)
    assert screen.time_left_s(run, step) == left


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
