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

    def gradient(dtype, scale=1.0):
        own = x.to(dtype).requires_grad_()
        loss = model.cross_entropy(own[None], weight.to(dtype), targets[None], config).sum()
        (loss * scale / 524_288).backward()
        return own.grad.double() / scale

    exact = gradient(torch.double)
    error = lambda *how: float((gradient(torch.half, *how) - exact).norm() / exact.norm())
    assert error(Counters().fp16_scale) < 1e-3 and error() > 1e-2


class OnGPU(torch.Tensor):
    is_cuda = True


TRIL = torch.ones(8, 8, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    "dtype, mask, heads",
    [(torch.half, None, 4), (torch.bfloat16, TRIL, 4), (torch.bfloat16, None, 2)],
)
def test_a_gpu_gets_a_key_for_each_query_where_its_kernel_takes_no_groups(
    dtype, mask, heads, monkeypatch
):
    seen = []
    attention = F.scaled_dot_product_attention
    noting = lambda q, k, v, **how: seen.append(k.size(1)) or attention(q, k, v, **how)
    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    q, k, v = (torch.randn(1, n, 8, 16, dtype=dtype) for n in (4, 2, 2))
    grouped = model.attend(q, k, v, mask)
    whole = model.attend(*(x.as_subclass(OnGPU) for x in (q, k, v)), mask)
    assert seen == [2, heads]
    torch.testing.assert_close(whole.as_subclass(torch.Tensor), grouped)


def spoiled(rank):
    """The scale doubles after four good steps; the gradients of step 9 overflow on one rank."""
    return [("growth", 4), ("wait_for_saves",), ("poison", [9], rank, "gradients")]


@pytest.fixture(scope="module")
def whole(small_data, trained_run, once):
    make = lambda folder: start(small_data, folder / "run", *FP16, spoil=spoiled(0)).end(0)
    run_dir = once("fp16", make) / "run"
    low = Counters().fp16_scale
    assert logged(run_dir, "scale") == 4 * [low] + 4 * [2 * low] + [4 * low] + 3 * [2 * low]
    half, single = (logged(folder, "norm") for folder in (run_dir, trained_run))
    assert half[:8] == pytest.approx(single[:8], rel=0.01)
    return run_dir


def test_killed_between_a_growth_and_an_overflow_it_is_the_same(whole, small_data, run_dir):
    """Resumed after two good steps."""
    spoil = [*spoiled(0), ("signal_at", 8, signal.SIGKILL)]
    start(small_data, run_dir, *FP16, spoil=spoil).end(-signal.SIGKILL)
    assert "resumed at step 6" in start(small_data, run_dir, *FP16, spoil=spoiled(0)).end(0)
    assert logged(run_dir, "scale") == logged(whole, "scale")
    assert_same_state(whole, run_dir, 12)


@pytest.mark.parametrize("world, parallel", [(2, "fsdp"), (3, "ddp")])
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
    assert cells == page
    data = "--source files:machinery --vocab_size 512 --row_len 65 --val_fraction 0.2"
    small = "--steps 3 --n_layer 2 --tokens_per_step 512 --no_compile --eval_tokens 512 --mirror"
    swaps = {"{address}": str(ROOT), "=gpu": "=1", "data.py d6": f"data.py d6 {data}"}
    swaps |= {"d6": "tiny", "--mirror": small, "nvidia-smi -L": "true"}
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ, environment()):
        exec(cells[0], {"input": str})
        for line in "\n".join(cells[1:]).splitlines():
            for old, new in swaps.items():
                line = line.replace(old, new)
            if line.startswith("%cd "):
                os.chdir(line[4:])
            else:
                assert line.startswith("!")
                subprocess.run(["bash", "-ec", line[1:]], check=True)
        assert list((tmp_path / "kept/tiny").glob("step_*/MANIFEST.json"))
