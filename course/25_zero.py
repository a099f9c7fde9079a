# %% [markdown]
# # 25. ZeRO: who keeps which part
#
# **Question.** With data parallelism every rank keeps the same weights, gradients and moments. Each
# stage of ZeRO shards one more of them: how much memory does it save, and which bytes travel?
#
# Sources: *Pré-Treino Eficiente de Modelos de Linguagem*, "Zero Redundancy Optimizer (ZeRO)",
# "ZeRO-1: Particionamento dos Estados do Optimizer", "ZeRO-2: Adicionando o particionamento do
# Gradiente", "ZeRO-3: Adicionando o particionamento do Modelo (FSDP)", "Paralelismo 5D - em poucas
# palavras"; *Armazenamento*, "Checkpoints fragmentados/distribuídos". Core file:
# `machinery/build.py`, `shard`. Before: lesson 24. Next: lesson 26.
# Takes 12 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from config import PRESETS
from model import GPT
from optim import state_bytes

lesson.begin(25, "ZeRO")

# %% [markdown]
# ## The arithmetic
# In fp32, P parameters take 4 P bytes, their gradients 4 P, AdamW's moments 8 P. In mixed precision
# it is 2 P, 2 P and 12 P: the fp32 weights that are updated count as state of the optimizer.


# %%
def per_rank(stage, n_params, N, each=(4, 4, 8)):
    """Bytes of weights, gradients and optimizer state on one of N ranks; stage 0: plain DDP."""
    return [size * n_params / (N if stage >= cut else 1) for size, cut in zip(each, (3, 2, 1))]


with torch.device("meta"):
    P = sum(p.numel() for p in GPT(PRESETS["biatron-345m"].model).parameters())
rows = [(stage, *(int(x) for x in per_rank(stage, P, 8))) for stage in range(4)]
rows = [(*row, sum(row[1:])) for row in rows]
columns = ["stage", "weights", "gradients", "moments", "sum"]
lesson.table(columns, rows, "bytes per rank: biatron-345m, AdamW, 8 ranks")
sums = [row[-1] for row in rows]
lesson.holds(sums[0] == state_bytes({"matrix": P}, "adamw"), "stage 0: the plan's 16 P")
gold = [5_524_684_800, 3_107_635_200, 1_899_110_400, 690_585_600]
lesson.holds(sums == gold, "16 P; 8 P + 8 P / N; 4 P + 12 P / N; 16 P / N")
mixed = [round(sum(per_rank(stage, 7.5e9, 64, (2, 2, 12))) / 1e9, 1) for stage in range(4)]
lesson.holds(mixed == [120, 31.4, 16.6, 1.9], "7.5B, mixed, 64 ranks: 120, 31.4, 16.6, 1.9 GB")

# %% [markdown]
# ## The three stages by hand
# A unit holds the parameters of a layer end to end, cut into one shard per rank; a rank updates its
# own. An all-reduce is a reduce-scatter (the sum of *my* shard) and an all-gather (everybody's
# shard); ZeRO takes the two apart and updates in between. In a ring, a rank sends (N - 1) / N of
# the tensor in each. Checkpoints follow: every rank writes its own shard.


# %%
class Unit:
    sent = 0  # bytes by this rank, in all units

    def __init__(self, params, whole):
        """whole: the weights of all shards stay here."""
        self.params, end, self.world = list(params), 0, dist.get_world_size()
        n = sum(p.numel() for p in self.params)
        self.flat = torch.zeros(-(-n // self.world) * self.world)
        for p in self.params:
            here = slice(end, end := end + p.numel())
            self.flat[here] = p.data.flatten()
            p.data = self.flat[here].view_as(p)
        mine = self.flat.chunk(self.world)[dist.get_rank()]
        self.mine = nn.Parameter(mine if whole else mine.clone())
        if not whole:
            self.free()

    def free(self, *_):
        self.flat.untyped_storage().resize_(0)  # its shape stays, its memory goes

    def gather(self, *_):
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        dist.all_gather_into_tensor(self.flat, self.mine.detach().clone())
        Unit.sent += self.flat.nbytes * (self.world - 1) // self.world

    def reduce(self):
        """Add the mean gradient of my shard to its grad, and drop the whole gradients."""
        whole, part = torch.cat([p.grad.flatten() for p in self.params]), self.mine.detach() * 0
        whole = nn.functional.pad(whole, (0, len(self.flat) - len(whole)))
        dist.reduce_scatter_tensor(part, whole / self.world)
        Unit.sent += whole.nbytes * (self.world - 1) // self.world
        self.mine.grad = part if self.mine.grad is None else self.mine.grad + part
        for p in self.params:
            p.grad = None


class Zero:
    """Stage 1, 2 or 3 for a sequence of layers; `optimizer` sees the shards of this rank alone."""

    def __init__(self, layers, stage, optimizer, **options):
        self.stage, self.arrived = stage, []
        self.units = [Unit(layer.parameters(), whole=stage < 3) for layer in layers]
        self.optimizer = optimizer([unit.mine for unit in self.units], **options)
        for layer, unit in zip(layers, self.units):
            if stage >= 2:  # gradients leave as they come
                for p in layer.parameters():
                    p.register_post_accumulate_grad_hook(partial(self.hook, unit))
            if stage == 3:  # weights come before use, and go
                layer.register_forward_pre_hook(unit.gather)
                layer.register_forward_hook(unit.free)
                layer.register_full_backward_pre_hook(unit.gather)

    def hook(self, unit, p):
        self.arrived.append(p)
        if len(self.arrived) == len(unit.params):  # the layer is complete
            self.arrived = []
            unit.reduce()
            if self.stage == 3:
                unit.free()

    def step(self):
        if self.stage == 1:
            for unit in self.units:
                unit.reduce()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.stage < 3:
            for unit in self.units:
                unit.gather()


class DDP(Zero):
    """Stage 0: whole gradients are averaged, everybody updates everything."""

    def __init__(self, layers, stage, optimizer, **options):
        self.optimizer = optimizer(layers.parameters(), **options)

    def step(self):
        for p in self.optimizer.param_groups[0]["params"]:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
            Unit.sent += 2 * p.grad.nbytes * (dist.get_world_size() - 1) // dist.get_world_size()
        self.optimizer.step()


# %% [markdown]
# Five steps of AdamW on two ranks, beside one process that sees all rows, and beside PyTorch's
# `fully_shard`, which `machinery/build.py` calls.


# %%
def held(layers, optimizer):
    """Bytes of weights, gradients and moments that are here now; norm of the gradients here."""
    tensors = {id(t): t for t in [*layers.parameters(), *optimizer.param_groups[0]["params"]]}
    storages = [t.untyped_storage() for t in tensors.values()]
    weights = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    gradients = [t.grad for t in tensors.values() if t.grad is not None]
    states = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    sizes = [sum(t.nbytes for t in group) for group in (gradients, states)]
    return [weights, *sizes], torch.nn.utils.get_total_norm(gradients).item()


def train(rank, world, way, accum=1):
    """-> weights after five steps; of the last: bytes sent, and what was held before it."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(31, 31), nn.Tanh()) for _ in range(4)))
    data = torch.randn(5, 8, 2, 31)
    if way == "fully_shard":
        for module in (*layers, layers):
            fully_shard(module, mesh=dist.init_device_mesh("cpu", (world,)))
    if way in ("one process", "fully_shard"):
        trainer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    else:
        trainer = (Zero if way else DDP)(layers, way, torch.optim.AdamW, lr=0.01)
    optimizer = getattr(trainer, "optimizer", trainer)
    for rows in data:
        Unit.sent = 0
        for part in rows.chunk(world)[rank].chunk(accum):
            ((layers(part[:, 0]) - part[:, 1]).square().mean() / accum).backward()
        here = None if way == "fully_shard" else held(layers, optimizer)
        trainer.step()
        layers.zero_grad()
    sent = Unit.sent
    for unit in getattr(trainer, "units", []):
        unit.gather()
    whole = [getattr(p, "full_tensor", p.detach)().flatten() for p in layers.parameters()]
    return torch.cat(whole).detach(), sent, here


def compare(rank, world):
    out = {way: train(rank, world, way) for way in [0, 1, 2, 3, "fully_shard"]}
    out |= {(way, 2): train(rank, world, way, accum=2) for way in range(4)}
    return out, train(0, 1, "one process")


# %%
(first, (alone, _, (_, norm))), (second, _) = lesson.ranks(2, compare, timeout_s=150)
rows, n = [], len(alone)
for way in [0, 1, 2, 3, "fully_shard"]:
    far = max((rank[way][0] - alone).abs().max().item() for rank in (first, second))
    known = isinstance(way, int)
    more = (*first[way][2][0], first[way][1], first[way, 2][1]) if known else [None] * 5
    rows.append((str(way), far, *more))
columns = ["stage", "to one process", *columns[1:4], "sent", "sent, accum 2"]
lesson.table(columns, rows, f"two ranks, {n:,} parameters: bytes held before the step")
lesson.holds(max(row[1] for row in rows) < 1e-6, "all stages equal one process, to 1e-6")
memory = all(first[way][2][0] == per_rank(way, n, 2) for way in range(4))
lesson.holds(memory, "bytes held are those of the arithmetic")
sent, twice = ([row[i] / (4 * n) for row in rows[:4]] for i in (5, 6))
lesson.holds(sent == [1, 1, 1, 1.5], "sent: 2 (N - 1) / N P; in stage 3, 3 (N - 1) / N P")
lesson.holds(twice == [1, 1, 1.5, 3], "two micro-batches: stage 3 sends all of it twice")

# %% [markdown]
# ## Five dimensions
# ZeRO shards along the ranks of data parallelism. The other ways cut another dimension, and can be
# combined: 70B parameters on 512 GPUs, with bf16 weights, and no activations counted.

# %%
dimensions = [
    ("data (DP)", "rows of the batch", "gradients", "once a step"),
    ("ZeRO-3", "every tensor, by rank", "weights, gradients", "each layer, twice and once"),
    ("tensor (TP)", "channels, heads", "activations", "each layer, 4 all-reduces"),
    ("sequence (SP)", "positions, in the norms", "activations", "the same bytes as TP"),
    ("context (CP)", "positions", "keys and values", "each attention"),
    ("pipeline (PP)", "layers", "activations", "between stages"),
    ("expert (EP)", "experts", "tokens", "each such layer, 4 all-to-alls"),
]
lesson.table(["way", "cuts", "sends", "when"], dimensions, "what is cut, what travels")
rows = []
for tp, pp, stage in ((1, 1, 0), (8, 1, 0), (8, 1, 1), (8, 4, 1), (1, 1, 3), (8, 1, 3)):
    dp = 512 // (tp * pp)
    gb = sum(per_rank(stage, 70e9 / (tp * pp), dp, (2, 2, 12))) / 1e9
    rows.append((dp, tp, pp, stage, gb, "yes" if gb < 80 else "no"))
lesson.table(["dp", "tp", "pp", "ZeRO", "GB", "fits 80 GB"], rows, "70B on 512 GPUs")
lesson.holds([row[5] for row in rows] == ["no"] * 2 + ["yes"] * 4, "TP of 8 alone is not enough")

# %%
fig = lesson.figure(8, 3.6)
for stage, ax in enumerate(fig.subplots(1, 4, sharey=True)):
    bottom = [0.0] * 4
    for i, color in enumerate(("steelblue", "orange", "lightgray")):
        sizes = [per_rank(stage, P, N)[i] / 1e9 for N in (1, 2, 8, 64)]
        ax.bar(["1", "2", "8", "64"], sizes, bottom=bottom, color=color, label=columns[2 + i])
        bottom = [a + b for a, b in zip(bottom, sizes)]
    ax.set(title=f"stage {stage}" if stage else "DDP: GB per rank", xlabel="ranks", ylim=(0, 6))
    ax.text(3, bottom[-1] + 0.1, f"{bottom[-1]:.2f}", ha="center", color="crimson")
ax.legend()
lesson.save(fig, "25_zero")

# %% [markdown]
# ## Trap
# A rank that clips gradients by the norm of what *it* holds uses a different factor from its
# neighbour's, and no error is raised.

# %%
local = [rank[2][2][1] for rank in (first, second)]
print(f"norms of the shards {local[0]:.4f} and {local[1]:.4f}, of the gradient {norm:.4f}")
together = abs(sum(x * x for x in local) / norm**2 - 1) < 1e-5
lesson.holds(together and max(local) < 0.9 * norm, "add up the squares of all ranks, then clip")

# %% [markdown]
# The last column of the second table holds another trap: stages 2 and 3 have no room for whole
# gradients, so they exchange those of every micro-batch. Accumulation saves DDP traffic, not them.
#
# ## Exercise
# `exercises/ex25.py`: who updates which parameter? `python course/check.py 25`
