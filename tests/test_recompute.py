"""--recompute: the same gradients from less memory, and a plan that knows how much less."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from chat_helpers import random_model
from conftest import losses
from faults import start

from config import GPTConfig
from instruments.run import forecast
from machinery.plan import activation_bytes
from model import GPT

SHAPE = dict(seq_len=64, vocab_size=128, n_layer=4, n_embd=32, mlp_hidden=128)
SHAPE |= dict(n_head=2, n_kv_head=2, head_dim=16, extras=(), doc_mask=False)
KINDS = [
    dict(extras=("key_offset", "value_embeds")),
    dict(doc_mask=True, nope_every=2),
    dict(mlp="swiglu", tie_embeddings=True, n_kv_head=1, logit_softcap=0.0),
]


def gradients(gpt: GPT, tokens, recompute: bool, call=None) -> tuple:
    """(loss, the gradients, bytes that the graph keeps for backward: not the weights)."""
    gpt.recompute = recompute
    kept = {}
    gpt.zero_grad()
    weights = {p.untyped_storage().data_ptr() for p in gpt.parameters()}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = (gpt if call is None else call)(tokens, tokens)
    size = sum(n for at, n in kept.items() if at not in weights)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in gpt.parameters()], size


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("how", KINDS)
def test_the_gradients_are_the_same_to_the_bit(how, drops):
    """Also where a reader has added dropout to the block: what is computed again draws the same."""
    gpt = random_model(**SHAPE | how)
    tokens = torch.randint(128, (3, 64))
    for block in gpt.blocks:
        block.mlp.register_forward_hook(lambda module, args, x: F.dropout(x, 0.5 * drops))
    (loss, grads, size), (again, others, less) = (
        gradients(gpt, tokens, recompute) for recompute in (False, True)
    )
    assert torch.equal(loss, again) and min(g.abs().max() for g in grads) > 0
    assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    assert less < 0.5 * size
    assert torch.equal(loss, gpt(tokens, tokens).detach()) != drops  # drawn anew each time


@pytest.mark.slow
@pytest.mark.parametrize("extras", [(), ("value_embeds",)])
def test_the_plan_knows_what_a_compiled_step_keeps(extras):
    """As test_plan.py without --recompute; plus one layer, which backward restores."""
    torch._dynamo.reset()
    shape = SHAPE | dict(n_layer=6, n_embd=128, mlp_hidden=512, head_dim=64, seq_len=128)
    gpt = GPT(GPTConfig(**shape | dict(extras=extras)), compute_dtype=torch.bfloat16)
    gpt.init_weights()
    tokens = torch.randint(128, (8, 128))
    step = torch.compile(gpt, backend="aot_eager_decomp_partition", dynamic=False)
    _, _, kept = gradients(gpt, tokens, True, step)
    two, one = (activation_bytes(replace(gpt.config, n_layer=n)) for n in (2, 1))
    estimate = activation_bytes(gpt.config, recompute=True)
    assert 1 <= estimate / (kept / tokens.numel() + two - one) < 1.15


def test_the_losses_of_a_sharded_run_do_not_change(small_data, tmp_path):
    """Compiled: test_train.py."""
    found = []
    for name, more in (("plain", ()), ("less", ("--recompute",))):
        options = ("--steps", 3, "--eval_every", 0, "--parallel", "fsdp", *more)
        start(small_data, tmp_path / name, *options, world=2).end(0)
        found.append(losses(tmp_path / name))
    assert found[0] == found[1]


def test_the_utilization_stays_the_models():
    """A third more of computation is no more FLOPs of the model: tokens a second and MFU fall."""
    words = ["d12", "--gpu", "H100"]
    pages = [forecast.page_of([*words, *more]) for more in ([], ["--recompute"])]
    patterns = r"time .*: ([\d.]+) hours", r"(\d+)% MFU"
    plain, more = ([float(re.search(p, page)[1]) for p in patterns] for page in pages)
    assert 1.15 < more[0] / plain[0] < 1.4
    assert plain[1] / more[1] == pytest.approx(more[0] / plain[0], rel=0.05)
    assert len({re.search(r"FLOPs.*", page)[0] for page in pages}) == 1
