"""machinery/build.py: where a compiler, memory or both are missing, a run goes on, and says so."""

import re
import shutil
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import losses, train_here
from faults import start
from plans import small_preset, small_world
from torch._dynamo.exc import BackendCompilerFailed

import optim
from machinery import build, checkpoint, plan, ranks
from model import GPT


def no_compiler(*args, **kwargs):
    raise BackendCompilerFailed("inductor", RuntimeError("no C++ compiler found"), None)


def test_no_compiler_means_eager(trained_run, small_data, run_dir, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda model, **how: no_compiler)
    assert train_here(small_data, run_dir, "--compile") == 0
    assert "no C++ compiler found" in capsys.readouterr().out
    assert losses(run_dir) == losses(trained_run)


# ------------------------------------------------------------------------ too little memory
@pytest.mark.parametrize("world", [1, 2])
def test_the_micro_batch_is_halved_until_it_fits(world, trained_run, small_data, run_dir):
    """8 rows per step: 8 and 4 at a time are too many for one rank, 4 for one of two."""
    spoil = [("memory_for", 3, 0, world - 1)]
    text = start(small_data, run_dir, "--save_every", 4, world=world, spoil=spoil).end(0)
    halved = [int(n) for n in re.findall("micro-batch reduced to (\\d+)", text)]
    assert halved == ([4, 2] if world == 1 else [2])
    trainer = checkpoint.read_trainer(run_dir / "checkpoints" / "step_00000012")
    assert trainer.micro_batch == 2 and trainer.tokens == 12 * 512
    one = losses(run_dir)
    assert one == pytest.approx(losses(trained_run), abs=1e-3)
    # resumed, also where there is room for more, it sums as before: the same bits
    shutil.rmtree(run_dir / "checkpoints" / "step_00000012")
    (run_dir / "status.json").unlink()
    start(small_data, run_dir, world=world).end(0)
    assert losses(run_dir) == one


@pytest.mark.parametrize("asked, rows", [((), 0), (("--micro_batch", 4), 3)])
def test_where_nothing_is_left_to_halve_the_options_are_named(asked, rows, small_data, run_dir):
    text = start(small_data, run_dir, *asked, spoil=[("memory_for", rows)]).end(2)
    assert "--recompute" in text and "Traceback" not in text


def test_out_of_memory_later_names_the_command_that_resumes(trained_run, small_data, run_dir):
    spoil = [("memory_for", 4, 6)]
    text = start(small_data, run_dir, "--save_every", 3, spoil=spoil).end(2)
    command = re.search("error: step 6: .*: train.py (tiny .*)", text)[1].split()
    text = start(small_data, run_dir, argv=[*command, "--micro_batch", 4], spoil=spoil).end(0)
    assert "resumed at step 6 " in text
    assert losses(run_dir) == pytest.approx(losses(trained_run), abs=1e-3)


LOG = SimpleNamespace(print=lambda text: None)


def decided(**changes) -> plan.Plan:
    return replace(plan.make_plan(small_preset(), small_world()), **changes)


def test_the_micro_batch_of_a_sharded_model_is_not_tried_again(monkeypatch):
    """The other ranks wait for exchanges of this one."""
    model = GPT(small_preset().model)
    model.init_weights()
    monkeypatch.setattr(GPT, "forward", mock.Mock(side_effect=torch.OutOfMemoryError("x")))
    with pytest.raises(torch.OutOfMemoryError):
        build.try_step(model, decided(parallel="fsdp"), validate=False)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_all_ranks_run_eager_if_one_has_no_compiler(kind, monkeypatch):
    """And on a GPU alone the trial has less memory than the run, and the optimizers and the
    validation are compiled, too."""
    on_gpu = kind == "cuda"
    limits = []
    compiled = []

    def try_step(model, plan, validate):
        assert (limits[-1:], validate) == ([0.92] * on_gpu, on_gpu)
        return plan.compile, None

    monkeypatch.setattr(build, "try_step", try_step)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    monkeypatch.setattr(optim, "compile_steps", compiled.append)
    model = mock.Mock()
    for works in (False, True):  # on another rank
        problems = iter([None] if works else ["no compiler", None])
        monkeypatch.setattr(ranks.Team, "any", lambda team, own, left=problems: next(left))
        how = (["muon"], decided(compile=True), small_world(kind), LOG)
        step, val, found = build.compile_step(model, *how)
        assert (step, found.compile) == (works, works)
        assert compiled == [["muon"]] * (works and on_gpu) and limits[-1:] == [1.0] * on_gpu
        assert val is (step if on_gpu else model)


@pytest.mark.parametrize("doc_mask", [False, True])
def test_no_cudnn_with_a_mask(doc_mask, monkeypatch):
    """Its backward could give NaN."""
    said = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", said.append)
    model = replace(small_preset().model, doc_mask=doc_mask)
    build.build_model(model, decided(), small_world(), seed=0)
    assert said == [False] * doc_mask
