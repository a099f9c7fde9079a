# %% [markdown]
# # 11. Data parallel: average the gradients, and nothing else
#
# **Question.** Each rank has a copy of the model and its own rows. There are several ways to
# average the gradients: which are right, and which bytes travel?
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "Paralelismo de Dados" (three
# optimizations, two listings, ring all-reduce), "Segunda Otimização: Sincronizar um lote/bucket de
# gradientes". Core file: `train.py`, `get_ready` and `accumulate`. Before: lesson 10. Next: lesson
# 12. Takes 12 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from config import PRESETS
from model import GPT, GPTConfig

SIZES = dict(n_layer=2, n_head=2, n_kv_head=2, head_dim=16, n_embd=32, mlp_hidden=64)
CONFIG = GPTConfig(seq_len=16, vocab_size=64, tie_embeddings=True, **SIZES)
STEPS = 5
ROWS = 8
BUCKET = 16_384  # bytes
lesson.begin(11, "data parallel")

# %% [markdown]
# ## After the backward pass, during it, and in buckets
# A wrapper makes the ranks' weights equal once. From then on equal weights plus equal gradients
# stay equal weights, so only gradients travel. A frozen weight has none; a tied one has one.


# %%
class Naive(nn.Module):
    """After the backward pass, average the gradients one by one. `log`: bytes of each exchange."""

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
        t /= dist.get_world_size()

    def finish(self):
        """Between the backward pass and the optimizer."""
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
            t /= dist.get_world_size()
        self.sent = []


class Bucketed(Overlapped):
    """The same with gradients that lie end to end in one tensor, sent in slices of equal size."""

    def __init__(self, module, bucket_bytes=BUCKET):
        super().__init__(module)
        flat = torch.zeros(sum(p.numel() for p in self.params))
        self.buckets, self.place, end = flat.split(bucket_bytes // 4), {}, 0
        for p in reversed(self.params):  # the last layer's gradients come first
            self.place[p] = range(end, end + p.numel())
            p.grad = flat[end : end + p.numel()].view_as(p)
            end += p.numel()
        self.missing = [len(bucket) for bucket in self.buckets]

    def hook(self, p):
        if not self.sync:
            return
        place, size = self.place[p], len(self.buckets[0])
        for i in range(place.start // size, (place.stop - 1) // size + 1):
            inside = min(place.stop, (i + 1) * size) - max(place.start, i * size)
            self.missing[i] -= inside
            if not self.missing[i]:
                self.sent.append((self.buckets[i], self.send(self.buckets[i])))
                self.missing[i] = len(self.buckets[i])


# %% [markdown]
# ## A ring
# How does an all-reduce move its bytes? N ranks in a ring cut the tensor in N parts. For N - 1
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
    def finish(self):
        flat = torch.cat([p.grad.flatten() for p in self.params])
        self.log.append(ring_all_reduce(flat))
        for p, g in zip(self.params, flat.split([p.numel() for p in self.params])):
            p.grad.copy_(g.view_as(p) / dist.get_world_size())


# %% [markdown]
# ## The source's two listings
# Both call an averaging function from a hook; nothing is left for the end. The first hook belongs
# to the tensor and gets the gradient of *this* backward pass. The second runs when the gradient has
# been added up, and is handed the *parameter*.


# %%
class TensorHook(Naive):
    def __init__(self, module):
        super().__init__(module)
        for p in self.params:
            self.register(p)

    def register(self, p):
        p.register_hook(self.hook)

    def hook(self, g):
        if self.sync:
            self.average(g)
        return g

    def finish(self):
        pass


class ParameterHook(TensorHook):
    def register(self, p):
        p.register_post_accumulate_grad_hook(lambda p: self.average(p.data) if self.sync else None)


WAYS = {
    "naive": Naive,
    "overlapped": Overlapped,
    "in buckets": Bucketed,
    "our ring": Ring,
    "PyTorch's DDP": DistributedDataParallel,
    "tensor's hook": TensorHook,
    "parameter's hook": ParameterHook,
}


def train(way, rank, world, accum):
    """STEPS steps of SGD -> weights, bytes of each exchange of the last step, and how many of those
    were sent before the end of its backward pass."""
    torch.manual_seed(rank)  # other weights on each rank, until the wrapper makes them equal
    model = GPT(CONFIG)
    model.init_weights()
    model.blocks[0].attn.q.weight.requires_grad_(False)
    wrapped = WAYS[way](model) if way else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randint(64, (STEPS, ROWS, 17), generator=torch.Generator().manual_seed(1))
    for rows in data:
        optimizer.zero_grad(set_to_none=False)
        wrapped.log = []
        parts = rows.chunk(world)[rank].chunk(accum)
        for part in parts:
            hold = way and part is not parts[-1]
            with wrapped.no_sync() if hold else contextlib.nullcontext():
                (wrapped(part[:, :-1], part[:, 1:]) / accum).backward()
        early = len(wrapped.log)
        if hasattr(wrapped, "finish"):
            wrapped.finish()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), wrapped.log, early


def compare(rank, world):
    alone = train(None, 0, 1, 1)[0]
    return alone, {(way, k): train(way, rank, world, k) for way in WAYS for k in (1, 2)}


# %%
(alone, first), (_, second) = lesson.ranks(2, compare, timeout_s=150)
rows, apart = [], {}
for way in WAYS:
    to_one = [(first[way, k][0] - alone).abs().max().item() for k in (1, 2)]
    apart[way] = [(first[way, k][0] - second[way, k][0]).abs().max().item() for k in (1, 2)]
    _, log, early = first[way, 2]
    known = (len(log), sum(log), "yes" if early else "no") if log else (None, None, None)
    rows.append((way, *known, *to_one, *apart[way]))
columns = ["way", "exchanges", "bytes", "early", "to one process", "accum 2", "between ranks"]
lesson.table([*columns, "accum 2"], rows, "two ranks, five steps: largest difference of a weight")
by_way = {row[0]: row for row in rows}

gradients = 4 * (len(alone) - 32 * 32)  # bytes of all gradients; the frozen matrix has none
right, wrong = list(WAYS)[:5], list(WAYS)[5:]
same = all(max(by_way[way][4:6]) < 1e-6 for way in right)
lesson.holds(same, "five ways are one process with all the rows, to 1e-6, accumulating or not")
lesson.holds(all(max(apart[way]) == 0 for way in right), "their ranks are equal bit for bit")
counts = {way: len(first[way, 1][1]) for way in WAYS}
tensors = sum(1 for _ in GPT(CONFIG).parameters()) - 1
lesson.holds(counts["naive"] == counts["overlapped"] == tensors, "an exchange per parameter")
lesson.holds(counts["in buckets"] == -(-gradients // BUCKET), "or ceil(S / bucket) of them")
lesson.holds(
    by_way["our ring"][2] == gradients, "a ring of 2 sends 2 (N - 1) / N x S = S bytes per rank"
)
sent = all(sum(first[way, k][1]) == gradients for way in right[:3] for k in (1, 2))
lesson.holds(sent, "each gradient is sent once a step, accumulating or not")
early = [by_way[way][3] for way in right[:3]]
lesson.holds(early == ["no", "yes", "yes"], "hooks send before the backward pass has ended")
lesson.holds(max(by_way[wrong[0]][4::2]) < 1e-6, "the tensor's hook is right without accumulation")
lesson.holds(apart[wrong[0]][1] > 1e-3, "with it, the ranks drift apart")
lesson.holds(min(apart[wrong[1]]) > 1e-3, "averaged weights drift apart in any case")

# %% [markdown]
# ## Why buckets
# A message costs a fixed time and one per byte. An all-reduce over N nodes is 2 (N - 1) of them in
# a row, so with k exchanges
#
#     t = k 2 (N - 1) alpha + 2 (N - 1) / N S / beta
#
# Many small ones pay alpha, one big one cannot begin before the backward pass ends. Take the 345M
# model of the source, a backward pass of 200 ms, messages of 5 us, and 50 GB/s (assumed figures).

# %%
backward_s, alpha_s, beta = 0.2, 5e-6, 50e9  # beta in bytes/s
with torch.device("meta"):
    model = GPT(PRESETS["biatron-345m"].model)
tensor_bytes = [4 * p.numel() for p in model.parameters()][::-1]


def exchanges(sizes, nodes, overlap=True):
    """-> (start, end) of each exchange in seconds since the backward pass began.

    A gradient is ready after its share of the backward pass, and exchanges queue."""
    ready, free, out = 0.0, 0.0, []
    for n in sizes:
        ready += backward_s * n / sum(sizes)
        start = max(free, ready if overlap else backward_s)
        free = start + 2 * (nodes - 1) * alpha_s + 2 * (nodes - 1) / nodes * n / beta
        out.append((start, free))
    return out


def bucketed(mb):
    whole, rest = divmod(sum(tensor_bytes), int(mb * 1e6))
    return [int(mb * 1e6)] * whole + [rest]


plans = {
    "naive": (tensor_bytes, False),
    "overlapped": (tensor_bytes, True),
    "buckets of 25 MB": (bucketed(25), True),
    "one bucket": ([sum(tensor_bytes)], True),
}
nodes = [2, 16, 128, 512]
after = {
    name: [1e3 * (exchanges(sizes, N, overlap)[-1][1] - backward_s) for N in nodes]
    for name, (sizes, overlap) in plans.items()
}
rows = [(name, len(sizes), *after[name]) for name, (sizes, _) in plans.items()]
lesson.table(["way", "k", *(f"N = {N}" for N in nodes)], rows, "ms of waiting after backward")
formula = len(tensor_bytes) * 2 * 511 * alpha_s + 2 * 511 / 512 * sum(tensor_bytes) / beta
lesson.holds(
    abs(after["naive"][-1] / 1e3 / formula - 1) < 1e-9, "naive waits for the whole formula"
)
best = all(after["buckets of 25 MB"][i] == min(a[i] for a in after.values()) for i in (1, 2))
lesson.holds(best, "at 16 and 128 nodes, buckets wait least")

# %%
fig = lesson.figure(8, 4)
left, right = fig.subplots(1, 2, width_ratios=[3, 2])
colors = ["crimson", "darkorange", "seagreen", "gray"]
for y, (sizes, overlap) in enumerate(plans.values()):
    spans = [(1e3 * a, 1e3 * (b - a)) for a, b in exchanges(sizes, 128, overlap)]
    left.broken_barh([(0, 1e3 * backward_s)], (y - 0.35, 0.3), color="lightgray")
    left.broken_barh(spans, (y, 0.3), color=colors[y], edgecolor="white", linewidth=0.05)
left.axvline(1e3 * backward_s, color="black", linewidth=0.8)
left.text(100, -0.2, "backward pass", ha="center", va="center")
left.set_yticks(range(4), plans), left.invert_yaxis()
left.set(xlabel="ms", title="exchanges of a step, 128 nodes")
sizes_mb = [0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1380]
for N, shade in zip(nodes, (0.35, 0.55, 0.75, 1.0)):
    waits = [1e3 * (exchanges(bucketed(mb), N)[-1][1] - backward_s) for mb in sizes_mb]
    right.loglog(sizes_mb, waits, color="seagreen", alpha=shade)
    right.text(0.45, waits[0], f"{N}", ha="right", va="center", color="seagreen")
right.set(xlim=(0.15, 2000), xlabel="MB in a bucket", title="ms of waiting, 2 to 512 nodes")
lesson.save(fig, "11_ddp")

# %% [markdown]
# ## Trap
# A hook gets an argument, and it is not always the gradient that you mean. The tensor's hook gets
# that of the last micro-batch alone: the sums of the earlier ones stay different, and the ranks
# part. The other one gets the parameter, and a function called `average_gradients` averages
# weights. Both train, both losses fall, no error is raised. The right line is `p.grad`, in
# `register_post_accumulate_grad_hook`; and the test is that ranks are equal, bit for bit.
#
# ## Exercise
# `exercises/ex11.py`: the ring all-reduce. `python course/check.py 11`
