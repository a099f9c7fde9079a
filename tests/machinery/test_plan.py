"""machinery/plan.py: the arithmetic of a run, from the preset and the machine's figures alone."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plans import small_world
from test_recompute import gradients

import config
from config import GPTConfig
from machinery import plan
from model import GPT


def test_state_over_half_of_the_memory_is_sharded():
    world = lambda n: small_world(ranks_=n, memory_bytes=80 * 10**9)
    found = [plan.pick_parallel("auto", world(8), state) for state in (39e9, 41e9)]
    assert found == ["ddp", "fsdp"]
    assert plan.pick_parallel("ddp", world(8), 41e9) == "ddp"
    assert plan.pick_parallel("auto", world(1), 41e9) == "none"


@pytest.mark.parametrize("preset, memory_gb", [("d12", 20), ("d24", 46)])
def test_the_gradients_of_ddp_are_in_memory_once(preset, memory_gb):
    """There are no buckets beside the gradients: of a card, 8 ranks fill as much as one does."""
    found = config.PRESETS[preset]
    gpu = dict(kind="cuda", dtype=torch.bfloat16, memory_bytes=memory_gb * 10**9)
    ddp = replace(found, run=replace(found.run, parallel="ddp"))
    one, eight = (plan.make_plan(ddp, small_world(ranks_=n, **gpu)) for n in (1, 8))
    assert (one.parallel, eight.parallel) == ("none", "ddp")
    assert one.micro_batch == eight.micro_batch > 1


def test_a_plan_opens_no_file_and_touches_no_device(monkeypatch):
    for owner, name in ((Path, "exists"), (shutil, "disk_usage"), (torch.cuda, "is_available")):
        monkeypatch.setattr(owner, name, lambda *args: pytest.fail("not pure"))
    worlds = [small_world("cuda", 8, dtype=torch.bfloat16) for _ in range(2)]
    one, two = (plan.make_plan(config.PRESETS["d20"], world) for world in worlds)
    assert one == two and "x 1.265" in one.text  # the learning rates


@pytest.mark.parametrize(
    "share, most, rows",
    [
        (512, 24, 16),  # 32 of them; 22 of 24 would compute 16 rows for nothing
        (512, 32, 32),
        (51, 32, 17),  # three, and none is padding
        (34, 16, 12),  # three with two rows of padding, instead of 17 of two rows
        (31, 16, 16),
        (7, 16, 7),
        (5, 1, 1),
    ],
)
def test_a_micro_batch_without_padding_may_have_half_of_the_rows_that_fit(share, most, rows):
    for world_size in (1, 2, 3):
        assert plan.micro_batch_for(share * world_size, world_size, most) == rows
    assert plan.micro_batch_for(512, 1, 24, sharded=True) == 24  # fewer times to gather weights


@pytest.mark.parametrize("extras", [(), ("value_embeds",)])
def test_the_plan_knows_what_forward_keeps_for_backward(extras):
    """With queries and keys normed, or grouped. The logits are few here."""
    sizes = dict(n_layer=2, n_embd=128, n_head=4, head_dim=32, mlp_hidden=256, seq_len=256)
    sizes |= dict(n_kv_head=4 if extras else 2, vocab_size=64, mlp="swiglu" if extras else "relu2")
    config = GPTConfig(**sizes, qk_norm=bool(extras), extras=extras)
    model = GPT(config, compute_dtype=torch.bfloat16)
    model.init_weights()
    step = torch.compile(model, backend="aot_eager_decomp_partition", dynamic=False)
    tokens = torch.randint(64, (16, 256))
    _, _, kept = gradients(model, tokens, False, step)
    assert plan.activation_bytes(config) == pytest.approx(kept / tokens.numel(), rel=0.1)
