# %% [markdown]
# # 29. Pipeline parallelism: schedules and their bubbles; experts
#
# **Question.** The layers of a model are cut into stages, one per device, and a batch into
# micro-batches. Which order of forward and backward passes wastes least, and what does it keep in
# memory?
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "Pipeline Parallelism" (naive, 1F1B),
# "Intercalando os Estágios", "Zero Bubble and DualPipe", "Paralelismo de Expert". Core file:
# `model.py`, `Block` (what a stage is made of). Before: lesson 26. Next: lesson 31.
# Takes 15 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import numpy as np
import torch
import torch.distributed as dist

from config import GPTConfig
from model import GPT, Positions, rms_norm

lesson.begin(29, "pipeline")

# %% [markdown]
# ## A schedule is one list per device
# An operation is (kind, micro-batch, stage). `F` is forward. `B` is backward, and takes twice as
# long, as it computes two gradients: that of the stage's input, which the stage before waits for,
# and that of its weights, which nobody waits for. A schedule may split the second off as `W`.
#
# An operation starts as soon as its device is free and its inputs are there. Nothing else is needed
# to know when everything happens:


# %%
def needs(op: tuple, last: int) -> list[tuple]:
    """The operations whose results this one reads; `last` is the last stage."""
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
    left, free, done, events = [list(order) for order in orders], [0.0] * len(orders), {}, []
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


def alternate(forward: list, backward: list, warmup: int) -> list:
    """`warmup` forward passes, then in turns, then the backward passes that are left."""
    pairs = [op for pair in zip(forward[warmup:], backward) for op in pair]
    return forward[:warmup] + pairs + backward[len(forward) - warmup :]


def one_f_one_b(P: int, M: int) -> list:
    passes = lambda kind, d: [(kind, m, d) for m in range(M)]
    return [alternate(passes("F", d), passes("B", d), min(P - 1 - d, M)) for d in range(P)]


def interleaved(P: int, M: int, V: int = 2) -> list:
    """Groups of P micro-batches visit all V stages of a device; M is a multiple of P."""
    visits = [(m + i, v) for m in range(0, M, P) for v in range(V) for i in range(P)]
    forward = lambda d: [("F", m, v * P + d) for m, v in visits]
    backward = lambda d: [("B", m, (V - 1 - v) * P + d) for m, v in visits]
    warmup = lambda d: min(2 * (P - 1 - d) + (V - 1) * P, M * V)
    return [alternate(forward(d), backward(d), warmup(d)) for d in range(P)]


def zb_h1(P: int, M: int) -> list:
    """Device d keeps the weight gradients of d micro-batches for the end."""
    orders = []
    for d, order in enumerate(one_f_one_b(P, M)):
        out = []
        for kind, m, _ in order:
            out += [(kind, m, d)] + ([("W", m - d, d)] if kind == "B" and m >= d else [])
        orders.append(out + [("W", m, d) for m in range(max(0, M - d), M)])
    return orders


FUSED, SPLIT, HALF = dict(F=1, B=2), dict(F=1, B=1, W=1), dict(F=0.5, B=1)
schedules = {"naive": (naive, FUSED), "gpipe": (gpipe, FUSED), "1F1B": (one_f_one_b, FUSED)}
schedules |= {"interleaved": (interleaved, HALF), "ZB-H1": (zb_h1, SPLIT)}
P, M = 4, 8
rows, events, found = [], {}, {}  # found: end, bubble, bubble/work, peaks
for name, (schedule, cost) in schedules.items():
    end, events[name], peaks = simulate(schedule(P, M), cost)
    last = max(stage for _, (_, _, stage), _ in events[name])
    found[name] = (end, end - 3 * M, (end - 3 * M) / (3 * M), peaks)
    rows.append((name, *found[name], 2 * M * last))  # between two stages: a tensor each way
columns = ["schedule", "end", "bubble", "bubble/work", "peak activations by device", "messages"]
lesson.table(columns, rows, f"{P} devices, {M} micro-batches; a device works {3 * M}")

lesson.holds(found["naive"][0] == 3 * P * M == 96, "naive: one device works at a time, 96")
lesson.holds(found["gpipe"] == (33, 9, 0.375, [8, 8, 8, 8]), "gpipe: bubble 9, all M are kept")
lesson.holds(found["1F1B"] == (33, 9, 0.375, [4, 3, 2, 1]), "1F1B: the same bubble, P - d kept")
lesson.holds(found["interleaved"] == (28.5, 4.5, 0.1875, [11, 9, 7, 5]), "interleaved: half of it")
lesson.holds(found["ZB-H1"] == (27, 3, 0.125, [4, 4, 4, 4]), "ZB-H1: a third of it")

# %% [markdown]
# The formulas, on a grid of P and M; Bi is backward without `W`. Two that are quoted and not built
# here: ZB-H2 keeps twice as much and has (P - 1)(F + Bi - 2W), here 0; DualPipe
# feeds the pipe from both ends, has two copies of the weights, and (P/2 - 1)(FB + B - 3W), where
# FB is a forward and a backward pass that overlap.

# %%
grid = [(p, k * p) for p in (2, 3, 4, 8) for k in (1, 2, 4)]
bubble = lambda schedule, p, m, cost: simulate(schedule(p, m), cost)[0] - 3 * m
formulas = {
    "gpipe: (P - 1)(F + B), whatever M": (gpipe, FUSED, 3),
    "1F1B: the same": (one_f_one_b, FUSED, 3),
    "interleaved, V = 2: (P - 1)(F + B) / V": (interleaved, HALF, 3 / 2),
    "V = 4: the same": (lambda p, m: interleaved(p, m, 4), dict(F=0.25, B=0.5), 3 / 4),
    "ZB-H1: (P - 1)(F + Bi - W)": (zb_h1, SPLIT, 1),
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
lesson.save(fig, "29_pipeline")

# %% [markdown]
# ## Trap
# "1F1B reduces the bubble." It does not: 33 and 33. It reduces the *memory*, and that allows more
# micro-batches, over which the same bubble is spread. Interleaving does shrink the bubble, and pays
# twice: 5.5 stages' activations where 1F1B keeps 4, and a message for each thin stage.

# %%
kept = lambda schedule, m: max(simulate(schedule(P, m), FUSED)[2])
lesson.holds(kept(gpipe, 4) == kept(one_f_one_b, 64) == 4, "room for 4: gpipe M = 4, 1F1B any M")
idle = bubble(gpipe, P, 4, FUSED) / (3 * 4), bubble(one_f_one_b, P, 64, FUSED) / (3 * 64)
lesson.holds(idle == (0.75, 9 / 192), "and then gpipe's bubble is 75% of the work, 1F1B's 5%")


# %% [markdown]
# ## The real thing: two processes, blocks of the project's model
# Each rank follows its list. It sends what the other one waits for, and keeps a stage's input and
# output until the backward pass. What comes out must be what one process gets from the whole batch.


# %%
def pipeline(rank: int, world: int, micro: int) -> tuple:
    """1F1B of a GPT of 4 layers -> loss, error of the gradients, most activations kept."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(16, 64, 4, 2, 2, 16, 32, mlp_hidden=64))
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.1)
    tokens = torch.randint(0, 64, (micro, 2, 17))
    (loss := model(tokens[..., :-1].flatten(0, 1), tokens[..., 1:].flatten(0, 1))).backward()
    whole = {p: p.grad for p in model.parameters()}
    model.zero_grad()  # forgets them; `whole` does not

    def stage(m: int, x: torch.Tensor) -> torch.Tensor:
        if rank == 0:
            x = rms_norm(model.embed(tokens[m, :, :-1]))  # (B, T, C)
        for block in model.blocks[2 * rank : 2 * rank + 2]:
            x = block(x, None, Positions(model.cos, model.sin, None, None, None))
        if rank == 1:
            head = rms_norm(x), model.head.weight
            x = model.cross_entropy(*head, tokens[m, :, 1:], model.config).mean() / micro
        return x

    kept, total, most, sends = {}, 0.0, 0, []
    for kind, m, _ in one_f_one_b(world, micro)[rank]:
        x = torch.empty(2, 16, 32)  # (B, T, C): what crosses the cut, both ways
        if receives := (kind == "F") == (rank == 1):
            dist.recv(x, 1 - rank)
        if kind == "F":
            kept[m] = x.requires_grad_(), stage(m, x)
            most, out = max(most, len(kept)), kept[m][1].detach()
            total += out.item() if rank else 0
        else:
            inputs, output = kept.pop(m)
            output.backward(None if rank else x)
            out = inputs.grad
        if not receives:
            sends.append((dist.isend(out, 1 - rank), out))
    for sent, _ in sends:
        sent.wait()
    errors = [(p.grad - g).abs().max().item() for p, g in whole.items() if p.grad is not None]
    return abs(total - loss.item()) * rank, max(errors), most, len(errors) / len(whole)


ran = lesson.ranks(2, pipeline, 6, timeout_s=150)
columns = ["rank", "loss error", "gradient error", "most activations kept", "share of weights"]
lesson.table(columns, [(rank, *row) for rank, row in enumerate(ran)], "1F1B on two processes")
lesson.holds(max(max(row[:2]) for row in ran) < 1e-6, "loss and gradients are one process's")
lesson.holds([row[2:] for row in ran] == [(2, 0.5), (1, 0.5)], "rank d keeps P - d activations")

# %% [markdown]
# ## Experts: a cut that the data decides
# A mixture of experts has many MLPs, and a router that sends each token to the best two. With
# experts on several ranks, tokens travel twice: to their experts and back. Each expert has room for
# `capacity` times its even share; a token above that is dropped.

# %%
E, N, C, TOKENS, TOP = 8, 4, 16, 512, 2  # experts, ranks, width, tokens, experts per token
rng = np.random.default_rng(0)
x = rng.normal(size=(TOKENS, C)).astype(np.float32)
w1, w2 = rng.normal(0, 0.2, (2, E, C, C)).astype(np.float32)
expert = lambda e, x: np.maximum(x @ w1[e], 0) @ w2[e]
home, lives = np.arange(TOKENS) * N // TOKENS, np.arange(E) * N // E  # rank of a token, an expert


def gates(logits: np.ndarray) -> np.ndarray:
    """(tokens, E) -> softmax over the TOP largest of each row, 0 elsewhere."""
    g = np.where(logits >= np.sort(logits, 1)[:, -TOP, None], np.exp(logits), 0)
    return (g / g.sum(1, keepdims=True)).astype(np.float32)


t, router = np.arange(TOKENS)[:, None], rng.normal(0, C**-0.5, (C, E))
even = -((np.arange(E) - t) % E).astype(float)  # token t goes to experts t and t + 1, modulo E
rows = []
for name, logits in (("even", even), ("random router", x @ router), ("skewed", (x + 0.5) @ router)):
    g, y, sent = gates(logits), np.zeros((TOKENS, C), np.float32), 0
    for e in range(E):
        chosen = np.flatnonzero(g[:, e])
        sent += 2 * x[chosen][home[chosen] != lives[e]].nbytes  # there and back
        y[chosen] += g[chosen, e][:, None] * expert(e, x[chosen])
    load = (g > 0).sum(0)
    error = float(np.abs(y - sum(g[:, e, None] * expert(e, x) for e in range(E))).max())
    drop = [100 * np.maximum(load - c * load.mean(), 0).sum() / load.sum() for c in (1.0, 1.25)]
    rows.append((name, load.max() / load.mean(), *drop, sent, error))
columns = ["routing", "max/mean", "dropped % at 1.0", "at 1.25", "bytes sent", "error"]
lesson.table(columns, rows, f"top {TOP} of {E} experts, {N} ranks")
copies = TOP * TOKENS
lesson.holds(rows[0][4] == 2 * copies * C * 4 * (N - 1) // N, "2 x copies x C x 4 (N - 1)/N")
lesson.holds(max(row[5] for row in rows) < 1e-6, "sent to its experts or to all: the same")
lesson.holds(rows[0][1:4] == (1, 0, 0) and rows[2][2] > rows[2][3] > 5, "skewed, it drops tokens")

# %% [markdown]
# ## Exercise
# `exercises/ex29.py`: write 1F1B; the simulator is the judge. `python course/check.py 29`
