"""machinery/build.py: where a compiler, memory or both are missing, a run goes on, and says so."""

import dataclasses
import re
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import SMALL, losses, metrics
from faults import start
from plans import small_preset, small_world
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import FSDPModule

import optim
import train
from config import UsageError
from machinery import build, checkpoint, plan, ranks
from model import GPT


def no_compiler(*args, **kwargs):
    raise BackendCompilerFailed("inductor", RuntimeError("no C++ compiler found"), None)


@pytest.mark.parametrize("where", ["at once", "when called"])
def test_without_a_compiler_the_step_runs_eager_and_says_so(
    where, trained_run, small_data, tmp_path, monkeypatch, capsys
):
    found = no_compiler if where == "at once" else lambda model, **how: no_compiler
    monkeypatch.setattr(torch, "compile", found)
    small = [word for word in SMALL if word != "--no_compile"]
    options = ["--data_dir", str(small_data), "--run_dir", str(tmp_path / "run")]
    assert train.main(["tiny", *small, *options]) == 0
    assert "no C++ compiler found" in capsys.readouterr().out
    assert losses(tmp_path / "run") == losses(trained_run)


def test_an_error_of_the_models_own_code_is_raised(monkeypatch):
    """A student's mistake is no reason to run it without the compiler."""
    model = GPT(small_preset().model)
    model.init_weights()
    monkeypatch.setattr(GPT, "forward", lambda *args, **kwargs: 1 / 0)
    decided = dataclasses.replace(plan.make_plan(small_preset(), small_world()), compile=False)
    with pytest.raises(ZeroDivisionError):
        build.try_step(model, decided, validate=False)


# ------------------------------------------------------------------------ too little memory


def first_norm(run_dir) -> float:
    return next(r["norm"] for r in metrics(run_dir) if "norm" in r)


@pytest.mark.parametrize("world", [1, 2])
def test_the_micro_batch_is_halved_until_it_fits(world, trained_run, small_data, tmp_path):
    """8 rows per step: 8 and 4 at a time are too many for one rank, 4 for one of two."""
    run_dir, spoil = tmp_path / "run", [("memory_for", 3, 0, world - 1)]
    text = start(small_data, run_dir, "--save_every", 4, world=world, spoil=spoil).end(0)
    halved = [int(n) for n in re.findall("micro-batch reduced to (\\d+)", text)]
    assert halved == ([4, 2] if world == 1 else [2])
    trainer = checkpoint.read_trainer(run_dir / "checkpoints" / "step_00000012")
    assert trainer["micro_batch"] == 2 and trainer["tokens"] == 12 * 512
    one, two = losses(run_dir), losses(trained_run)
    assert max(abs(one[s] - two[s]) for s in two) < 1e-3
    # resumed, also where there is room for more, it sums as before: the same bits
    shutil.rmtree(run_dir / "checkpoints" / "step_00000012")
    (run_dir / "status.json").unlink()
    start(small_data, run_dir, world=world).end(0)
    assert losses(run_dir) == one


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="this torch cannot put FSDP right again"
)
def test_the_micro_batch_is_halved_in_the_middle_of_a_sharded_backward(small_data, tmp_path):
    """Later blocks have exchanged their gradients by then, the first is still whole."""
    run_dir, spoil = tmp_path / "run", [("memory_for_backward", 2), ("validation_in_the_trial",)]
    options = ("--parallel", "fsdp", "--lr_scale", 0.1)
    text = start(small_data, run_dir, *options, world=2, spoil=spoil).end(0)
    assert "micro-batch reduced to 2" in text
    start(small_data, tmp_path / "one", "--lr_scale", 0.1).end(0)
    one, two = losses(tmp_path / "one"), losses(run_dir)
    assert max(abs(one[s] - two[s]) for s in one) < 1e-4
    one, two = (first_norm(tmp_path / name) for name in ("one", "run"))
    assert one == pytest.approx(two, rel=1e-4)  # no gradient of the trial is left in it


def test_not_even_one_row_fits(small_data, tmp_path):
    start(small_data, tmp_path / "run", spoil=[("memory_for", 0)]).end(2)
    args = ["--micro_batch", 4]  # asked for: nobody halves it
    text = start(small_data, tmp_path / "run", *args, spoil=[("memory_for", 3)]).end(2)
    assert "--micro_batch 2" in text


def test_out_of_memory_in_the_middle_names_the_command_that_resumes(
    trained_run, small_data, tmp_path
):
    run_dir, spoil = tmp_path / "run", [("memory_for", 4, 6)]
    text = start(small_data, run_dir, "--save_every", 3, spoil=spoil).end(2)
    command = re.search("error: step 6: .*: train.py (tiny .*)", text)[1].split()
    assert "Traceback" not in text
    text = start(small_data, run_dir, argv=[*command, "--micro_batch", 4], spoil=spoil).end(0)
    assert "resumed at step 6 " in text
    one, two = losses(run_dir), losses(trained_run)
    assert max(abs(one[s] - two[s]) for s in two) < 1e-3


@pytest.fixture
def trials(monkeypatch):
    """try_step on a GPU that is not there, where four rows fit and no more: the micro-batches that
    were tried, and the share of the memory that each trial had."""
    limits, tried = [], []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)

    def try_step(model, plan, validate):
        assert validate  # on a GPU it is compiled as well
        tried.append((plan.micro_batch, limits[-1:]))
        return "fast", build.OUT_OF_MEMORY if plan.micro_batch > 4 else None

    monkeypatch.setattr(build, "try_step", try_step)
    return tried, limits


LOG = SimpleNamespace(print=lambda text: None)


def decided(**changes) -> plan.Plan:
    made = plan.make_plan(small_preset(), small_world())
    assert made.micro_batch == 8 and made.auto_micro_batch
    return dataclasses.replace(made, **{"compile": False} | changes)


def toy() -> mock.Mock:
    return mock.Mock(config=SimpleNamespace(seq_len=64))


def test_on_a_gpu_the_trial_has_less_memory_than_the_run(trials):
    """Unless the micro-batch was asked for: then it may fill the card."""
    (tried, limits), world = trials, small_world("cuda")
    step, val, found = build.compile_step(toy(), [], decided(), world, LOG)
    assert (step, val, found.micro_batch) == ("fast", "fast", 4)
    assert tried == [(8, [0.92]), (4, [0.92])] and limits == [0.92, 1.0]
    asked = decided(micro_batch=8, auto_micro_batch=False)
    limits.clear()
    with pytest.raises(UsageError):
        build.compile_step(toy(), [], asked, world, LOG)
    assert tried[2:] == [(8, [])]


def test_a_sharded_model_tries_again_only_if_all_ranks_failed(trials, monkeypatch):
    """Another rank that had memory enough waits for exchanges of this one."""
    world, gpt, sharded = small_world("cuda"), toy(), decided(parallel="fsdp")
    assert build.compile_step(gpt, [], sharded, world, LOG)[2].micro_batch == 4
    assert gpt.reset_iter_state.call_count == 1
    honest = ranks.any_rank
    monkeypatch.setattr(ranks, "any_rank", lambda x: True if isinstance(x, bool) else honest(x))
    with pytest.raises(UsageError):
        build.compile_step(gpt, [], sharded, world, LOG)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_all_ranks_run_eager_if_one_has_no_compiler(kind, monkeypatch):
    """And on a GPU alone the optimizers and the validation are compiled, too."""
    problems, compiled = ["no compiler", None, None], []
    monkeypatch.setattr(build, "try_step", lambda model, plan, validate: (plan.compile, None))
    monkeypatch.setattr(ranks, "any_rank", lambda x: x if type(x) is bool else problems.pop(0))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share: None)
    monkeypatch.setattr(optim, "compile_steps", compiled.append)
    world, model = small_world(kind), toy()
    step, val, found = build.compile_step(model, ["muon"], decided(compile=True), world, LOG)
    assert (step, found.compile, compiled) == (False, False, [])
    problems[:] = [None]
    step, val, found = build.compile_step(model, ["muon"], decided(compile=True), world, LOG)
    assert (step, found.compile, compiled) == (True, True, [["muon"]] * (kind == "cuda"))
    assert val is (step if kind == "cuda" else model)


@pytest.mark.parametrize("doc_mask", [False, True])
def test_no_cudnn_with_a_mask(doc_mask):
    """Its backward could give NaN; the choice is undone with the run."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with build.attention_kernels(dataclasses.replace(small_preset().model, doc_mask=doc_mask)):
        assert torch.backends.cuda.cudnn_sdp_enabled() == (before and not doc_mask)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
