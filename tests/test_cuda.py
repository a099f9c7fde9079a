"""What only a GPU can show: model.py, data.py, machinery/build.py and train.py on one.

Skipped without a GPU. TEST_DEVICE=cpu runs what has a meaning there, to test the tests."""

import os

import pytest
import torch
from conftest import SMALL, losses, run_code
from faults import start
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


def batch(rows: int, seq_len: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(vocab, (rows, seq_len + 1), device=DEVICE)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()  # (B, T) each


def gradients(gpt: model.GPT, step, inputs, targets) -> tuple[float, torch.Tensor]:
    gpt.zero_grad()
    loss = step(inputs, targets)
    loss.backward()
    return loss.item(), torch.cat([p.grad.float().flatten() for p in gpt.parameters()])


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


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
    inputs, targets = batch(4, 512, 1000)
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        torch.manual_seed(0)
        gpt = model.GPT(config, compute_dtype=dtype).to(DEVICE)
        gpt.init_weights()
        for p in gpt.parameters():  # beyond the start, where some matrices are zero
            p.data.add_(torch.randn_like(p), alpha=0.02)
        found[name] = gradients(gpt, gpt, inputs, targets)
        if dtype == torch.bfloat16:
            compiled = torch.compile(gpt, dynamic=False, fullgraph=True)
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
                found["compiled"] = gradients(gpt, compiled, inputs, targets)  # no T x T scores
    (exact, grad), (eager, eager_grad) = found["fp32"], found["bf16"]
    loss, compiled_grad = found["compiled"]
    assert abs(loss - exact) < 0.01 and abs(eager - exact) < 0.01
    assert difference(compiled_grad, grad) < 1.5 * difference(eager_grad, grad) + 0.005
    assert difference(eager_grad, grad) < 0.05


def test_pinned_batches_are_the_rows_of_the_data_also_when_the_device_is_behind(small_data):
    """A buffer that is refilled before its copy has happened would show here."""
    manifest = shards.Manifest.load(small_data)
    order = order_of(manifest, 3)
    here = RowLoader(manifest, order, 8, prefetch=2)
    there = RowLoader(manifest, order, 8, device=DEVICE, prefetch=2)
    busy = torch.randn(2048, 2048, device=DEVICE)
    on_device = []
    for _ in range(40):
        for _ in range(20 if DEVICE.type == "cuda" else 0):
            busy = busy @ busy / 2048  # the copies queue up behind this
        on_device.append([x.clone() for x in there.next_batch()])
    for batch_there in on_device:
        for x, y in zip(batch_there, here.next_batch()):
            assert torch.equal(x.cpu(), y)
    here.close()
    there.close()


@pytest.mark.parametrize("compile", ["--no_compile", pytest.param("--compile", marks=gpu_only)])
def test_killed_and_resumed_it_ends_at_the_same_loss(compile, small_data, tmp_path):
    args = ["--device", DEVICE.type, "--dtype", "bf16", "--steps", 40, "--save_every", 10, compile]
    env = {"CUDA_VISIBLE_DEVICES": "0"}
    start(small_data, tmp_path / "whole", *args, env=env).end(0, timeout_s=240)
    run = start(small_data, tmp_path / "run", *args, spoil=[("slow", 0.05)], env=env)
    saved = lambda: any((tmp_path / "run" / "checkpoints").glob("step_*"))
    run.until(lambda: run.step() >= 25 and saved()).kill().end()
    text = start(small_data, tmp_path / "run", *args, env=env).end(0, timeout_s=240)
    assert "resumed at" in text
    whole = losses(tmp_path / "whole")
    resumed = losses(tmp_path / "run")
    tolerance = 0.02 if DEVICE.type == "cuda" else 0.0
    assert whole.keys() == resumed.keys() and len(whole) == 40
    assert max(abs(whole[s] - resumed[s]) for s in whole) <= tolerance


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
print("probe", taken["probe"], "steps", torch.cuda.max_memory_allocated())
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
    words = run_code(PEAKS, *args, timeout=600).split()
    probe = int(words[words.index("probe") + 1])
    steps = int(words[-1])
    assert steps < 1.05 * probe, f"{probe / 1e9:.2f} GB in the trial, {steps / 1e9:.2f} after it"
