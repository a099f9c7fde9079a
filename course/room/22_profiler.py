# %% [markdown]
# # 22. Profiler: where time and memory go
#
# **Question.** A line of elementwise code takes its time: for what? What is in memory at which
# moment, and what does it cost to forget some of it?
#
# **Afterwards** you can say, before you compile a few lines, whether that will make them faster.
# You can predict what a training step holds in memory at each moment.
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "Anotações da Semana 6" (an ELU with and
# without torch.compile), "The Ultra-Scale Playbook: Training LLMs on GPU Clusters." (four kinds of
# memory, and an odd first step), "Teste de Memory profile", "Nemotron-4 340B Technical Report (Aug,
# 2024)" (its file of settings says no recomputation; Megatron-LM's paper, quoted there, recomputes
# every layer); *NfNN*, "1.1.6 Capacidade de fusão de kernel". Core files: `model.py`,
# `relu_squared`; `instruments/run/profiler.py`. Before: lesson 7. Next: lesson 23.
# Takes 12 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import gzip
import json
import os
import resource
import time
import timeit
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
# ## Time: the four costs of a line
# A line such as `x * 1.5` hardly computes anything. So where does its time go? Every line of
# ordinary (**eager**) code is a **call**: Python asks torch, torch picks a loop for the dtype, and
# the loop runs. It reads its arguments from **memory** and writes its result there. The result
# needs a place: if it is large, the operating system hands out **new pages**, and fills them with
# zeros first. And in between there is the **arithmetic**. The last column below says which of the
# four costs most.


# %%
def ns(f, *args) -> float:
    """Nanoseconds of CPU time for each number of the first argument, the best of eight tries."""
    n = args[0].numel()
    calls = max(1, 50_000 // n)
    timer = time.process_time_ns
    return min(timeit.repeat(lambda: f(*args), timer=timer, number=calls, repeat=8)) / calls / n


faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt  # pages fetched so far
small, x, huge = (torch.randn(n) for n in (1000, 1_000_000, 16_000_000))
old = torch.zeros_like(huge)  # memory that is already there
triple = lambda x: x * 1.5
work = [
    ("x * 1.5", triple, small, "the call"),
    ("x * 1.5", triple, x, "memory"),
    ("copy x", torch.clone, x, "memory"),
    ("tanh(x)", torch.tanh, x, "arithmetic"),
    ("x * 1.5, out=old", lambda x: torch.mul(x, 1.5, out=old), huge, "memory"),
    ("x * 1.5", triple, huge, "new pages"),
]
rows = []
for name, f, argument, mostly in work:
    each = ns(f, argument)
    before = faults()
    f(argument)
    rows.append((name, argument.numel(), each, faults() - before, mostly))
lesson.table(["line", "numbers", "ns each", "new pages", "mostly"], rows, "what a line costs")
_, _, each, pages, _ = zip(*rows)
lesson.timed(each[0] > 3 * each[1], "a number costs 3 times more among 1,000 than in a million")
lesson.timed(each[1] < 3 * each[2], "a million multiplications cost about as much as copies")
lesson.holds(pages[5] > 10 + pages[4], "64 MB of results are new pages, unless memory is given")

# %% [markdown]
# ## What fusing takes off
# `torch.compile` writes one loop for all of your lines: it reads each number once, takes it through
# every operation in a register, and writes it once. That leaves one call, one pass over memory, one
# result. The arithmetic stays. So if you fuse a chain of k operations, it should become k times
# faster if they are cheap, and gain little if they are expensive, **though you save the same bytes
# in both cases**: an eager chain reads and writes 8 k bytes for each number, a fused one 8.


# %%
def chain(operation, k: int):
    def f(x):
        for _ in range(k):
            x = operation(x)
        return x

    return f


elu = lambda x: torch.where(x > 0, x, torch.exp(x) - 1)
work = [
    ("1 of x * 1.5", triple, x, 8),
    ("8 of x * 1.5", chain(triple, 8), x, 64),
    ("1 of tanh", torch.tanh, x, 8),
    ("8 of tanh", chain(torch.tanh, 8), x, 64),
    ("an ELU", elu, x, 34),
    ("1 of x * 1.5, small", triple, small, 8),
]
try:  # it needs a C++ compiler and Python's headers
    torch.compile(triple, dynamic=False)(x)
    compiles = True
except Exception as error:
    compiles = False
    print(f"torch.compile does not work here ({type(error).__name__}): no fused times")
times = []
for name, f, argument, moved in work:
    eager = ns(f, argument)
    torch._dynamo.reset()
    fused = ns(torch.compile(f, dynamic=False, fullgraph=True), argument) if compiles else np.nan
    times.append((name, moved / 8, eager, fused, eager / fused))
columns = ["work", "bytes saved", "ns eager", "ns fused", "time saved"]
lesson.table(columns, times, "one of a million numbers (small: a thousand); saved: eager / fused")
names, _, eager, fused, gain = zip(*times)
lesson.timed(gain[1] > 1.5 * gain[3], "for the same bytes multiplications gain more than tanh")
lesson.timed(gain[5] < 1, "on 1,000 numbers, one compiled line is slower")

# %% [markdown]
# The bytes do not predict the ELU. It moves 34 bytes eager and 8 fused, yet it gains about ten
# times or more on the machine that printed this course's pages (AVX-512, torch 2.13). There the
# eager loop of `where` jumps for each number, one way or the other. A processor guesses jumps, and
# of random signs it guesses half wrong. The fused loop computes both sides and picks one without a
# jump. And where the library has a faster tanh than the compiler, the fused chain of tanh even
# loses. **So fusing saves calls, passes over memory and pages; what a compiler gains or loses
# beyond these is the quality of its loop, and only a measurement tells you that.**
#
# Fusing also leaves what backward needs. `F.relu(x).square()` keeps relu(x) beside its result,
# fused or not. It would not have to: the slope, 2 relu(x), is twice the root of the result, and the
# next matmul keeps that anyway. You could write a backward that uses this; but then anyone who
# edits only the forward trains with a wrong gradient. That is about memory, the other half of the
# question. (And compiled code is made for one shape. With `dynamic=False` each new shape compiles
# again, and after eight of them torch gives up: the rest runs eager, and all you see is a warning
# in the log.)
#
# ## Memory: a ledger
# A step holds four kinds of numbers: weights, gradients, the optimizer's moments, and the
# activations, which forward leaves behind for backward. Autograd lets you watch the activations: it
# hands each tensor that it keeps to a hook, and drops what the hook returned as soon as backward is
# done with it.


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
        """Bytes of what is kept, each counted once; weights and their views do not count."""
        at = lambda t: t.untyped_storage().data_ptr()
        own = {at(t) for t in (*self.model.parameters(), *self.model.buffers())}
        storages = {at(k.tensor): k.tensor for k in list(self.alive)}
        return sum(t.untyped_storage().nbytes() for i, t in storages.items() if i not in own)

    def note(self, moment: str) -> None:
        weights = list(self.model.parameters())
        state = [t for s in self.optimizer.state.values() for t in s.values() if t.ndim]
        grads = [p.grad for p in weights if p.grad is not None]
        kinds = [sum(t.nbytes for t in kind) for kind in (weights, state, grads)]
        kinds += [self.activations()]
        self.lines.append((moment, *kinds, sum(kinds)))


def begin() -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    model.init_weights()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


text = torch.from_numpy(lesson.bytes_of_stdlib(4 * 257)).view(4, 257)
x, y = text[:, :-1], text[:, 1:]


def two_steps(set_to_none: bool = True) -> list[tuple]:
    model, optimizer = begin()
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
columns = ["moment", "weights", "moments", "gradients", "activations", "sum"]
rows = [(line[0], *(n / 1e6 for n in line[1:])) for line in lines]
lesson.table(columns, rows[:6], "MB, step 1")
lesson.table(columns, rows[6:], "MB, step 2")
weights, moments, gradients, activations, total = zip(*(line[1:] for line in lines))
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
# You can keep only what enters each block, and run the block's forward again when backward comes to
# it. This is called **activation checkpointing**, or recomputation.


# %%
def one_step(recompute: bool) -> tuple:
    """-> bytes kept, FLOPs, gradients."""
    model, optimizer = begin()
    if recompute:
        for block in model.blocks:
            inner = block.forward
            block.forward = lambda *a, f=inner: checkpoint(f, *a, use_reentrant=False)
    ledger = Ledger(model, optimizer)
    with FlopCounterMode(display=False) as flops:
        with ledger.watch():
            loss = model(x, y)
        kept = ledger.activations()
        loss.backward()
    grads = [p.grad for p in model.parameters()]
    return kept, flops.get_total_flops(), grads


ways = {"keep all": one_step(False), "recompute": one_step(True)}
rows = [(name, kept / 1e6, flops / 1e9) for name, (kept, flops, _) in ways.items()]
lesson.table(["way", "MB kept", "GFLOP"], rows, "one step, forward and backward")
(kept, flops, grads), (less, more, same) = ways.values()
lesson.holds(less < kept / 5, "recomputing keeps a fifth or less of the activations")
lesson.holds(1.1 < more / flops < 4 / 3, "recomputing costs more FLOPs, but less than a third more")
lesson.holds(all(map(torch.equal, grads, same)), "either way the gradients are equal, bit for bit")

# %% [markdown]
# A step costs as many FLOPs as three forwards, because backward does two matmuls for each one of
# forward. So one more forward would be a third more. It is less, because the head is not run again,
# and because torch stops a block as soon as backward needs nothing more of it: before its last
# matmul.
#
# ## The ledger against the profiler
# The ledger knows six moments. PyTorch's profiler sees every allocation, and the time of every
# operator. `train.py --profile` prints its table, regions first, and writes a trace that you can
# open in https://ui.perfetto.dev (this lesson's is out/22_trace.json.gz). The profiler counts from
# the profiled step on, so its sum leaves out weights and moments, which were there before.

# %%
model, optimizer = begin()


def step() -> None:
    with record_function("forward"):
        loss = model(x, y)
    loss.backward()
    optimizer.step()  # torch makes it a region of its own
    optimizer.zero_grad()


step()  # the first one makes the moments
with profile(profile_memory=True) as profiled:
    step()
TRACE = lesson.OUT / "22_trace.json.gz"
profiled.export_chrome_trace(str(TRACE))
events = json.loads(gzip.decompress(TRACE.read_bytes()))["traceEvents"]
table = profiled.key_averages().table("self_cpu_time_total", 6, max_name_column_width=32)
print("\n".join(line[:74] for line in table.splitlines()))  # its first columns
forward = next(e for e in events if e["name"] == "forward" and e.get("dur"))
memory = [e for e in events if e["name"] == "[memory]"]
memory = [(e["ts"], e["args"]["Total Allocated"]) for e in memory]  # microseconds, bytes
end = forward["ts"] + forward["dur"]
done = [b for t, b in memory if t <= end][-1]
peak_at, peak = max(memory, key=lambda m: m[1])
rows = [("forward done", A / 1e6, done / 1e6), ("most at one time", A / 1e6, peak / 1e6)]
lesson.table(["moment", "ledger", "profiler"], rows, "MB beside weights and moments")
lesson.holds(0.95 < done / A < 1.05, "after forward, ledger and profiler differ by less than 5%")
lesson.holds(peak_at > end and peak > A, "the true peak comes later, in backward, and is higher")

# %% [markdown]
# Backward begins with all activations in memory, and each of its operations needs room for its
# results before it can free what it has used. So the ledger's sums are a lower bound. The
# **temporaries** of one operation come on top: here 4 MB. (In a real run they are larger: the
# logits of 16 rows of 2,048 tokens over a vocabulary of 32,768 take 4.3 GB in fp32, and so does
# their gradient.) A batch that barely fits by the ledger does not fit on the device.

# %%
fig = lesson.figure(10, 3.6)
left, right = fig.subplots(1, 2, width_ratios=[1, 2])
left.barh(np.arange(5) - 0.2, eager[:5], 0.4, color="silver", label="eager")
left.barh(np.arange(5) + 0.2, fused[:5], 0.4, label="fused")
left.set_yticks(range(5), names[:5]), left.invert_yaxis()
left.set(xlabel="ns a number"), left.legend()
mb = np.array([weights, moments, gradients, activations]) / 1e6  # (4, 12)
right.stackplot(range(12), mb, labels=columns[1:5])
right.set_xticks(range(12), [line[0].replace(" ", "\n") for line in lines], fontsize=7)
right.axvline(5.5, color="black", ls=":")
right.plot(8, (3 * W + peak) / 1e6, "v", color="black", label="peak, by the profiler")
right.set(ylabel="MB", xlim=(0, 11), ylim=(0, 85))
right.set_title(f"step 1{40 * ' '}step 2", loc="center")
right.legend(loc="upper left", ncols=2)
lesson.save(fig, "22_profiler")

# %% [markdown]
# ## Trap
# `zero_grad(set_to_none=False)` fills the gradients with zeros, and so keeps them through the next
# forward pass, at whose end memory is fullest.

# %%
zeros = max(line[-1] for line in two_steps(set_to_none=False))
lesson.holds(zeros - max(total) == W, "with set_to_none=False the peak grows by all gradients")

# %% [markdown]
# ## Exercise
# `exercises/ex22.py`: recomputation for any function. `python course/check.py 22`
