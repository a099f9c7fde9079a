# %% [markdown]
# # 22. Profiler: memory over a step
#
# **Afterwards** you can predict what a training step holds in memory at each moment, and check it.
#
# **Question.** What is in memory when, and what does forgetting cost?
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "The Ultra-Scale Playbook: Training LLMs
# on GPU Clusters." (four kinds of memory, and an odd first step), "Teste de Memory profile",
# "Nemotron-4 340B Technical Report (Aug, 2024)" (no recomputation, says its file of settings;
# Megatron-LM's paper, quoted there, has it after every layer). Core file:
# `instruments/run/profiler.py`. Before: lesson 21. Next: lesson 25. Takes 12 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import gzip
import json
import os
import weakref

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import profile, record_function
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from config import GPTConfig
from model import GPT

os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler would print its own start and end
torch.set_num_threads(1)
CONFIG = GPTConfig(256, 256, 6, 2, 2, 64, 128, mlp_hidden=512)  # 6 layers, 2 heads of 64
lesson.begin(22, "profiler")

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
        self.model = model
        self.optimizer = optimizer
        self.alive = weakref.WeakSet()
        self.lines = []
        middle = model.blocks[len(model.blocks) // 2]
        middle.register_forward_hook(self.halfway)

    def halfway(self, module, args, out) -> None:
        self.note("half of forward")
        out.register_hook(lambda grad: self.note("half of backward"))

    def watch(self):
        return saved_tensors_hooks(self.keep, lambda kept: kept.tensor)

    def keep(self, tensor: torch.Tensor) -> Kept:
        kept = Kept(tensor)
        self.alive.add(kept)
        return kept

    def activations(self) -> int:
        """Bytes of what is kept; weights and their views do not count, and nothing counts twice."""
        at = lambda t: t.untyped_storage().data_ptr()
        own = {at(t) for t in (*self.model.parameters(), *self.model.buffers())}
        storages = {at(k.tensor): k.tensor for k in list(self.alive)}
        return sum(t.untyped_storage().nbytes() for i, t in storages.items() if i not in own)

    def note(self, moment: str) -> None:
        weights = list(self.model.parameters())
        state = [t for s in self.optimizer.state.values() for t in s.values() if t.ndim]
        grads = [p.grad for p in weights if p.grad is not None]
        kinds = [sum(t.nbytes for t in kind) for kind in (weights, grads, state)]
        kinds += [self.activations()]
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
late = set(moments[:5]) == {0} and moments[5] == 2 * weights[0]
lesson.holds(late, "AdamW's moments take nothing until its first step, then twice the weights")
rising = gradients[2] < gradients[3] < gradients[4]
falling = activations[2] > activations[3] > activations[4]
lesson.holds(rising and falling, "in backward, gradients come as activations go")
A = activations[2]
W = weights[0]
lesson.holds(max(total[:6]) == W + A, "step 1 holds at most W weights + A activations, as noted")
lesson.holds(max(total[6:]) == 3 * W + A, "step 2 holds W + 2 W moments + A, more than step 1")
# %% [markdown]
# ## Forgetting
# *Activation checkpointing*: keep only what enters each block, and run the block's forward again
# when backward comes to it.


# %%
def one_step(recompute: bool) -> tuple:
    """-> bytes kept, forward calls per block, FLOPs, gradients."""
    model = new_model()
    calls = []
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda module, args: calls.append(module))
        if recompute:
            inner = block.forward
            block.forward = lambda *a, f=inner: checkpoint(f, *a, use_reentrant=False)
    ledger = Ledger(model, torch.optim.AdamW(model.parameters()))
    with FlopCounterMode(display=False) as flops:
        with ledger.watch():
            loss = model(x, y)
        kept = ledger.activations()
        loss.backward()
    grads = [p.grad for p in model.parameters()]
    return kept, len(calls) / len(model.blocks), flops.get_total_flops(), grads


ways = {"keep all": one_step(False), "recompute": one_step(True)}
rows = [(name, kept / 1e6, calls, flops / 1e9) for name, (kept, calls, flops, _) in ways.items()]
lesson.table(["way", "MB kept", "forward calls", "GFLOP"], rows, "one step, forward and backward")
(kept, calls, flops, grads), (less, twice, more, same) = ways.values()
lesson.holds(less < kept / 5, "recomputing keeps a fifth or less of the activations")
lesson.holds((calls, twice) == (1, 2), "recomputing runs each block's forward twice")
lesson.holds(1.1 < more / flops < 4 / 3, "recomputing costs more FLOPs, but less than a third more")
lesson.holds(all(map(torch.equal, grads, same)), "recomputed or kept, the gradients are equal bits")

# %% [markdown]
# A step is three forwards' worth of FLOPs (backward does two matmuls for each of forward's), so one
# forward more would be a third more. It is less, because the head is not run again, and because
# torch stops a block where backward needs nothing more: its last matmul.
#
# ## The ledger against the profiler
# The ledger knows six moments. PyTorch's profiler sees every allocation, and the time of every
# operator. `train.py --profile` prints its table, regions first, and writes a trace to open in
# https://ui.perfetto.dev (this lesson's is out/18_trace.json.gz). It counts from the profiled step
# on, so weights and moments, which were there before, are not in its sum.

# %%
model = new_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def step() -> None:
    with record_function("forward"):
        loss = model(x, y)
    loss.backward()
    optimizer.step()  # a region of its own, by torch
    optimizer.zero_grad()


step()  # the first one makes the moments
with profile(profile_memory=True) as profiled:
    step()
TRACE = lesson.OUT / "18_trace.json.gz"
profiled.export_chrome_trace(str(TRACE))
events = json.loads(gzip.decompress(TRACE.read_bytes()))["traceEvents"]
table = profiled.key_averages().table("self_cpu_time_total", 6, max_name_column_width=32)
print("\n".join(line[:74] for line in table.splitlines()))  # its first columns
forward = next(e for e in events if e["name"] == "forward" and e.get("dur"))
memory = [e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == 0]
memory = [(e["ts"], e["args"]["Total Allocated"]) for e in memory]  # microseconds, bytes
done = [b for t, b in memory if t <= forward["ts"] + forward["dur"]][-1]
peak_at, peak = max(memory, key=lambda m: m[1])
around = [e for e in events if e.get("cat") == "cpu_op" and 0 <= peak_at - e["ts"] <= e["dur"]]
inner = " in ".join(e["name"].split(": ")[-1] for e in sorted(around, key=lambda e: e["dur"])[:2])
rows = [("forward done", A / 1e6, done / 1e6), ("most at one time", A / 1e6, peak / 1e6)]
lesson.table(["moment", "ledger", "profiler"], rows, "MB beside weights and moments")
print(f"the profiler's peak is in {inner}")
lesson.holds(0.95 < done / A < 1.05, "after forward, ledger and profiler differ by less than 5%")
later = peak_at > forward["ts"] + forward["dur"]
lesson.holds(later and peak > A, "the true peak comes later, in backward, and is higher")

# %% [markdown]
# Backward begins with all activations in memory, and each of its operations needs room for its own
# results before it frees what it has used. So the sums of the ledger are a lower bound, and the
# **temporaries** of one operation come on top: here 3 MB. (The logits of 16 rows of 2,048 tokens
# over a vocabulary of 32,768 are 4.3 GB in fp32, and their gradient is as large.) A batch that just
# fits by the ledger does not fit the device.

# %%
fig = lesson.figure(8, 3.4)
ax = fig.subplots()
kinds = dict(weights=weights, moments=moments, gradients=gradients, activations=activations)
colors = ["silver", "tab:purple", "tab:orange", "tab:blue"]
values = np.array([*kinds.values()]) / 1e6  # (4, 12)
ax.stackplot(range(12), values, labels=list(kinds), colors=colors)
ax.set_xticks(range(12), [line[0].replace(" ", "\n", 1) for line in lines], fontsize=7)
ax.axvline(5.5, color="black", ls=":")
ax.plot([8], [(3 * W + peak) / 1e6], "v", color="black", label="peak, by the profiler")
ax.set(ylabel="MB", xlim=(0, 11), ylim=(0, 85))
ax.set_title(f"step 1{40 * ' '}step 2", loc="center")
ax.legend(loc="upper left", ncols=2)
lesson.save(fig, "22_profiler")

# %% [markdown]
# ## Trap
# `zero_grad(set_to_none=False)` fills the gradients with zeros and keeps them through the next
# forward pass, where the memory is fullest.

# %%
zeros = max(line[-1] for line in two_steps(set_to_none=False))
lesson.holds(zeros - max(total) == W, "with set_to_none=False the peak grows by all gradients")

# %% [markdown]
# ## Exercise
# `exercises/ex22.py`: recomputation as an autograd function. `python course/check.py 22`
