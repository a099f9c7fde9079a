# %% [markdown]
# # 42. ZeRO: who keeps which part
#
# **Question.** With data parallelism every rank keeps the same weights, gradients and moments. Each
# stage of ZeRO shards one more of them: how much memory does it save, and which bytes travel?
#
# **Afterwards** you can write a sharded optimizer, and say before a run what each stage holds.
#
# Sources: *Pré-Treino Eficiente de Modelos de Linguagem*, "Zero Redundancy Optimizer (ZeRO)",
# "ZeRO-1: Particionamento dos Estados do Optimizer", "ZeRO-2: Adicionando o particionamento do
# Gradiente", "ZeRO-3: Adicionando o particionamento do Modelo (FSDP)", "Paralelismo 5D - em poucas
# palavras"; *Armazenamento*, "Checkpoints fragmentados/distribuídos". Core file:
# `machinery/build.py`, `shard`. Before: lesson 28. Next: lesson 29.
# Takes 12 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path

import torch
import torch.distributed as dist
from torch import nn

from config import PRESETS
from model import GPT
from optim import state_bytes

lesson.begin(42, "ZeRO")

# %% [markdown]
# ## The arithmetic
# In fp32, P parameters take 4 P bytes, their gradients 4 P, AdamW's moments (the running means of
# the gradient and of its square) 8 P. In mixed precision it is 2 P, 2 P and 12 P: the fp32 weights
# that are updated count as state of the optimizer. Stage 1 shards the state over N ranks, stage 2
# the gradients too, stage 3 the weights too; stage 0 is plain data parallelism. (The example of the
# paper, ZeRO 2019: 7.5B parameters, mixed, 64 ranks: 120, 31.4, 16.6 and 1.9 GB.)


# %%
# bytes of weights, gradients and optimizer state on one of N ranks
def per_rank(stage, n_params, N, each=(4, 4, 8)):
    return [size * n_params / (N if stage >= cut else 1) for size, cut in zip(each, (3, 2, 1))]


with torch.device("meta"):
    P = sum(p.numel() for p in GPT(PRESETS["biatron-345m"].model).parameters())
rows = [(k, *map(int, [*per_rank(k, P, 8), sum(per_rank(k, P, 8))])) for k in range(4)]
columns = ["stage", "weights", "gradients", "moments", "sum"]
lesson.table(columns, rows, "bytes per rank: biatron-345m, AdamW, 8 ranks")
sums = [row[-1] for row in rows]
lesson.holds(sums[0] == state_bytes({"matrix": P}, "adamw"), "stage 0: 16 P, as train.py plans it")
formulas = [16 * P, 8 * P + P, 4 * P + 12 * P // 8, 16 * P // 8]
lesson.arithmetic(sums == formulas, "16 P; 8 P + 8 P / N; 4 P + 12 P / N; 16 P / N")

# %% [markdown]
# ## Stage 1: a sharded optimizer
# Each parameter has one owner, which alone keeps its moments, updates it, and tells the others. To
# a training loop it looks like any optimizer. Which rank owns what must come out the same on all
# ranks, without asking; here, layers take turns, which is even if all layers are alike (the
# exercise asks for a rule that is even for any). A schedule writes the learning rate into
# `param_groups`, from where `step` takes it to the optimizer inside.


# %%
SENT = [0]  # bytes that this rank sends


def count(parts, t):
    SENT[0] += parts * t.nbytes * (dist.get_world_size() - 1) // dist.get_world_size()  # in a ring


class ShardedOptimizer(torch.optim.Optimizer):
    """cls(params, **options), with the state of each parameter on one rank only."""

    def __init__(self, params, cls, **options):
        self.owner = {}
        self.local = None
        self.cls = cls
        super().__init__(params, options)  # calls add_param_group

    def add_param_group(self, group):
        super().add_param_group(group)
        mine = dict(self.param_groups[-1])
        for p in mine["params"]:
            self.owner[p] = len(self.owner) // 2 % dist.get_world_size()  # matrix and bias together
        mine["params"] = [p for p in mine["params"] if self.owner[p] == dist.get_rank()]
        if self.local:
            self.local.add_param_group(mine)
        self.local = self.local or self.cls([mine])
        self.param_groups[-1] = (
            self.local.param_groups[-1] | self.param_groups[-1]
        )  # cls's defaults

    def step(self, closure=None):
        for here, there in zip(self.param_groups, self.local.param_groups):
            there.update({key: x for key, x in here.items() if key != "params"})
        loss = self.local.step(closure)
        for p, owner in self.owner.items():
            dist.broadcast(p.data, owner)
            count(1, p)
        return loss


# %% [markdown]
# ## Stages 2 and 3: nothing whole
# Now a *unit* holds the parameters of a layer end to end, cut into one equal shard per rank; a rank
# updates its own. An all-reduce is a reduce-scatter (each rank gets the sum of *its* shard) and an
# all-gather (everybody gets all shards). ZeRO takes the two apart and updates in between. In a
# ring, a rank sends (N - 1) / N of the tensor in each. Checkpoints follow: every rank writes its
# own shard.


# %%
class Unit:
    def __init__(self, layer, stage):
        self.params = [*layer.parameters()]
        self.world = dist.get_world_size()
        self.stage = stage
        flat = nn.utils.parameters_to_vector(self.params).detach()
        self.flat = nn.functional.pad(flat, (0, -len(flat) % self.world))
        nn.utils.vector_to_parameters(self.flat, self.params)  # they are views of it now
        mine = self.flat.chunk(self.world)[dist.get_rank()]
        self.mine = nn.Parameter(mine.clone() if stage == 3 else mine)
        for p in self.params:  # gradients leave as they come
            p.register_post_accumulate_grad_hook(self.hook)
        if stage == 3:  # weights come before use, and go
            self.free()
            layer.register_forward_pre_hook(self.gather)
            layer.register_forward_hook(self.free)
            layer.register_full_backward_pre_hook(self.gather)

    def free(self, *_):
        self.flat.untyped_storage().resize_(0)  # its shape stays, its memory goes

    def gather(self, *_):
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        dist.all_gather_into_tensor(self.flat, self.mine.detach().clone())
        count(1, self.flat)

    def hook(self, _):
        if any(p.grad is None for p in self.params):
            return
        whole = torch.cat([p.grad.flatten() for p in self.params])
        whole = nn.functional.pad(whole / self.world, (0, len(self.flat) - len(whole)))
        part = torch.empty_like(self.mine)
        dist.reduce_scatter_tensor(part, whole)  # the mean gradient of my shard
        count(1, whole)
        self.mine.grad = part if self.mine.grad is None else self.mine.grad + part
        for p in self.params:
            p.grad = None
        if self.stage == 3:
            self.free()


# %% [markdown]
# Five steps of AdamW on two ranks, beside one process that sees all rows. (`machinery/build.py`
# calls PyTorch's `fully_shard`, which is stage 3; `tests/test_train.py` compares that one.)


# %%
# bytes of weights, gradients and moments that are here now; norm of the gradients here
def held(layers, optimizer):
    tensors = {*layers.parameters(), *optimizer.param_groups[0]["params"]}
    storages = [t.untyped_storage() for t in tensors]
    weights = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    gradients = [t.grad for t in tensors if t.grad is not None]
    states = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    sizes = [sum(t.nbytes for t in group) for group in (gradients, states)]
    return [weights, *sizes], nn.utils.get_total_norm(gradients).item()


# -> weights after five steps; of the last: bytes sent, and what was held before it
def train(rank, world, way, accum=1):
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(31, 31), nn.Tanh()) for _ in range(4)))
    units = [Unit(layer, way) for layer in layers] if way in (2, 3) else []
    params = [unit.mine for unit in units] or [*layers.parameters()]
    AdamW = torch.optim.AdamW
    optimizer = ShardedOptimizer(params, AdamW, lr=0.01) if way == 1 else AdamW(params, lr=0.01)
    for rows in torch.randn(5, 8, 2, 31):
        SENT[0] = 0
        for part in rows.chunk(world)[rank].chunk(accum):
            ((layers(part[:, 0]) - part[:, 1]).square().mean() / accum).backward()
        here = held(layers, getattr(optimizer, "local", optimizer))
        for p in params if way in (0, 1) else ():  # average, in stage 1 on the owner alone
            dist.all_reduce(p.grad) if way == 0 else dist.reduce(p.grad, optimizer.owner[p])
            p.grad /= world
            count(2 - way, p.grad)
        optimizer.step()
        optimizer.zero_grad()
        [unit.gather() for unit in units if way == 2]
    sent = SENT[0]  # to gather for the comparison is not counted
    [unit.gather() for unit in units]
    return nn.utils.parameters_to_vector(layers.parameters()).detach(), sent, here


def compare(rank, world):
    out = {(way, k): train(rank, world, way, k) for way in range(4) for k in (1, 2)}
    return out, train(0, 1, "one process")


# %%
(first, (alone, _, (_, norm))), (second, _) = lesson.ranks(2, compare, timeout_s=150)
rows = []
n = len(alone)
for way in range(4):
    ends = torch.stack([rank[way, k][0] for rank in (first, second) for k in (1, 2)])
    _, sent, (here, _) = first[way, 1]
    rows.append((way, (ends - alone).abs().max().item(), *here, sent, first[way, 2][1]))
columns = ["stage", "error", *columns[1:4], "sent", "sent, two parts"]
lesson.table(columns, rows, f"two ranks, {n:,} parameters: bytes held, and sent in a step")
lesson.holds(max(row[1] for row in rows) < 1e-4, "all stages equal one process, to 1e-4")
memory = all([*row[2:5]] == per_rank(row[0], n, 2) for row in rows)
lesson.holds(memory, "the bytes that a rank holds are those of the arithmetic, in all stages")
sent, twice = ([row[i] / (4 * n) for row in rows] for i in (5, 6))
lesson.holds(sent == [1, 1, 1, 1.5], "stages 0, 1 and 2 send 2 (N - 1) / N P; stage 3 sends 3")
lesson.holds(twice == [1, 1, 1.5, 3], "two micro-batches: stage 3 sends all of it twice")

# %% [markdown]
# ## A 70B model on 512 GPUs
# ZeRO shards along the ranks of data parallelism (DP). The other ways cut something else:
#
# - tensor (TP, lesson 29) cuts channels and heads, and sends activations, 4 times a layer;
# - sequence (SP, lesson 29) cuts positions between the matrices, for the same bytes as TP;
# - context (CP, lesson 20) cuts positions, and sends keys and values, once per attention;
# - pipeline (PP, lesson 30) cuts layers, and sends activations, between stages;
# - expert (EP, lesson 29) cuts experts, and sends tokens, 4 times a layer.
#
# They can be combined. And there is a fourth thing in memory, which no stage of ZeRO shards: what
# the forward pass keeps for the backward pass, the *activations*. Korthikanti et al. (2022,
# "Reducing Activation Recomputation in Large Transformer Models") count 34 bytes per token, channel
# and layer in bf16; if each layer's forward pass is done again during the backward pass, only its
# input is kept: 2 bytes. TP with SP divides both. A stage of a pipeline has 1 / PP of the layers
# and, under 1F1B, PP micro-batches on the way: the same in the end.

# %%
LAYERS = 80
WIDTH = 8192
TOKENS = 4096  # one row on each GPU
rows = []
cases = "1100 8100 8101 8110 8410 1130 1131 8130"
for tp, pp, stage, again in (map(int, case) for case in cases.split()):
    states = sum(per_rank(stage, 70e9 / (tp * pp), 512 // (tp * pp), (2, 2, 12))) / 1e9
    kept = (2 if again else 34) * LAYERS * WIDTH * TOKENS / tp / 1e9
    name = f"TP {tp}, PP {pp}, ZeRO-{stage}" + ", recompute" * again
    rows.append((name, states, kept, "yes" if states + kept < 80 else "no"))
columns = ["DP: the other GPUs", "states, GB", "activations, GB", "fits 80 GB"]
lesson.table(columns, rows, "70B on 512 GPUs, bf16 weights: what one GPU holds")
fits = [row[3] for row in rows] == ["no"] * 3 + ["yes"] * 2 + ["no"] + ["yes"] * 2
lesson.arithmetic(fits, "ZeRO-3 alone: 2 GB of states, and one row's activations do not fit")

# %%
fig = lesson.figure(8, 3.6)
ax = fig.subplots()
names, states, kept, _ = zip(*rows)
ax.barh(names, states, color="steelblue", label="weights, gradients, optimizer")
ax.barh(names, kept, left=states, color="orange", label="activations")
ax.axvline(80, color="crimson", label="80 GB"), ax.invert_yaxis(), ax.legend()
ax.set(xlim=(0, 200), xlabel="GB on each of 512 GPUs, 70B (the first bar goes on to 1,211)")
lesson.save(fig, "42_zero")

# %% [markdown]
# ## Trap
# A rank that clips gradients by the norm of what *it* holds uses a different factor from its
# neighbour's, and no error is raised.

# %%
local = [rank[2, 1][2][1] for rank in (first, second)]
together = max(local) < 0.9 * norm and abs(sum(x * x for x in local) / norm**2 - 1) < 1e-5
lesson.holds(together, "only the squared norms of all shards add up to that of the gradient")

# %% [markdown]
# The last column of the second table holds another trap: stages 2 and 3 have no room for whole
# gradients, so they exchange those of every micro-batch. Accumulation saves DDP traffic, not them.
#
# ## Exercise
# `exercises/ex42.py`: who updates which parameter? `python course/check.py 42`
