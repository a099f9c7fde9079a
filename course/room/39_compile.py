# %% [markdown]
# # 39. Compile: what fusing takes off
#
# **Afterwards** you can say, before you compile a few lines, whether that will make them faster.
#
# **Question.** A line such as `x * 1.5` hardly computes. What does its time consist of, and what
# of that do fused lines and smaller numbers save?
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "Anotações da Semana 6" (an ELU with and
# without torch.compile), "GPT-OSS-120B & GPT-OSS-20B Model Card" (4 bits and a scale), "Tabela 7.1"
# (the FP8 row); *NfNN*, "1.1.6 Capacidade de fusão de kernel"; *Armazenamento*, "Checkpoints: o que
# salvar e como salvar com segurança" (the gradient scaler). Core file: `model.py`, `head_logits`.
# Before: lesson 8. Next: lesson 21. Takes 20 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import logging
import resource
import time
import timeit

import torch
from torch.utils._python_dispatch import TorchDispatchMode

torch.set_num_threads(1)
torch.manual_seed(0)
logging.getLogger("torch").setLevel(logging.ERROR)  # the recompilations below are on purpose
lesson.begin(39, "compile")

# %% [markdown]
# ## The four costs of a line
# Every line of ordinary (*eager*) code is a **call**: Python asks torch, torch picks a loop for the
# dtype, and the loop runs. It reads its arguments from **memory** and writes its result there. The
# result needs a place: a large one gets **new pages** from the operating system, which fills them
# with zeros first. And in between there is the **arithmetic**. The last column below says which of
# the four dominates a row.


# %%
def ns(f, *args) -> float:
    """Nanoseconds of CPU time for each number of the first argument, the best of eight tries."""
    n = args[0].numel()
    calls = max(1, 50_000 // n)
    timer = time.process_time_ns
    return min(timeit.repeat(lambda: f(*args), timer=timer, number=calls, repeat=8)) / calls / n


faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt  # pages that were fetched
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
lesson.timed(each[3] > each[1], "a tanh costs more than a multiplication")
lesson.holds(pages[5] > 10 + pages[4], "64 MB of results are new pages, unless memory is given")

# %% [markdown]
# ## What fusing takes off
# `torch.compile` writes one loop for all lines: each number is read once, goes through every
# operation in a register, and is written once. That leaves one call, one pass over memory, one
# result. The arithmetic stays. So fusing a chain of k operations should make it k times faster if
# they are cheap and gain little if they are dear, **though it saves the same bytes in both cases**.


# %%
class Traffic(TorchDispatchMode):  # counts the bytes that operators read and write
    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += sum(t.nbytes for t in (*args, out) if isinstance(t, torch.Tensor))
        return out


def chain(operation, k: int):
    def f(x):
        for _ in range(k):
            x = operation(x)
        return x

    return f


elu = lambda x: torch.where(x > 0, x, torch.exp(x) - 1)
try:  # it needs a C++ compiler and Python's headers
    torch.compile(triple, dynamic=False)(x)
    compiles = True
except Exception as error:
    compiles = False
    print(f"torch.compile does not work here ({type(error).__name__}): no fused times")
LENGTHS = (1, 3, 8)
TITLE = "fusing makes cheap operations free, and dear ones no cheaper"
operations = ("x * 1.5", triple), ("tanh", torch.tanh)
work = [(f"{k} of {name}", chain(f, k), x) for name, f in operations for k in LENGTHS]
work += [("1 of x * 1.5, small", triple, small), ("8 of sigmoid", chain(torch.sigmoid, 8), x)]
rows = []
eager = {}
fused = {}
for name, f, argument in [*work, ("an ELU", elu, x)]:
    with Traffic() as traffic:
        expected = f(argument)
    eager[name] = ns(f, argument)
    if compiles:
        torch._dynamo.reset()
        g = torch.compile(f, dynamic=False, fullgraph=True)
        assert torch.allclose(g(argument), expected, atol=1e-4), name
        fused[name] = ns(g, argument)
    gain = eager[name] / fused[name] if compiles else None
    less = traffic.bytes / (2 * argument.nbytes)
    rows.append((name, traffic.bytes / 1e6, eager[name], fused.get(name), less, gain))
columns = ["work", "MB eager", "ns eager", "ns fused", "bytes saved", "time saved"]
lesson.table(columns, rows, "times for one of a million numbers (small: a thousand); saved: ratio")
less, gain = ({row[0]: row[i] for row in rows} for i in (4, 5))
lesson.holds(less["8 of x * 1.5"] == less["8 of tanh"] == 8, "fused, both save 7/8 of the bytes")
lesson.holds(less["an ELU"] == 34 / 8, "an eager ELU moves 34 bytes for each number, fused 8")
if compiles:
    cheap, dear = gain["8 of x * 1.5"], gain["8 of tanh"]
    lesson.timed(cheap > 1.5 * dear, "for the same bytes multiplications gain more than tanh does")
    flat = fused["8 of x * 1.5"] < 3 * fused["1 of x * 1.5"]
    lesson.timed(flat, "fused, 8 multiplications cost little more than 1")
    lesson.timed(fused["8 of tanh"] > 4 * fused["1 of tanh"], "fused, 8 tanh cost as 8 tanh do")
    lesson.timed(gain["1 of x * 1.5, small"] < 1, "on 1,000 numbers, one compiled line is slower")
    lesson.timed(gain["an ELU"] > 1.5, "an ELU is at least 1.5 times as fast")

# %% [markdown]
# The bytes predict neither the sigmoid nor the ELU. On the machine that printed this course's pages
# (AVX-512, torch 2.13) the fused sigmoid is *slower*: a compiler must write the arithmetic too, and
# torch's own sigmoid loop is the better one. The ELU gains 10 to 19 times where bytes say 4. Look
# at its lines one by one, on the same numbers in random order and sorted: as many bytes, as much
# arithmetic.

# %%
rows = []
for order, t in (("random", x), ("sorted", x.sort().values)):
    mask = t > 0
    e = torch.exp(t)
    lines = [(torch.gt, t, 0), (torch.exp, t), (torch.sub, e, 1), (torch.where, mask, t, e)]
    parts = [ns(*line) for line in lines]
    rows.append((order, *parts, sum(parts), ns(elu, t), ns(g, t) if compiles else None))
columns = ["order", "x > 0", "exp", "- 1", "where", "sum", "ELU", "fused"]
lesson.table(columns, rows, "an ELU, ns per number")
add_up = all(0.5 < row[5] / row[6] < 1.5 for row in rows)
lesson.timed(add_up, "the times of the ELU's four lines add up to that of the ELU")

# %% [markdown]
# Where one order is much slower, the loop of `where` decides for each number by a jump. A processor
# guesses jumps; of random signs it gets half wrong. The fused loop computes both sides and picks
# without a jump. **So fusing saves calls, passes over memory and pages; what a compiler gains or
# loses beyond these is the quality of its loop, and only a measurement tells.**
# (`head_logits` in model.py squashes every logit by a tanh, and writes it as a sigmoid, since that
# takes fewer instructions: arithmetic is what fusing leaves. It also leaves what backward needs:
# `F.relu(x).square()` keeps x beside its result, fused or not, 33.6 MB of `tiny`'s 193.6. So
# `ReluSquared` computes its slope from the result, which the next matmul keeps anyway.)

# %% [markdown]
# ## What smaller numbers take off
# They halve the bytes again and again: 32 bits, 16, 8, 4. But there are only 2^bits different ones.
# A float of 8 bits (e4m3: 4 for the exponent, 3 behind the point) ends at 448; one of 4 bits (e2m1)
# has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; int8 has 127 equal steps. A *scale* brings the
# largest value of a tensor, or of 32 neighbours, to the end of the range. Here one value in 1,000
# is 100 times larger than usual, as in the activations of a language model.

# %%
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FORMATS = {  # name -> largest value, rounding
    "fp8 e4m3": (448.0, lambda x: x.to(torch.float8_e4m3fn).float()),
    "int8": (127.0, torch.round),
    "fp4 e2m1": (6.0, lambda x: x.sign() * E2M1[(x.abs()[..., None] - E2M1).abs().argmin(-1)]),
}


def cast(x, name: str, block: int):
    largest, rounding = FORMATS[name]
    parts = x.reshape(-1, block)
    scale = parts.abs().amax(1, keepdim=True) / largest
    return (rounding(parts / scale) * scale).view_as(x)


w = torch.randn(512, 512)
a = torch.where(torch.rand(512, 512) < 1e-3, 100.0, 1.0) * torch.randn(512, 512)
usual = a.abs().amax(1) < 10  # rows without an outlier: what the tensor's scale does to them
exact = (a.double() @ w.double())[usual]


loss = {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    loss[str(dtype).removeprefix("torch.")] = a.to(dtype).float() @ w.to(dtype).float()
for name in FORMATS:
    for block, scales in ((32, "per 32"), (a.numel(), "per tensor")):
        loss[f"{name}, {scales}"] = cast(a, name, block) @ cast(w, name, block)
loss = {name: ((y[usual] - exact).norm() / exact.norm()).item() for name, y in loss.items()}
lesson.table(["format", "error of a @ w"], list(loss.items()), "a product of 512 x 512 matrices")
order = [loss[n] for n in ("float32", "bfloat16", "fp8 e4m3, per 32", "fp8 e4m3, per tensor")]
lesson.holds(order == sorted(order), "fp32 < bf16 < fp8 with a scale for 32 < fp8 with one for all")
equal = [loss[f"{name}, per tensor"] / loss[f"{name}, per 32"] for name in FORMATS]
lesson.holds(equal[0] < 2 and min(equal[1:]) > 4, "one scale is enough for fp8, not for int8, fp4")
g = torch.tensor(1e-8)
kept = g.half().float(), (g * 2**14).half().float() / 2**14, g.bfloat16().float()
lesson.holds(kept[0] == 0 and abs(kept[1] / g - 1) < 1e-3, "fp16 loses 1e-8, but not 2^14 times it")
lesson.holds(abs(kept[2] / g - 1) < 2**-8, "bf16 keeps 1e-8, to 1 in 256")

# %% [markdown]
# A float brings a scale of its own, its exponent, so an outlier costs fp8 little. But exponents are
# limited, and a gradient of 1e-8 is lost in fp16 unless the loss was multiplied by 2^14 before and
# the gradient is divided after (a *gradient scaler*). bf16 has the exponents of fp32: no scaler.

# %%
fig = lesson.figure(6, 3.4)
ax = fig.subplots()
for way, times in (("eager", eager), ("fused", fused or eager)):
    for name, color in (("x * 1.5", "tab:blue"), ("tanh", "crimson")):
        y = [times[f"{k} of {name}"] for k in LENGTHS]
        ax.loglog(LENGTHS, y, "o--" if way == "eager" else "o-", color=color)
        up = {"eager": "bottom", "fused": "top"}[way]
        ax.text(8.6, y[-1], f"{name}, {way}", color=color, va=up)
ax.set(xlim=(0.9, 24), xlabel="operations in a chain", ylabel="ns a number", title=TITLE)
ax.set_xticks(LENGTHS, [str(k) for k in LENGTHS]), ax.minorticks_off()
lesson.save(fig, "39_compile")

# %% [markdown]
# ## Trap
# Compiled code is made for a shape. With `dynamic=False` each new shape compiles again, and after
# eight torch gives up: the rest runs eager, and all you see is a warning in the log. (It also ends
# a loop where Python must see a number: nothing is fused across an `.item()`.)

# %%
made = []
for dynamic in (False, True):
    torch._dynamo.reset()
    backend = lambda graph, inputs, dynamic=dynamic: made.append(dynamic) or graph.forward
    f = torch.compile(triple, backend=backend, dynamic=dynamic)
    for n in [*range(2, 14), *range(2, 14)]:
        f(torch.randn(n))
lesson.holds(made.count(False) == 8, "12 shapes, 24 calls: 8 compilations, then no more")
lesson.holds(made.count(True) == 1, "dynamic=True: one compilation for all 12 shapes")

# %% [markdown]
# ## Exercise
# `exercises/ex39.py`: eight bits and a scale for each block. `python course/check.py 39`
