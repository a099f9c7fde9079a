# %% [markdown]
# # 28. Data parallel: average the gradients, and share what is kept
#
# **Question.** Each rank has a copy of the model and rows of its own. Which ways of averaging the
# gradients are right? And if the ranks keep one copy between them: what does each stage of ZeRO
# save, and what does it send?
#
# **Afterwards** you can write a data-parallel wrapper that exchanges gradients while the backward
# pass runs, and a sharded optimizer, and test both for the mistakes that raise no error.
#
# Sources: *Pré-Treino Eficiente de Modelos de Linguagem*, "Paralelismo de Dados" (three
# optimizations, two listings, ring all-reduce), "Zero Redundancy Optimizer (ZeRO)";
# *Armazenamento*, "Checkpoints fragmentados/distribuídos". Core files: `train.py`, `take_steps`;
# `optim.py`, `sum_over_ranks`; `machinery/build.py`, `shard`. Before: lesson 10.
# Next: lesson 29. Takes 12 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import torch
import torch.distributed as dist
from torch import nn

from config import PRESETS
from model import GPT

BUCKET = 4096  # bytes
LOG = []  # for each exchange, the bytes that this rank sends in a ring
lesson.begin(28, "data parallel")


# 1 time: each rank gets the sum of its part, or it gets all parts; 2 times: both
def count(times, t):
    world = dist.get_world_size()
    LOG.append(times * t.nbytes * (world - 1) // world)


# %% [markdown]
# ## Average after the backward pass
# Several processes (*ranks*) train one model. An *all-reduce* replaces a tensor on each rank with
# the sum over all ranks. A wrapper makes the weights equal once. From then on, equal gradients keep
# equal weights equal, so only gradients travel. A frozen weight has no gradient; a weight that two
# layers share (a tied one) has one.
#
# `Naive` averages the gradients one by one in `finish`, which you call between the last backward
# pass of a step and the optimizer's step. A step may have several backward passes, one for each
# *micro-batch*, whose gradients add up; `require_backward_grad_sync` is False for all but the last.
# (The source and PyTorch's own wrapper have a switch of the same name, which `no_sync` sets.) In
# `attach`, the other wrappers will register their hooks.


# %%
class Naive(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.sent = []
        self.require_backward_grad_sync = True
        self.params = [p for p in module.parameters() if p.requires_grad]
        for p in module.parameters():
            dist.broadcast(p.data, 0)  # all start from the weights of rank 0
        for p in self.params:
            self.attach(p)

    def attach(self, p):
        pass  # Naive needs no hook

    def forward(self, *inputs):
        return self.module(*inputs)

    def send(self, t):
        count(2, t)
        return dist.all_reduce(t, async_op=True)  # the sum, in place, some time later

    def average(self, t):
        self.send(t).wait()
        t.div_(dist.get_world_size())

    def finish(self):
        for p in self.params:
            self.average(p.grad)


# %% [markdown]
# ## During the backward pass
# The last layer's gradients are ready long before the first layer's. A *hook* is a function that
# autograd calls at a certain moment; one registered by `register_post_accumulate_grad_hook` is
# called when `p.grad` is complete. `Overlapped` sends each gradient at that moment, while the
# backward pass goes on, and waits for the sums in `finish`.
#
# Many small messages are slow. So `Bucketed` lays all gradients end to end in one flat tensor,
# makes each `p.grad` a view of its place there, and sends slices of equal size (*buckets*) as they
# fill up. The view does not last: by default, `optimizer.zero_grad()` sets `p.grad` to None, and
# the next backward pass puts a fresh tensor there. `adopt` takes such a gradient back into its
# place. `StaleBuckets` is the same class without it. (If some weight gets no gradient in a step,
# its bucket is never sent: for that case PyTorch's wrapper has `find_unused_parameters`.)


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


class Bucketed(Overlapped):
    def __init__(self, module):
        super().__init__(module)
        order = self.params[::-1]  # the last layer's gradients come first
        sizes = [p.numel() for p in order]
        flat = torch.zeros(sum(sizes))
        done = torch.zeros(sum(sizes), dtype=torch.bool)
        self.buckets = list(zip(flat.split(BUCKET // 4), done.split(BUCKET // 4)))
        self.place = dict(zip(order, zip(flat.split(sizes), done.split(sizes))))
        for p, (place, _) in self.place.items():
            p.grad = place.view_as(p)

    def adopt(self, p, view):
        if p.grad.data_ptr() != view.data_ptr():
            p.grad = view.copy_(p.grad)

    def hook(self, p):
        if self.require_backward_grad_sync:
            place, done = self.place[p]
            self.adopt(p, place.view_as(p))
            done.fill_(True)
            for bucket, full in self.buckets:
                if full.all():
                    self.sent.append((bucket, self.send(bucket)))
                    full.zero_()


class StaleBuckets(Bucketed):
    def adopt(self, p, view):
        pass


# %% [markdown]
# The source has two listings. Both call an averaging function from a hook and leave nothing for the
# end. The first registers its hook on the tensor, where it gets the gradient of *this* backward
# pass. (The second's hook is handed the *parameter*, and so averages the weights.)


# %%
class TensorHook(Naive):
    def attach(self, p):
        p.register_hook(self.hook)

    def hook(self, grad):
        if self.require_backward_grad_sync:
            self.average(grad)

    def finish(self):
        pass


# %% [markdown]
# ## One copy for all: ZeRO
# In data parallelism all ranks keep the same things. In fp32, P parameters take 4 P bytes, their
# gradients 4 P, and AdamW's moments (the running means of the gradient and of its square) 8 P.
# Stage 1 of ZeRO shards the moments over N ranks, stage 2 the gradients as well, and stage 3 also
# the weights; stage 0 is plain data parallelism. Each rank holds
#
#     stage   weights   gradients   moments   sent in a step, (N - 1) / N times
#     0       4 P       4 P         8 P       8 P
#     1       4 P       4 P         8 P / N   8 P
#     2       4 P       4 P / N     8 P / N   4 P, and 4 P for each micro-batch
#     3       4 P / N   4 P / N     8 P / N   12 P for each micro-batch
#
# and sends what the last column says. (In mixed precision they take 2 P, 2 P and 12 P, because the
# fp32 weights that are updated count as optimizer state. 7.5B parameters on 64 ranks then take 120,
# 31.4, 16.6 and 1.9 GB: the example in the paper, ZeRO 2019.)
#
# *Stage 1*: each parameter has one owner. The owner alone gets the mean of its gradients (a
# *reduce*), keeps its moments, updates it, and tells the others. To a training loop this looks like
# any other optimizer, including `param_groups`, where a schedule writes the learning rate. All
# ranks must agree on who owns what without asking each other. Here the ranks take turns, layer by
# layer (matrix and bias), which is fair when all layers are alike.


# %%
class ShardedOptimizer(torch.optim.Optimizer):
    """cls(params, **options), with the state of each parameter on one rank only."""

    def __init__(self, params, cls, **options):
        self.local = cls(params, **options)
        super().__init__(self.local.param_groups, {})
        self.param_groups = self.local.param_groups  # a rate written here is read there

    def owners(self):
        params = [p for group in self.param_groups for p in group["params"]]
        return {p: i // 2 % dist.get_world_size() for i, p in enumerate(params)}

    def step(self):
        for p, owner in self.owners().items():
            if owner != dist.get_rank():
                p.grad = None  # so `local` skips it, and makes no state for it
        self.local.step()
        for p, owner in self.owners().items():
            dist.broadcast(p.data, owner)
            count(1, p)


# %% [markdown]
# *Stages 2 and 3*: a *unit* holds the parameters of a layer end to end, cut into one equal shard
# per rank, and each rank updates its own. An all-reduce consists of a *reduce-scatter* (each rank
# gets the sum of *its* shard) and an *all-gather* (every rank gets all shards). ZeRO takes the two
# apart and updates in between. In a ring, a rank sends (N - 1) / N of the tensor in each.
# Checkpoints follow the same cut: each rank writes its own shard. (`machinery/build.py` calls
# PyTorch's `fully_shard`, which is stage 3.)


# %%
class Unit:
    def __init__(self, layer, stage):
        self.params = [*layer.parameters()]
        self.stage = stage
        self.flat = nn.utils.parameters_to_vector(self.params).detach()
        nn.utils.vector_to_parameters(self.flat, self.params)  # from here on they are views of it
        mine = self.flat.chunk(dist.get_world_size())[dist.get_rank()]
        self.mine = nn.Parameter(mine.clone() if stage == 3 else mine)
        for p in self.params:  # gradients leave as they arrive
            p.register_post_accumulate_grad_hook(self.hook)
        if stage == 3:  # weights arrive before use, and leave after it
            self.free()
            layer.register_forward_pre_hook(self.gather)
            layer.register_forward_hook(self.free)
            layer.register_full_backward_pre_hook(self.gather)

    def free(self, *_):
        self.flat.untyped_storage().resize_(0)  # its shape stays, its memory goes

    def gather(self, *_):
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        dist.all_gather_into_tensor(self.flat, self.mine.data.clone())
        count(1, self.flat)

    def hook(self, _):
        if any(p.grad is None for p in self.params):
            return
        whole = torch.cat([p.grad.flatten() for p in self.params]) / dist.get_world_size()
        part = torch.empty_like(self.mine)
        dist.reduce_scatter_tensor(part, whole)  # the mean gradient of my shard
        count(1, whole)
        self.mine.backward(part)  # adds it to mine.grad
        for p in self.params:
            p.grad = None
        if self.stage == 3:
            self.free()


# %% [markdown]
# ## Eight ways, five steps
# Take two ranks, each with half of the rows, in k = 1 or k = 2 micro-batches; the judge is a single
# process that sees all rows. In the first table, "error, 2" is the distance from that process for
# k = 2, and "apart, 2" the distance between the two ranks. "early" counts the exchanges that start
# before the backward pass ends.


# %%
WAYS = {way.__name__: way for way in (Naive, Overlapped, Bucketed, StaleBuckets, TensorHook)}


# bytes of weights, gradients and moments that this rank holds now
def held(layers, optimizer):
    tensors = {*layers.parameters(), *optimizer.param_groups[0]["params"]}
    storages = [t.untyped_storage() for t in tensors]
    weights = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    gradients = sum(t.grad.nbytes for t in tensors if t.grad is not None)
    states = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    return weights, gradients, sum(t.nbytes for t in states)


# -> weights after five steps; of the last step: log, exchanges before its end, what was held then
def train(way, rank, world, k=1):
    torch.manual_seed(rank if way in WAYS else 0)  # a wrapper makes the weights equal
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(31, 31), nn.Tanh()) for _ in range(4)))
    model = WAYS[way](layers) if way in WAYS else layers
    units = [Unit(layer, way) for layer in layers] if way in (2, 3) else []
    params = [unit.mine for unit in units] or [*layers.parameters()]
    AdamW = torch.optim.AdamW
    optimizer = ShardedOptimizer(params, AdamW, lr=0.01) if way == 1 else AdamW(params, lr=0.01)
    for rows in torch.randn(5, 8, 2, 31, generator=torch.Generator().manual_seed(1)):
        optimizer.zero_grad()
        LOG.clear()
        parts = rows.chunk(world)[rank].chunk(k)
        for part in parts:
            model.require_backward_grad_sync = part is parts[-1]
            ((model(part[:, 0]) - part[:, 1]).square().mean() / k).backward()
        early = len(LOG)
        here = held(layers, getattr(optimizer, "local", optimizer))
        if way in WAYS:
            model.finish()
        for p, owner in optimizer.owners().items() if way == 1 else ():
            dist.reduce(p.grad, owner)  # the owner alone needs the mean
            p.grad /= world
            count(1, p.grad)
        optimizer.step()
        for unit in units if way == 2 else ():
            unit.gather()
    log = list(LOG)
    for unit in units:  # for the comparison
        unit.gather()
    return nn.utils.parameters_to_vector(layers.parameters()).detach(), log, early, here


def compare(rank, world):
    out = {(way, k): train(way, rank, world, k) for way in [*WAYS, 1, 2, 3] for k in (1, 2)}
    return out, train("one process", 0, 1)[0]


(first, alone), (second, _) = lesson.ranks(2, compare, timeout_s=150)
size = alone.nbytes  # of the weights, and of the gradients
far = lambda a, b: (a - b).abs().max().item()


# distances of a weight from one process and from the other rank, for k = 1 and k = 2
def off(way):
    pairs = [(first[way, k][0], second[way, k][0]) for k in (1, 2)]
    return [far(x, alone) for x, _ in pairs] + [far(*pair) for pair in pairs]


rows = []
for way in WAYS:
    _, log, early, _ = first[way, 2]
    rows.append((way, len(log), early, sum(log), *off(way)))
columns = ["way", "sends", "early", "bytes", "error, 1", "error, 2", "apart, 1", "apart, 2"]
lesson.table(columns, rows, "two ranks, five steps: largest distance of a weight")

right, (stale, tensor_hook) = rows[:3], rows[3:]
lesson.holds(max(max(row[4:]) for row in right) < 1e-5, "three ways equal one process, to 1e-5")
sends = [row[1:4] for row in right] == [(8, 0, size), (8, 8, size), (4, 4, size)]
lesson.holds(sends, "each gradient travels once; hooks send 8 tensors, or 4 buckets, early")
lesson.holds(min(stale[6:]) > 1e-3, "with stale buckets the ranks drift apart")
lesson.holds(tensor_hook[6] == 0 and tensor_hook[7] > 1e-3, "TensorHook is right for k = 1 only")

# %%
rows = []
for stage, way in enumerate(("Naive", 1, 2, 3)):
    sent = [sum(first[way, k][1]) for k in (1, 2)]
    rows.append((stage, max(off(way)), *first[way, 1][3], *sent))
columns = ["stage", "error", "weights", "gradients", "moments", "sent, k=1", "sent, k=2"]
lesson.table(columns, rows, f"ZeRO on two ranks, {len(alone):,} parameters: bytes held, and sent")
lesson.holds(max(row[1] for row in rows) < 1e-5, "all stages equal one process, to 1e-5")
shares = [[x / size for x in row[2:]] for row in rows]
planned = [[1, 1, 2, 1, 1], [1, 1, 1, 1, 1], [1, 0.5, 1, 1, 1.5], [0.5, 0.5, 1, 1.5, 3]]
lesson.holds(shares == planned, "bytes held and sent are those of the list above, in all stages")

# %% [markdown]
# ## Why buckets
# Inside an all-reduce the N ranks form a ring. Each sends 2 (N - 1) messages of S / N bytes to the
# next rank (the exercise asks how), and each message must wait for the one before it to arrive. A
# message costs a fixed time alpha, plus 1 / beta for each byte. With k exchanges of S bytes in all:
#
#     t = k 2 (N - 1) alpha + 2 (N - 1) / N S / beta
#
# Many small exchanges pay alpha again and again; a single big one cannot start before the backward
# pass ends. Take the source's 345M model, a backward pass of 200 ms, 5 us a message, and 50 GB/s
# (assumed figures).

# %%
backward_s = 0.2
alpha_s = 5e-6
beta = 50e9  # bytes/s
with torch.device("meta"):
    tensor_bytes = [4 * p.numel() for p in GPT(PRESETS["biatron-345m"].model).parameters()][::-1]


# -> (start, end) of each, in seconds; a gradient is ready after its share of the pass
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

# %%
waits = []
fig = lesson.figure(8, 4)
ax = fig.subplots()
ax.axvspan(0, 1e3 * backward_s, color="lightgray")
for y, (sizes, overlap) in enumerate(plans.values()):
    spans = [(1e3 * a, 1e3 * (b - a)) for a, b in exchanges(sizes, 128, overlap)]
    end = sum(spans[-1])
    waits.append(end - 1e3 * backward_s)
    ax.broken_barh(spans, (y - 0.2, 0.4), color=f"C{y}")
    ax.text(end + 5, y, f"+ {waits[y]:.0f} ms", va="center")
ax.set_yticks(range(len(plans)), plans), ax.invert_yaxis()
ax.set(xlim=(0, 650), xlabel="ms", title="exchanges on 128 nodes, and the backward pass (gray)")
lesson.save(fig, "28_ddp")
short = max(waits[2:4]) < waits[4] / 10
lesson.arithmetic(short, "in buckets: less than a tenth of the wait for a single exchange")

# %% [markdown]
# On 128 nodes the exchange of one tensor is mostly alpha: `Overlapped` is still sending when a
# single exchange would be over. On 512 nodes alpha counts four times as much, and buckets should be
# larger.
#
# ## What else is in memory, and what else can be cut
# There is a fourth thing in memory, which no stage of ZeRO shards: the *activations*, which the
# forward pass keeps for the backward pass. Korthikanti et al. (2022, "Reducing Activation
# Recomputation in Large Transformer Models") count 34 bytes per token, channel and layer in bf16.
# If you repeat each layer's forward pass during the backward pass, you only keep its input: 2
# bytes. A model of 70B parameters (80 layers of 8,192 channels) on 512 GPUs with ZeRO-3 has 2 GB of
# states on each, and the activations of one row of 4,096 tokens are 91 GB. This is why ZeRO is
# combined with other cuts:
#
# - tensor (TP, lesson 29) cuts channels and heads, and sends activations, 4 times a layer;
# - sequence (SP, lesson 29) cuts positions between the matrices, for the same bytes as TP;
# - context (CP, lesson 20) cuts positions, and sends keys and values, once per attention;
# - pipeline (PP, lesson 30) cuts layers, and sends activations, between stages;
# - expert (EP, lesson 29) cuts experts, and sends tokens, 4 times a layer.
#
# ## Trap
# The wrong ways train, and none raises an error. Each averages a tensor that is no longer the
# gradient, or not yet. `StaleBuckets` sends a flat tensor that no `p.grad` has been a part of since
# the first `zero_grad()`. `TensorHook` gets the last micro-batch's gradient alone; the sum of the
# earlier ones differs from rank to rank. The first passes a test that calls
# `zero_grad(set_to_none=False)`, the second one that trains with a single micro-batch. Average
# `p.grad`, check where it lies in memory, and test that the ranks are equal, bit for bit.
#
# ZeRO adds one more. A rank that clips gradients by the norm of what *it* holds uses another factor
# than its neighbor: only the squared norms of all shards add up to that of the gradient. And
# accumulation saves traffic in plain data parallelism but not in stages 2 and 3, which have no room
# for whole gradients, and so exchange those of every micro-batch.
#
# This trainer sums after the backward pass: its model is one compiled graph, so nothing overlaps.
# Its loss is divided by the targets of all ranks, which makes the sum the mean.
#
# ## Exercise
# `exercises/ex28.py`: the ring all-reduce. `python course/check.py 28`
