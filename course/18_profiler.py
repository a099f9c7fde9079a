# %% [markdown]
# # 18. Profiler: memory over a step
#
# **Question.** What is in memory when, and what does forgetting cost?
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "The Ultra-Scale Playbook: Training LLMs
# on GPU Clusters." (four kinds of memory, and an odd first step), "Teste de Memory profile",
# "Nemotron-4 340B Technical Report (Aug, 2024)" (recomputation after every layer). Core file:
# `instruments/profiler.py`. Before: lesson 19. Next: lesson 24. Takes 15 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import weakref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from config import GPTConfig
from instruments.profiler import Profile, breakdown, step_marks, to_spans
from model import GPT
from optim import Muon

torch.set_num_threads(1)
CONFIG = GPTConfig(
    seq_len=256,
    vocab_size=256,
    n_layer=6,
    n_embd=128,
    n_head=2,
    n_kv_head=2,
    head_dim=64,
    mlp_hidden=512,
)
lesson.begin(18, "profiler")

# %% [markdown]
# ## A ledger
# Weights, gradients, the optimizer's moments, and the activations: what forward leaves behind for
# backward. Autograd lets us watch the last: it hands each tensor that it keeps to a hook, and
# drops what the hook returned as soon as backward is done with it.


# %%
class Kept:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Ledger:
    """Bytes of four kinds, noted at the moments of a step."""

    def __init__(self, model: GPT, optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.alive, self.lines = weakref.WeakSet(), []
        middle = model.blocks[len(model.blocks) // 2]
        middle.register_forward_hook(self.halfway)

    def halfway(self, module, args, out) -> None:
        self.note("half of forward")
        out.register_hook(lambda grad: self.note("half of backward"))

    def watch(self):
        def keep(tensor: torch.Tensor) -> Kept:
            kept = Kept(tensor)
            self.alive.add(kept)
            return kept

        return saved_tensors_hooks(keep, lambda kept: kept.tensor)

    def activations(self) -> int:
        """Bytes of what is kept; weights and their views do not count, and nothing counts twice."""
        own = {
            t.untyped_storage().data_ptr() for t in self.model.state_dict(keep_vars=True).values()
        }
        own |= {t.untyped_storage().data_ptr() for t in self.model.buffers()}
        storages = {k.tensor.untyped_storage().data_ptr(): k.tensor for k in list(self.alive)}
        return sum(t.untyped_storage().nbytes() for at, t in storages.items() if at not in own)

    def note(self, moment: str) -> None:
        weights = list(self.model.parameters())
        state = [t for s in self.optimizer.state.values() for t in s.values() if t.ndim]
        grads = [p.grad for p in weights if p.grad is not None]
        kinds = [sum(t.nbytes for t in kind) for kind in (weights, grads, state)]
        kinds.append(self.activations())
        self.lines.append((moment, *kinds, sum(kinds)))


def new_model() -> GPT:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    model.init_weights()
    return model


text = torch.from_numpy(lesson.bytes_of_stdlib(4 * 257)).view(4, 257)
x, y = text[:, :-1], text[:, 1:]


def two_steps(set_to_none: bool = True) -> list[tuple]:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ledger = Ledger(model, optimizer)
    for _ in range(2):
        ledger.note("begin")
        with ledger.watch():
            loss = model(x, y)
        ledger.note("forward done")
        loss.backward()
        ledger.note("backward done")
        optimizer.step()
        ledger.note("optimizer done")
        optimizer.zero_grad(set_to_none)
    return ledger.lines


lines = two_steps()
columns = ["moment", "weights", "gradients", "moments", "activations", "sum"]
rows = [(line[0], *(n / 1e6 for n in line[1:])) for line in lines]
lesson.table(columns, rows[:6], "MB, step 1")
lesson.table(columns, rows[6:], "MB, step 2")
weights, gradients, moments, activations, total = zip(*(line[1:] for line in lines))
lesson.holds(set(moments[:5]) == {0} and moments[5] == 2 * weights[0], "AdamW: 0, then 2 x weights")
rising = [a < b for a, b in zip(gradients[2:4], gradients[3:5])]
falling = [a > b for a, b in zip(activations[2:4], activations[3:5])]
lesson.holds(all(rising + falling), "in backward gradients come as activations go")
A, W = activations[2], weights[0]
lesson.holds(max(total[:6]) == W + A, "peak of the first step: W + A")
lesson.holds(
    max(total[6:]) == W + 2 * W + A, "and of all others: 3 W + A, so one step proves little"
)
model = new_model()
muon = Muon(list(model.blocks.parameters()))
model(x, y).backward()
muon.step()
matrices = sum(p.nbytes for p in model.blocks.parameters())
state = sum(t.nbytes for s in muon.state.values() for t in s.values() if torch.is_tensor(t))
lesson.holds(matrices <= state < 1.02 * matrices, "Muon keeps one number per weight, not two")

# %% [markdown]
# ## Forgetting
# *Activation checkpointing*: keep only what enters each block, and run the block's forward again
# when backward comes to it.


# %%
def one_step(recompute: bool, to_the_end: bool = False) -> tuple:
    """-> bytes kept, forward calls per block, FLOPs, gradients."""
    model, calls = new_model(), 0

    def count(module, args):
        nonlocal calls
        calls += 1

    for block in model.blocks:
        block.mlp.register_forward_pre_hook(count)
        if recompute:
            inner = block.forward
            block.forward = lambda *a, f=inner: checkpoint(f, *a, use_reentrant=False)
    ledger = Ledger(model, torch.optim.AdamW(model.parameters()))
    early = set_checkpoint_early_stop(not to_the_end)
    with FlopCounterMode(display=False) as flops, early:
        with ledger.watch():
            loss = model(x, y)
        kept = ledger.activations()
        loss.backward()
    grads = [p.grad for p in model.parameters()]
    return kept, calls / len(model.blocks), flops.get_total_flops(), grads


ways = {"keep all": one_step(False), "recompute": one_step(True)}
ways["recompute to the end"] = one_step(True, to_the_end=True)
rows = [(name, kept / 1e6, calls, flops / 1e9) for name, (kept, calls, flops, _) in ways.items()]
lesson.table(["way", "MB kept", "forward calls", "GFLOP"], rows)
(kept, calls, flops, grads), (less, twice, more, same), (_, _, most, _) = ways.values()
lesson.holds(less < kept / 5 and (calls, twice) == (1, 2), "a fifth or less is kept, forward twice")
lesson.holds(1.3 < most / flops < 4 / 3, "FLOPs times 4/3, less the head")
lesson.holds(more < most, "torch stops early: backward needs nothing from a block's last matmul")
lesson.holds(all(map(torch.equal, grads, same)), "the gradients are equal bit for bit")

# %% [markdown]
# ## The same from the real profiler
# `train.py --profile` makes this table. Open the trace in https://ui.perfetto.dev.

# %%
model = new_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with Profile(lesson.OUT / "10_profile", torch.device("cpu")) as profile:
    while not profile.done:
        model(x, y).backward()
        with torch.profiler.record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        profile.step()
print(profile.table())
events = profile.trace_events()
marks = step_marks(events)
start, end = marks[0]["ts"], max(e["ts"] + e["dur"] for e in marks)
parts = breakdown(to_spans(events), start, end)
lesson.holds(abs(sum(parts.values()) - (end - start)) < 1, "its rows add up to the step")

# %%
fig = lesson.figure(8, 3.4)
ax = fig.subplots()
kinds = {"weights": weights, "moments": moments, "gradients": gradients, "activations": activations}
colors = ["silver", "tab:purple", "tab:orange", "tab:blue"]
series = [[n / 1e6 for n in kind] for kind in kinds.values()]
ax.stackplot(range(12), series, labels=list(kinds), colors=colors)
ax.set_xticks(range(12), [line[0].replace(" ", "\n", 1) for line in lines], fontsize=7)
ax.axvline(5.5, color="black", ls=":")
ax.set(ylabel="MB", xlim=(0, 11), title=f"step 1{40 * ' '}step 2")
ax.legend(loc="upper left", fontsize=8)
lesson.save(fig, "18_profiler")

# %% [markdown]
# ## Trap
# `zero_grad(set_to_none=False)` fills the gradients with zeros and keeps them through the next
# forward pass, where the memory is fullest.

# %%
kept_zeros = max(line[-1] for line in two_steps(set_to_none=False))
print(f"peak {kept_zeros / 1e6:.1f} MB instead of {max(total) / 1e6:.1f}")
lesson.holds(kept_zeros - max(total) == W, "the peak grows by one gradient per weight")

# %% [markdown]
# ## Exercise
# `exercises/ex18.py`: recomputation as an autograd function. `python course/check.py 18`
