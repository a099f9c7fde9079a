# %% [markdown]
# # 28. Data parallel: average the gradients, and nothing else
#
# **Question.** Each rank has a copy of the model and its own rows. Which ways of averaging the
# gradients are right, and what does each send?
#
# **Afterwards** you can write a data-parallel wrapper that exchanges gradients while the backward
# pass runs, and test for the three mistakes that raise no error.
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "Paralelismo de Dados" (three
# optimizations, two listings, ring all-reduce), "Segunda Otimização: Sincronizar um lote/bucket de
# gradientes". Core files: `train.py`, `take_steps`; `optim.py`, `sum_over_ranks`. Before:
# lesson 27. Next: lesson 28. Takes 14 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import torch
import torch.distributed as dist
from torch import nn

from config import PRESETS, GPTConfig
from model import GPT

CONFIG = GPTConfig(16, 64, 2, 2, 2, 16, n_embd=32, mlp_hidden=64, tie_embeddings=True)
BUCKET = 16_384  # bytes
lesson.begin(28, "data parallel")

# %% [markdown]
# ## Average after the backward pass
# Several processes (*ranks*) train one model. An *all-reduce* replaces a tensor on each rank by the
# sum over all ranks. A wrapper makes the weights equal once. From then on, equal gradients keep
# equal weights equal, so only gradients travel. A frozen weight has none; a weight that two layers
# share (a tied one) has one.
#
# `Naive` averages the gradients one by one, in `finish`, which is called between the last backward
# pass of a step and the optimizer's step. A step may have several backward passes, one for each
# *micro-batch*, whose gradients add up; `require_backward_grad_sync` is False for all but the last.
# (The source and PyTorch's own wrapper have a switch of the same name, which `no_sync` sets.) `log`
# has the bytes of each exchange, and `attach` is where other wrappers register their hooks.


# %%
class Naive(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.log = []
        self.sent = []
        self.require_backward_grad_sync = True
        self.params = [p for p in module.parameters() if p.requires_grad]
        for p in module.parameters():
            dist.broadcast(p.data, 0)  # all begin with the weights of rank 0
        for p in self.params:
            self.attach(p)

    def attach(self, p):
        pass  # Naive needs no hook

    def forward(self, *inputs):
        return self.module(*inputs)

    def send(self, t):
        self.log.append(t.nbytes)
        return dist.all_reduce(t, async_op=True)  # the sum, in place, some time later

    def average(self, t):
        self.send(t).wait()
        t.div_(dist.get_world_size())

    def finish(self):
        for p in self.params:
            self.average(p.grad)


# %% [markdown]
# ## During the backward pass
# The last layer's gradients are there long before the first layer's. A *hook* is a function that
# autograd calls at some moment; `register_post_accumulate_grad_hook` calls it when `p.grad` is
# complete. `Overlapped` sends each gradient then, while the backward pass goes on, and waits for
# the sums in `finish`.


# %%
class Overlapped(Naive):
    def attach(self, p):
        p.register_post_accumulate_grad_hook(self.hook)

    def hook(self, p):
        if self.require_backward_grad_sync:
            self.sent.append((p.grad, self.send(p.grad)))

    def finish(self):
        for t, work in self.sent:
            work.wait()
            t.div_(dist.get_world_size())
        self.sent = []


# %% [markdown]
# ## In buckets
# Many small messages are slow. So all gradients lie end to end in one flat tensor, each `p.grad` is
# a view of its place there, and slices of equal size (*buckets*) are sent when they are full.
#
# The view does not stay. `optimizer.zero_grad()` sets `p.grad` to None, by default, and the next
# backward pass puts a fresh tensor there. `adopt` takes such a gradient back into its place.
# `StaleBuckets` is the same class without it.


# %%
class Bucketed(Overlapped):
    def __init__(self, module):
        super().__init__(module)
        n = sum(p.numel() for p in self.params)
        end = 0
        self.place = {}
        flat = torch.zeros(n)
        done = torch.zeros(n, dtype=torch.bool)
        self.buckets = list(zip(flat.split(BUCKET // 4), done.split(BUCKET // 4)))
        for p in reversed(self.params):  # the last layer's gradients come first
            here = slice(end, end + p.numel())
            end = here.stop
            p.grad = flat[here].view_as(p)
            self.place[p] = (flat[here].view_as(p), done[here])

    def adopt(self, p, view):
        if p.grad.data_ptr() != view.data_ptr():
            p.grad = view.copy_(p.grad)

    def hook(self, p):
        if self.require_backward_grad_sync:
            self.adopt(p, self.place[p][0])
            self.place[p][1].fill_(True)
            for bucket, full in self.buckets:
                if full.all():
                    self.sent.append((bucket, self.send(bucket)))
                    full.zero_()

    def finish(self):
        assert len(self.sent) == len(self.buckets), "a weight got no gradient: its bucket waits"
        super().finish()


class StaleBuckets(Bucketed):
    def adopt(self, p, view):
        pass


# %% [markdown]
# ## The source's two listings
# Both call an averaging function from a hook; nothing is left for the end. The first hook belongs
# to the tensor and gets the gradient of *this* backward pass. The second runs when the gradient has
# been added up, and is handed the *parameter*.


# %%
class TensorHook(Naive):
    def attach(self, p):
        p.register_hook(self.hook)

    def hook(self, grad):
        if self.require_backward_grad_sync:
            self.average(grad)

    def finish(self):
        pass


class ParameterHook(TensorHook):
    def attach(self, p):
        p.register_post_accumulate_grad_hook(lambda p: self.hook(p.data))


# %% [markdown]
# ## Seven ways, five steps
# Two ranks, each with half of the rows, in one micro-batch (k = 1) or in two (k = 2), and one
# process that sees all rows. The judge is PyTorch's own `DDP`.

# %%
HAND_MADE = [Naive, Overlapped, Bucketed, StaleBuckets, TensorHook, ParameterHook]
WAYS = {"DDP": nn.parallel.DistributedDataParallel} | {way.__name__: way for way in HAND_MADE}


# -> weights after five steps, bytes of each exchange of the last one, how many were early
def train(way, rank, world, k, to_none=True):
    torch.manual_seed(rank)  # other weights on each rank, until the wrapper makes them equal
    model = GPT(CONFIG)
    model.init_weights()
    model.blocks[0].attn.q.weight.requires_grad_(False)
    wrapped = WAYS[way](model) if way else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in torch.randint(64, (5, 8, 17), generator=torch.Generator().manual_seed(1)):
        optimizer.zero_grad(set_to_none=to_none)
        wrapped.log = []
        parts = rows.chunk(world)[rank].chunk(k)
        for part in parts:
            wrapped.require_backward_grad_sync = part is parts[-1]
            (wrapped(part[:, :-1], part[:, 1:]) / k).backward()
        early = len(wrapped.log)
        if hasattr(wrapped, "finish"):  # DDP has none
            wrapped.finish()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), wrapped.log, early


def compare(rank, world):
    out = {(way, k): train(way, rank, world, k) for way in WAYS for k in (1, 2)}
    return train(None, 0, 1, 1)[0], out, train("StaleBuckets", rank, world, 2, to_none=False)[0]


(alone, first, zeroed), (_, second, _) = lesson.ranks(2, compare, timeout_s=150)
rows = []
far = lambda a, b: (a - b).abs().max().item()
for way in WAYS:
    log, early = first[way, 2][1:]
    known = (len(log), sum(log), "yes" if early else "no") if log else (None, None, "")
    one, other = ([rank[way, k][0] for k in (1, 2)] for rank in (first, second))
    off = [far(x, alone) for x in one] + [far(x, y) for x, y in zip(one, other)]
    rows.append((way, *known, *(float(f"{x:.1g}") for x in off)))
columns = ["way", "sends", "bytes", "early", "error, k=1", "k=2", "apart, k=1", "apart, k=2"]
lesson.table(columns, rows, "two ranks, five steps: distance of a weight to one process, to a rank")

right, (stale, tensor_hook, parameter_hook) = rows[:4], rows[4:]
size = 4 * (len(alone) - 32 * 32)  # bytes of the gradients; the frozen matrix has none
lesson.holds(max(max(row[4:6]) for row in right) < 1e-6, "four ways equal one process, to 1e-6")
lesson.holds(max(max(row[6:]) for row in right) == 0, "the ranks of these four: the same bits")
sent = all(sum(first[row[0], k][1]) == size for row in right[1:] for k in (1, 2))
lesson.holds(sent, "each gradient is exchanged once a step, whatever the micro-batches")
sends = [(row[1], row[3]) for row in right[1:]] == [(12, "no"), (12, "yes"), (5, "yes")]
lesson.holds(sends and -(-size // BUCKET) == 5, "hooks send early: 12 weights, or 5 buckets")
drift = min(stale[6:]) > 1e-3 and stale[1:4] == right[3][1:4]
lesson.holds(drift, "stale buckets send as many bytes, and the ranks drift apart")
lesson.holds(far(zeroed, alone) < 1e-6, "zero_grad(set_to_none=False) makes stale buckets right")
lesson.holds(tensor_hook[6] == 0 and tensor_hook[7] > 1e-3, "TensorHook is right for k = 1 only")
lesson.holds(min(parameter_hook[6:]) > 1e-3, "ParameterHook averages weights: the ranks drift")

# %% [markdown]
# ## Why buckets
# Inside an all-reduce the N ranks form a ring. Each sends 2 (N - 1) messages of S / N bytes to the
# next rank (the exercise asks how), and none can be sent before the one before has arrived. A
# message costs a fixed time alpha, and a time per byte, 1 / beta. With k exchanges of S bytes in
# all:
#
#     t = k 2 (N - 1) alpha + 2 (N - 1) / N S / beta
#
# Many small ones pay alpha, one big one cannot begin before the backward pass ends. Take the 345M
# model of the source, a backward pass of 200 ms, messages of 5 us, and 50 GB/s (assumed figures).

# %%
backward_s = 0.2
alpha_s = 5e-6
beta = 50e9  # bytes/s
with torch.device("meta"):
    tensor_bytes = [4 * p.numel() for p in GPT(PRESETS["biatron-345m"].model).parameters()][::-1]


# -> (start, end) of each in seconds; a gradient is ready after its share of the pass
def exchanges(sizes, nodes, overlap=True):
    ready = 0.0
    free = 0.0
    out = []
    for n in sizes:
        ready += backward_s * n / sum(sizes)
        start = max(free, ready if overlap else backward_s)
        free = start + 2 * (nodes - 1) * alpha_s + 2 * (nodes - 1) / nodes * n / beta
        out.append((start, free))
    return out


total = sum(tensor_bytes)
in_buckets = lambda size: [min(size, total - i) for i in range(0, total, size)]
plans = {"Naive": (tensor_bytes, False), "Overlapped": (tensor_bytes, True)}
plans |= {f"Bucketed, {mb} MB": (in_buckets(mb * 1_000_000), True) for mb in (25, 100)}
plans["one bucket"] = [total], True
wait = lambda plan, N: 1e3 * (exchanges(plan[0], N, plan[1])[-1][1] - backward_s)
rows = [(way, len(p[0]), *(wait(p, N) for N in (2, 16, 128, 512))) for way, p in plans.items()]
columns = ["way", "k", "N = 2", "N = 16", "N = 128", "N = 512"]
lesson.table(columns, rows, "ms of waiting after the backward pass, on N nodes")
small, large, one = ([row[i] for i in (2, 3, 4, 5)] for row in rows[2:])
lesson.arithmetic(small[3] > one[3], "at 512 nodes, buckets of 25 MB wait longer than one exchange")
lesson.arithmetic(large[3] < one[3] / 5, "100 MB buckets wait least: more nodes, larger buckets")

# %%
fig = lesson.figure(8, 4)
ax = fig.subplots()
for y, (sizes, overlap) in enumerate(plans.values()):
    spans = [(1e3 * a, 1e3 * (b - a)) for a, b in exchanges(sizes, 128, overlap)]
    ax.broken_barh([(0, 1e3 * backward_s)], (y - 0.35, 0.3), color="lightgray")
    ax.broken_barh(spans, (y, 0.3), color=f"C{y}", edgecolor="white", linewidth=0.05)
    ax.text(sum(spans[-1]) + 5, y + 0.15, f"+ {rows[y][4]:.0f} ms", va="center", color=f"C{y}")
ax.set_yticks(range(len(plans)), plans), ax.invert_yaxis()
ax.set(xlim=(0, 650), xlabel="ms", title="a backward pass (gray) and its exchanges, 128 nodes")
lesson.save(fig, "28_ddp")

# %% [markdown]
# ## Trap
# All three wrong ways train, and none raises an error. Each averages a tensor that is not the
# gradient any more, or not yet: `StaleBuckets` sends a flat tensor that no `p.grad` lies in since
# the first `zero_grad()`. `TensorHook` gets the last micro-batch's gradient alone; the sum of the
# earlier ones differs from rank to rank. `ParameterHook` gets the parameter. A test that calls
# `zero_grad(set_to_none=False)`, or trains with one micro-batch, sees two of them pass.
# This trainer sums after backward: its model is one compiled graph, so nothing overlaps. Its loss
# is divided by the targets of all ranks, which makes the sum the mean.
# Average `p.grad`, ask where it lies, and test that the ranks are equal, bit for bit.
#
# ## Exercise
# `exercises/ex28.py`: the ring all-reduce. `python course/check.py 28`
