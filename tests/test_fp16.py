"""fp16: its edges against fp64, its loss scale in a run, and the notebook of docs/free.md."""

import os
import re
import signal
import subprocess
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, environment, logged, look, metrics, read_json
from faults import start
from test_faults import assert_same_state

import model
from config import GPTConfig
from machinery import ranks
from machinery.formats import Counters

FP16 = "--dtype fp16 --save_every 3 --keep 9".split()


@pytest.mark.parametrize("major, dtype", [(6, "float32"), (7, "float16"), (8, "bfloat16")])
def test_a_card_with_tensor_cores_but_no_bf16_gets_fp16(major, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    assert ranks.pick_dtype(torch.device("cuda")) == getattr(torch, dtype)


def test_relu_squared_ends_before_the_largest_number():
    x = torch.tensor([-3.0, 100, 200, 300, 60_000], dtype=torch.float16, requires_grad=True)
    h = model.relu_squared(x)
    h.backward(torch.ones_like(h))
    assert h.tolist() == [0, 10_000, 40_000, 65_024, 65_024]
    assert x.grad.tolist() == [0, 200, 400, 0, 0]


def test_the_gradient_of_the_loss_is_that_of_fp64_if_it_is_scaled():
    """With logits beyond the cap, and as many tokens as a step of d12 has."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=1000, n_embd=128)
    x = torch.randn(64, 128)
    weight = torch.randn(1024, 128)
    targets = torch.randint(1000, (64,))
    exact = x.double().requires_grad_()
    logits = 15 * torch.tanh(exact @ weight[:1000].double().T / 15)
    F.cross_entropy(logits, targets, reduction="sum").backward()
    errors = []
    for scale in (1.0, Counters().fp16_scale):
        half = x.half().requires_grad_()
        loss = model.cross_entropy(half[None], weight.half(), targets[None], config).sum()
        (loss * scale / 524_288).backward()
        grad = half.grad.double() * 524_288 / scale
        errors.append(float((grad - exact.grad).norm() / exact.grad.norm()))
    assert errors[1] < 1e-3 and errors[0] > 1e-2


class OnGPU(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(
    "dtype, masked, heads", [("half", 0, 4), ("bfloat16", 1, 4), ("bfloat16", 0, 2)]
)
def test_a_gpu_gets_a_key_for_each_query_where_its_kernel_takes_no_groups(
    dtype, masked, heads, monkeypatch
):
    seen = []
    attention = F.scaled_dot_product_attention
    noting = lambda q, k, v, **how: seen.append(k.size(1)) or attention(q, k, v, **how)
    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    mask = torch.ones(8, 8, dtype=torch.bool).tril() if masked else None
    q, k, v = (torch.randn(1, n, 8, 16, dtype=getattr(torch, dtype)) for n in (4, 2, 2))
    grouped = model.attend(q, k, v, mask)
    whole = model.attend(*(x.as_subclass(OnGPU) for x in (q, k, v)), mask)
    assert seen == [2, heads]
    torch.testing.assert_close(whole.as_subclass(torch.Tensor), grouped)


def spoiled(rank: int) -> list:
    """The gradients of step 7 overflow on one rank; the scale doubles after four good steps."""
    return [("growth", 4), ("wait_for_saves",), ("poison", [7], rank, "gradients")]


@pytest.fixture(scope="module")
def whole(small_data, trained_run, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("fp16") / "run"
    start(small_data, run_dir, *FP16, spoil=spoiled(0)).end(0)
    low = Counters().fp16_scale
    high = 2 * Counters().fp16_scale
    assert logged(run_dir, "scale") == 4 * [low] + 3 * [high] + 4 * [low] + [high]
    half, single = (logged(folder, "norm") for folder in (run_dir, trained_run))
    assert half[:6] == pytest.approx(single[:6], rel=0.01)
    return run_dir


def test_killed_across_a_growth_and_an_overflow_it_is_the_same(whole, small_data, run_dir):
    for step in (4, 8):  # resumed at 3, after three good steps, and at 6
        spoil = [*spoiled(0), ("signal_at", step, signal.SIGKILL)]
        start(small_data, run_dir, *FP16, spoil=spoil).end(-signal.SIGKILL)
    assert "resumed at step 6" in start(small_data, run_dir, *FP16, spoil=spoiled(0)).end(0)
    assert logged(run_dir, "scale") == logged(whole, "scale")
    assert_same_state(whole, run_dir, 12)


@pytest.mark.parametrize("world, parallel", [(2, "ddp"), (2, "fsdp"), (3, "ddp"), (3, "fsdp")])
def test_all_ranks_skip(world, parallel, whole, small_data, run_dir):
    args = [*FP16, "--parallel", parallel]
    start(small_data, run_dir, *args, world=world, spoil=spoiled(1)).end(0)
    assert logged(run_dir, "scale") == logged(whole, "scale")
    for one, several in zip(metrics(whole), metrics(run_dir), strict=True):
        assert one.get("loss", 0) == pytest.approx(several.get("loss", 0), abs=2e-3)


@pytest.mark.parametrize("what, step", [("gradients", 17), ("loss", 1)])
def test_an_overflow_at_scale_1_or_a_loss_of_nan_stops(what, step, small_data, run_dir):
    spoil = [("poison", [*range(1, 21)], 0, what)]
    start(small_data, run_dir, *FP16, "--steps", 20, spoil=spoil).end(5)
    assert len(metrics(run_dir, "skipped")) == step - 1


def test_a_run_in_fp16_is_scored_and_sampled_in_any_dtype(whole, capsys):
    text = ""
    for dtype in ("fp16", "fp32"):
        for command in ("loss", "sample"):
            text += look(capsys, command, whole, "--device", "cpu", "--dtype", dtype)
    one, two = map(float, re.findall(r"([\d.]+) nats per token", text))
    assert one == pytest.approx(two, abs=1e-3)


def test_the_notebook_is_the_page_and_runs_from_top_to_bottom(tmp_path, monkeypatch):
    """In an empty folder, on a CPU: `tiny`, cut small, in place of d6."""
    cells = read_json(ROOT / "docs/free.ipynb")["cells"]
    cells = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    page = re.findall(r"^```python\n(.*?)\n```", (ROOT / "docs/free.md").read_text(), re.M | re.S)
    assert cells == page and len(cells) >= 6
    data = "--source files:machinery --vocab_size 512 --row_len 65 --val_fraction 0.2"
    small = "--steps 3 --n_layer 2 --tokens_per_step 512 --no_compile --eval_tokens 512 --mirror"
    swaps = {"{address}": str(ROOT), "=gpu": "=1", "data.py d6": f"data.py d6 {data}"}
    swaps |= {"d6": "tiny", "--mirror": small}
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ, environment()):
        for cell in cells:
            for old, new in swaps.items():
                cell = cell.replace(old, new)
            if cell.startswith("import"):
                exec(cell, {"input": str})
            for line in cell.splitlines():
                if line.startswith("%cd "):
                    os.chdir(line[4:])
                elif line.startswith("!"):
                    subprocess.run(["bash", "-ec", line[1:]], check=True)
        assert list((tmp_path / "kept/tiny").glob("step_*/MANIFEST.json"))
