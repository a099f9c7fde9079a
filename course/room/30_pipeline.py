# %% [markdown]
# # 30. Pipeline parallelism: schedules and their bubbles
#
# **Question.** The layers of a model are cut into stages, one per device, and a batch into
# micro-batches. Which order of forward and backward passes wastes least time, and what does it keep
# in memory?
#
# **Afterwards** you can simulate any schedule, name its bubble, and run one on two processes.
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "Pipeline Parallelism" (naive, 1F1B),
# "Intercalando os Estágios", "Zero Bubble and DualPipe". Core file: `model.py`, `Block` (what a
# stage is made of). Before: lesson 29. Next: lesson 31. Takes 9 seconds on two cores.

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
# long, as it computes two gradients: that of the stage's input, which the stage before waits for,
# and that of its weights, which nobody waits for. A schedule may split the second off as `W`.
#
# An operation starts as soon as its device is free and its inputs are there. Nothing else is needed
# to know when everything happens:


# %%
# the operations whose results this one reads; `last` is the last stage
def needs(op: tuple, last: int) -> list[tuple]:
    kind, m, stage = op
    if kind == "F":
        return [("F", m, stage - 1)] if stage else []
    if kind == "B":
        return [("F", m, stage)] + ([("B", m, stage + 1)] if stage < last else [])
    return [("B", m, stage)]


def simulate(orders: list[list[tuple]], cost: dict) -> tuple[float, list, list[int]]:
    """Lists of operations by device, time by kind -> end, [(device, op, start)], peak activations
    by device: how many forward passes it keeps until their last use."""
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
        frees = "W" if any(kind == "W" for kind, _, _ in order) else "B"
        steps = [(kind == "F") - (kind == frees) for kind, _, _ in order]
        peaks.append(int(np.cumsum(steps).max()))
    return max(free), events, peaks


# %% [markdown]
# ## Five schedules
# `naive`: a micro-batch goes all the way down and up before the next one starts. `gpipe`: all
# forward passes, then all backward passes. `1F1B`: just enough forward passes that the last stage
# has work, then one backward for each forward. `interleaved`: each device has V thin stages (0 and
# 4, 1 and 5, ...), so the first backward pass comes sooner. `ZB-H1`: 1F1B whose `W` waits until the
# device has nothing else to do.


# %%
naive = lambda P, M: [[(kind, m, d) for m in range(M) for kind in "FB"] for d in range(P)]
gpipe = lambda P, M: [[(kind, m, d) for kind in "FB" for m in range(M)] for d in range(P)]


# `warmup` forward passes, then in turns, then the backward passes that are left
def alternate(forward: list, backward: list, warmup: int) -> list:
    pairs = [op for pair in zip(forward[warmup:], backward) for op in pair]
    return forward[:warmup] + pairs + backward[len(forward) - warmup :]


def one_f_one_b(P: int, M: int) -> list:
    passes = lambda kind, d: [(kind, m, d) for m in range(M)]
    return [alternate(passes("F", d), passes("B", d), min(P - 1 - d, M)) for d in range(P)]


# P micro-batches go through a device's thin stage 0, the same P through its stage 1, ..; then the
# next P. M is a multiple of P
def interleaved(P: int, M: int) -> list:
    V = 2
    turns = [(first + i, v) for first in range(0, M, P) for v in range(V) for i in range(P)]
    orders = []
    for d in range(P):
        forward = [("F", m, v * P + d) for m, v in turns]
        backward = [("B", m, (V - 1 - v) * P + d) for m, v in turns]
        orders.append(alternate(forward, backward, min(2 * (P - 1 - d) + (V - 1) * P, M * V)))
    return orders


# device d keeps the weight gradients of d micro-batches for the end
def zb_h1(P: int, M: int) -> list:
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
rows = []
events = {}
found = {}  # end, bubble, bubble/work, peaks
for name, (schedule, cost) in schedules.items():
    end, events[name], peaks = simulate(schedule(P, M), cost)
    found[name] = (end, end - 3 * M, (end - 3 * M) / (3 * M), peaks)
    rows.append((name, *found[name]))
columns = ["schedule", "end", "bubble", "bubble/work", "peak activations"]
lesson.table(columns, rows, f"{P} devices, {M} micro-batches; a device works {3 * M}")

lesson.holds(found["gpipe"] == (33, 9, 0.375, [8, 8, 8, 8]), "gpipe: bubble 9, all M are kept")
lesson.holds(found["1F1B"] == (33, 9, 0.375, [4, 3, 2, 1]), "1F1B: bubble 9, and P - d are kept")
half = found["interleaved"] == (28.5, 4.5, 0.1875, [11, 9, 7, 5])
lesson.holds(half, "interleaved: bubble 4.5, half of 1F1B's; 11 thin stages' activations")
lesson.holds(found["ZB-H1"] == (27, 3, 0.125, [4, 4, 4, 4]), "ZB-H1: bubble 3, a third of 1F1B's")

# %% [markdown]
# The formulas, on a grid of P and M >= P; Bi is backward without `W`. (With fewer micro-batches
# than devices, that of ZB-H1 is too small: there is too little `W` to fill the gaps.) Two more are
# only quoted: ZB-H2 keeps twice as much and has (P - 1)(F + Bi - 2W), here 0; DualPipe feeds
# the pipe from both ends, has two copies of the weights, and (P/2 - 1)(FB + B - 3W), where FB is a
# forward and a backward pass that overlap.

# %%
grid = [(p, k * p) for p in (2, 3, 4, 8) for k in (1, 2, 4)]
bubble = lambda schedule, p, m, cost: simulate(schedule(p, m), cost)[0] - 3 * m
formulas = {
    "gpipe: (P - 1)(F + B), whatever M": (gpipe, FUSED, 3),
    "1F1B: (P - 1)(F + B), too": (one_f_one_b, FUSED, 3),
    "interleaved, V = 2: (P - 1)(F + B) / V": (interleaved, HALF, 3 / 2),
    "ZB-H1: (P - 1)(F + Bi - W), if M >= P": (zb_h1, SPLIT, 1),
}
for text, (schedule, cost, each) in formulas.items():
    lesson.holds(all(bubble(schedule, p, m, cost) == (p - 1) * each for p, m in grid), text)

# %%
fig = lesson.figure(6.8, 4.5)
axes = fig.subplots(5, 1, sharex=True)
for ax, (name, (end, _, _, peaks)) in zip(axes, found.items()):
    ax.barh(range(P), min(end, 33), height=0.9, color="lightgray")  # idle, where nothing is on it
    for d, (kind, m, stage), start in events[name]:
        width = max(0, min(schedules[name][1][kind], 33 - start))  # naive goes on to 96
        looks = dict(alpha=dict(F=0.4, B=1, W=0.7)[kind], hatch="///" if kind == "W" else None)
        looks |= dict(height=0.9 if stage < P else 0.5, color=f"C{m + m // 7}", edgecolor="white")
        ax.barh(d, width, left=start, lw=0.6 if width else 0, **looks)
    most = max(peaks) * schedules[name][1]["F"]  # a thin stage keeps half as much
    ax.text(33.5, 1.5, f"{name}\nends at {end:g}\nkeeps {most:g}", va="center", fontsize=9)
    ax.set(ylim=(3.6, -0.6), yticks=range(P), xlim=(0, 39), ylabel="device")
axes[0].set_title("pale: forward, full: backward, hatched: weights; grey: idle", fontsize=9)
axes[-1].set_xlabel("time (a forward pass of a stage is 1)")
lesson.save(fig, "30_pipeline")

# %% [markdown]
# ## Trap
# "1F1B reduces the bubble." It does not: 33 and 33. It reduces the *memory*, and that allows more
# micro-batches, over which the same bubble is spread. Interleaving does shrink the bubble, and pays
# twice: 5.5 stages' activations where 1F1B keeps 4, and a message for each thin stage.

# %%
kept = lambda schedule, m: max(simulate(schedule(P, m), FUSED)[2])
lesson.holds(kept(gpipe, 4) == kept(one_f_one_b, 64) == 4, "room for 4: gpipe M = 4, 1F1B any M")
idle = bubble(gpipe, P, 4, FUSED) / (3 * 4), bubble(one_f_one_b, P, 64, FUSED) / (3 * 64)
lesson.holds(idle == (0.75, 9 / 192), "with that room gpipe's bubble is 75% of the work, 1F1B's 5%")


# %% [markdown]
# ## The real thing: two processes
# Each rank has half of the layers and follows its list. It sends what the other one waits for, and
# keeps a stage's input and output until the backward pass. What comes out must be what one process
# gets from the whole batch.


# %%
# 1F1B of four layers on two ranks -> error of the gradients, most activations kept
def pipeline(rank: int, world: int, micro: int) -> tuple:
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
lesson.holds(max(error for error, _ in ran) < 1e-6, "1F1B on two ranks: one process's gradients")
lesson.holds([most for _, most in ran] == [2, 1], "rank d keeps P - d activations at most")

# %% [markdown]
# ## Exercise
# `exercises/ex30.py`: 1F1B between devices whose messages take time; a simulator is the judge.
# `python course/check.py 30`
