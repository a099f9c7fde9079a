# %% [markdown]
# # 24. Data parallel: average the gradients, and nothing else
#
# **Question.** Each rank has a copy of the model and its own rows. There are several ways to
# average the gradients: which are right, and which bytes travel?
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "Paralelismo de Dados" (three
# optimizations, two listings, ring all-reduce), "Segunda Otimização: Sincronizar um lote/bucket de
# gradientes". Core files: `train.py`, `take_steps`; `machinery/build.py`, `wrap` and
# `exchange_gradients`. Before: lesson 18. Next: lesson 25. Takes 12 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import contextlib

import torch
import torch.distributed as dist
from torch import nn

from config import PRESETS, GPTConfig
from model import GPT

CONFIG = GPTConfig(16, 64, 2, 2, 2, 16, n_embd=32, mlp_hidden=64, tie_embeddings=True)
BUCKET = 16_384  # bytes
lesson.begin(24, "data parallel")

# %% [markdown]
# ## After the backward pass, during it, and in buckets
# A wrapper makes the ranks' weights equal once. From then on equal weights plus equal gradients
# stay equal weights, so only gradients travel. A frozen weight has none; a tied one has one.


# %%
class Naive(nn.Module):
    """After the backward pass, average the gradients one by one. `log`: bytes of each."""

    def __init__(self, module):
        super().__init__()
        self.module, self.sync, self.log = module, True, []
        self.params = [p for p in module.parameters() if p.requires_grad]
        for p in module.parameters():
            dist.broadcast(p.data, 0)  # all begin with the weights of rank 0

    def forward(self, *inputs):
        return self.module(*inputs)

    @contextlib.contextmanager
    def no_sync(self):
        """For all micro-batches of a step but the last: gradients add up on their rank."""
        self.sync = False
        yield
        self.sync = True

    def send(self, t):
        self.log.append(t.nbytes)
        return dist.all_reduce(t, async_op=True)  # the sum, in place, some time later

    def average(self, t):
        self.send(t).wait()
        t.div_(dist.get_world_size())

    def finish(self):
        for p in self.params:
            self.average(p.grad)


class Overlapped(Naive):
    """Send each gradient as soon as it is there, while the backward pass goes on."""

    def __init__(self, module):
        super().__init__(module)
        self.sent = []
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.hook)

    def hook(self, p):
        if self.sync:
            self.sent.append((p.grad, self.send(p.grad)))

    def finish(self):
        for t, work in self.sent:
            work.wait()
            t.div_(dist.get_world_size())
        self.sent = []


class Bucketed(Overlapped):
    """The same with gradients that lie end to end in one tensor, sent in slices of equal size."""

    def __init__(self, module):
        super().__init__(module)
        n, end, self.place = sum(p.numel() for p in self.params), 0, {}
        flat, done = torch.zeros(n), torch.zeros(n, dtype=torch.bool)
        self.buckets = list(zip(flat.split(BUCKET // 4), done.split(BUCKET // 4)))
        for p in reversed(self.params):  # the last layer's gradients come first
            here = slice(end, end := end + p.numel())
            p.grad, self.place[p] = flat[here].view_as(p), done[here]

    def hook(self, p):
        if self.sync:
            self.place[p].fill_(True)
            for bucket, done in self.buckets:
                if done.all():
                    self.sent.append((bucket, self.send(bucket)))
                    done.zero_()


# %% [markdown]
# ## A ring
# How does an all-reduce move its bytes? N ranks in a ring cut the tensor into N parts. For N - 1
# turns each passes a part to the right and adds the one that comes from the left; now each has one
# whole sum. For N - 1 more turns they pass the sums on. Each sends 2 (N - 1) / N of the tensor.


# %%
def ring_all_reduce(t) -> int:
    """Sum t (n,) over the ranks, in place -> bytes that this rank sent."""
    rank, world, sent = dist.get_rank(), dist.get_world_size(), 0
    parts = t.tensor_split(world)
    for turn in range(2 * (world - 1)):
        out, into = parts[(rank - turn) % world], parts[(rank - turn - 1) % world]
        arrived = torch.empty_like(into)
        sending = dist.isend(out, (rank + 1) % world)
        dist.recv(arrived, (rank - 1) % world)
        sending.wait()
        sent += out.nbytes
        into.copy_(into + arrived if turn < world - 1 else arrived)
    return sent


class Ring(Naive):
    def average(self, t):
        self.log.append(ring_all_reduce(t.view(-1)))
        t.div_(dist.get_world_size())


# %% [markdown]
# ## The source's two listings
# Both call an averaging function from a hook; nothing is left for the end. The first hook belongs
# to the tensor and gets the gradient of *this* backward pass. The second runs when the gradient has
# been added up, and is handed the *parameter*.


# %%
class TensorHook(Naive):
    finish = lambda self: None

    def __init__(self, module):
        super().__init__(module)
        for p in self.params:
            p.register_hook(lambda g: self.average(g) if self.sync else None)


class ParameterHook(TensorHook):
    def __init__(self, module):
        Naive.__init__(self, module)
        hook = lambda p: self.average(p.data) if self.sync else None
        for p in self.params:
            p.register_post_accumulate_grad_hook(hook)


BY_HAND = [Naive, Overlapped, Bucketed, Ring]
DDP = nn.parallel.DistributedDataParallel
WAYS = {way.__name__: way for way in [*BY_HAND, DDP, TensorHook, ParameterHook]}


def train(way, rank, world, accum):
    """-> weights after five steps, bytes of each exchange of the last one, how many were early."""
    torch.manual_seed(rank)  # other weights on each rank, until the wrapper makes them equal
    model = GPT(CONFIG)
    model.init_weights()
    model.blocks[0].attn.q.weight.requires_grad_(False)
    wrapped = WAYS[way](model) if way else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randint(64, (5, 8, 17), generator=torch.Generator().manual_seed(1))
    for rows in data:
        optimizer.zero_grad(set_to_none=False)
        wrapped.log = []
        parts = rows.chunk(world)[rank].chunk(accum)
        for part in parts:
            last = part is parts[-1]
            with contextlib.nullcontext() if last else wrapped.no_sync():
                (wrapped(part[:, :-1], part[:, 1:]) / accum).backward()
        early = len(wrapped.log)
        if hasattr(wrapped, "finish"):
            wrapped.finish()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), wrapped.log, early


def compare(rank, world):
    cases = [(way, k) for way in WAYS for k in (1, 2)]
    return train(None, 0, 1, 1)[0], {(way, k): train(way, rank, world, k) for way, k in cases}


# %%
(alone, first), (_, second) = lesson.ranks(2, compare, timeout_s=150)
rows, far = [], lambda a, b: (a - b).abs().max().item()
for way in WAYS:
    log, early = first[way, 2][1:]
    known = (len(log), sum(log), "yes" if early else "no") if log else (None, None, "")
    to_one = [far(first[way, k][0], alone) for k in (1, 2)]
    rows.append((way, *known, *to_one, *(far(first[way, k][0], second[way, k][0]) for k in (1, 2))))
columns = ["way", "exchanges", "bytes", "early", "to one process", "accum 2", "between ranks"]
lesson.table([*columns, "accum 2"], rows, "two ranks, five steps: largest difference of a weight")

right, tensor_hook, parameter_hook = rows[:5], *rows[5:]
size = 4 * (len(alone) - 32 * 32)  # bytes of the gradients; the frozen matrix has none
lesson.holds(max(max(row[4:6]) for row in right) < 1e-6, "five ways equal one process, to 1e-6")
lesson.holds(max(max(row[6:]) for row in right) == 0, "and their ranks are equal bit for bit")
sent = all(sum(first[way.__name__, k][1]) == size for way in BY_HAND for k in (1, 2))
lesson.holds(sent, "S bytes a step, accumulating or not; in a ring of 2, 2 (N - 1) / N S is S")
sends = [(row[1], row[3]) for row in right[:3]] == [(12, "no"), (12, "yes"), (5, "yes")]
lesson.holds(sends and 5 == -(-size // BUCKET), "hooks send early; ceil(S / bucket) exchanges")
lesson.holds(tensor_hook[6] == 0 and tensor_hook[7] > 1e-3, "TensorHook is right until accum is 2")
lesson.holds(min(parameter_hook[6:]) > 1e-3, "averaged weights drift apart in any case")

# %% [markdown]
# ## Why buckets
# A message costs a fixed time, and a time per byte. An all-reduce over N nodes is 2 (N - 1)
# messages in a row, so with k exchanges
#
#     t = k 2 (N - 1) alpha + 2 (N - 1) / N S / beta
#
# Many small ones pay alpha, one big one cannot begin before the backward pass ends. Take the 345M
# model of the source, a backward pass of 200 ms, messages of 5 us, and 50 GB/s (assumed figures).

# %%
backward_s, alpha_s, beta = 0.2, 5e-6, 50e9  # beta in bytes/s
with torch.device("meta"):
    big = GPT(PRESETS["biatron-345m"].model)
tensor_bytes = [4 * p.numel() for p in big.parameters()][::-1]


def exchanges(sizes, nodes, overlap=True):
    """-> (start, end) of each in seconds; a gradient is ready after its share of the pass."""
    ready, free, out = 0.0, 0.0, []
    for n in sizes:
        ready += backward_s * n / sum(sizes)
        start = max(free, ready if overlap else backward_s)
        free = start + 2 * (nodes - 1) * alpha_s + 2 * (nodes - 1) / nodes * n / beta
        out.append((start, free))
    return out


buckets = [min(25_000_000, sum(tensor_bytes) - i) for i in range(0, sum(tensor_bytes), 25_000_000)]
plans = {
    "Naive": (tensor_bytes, False),
    "Overlapped": (tensor_bytes, True),
    "Bucketed, 25 MB": (buckets, True),
    "one bucket": ([sum(tensor_bytes)], True),
}
nodes, rows = [2, 16, 128, 512], []
for name, (sizes, overlap) in plans.items():
    ends = [exchanges(sizes, N, overlap)[-1][1] for N in nodes]
    rows.append((name, len(sizes), *(1e3 * (end - backward_s) for end in ends)))
lesson.table(["way", "k", *(f"N = {N}" for N in nodes)], rows, "ms of waiting after backward")
best = [min(row[i] for row in rows) == rows[2 + (i == 5)][i] for i in (2, 3, 4, 5)]
lesson.holds(all(best), "to 128 nodes, buckets win; at 512 they are too many messages")

# %%
fig = lesson.figure(8, 4)
ax = fig.subplots()
for y, (sizes, overlap) in enumerate(plans.values()):
    spans = [(1e3 * a, 1e3 * (b - a)) for a, b in exchanges(sizes, 128, overlap)]
    ax.broken_barh([(0, 1e3 * backward_s)], (y - 0.35, 0.3), color="lightgray")
    ax.broken_barh(spans, (y, 0.3), color=f"C{y}", edgecolor="white", linewidth=0.05)
    ax.text(sum(spans[-1]) + 5, y + 0.15, f"+ {rows[y][4]:.0f} ms", va="center", color=f"C{y}")
ax.set_yticks(range(4), plans), ax.invert_yaxis()
ax.set(xlim=(0, 650), xlabel="ms", title="a backward pass (gray) and its exchanges, 128 nodes")
lesson.save(fig, "24_ddp")

# %% [markdown]
# ## Trap
# A hook gets an argument, and it is not always the gradient that you mean. The tensor's hook gets
# the last micro-batch's alone: the sum of the earlier ones differs from rank to rank, and so do the
# weights, by 0.02 after five steps. The other hook gets the parameter, and a function that should
# average gradients averages weights. Both runs train, and no error is raised. Average `p.grad`, in
# `register_post_accumulate_grad_hook`; and test that the ranks are equal, bit for bit.
#
# ## Exercise
# `exercises/ex24.py`: the ring all-reduce. `python course/check.py 24`
