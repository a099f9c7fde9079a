# %% [markdown]
# # 30. Pipeline parallelism: schedules and their bubbles
#
# **Question.** You cut a model's layers into stages, one per device, and a batch into
# micro-batches. Which order of forward and backward passes wastes the least time, and what does it
# keep in memory?
#
# **Afterwards** you can simulate any schedule, name its bubble, and run one on two processes.
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "Pipeline Parallelism" (naive, 1F1B),
# "Intercalando os Estágios", "Zero Bubble and DualPipe". Core file: `model.py`, `Block` (what a
# stage is made of). Before: lesson 8. Next: lesson 31. Takes 9 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

lesson.begin(30, "pipeline")

# %% [markdown]
# ## A schedule is one list per device
# An operation is (kind, micro-batch, stage). `F` is forward. `B` is backward, and takes twice as
# long because it computes two gradients: that of the stage's input, which the stage before is
# waiting for, and that of its weights, which nobody is waiting for. A schedule may split the second
# one off as `W`.
#
# An operation starts as soon as its device is free and its inputs are there. That is all you need
# to work out when everything happens:


# %%
# the operations whose results this one reads; `last` is the last stage
def needs(op, last):
    kind, m, stage = op
    if kind == "F":
        return [("F", m, stage - 1)] if stage else []
    if kind == "B":
        return [("F", m, stage)] + ([("B", m, stage + 1)] if stage < last else [])
    return [("B", m, stage)]


def simulate(orders, cost):
    """Lists of operations by device, time by kind -> end, [(device, op, start)], peak activations
    by device: the most forward passes that it keeps for later use."""
    last = max(stage for order in orders for _, _, stage in order)
    left = [list(order) for order in orders]
    free = [0.0] * len(orders)
    done = {}
    events = []
    while any(left):
        before = len(done)
        for d, order in enumerate(left):
            while order and all(x in done for x in needs(order[0], last)):
                op = order.pop(0)
                start = max([free[d], *(done[x] for x in needs(op, last))])
                free[d] = done[op] = start + cost[op[0]]
                events.append((d, op, start))
        assert len(done) > before, f"deadlock: {[order[0] for order in left if order]} all wait"
    peaks = []
    for order in orders:
        frees = order[-1][0]  # B, or W if it is split off
        steps = [(kind == "F") - (kind == frees) for kind, _, _ in order]
        peaks.append(int(np.cumsum(steps).max()))
    return max(free), events, peaks


# %% [markdown]
# ## Five schedules
# `naive`: a micro-batch goes all the way down and back up before the next one starts. `gpipe`: all
# forward passes, then all backward passes. `1F1B`: just enough forward passes to give the last
# stage work, then one backward for each forward. `interleaved`: each device has V thin stages (0
# and 4, 1 and 5, ...), so the first backward pass comes sooner. `ZB-H1`: 1F1B whose `W` waits until
# the device has nothing else to do. The *bubble* is the time in which a device waits.


# %%
naive = lambda P, M: [[(kind, m, d) for m in range(M) for kind in "FB"] for d in range(P)]
gpipe = lambda P, M: [[(kind, m, d) for kind in "FB" for m in range(M)] for d in range(P)]


# `warmup` forward passes, then one backward and one forward in turn, then the backward passes left
def alternate(forward, backward, warmup):
    pairs = [op for pair in zip(forward[warmup:], backward) for op in pair]
    return forward[:warmup] + pairs + backward[len(forward) - warmup :]


def one_f_one_b(P, M):
    passes = lambda kind, d: [(kind, m, d) for m in range(M)]
    return [alternate(passes("F", d), passes("B", d), min(P - 1 - d, M)) for d in range(P)]


# P micro-batches go through a device's first thin stage, the same P through its second, and so on;
# then the next P. M is a multiple of P
def interleaved(P, M):
    V = 2
    turns = [(first + i, v) for first in range(0, M, P) for v in range(V) for i in range(P)]
    orders = []
    for d in range(P):
        forward = [("F", m, v * P + d) for m, v in turns]
        backward = [("B", m, (V - 1 - v) * P + d) for m, v in turns]
        orders.append(alternate(forward, backward, min(2 * (P - 1 - d) + (V - 1) * P, M * V)))
    return orders


# device d keeps the weight gradients of d micro-batches for the end
def zb_h1(P, M):
    orders = []
    for d, order in enumerate(one_f_one_b(P, M)):
        out = []
        for kind, m, _ in order:
            out += [(kind, m, d)] + ([("W", m - d, d)] if kind == "B" and m >= d else [])
        orders.append(out + [("W", m, d) for m in range(max(0, M - d), M)])
    return orders


FUSED = dict(F=1, B=2)
SPLIT = dict(F=1, B=1, W=1)
HALF = dict(F=0.5, B=1)
schedules = {"naive": (naive, FUSED), "gpipe": (gpipe, FUSED), "1F1B": (one_f_one_b, FUSED)}
schedules |= {"interleaved": (interleaved, HALF), "ZB-H1": (zb_h1, SPLIT)}
P = 4
M = 8


def result(name, P, M):
    """-> bubble, what `simulate` returns."""
    schedule, cost = schedules[name]
    end, *more = simulate(schedule(P, M), cost)
    return end - 3 * M, end, *more


found = {name: result(name, P, M) for name in schedules}
peaks = {name: found[name][3] for name in schedules}
rows = [(n, end, idle, idle / (3 * M), peaks[n]) for n, (idle, end, *_) in found.items()]
columns = ["schedule", "end", "bubble", "bubble/work", "peak activations"]
lesson.table(columns, rows, f"{P} devices, {M} micro-batches; a device works {3 * M}")
lesson.holds(peaks["gpipe"] == [M] * P, "gpipe keeps the activations of all M micro-batches")
lesson.holds(peaks["1F1B"] == [4, 3, 2, 1], "1F1B: device d keeps those of P - d")

# %% [markdown]
# The bubble has a formula, checked here on a grid of P and M >= P; Bi is backward without `W`.
# (With fewer micro-batches than devices, ZB-H1's gives too little: there is not enough `W` to fill
# the gaps.) Two more are only quoted: ZB-H2 keeps twice as much and has (P - 1)(F + Bi - 2W), here
# 0; DualPipe feeds the pipe from both ends, with two copies of the weights, and has (P/2 - 1)(FB +
# B - 3W), where FB is a forward and a backward pass that overlap.

# %%
grid = [(p, k * p) for p in (2, 3, 4, 8) for k in (1, 2, 4)]
formulas = {
    "gpipe": ("(P - 1)(F + B), whatever M", 3),
    "1F1B": ("(P - 1)(F + B), too", 3),
    "interleaved": ("(P - 1)(F + B) / V, with V = 2 half of 1F1B's", 3 / 2),
    "ZB-H1": ("(P - 1)(F + Bi - W), a third of 1F1B's", 1),
}
for name, (text, each) in formulas.items():
    exact = all(result(name, p, m)[0] == (p - 1) * each for p, m in grid)
    lesson.holds(exact, f"bubble of {name}: {text}")

# %%
fig = lesson.figure(6.8, 4.5)
axes = fig.subplots(5, 1, sharex=True)
for ax, (name, (_, end, events, _)) in zip(axes, found.items()):
    cost = schedules[name][1]
    ax.barh(range(P), end, height=0.9, color="lightgray")  # idle, where nothing lies on it
    for d, (kind, m, stage), start in events:
        looks = dict(alpha=dict(F=0.4, B=1, W=0.7)[kind], hatch="///" if kind == "W" else None)
        looks |= dict(height=0.9 if stage < P else 0.5, color=f"C{m + m // 7}", edgecolor="white")
        ax.barh(d, cost[kind], left=start, **looks)
    most = max(peaks[name]) * cost["F"]  # a thin stage keeps half as much
    ax.text(33.5, 1.5, f"{name}\nends at {end:g}\nkeeps {most:g}", va="center", fontsize=9)
    ax.set(ylim=(3.6, -0.6), yticks=range(P), xlim=(0, 33), ylabel="device")
axes[0].set_title("pale: forward, solid: backward, hatched: weights; gray: idle")
ax.set_xlabel("time (a forward pass through a stage takes 1)")
lesson.save(fig, "30_pipeline")

# %% [markdown]
# ## Trap
# "1F1B reduces the bubble." It does not: both end at 33. It reduces the *memory*, which leaves room
# for more micro-batches to spread the same bubble over. Interleaving does shrink the bubble, and
# pays twice: 5.5 stages' activations where 1F1B keeps 4, and a message for each thin stage.

# %%
few = result("gpipe", P, 4)
many = result("1F1B", P, 64)
lesson.holds(max(few[3]) == max(many[3]) == 4, "room for 4: gpipe has M = 4, 1F1B any M")
idle = few[0] / (3 * 4), many[0] / (3 * 64)
lesson.holds(idle == (0.75, 9 / 192), "with that room gpipe's bubble is 75% of the work, 1F1B's 5%")


# %% [markdown]
# ## The real thing: two processes
# Each process (its number is its *rank*) has half of the layers and follows its list. It sends what
# the other one is waiting for, and keeps a stage's input and output until the backward pass. The
# gradients must be the ones that a single process gets from the whole batch.


# %%
# 1F1B of four layers on two ranks -> error of the gradients, most activations kept
def pipeline(rank, world, micro):
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    data = torch.randn(micro, 8, 16)
    layers(data).square().mean().backward()
    mine = layers[2 * rank : 2 * rank + 2]
    whole = [p.grad for p in mine.parameters()]
    layers.zero_grad()  # forgets them; `whole` does not
    kept = {}
    most = 0
    sends = []
    for kind, m, _ in one_f_one_b(world, micro)[rank]:
        x = data[m].clone()
        receives = (kind == "F") == (rank == 1)
        if receives:
            dist.recv(x, 1 - rank)
        if kind == "F":
            y = mine(x.requires_grad_())
            kept[m] = x, y if rank == 0 else y.square().mean() / micro
            most = max(most, len(kept))
            out = y.detach()
        else:
            inputs, output = kept.pop(m)
            output.backward(x if rank == 0 else None)
            out = inputs.grad
        if not receives:
            sends.append((dist.isend(out, 1 - rank), out))
    for sent, _ in sends:  # `out` must live until it is sent
        sent.wait()
    return max((p.grad - g).abs().max().item() for p, g in zip(mine.parameters(), whole)), most


ran = lesson.ranks(2, pipeline, 6, timeout_s=150)
error = max(error for error, _ in ran)
lesson.holds(error < 1e-6, "1F1B on two ranks: a single process's gradients")
lesson.holds([most for _, most in ran] == [2, 1], "rank d keeps at most P - d activations")

# %% [markdown]
# ## Exercise
# `exercises/ex30.py`: 1F1B between devices whose messages take time. The judge is a simulator.
# `python course/check.py 30`
