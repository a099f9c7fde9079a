"""What only a GPU can show: model.py, data.py, machinery/build.py and train.py on one.

Skipped without a GPU. TEST_DEVICE=cpu runs what has a meaning there, to test the tests."""

import os
from contextlib import closing

import pytest
import torch
from conftest import SMALL, losses, run_code
from faults import start
from test_recompute import gradients
from torch.nn.attention import SDPBackend, sdpa_kernel

import model
from config import GPTConfig
from data import RowLoader, order_of
from machinery import shards

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cuda"))
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"
)
gpu_only = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
D12 = dict(n_layer=3, n_embd=256, n_head=2, n_kv_head=2, head_dim=128, mlp_hidden=1024)


GROUPED = dict(mlp="swiglu", n_head=6, n_kv_head=2, head_dim=64)


@pytest.mark.parametrize(
    "changes",
    [{}, GROUPED, GROUPED | dict(doc_mask=True)],
    ids=["d12", "grouped queries", "of documents"],
)
def test_a_compiled_step_in_bf16_is_the_eager_one_in_fp32(changes):
    """Within what bf16 costs: the eager step in bf16 is as far from fp32."""
    extras = ("key_offset", "value_embeds")
    config = GPTConfig(seq_len=512, vocab_size=1000, extras=extras, **D12 | changes)
    tokens = torch.randint(1000, (4, 512), device=DEVICE)

    def built(dtype):
        torch.manual_seed(0)
        gpt = model.GPT(config, compute_dtype=dtype).to(DEVICE)
        gpt.init_weights()
        for p in gpt.parameters():  # beyond the start, where some matrices are zero
            p.data.add_(torch.randn_like(p), alpha=0.02)
        return gpt

    def loss_and_gradient(gpt, step=None):
        loss, found, _ = gradients(gpt, tokens, False, step)
        return loss, torch.cat([g.flatten() for g in found])

    exact, grad = loss_and_gradient(built(torch.float32))
    gpt = built(torch.bfloat16)
    eager, eager_grad = loss_and_gradient(gpt)
    compiled = torch.compile(gpt, dynamic=False, fullgraph=True)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        loss, compiled_grad = loss_and_gradient(gpt, compiled)  # no T x T scores
    assert abs(loss - exact) < 0.01 and abs(eager - exact) < 0.01
    apart = (eager_grad - grad).norm()
    assert (compiled_grad - grad).norm() < 1.5 * apart + 0.005 * grad.norm()
    assert apart < 0.05 * grad.norm()


def test_pinned_batches_are_the_rows_of_the_data_also_when_the_device_is_behind(small_data):
    """A buffer that is refilled before its copy has happened would show here."""
    manifest = shards.Manifest.load(small_data)
    order = order_of(manifest, 3)
    here = RowLoader(manifest, order, 8, prefetch=2)
    there = RowLoader(manifest, order, 8, device=DEVICE, prefetch=2)
    busy = torch.randn(2048, 2048, device=DEVICE)
    on_device = []
    with closing(here), closing(there):
        for _ in range(40):
            for _ in range(20 if DEVICE.type == "cuda" else 0):
                busy = busy @ busy / 2048  # the copies queue up behind this
            on_device += [x.clone() for x in there.next_batch()]
        expected = [x for _ in range(40) for x in here.next_batch()]
    assert all(torch.equal(x.cpu(), y) for x, y in zip(on_device, expected))


@pytest.mark.parametrize("compile", ["--no_compile", pytest.param("--compile", marks=gpu_only)])
def test_killed_and_resumed_it_ends_at_the_same_loss(compile, small_data, tmp_path):
    args = ["--device", DEVICE.type, "--dtype", "bf16", "--steps", 40, "--save_every", 10, compile]
    env = {"CUDA_VISIBLE_DEVICES": "0"}
    begin = lambda name, *spoil: start(small_data, tmp_path / name, *args, spoil=spoil, env=env)
    begin("whole").end(0, timeout_s=240)
    run = begin("run", ("slow", 0.05))
    saved = lambda: any(tmp_path.glob("run/checkpoints/step_*"))
    run.until(lambda: run.step() >= 25 and saved()).kill().end()
    assert "resumed at" in begin("run").end(0, timeout_s=240)
    tolerance = 0.02 if DEVICE.type == "cuda" else 0.0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), abs=tolerance)


PEAKS = """
import sys, torch, train
from machinery import build
taken = {}
honest = build.open_loader
def open_loader(*args):  # what comes after the trial
    taken["probe"] = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return honest(*args)
build.open_loader = open_loader
code = train.main(sys.argv[1:])
print(taken["probe"], torch.cuda.max_memory_allocated())
sys.exit(code)
"""


@gpu_only
def test_the_trial_step_needs_the_memory_of_a_real_one(small_data, tmp_path):
    """Else a micro-batch that passes the trial ends the run at its first step."""
    big = (
        "--n_layer 4 --n_embd 512 --n_head 4 --n_kv_head 4 --head_dim 128 --mlp_hidden 2048 "
        "--device cuda --dtype bf16 --compile --tokens_per_step 65536 --micro_batch 512 --steps 3"
    ).split()
    args = ["tiny", *SMALL, *big, "--data_dir", small_data, "--run_dir", tmp_path / "run"]
    probe, steps = map(int, run_code(PEAKS, *args, timeout=600).split()[-2:])
    assert steps < 1.05 * probe, f"{probe / 1e9:.2f} GB in the trial, {steps / 1e9:.2f} after it"
