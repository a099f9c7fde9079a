# %% [markdown]
# # 16. Compile: what fusion buys, and what precision buys
#
# **Question.** Why are ten elementwise lines slower than a matmul? And what do 16 and 8 bits lose?
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "Anotações da Semana 6" (an ELU with and
# without torch.compile), "GPT-OSS-120B & GPT-OSS-20B Model Card" (4 bits and a scale), "Tabela 7.1"
# (the FP8 row); *NfNN*, "1.1.6 Capacidade de fusão de kernel"; *Armazenamento*, "Checkpoints: o que
# salvar e como salvar com segurança" (the gradient scaler). Core files: `model.py`, `flops.py`.
# Before: lesson 14. Next: lesson 17. Takes 25 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import logging
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from config import GPTConfig
from flops import measure_matmul
from model import MLP

torch.set_num_threads(1)
logging.getLogger("torch").setLevel(logging.ERROR)  # the breaks below are on purpose
lesson.begin(16, "compile")

# %% [markdown]
# ## Bytes, not FLOPs
# Each line of eager code reads its arguments from memory and writes its result back. `Traffic`
# counts those bytes. What they cost follows from the speed of a copy; what the arithmetic costs,
# from the speed of a matmul: a computation takes the longer of the two (the *roofline*).


# %%
class Traffic(TorchDispatchMode):
    """Counts the operators that run, and the bytes that they read and write."""

    calls = bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.calls += 1
            self.bytes += sum(t.nbytes for t in (*args, out) if isinstance(t, torch.Tensor))
        return out


def ms(f, *args) -> float:
    """The best of seven."""
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        f(*args)
        best = min(best, time.perf_counter() - start)
    return 1000 * best


def elu(x):
    return torch.where(x > 0, x, torch.exp(x) - 1)


def chain(k: int):
    """k elementwise operations."""

    def f(x):
        for i in range(k):
            x = torch.sigmoid(x) if i % 2 else x * 1.5
        return x

    return f


torch.manual_seed(0)
x, a = torch.randn(4_000_000), torch.randn(768, 768)
bandwidth = 2 * x.nbytes / (ms(torch.empty_like(x).copy_, x) / 1000)  # bytes/s, read and written
peak = measure_matmul("cpu", torch.float32, seconds=0.5)
print(f"a copy moves {bandwidth / 1e9:.1f} GB/s, a matmul does {peak / 1e9:.0f} GFLOP/s")
work = {"matmul 768": (torch.mm, (a, a), 2 * 768**3), "10 lines": (chain(10), (x,), 10 * len(x))}
rows = []
for name, (f, args, flops) in work.items():
    with Traffic() as traffic:
        f(*args)
    limits = 1000 * flops / peak, 1000 * traffic.bytes / bandwidth
    rows.append((name, traffic.calls, flops / 1e6, traffic.bytes / 1e6, *limits, ms(f, *args)))
columns = ["work", "calls", "MFLOP", "MB", "ms by FLOPs", "ms by bytes", "ms"]
lesson.table(columns, rows, "eager")
lesson.holds(rows[0][2] > 20 * rows[1][2], "the matmul does 20 times the arithmetic")
lesson.holds(rows[1][3] > 40 * rows[0][3], "the ten lines move 40 times the bytes")
lesson.holds(rows[1][5] > rows[1][4] and rows[0][4] > rows[0][5], "so each meets another limit")

# %% [markdown]
# So the bytes are what to save, and a result that is never stored costs none.
#
# ## Fusion
# `torch.compile` writes one loop for the chain: each number is read once and written once, whatever
# happens in between. The bytes are then those of the first argument and the last result.

# %%
work = {"elu": elu, "softcap": lambda x: 15 * torch.tanh(x / 15)} | {
    f"chain {k}": chain(k) for k in (1, 3, 6)
}
try:  # it needs a C++ compiler and Python's headers
    torch.compile(elu, dynamic=False)(x)
    compiles = True
except Exception as error:
    compiles = False
    print(f"torch.compile does not work here: {type(error).__name__}")
rows, speedup, times = [], {}, {}
for name, f in work.items():
    with Traffic() as traffic:
        expected = f(x)
    row = name, traffic.calls, traffic.bytes / 1e6, 2 * x.nbytes / 1e6, ms(f, x)
    if compiles:
        fused = torch.compile(f, dynamic=False, fullgraph=True)
        assert torch.allclose(fused(x), expected, atol=1e-5)
        row += (ms(fused, x),)
        speedup[name] = row[-2] / row[-1]
    times[name] = row[4:]
    rows.append((*row, speedup[name]) if compiles else (*row, None, None))
columns = ["work", "calls", "MB eager", "MB fused", "ms eager", "ms fused", "ratio"]
lesson.table(columns, rows)
less = [eager / fused for name, _, eager, fused, *_ in rows if name != "chain 1"]
lesson.holds(min(less) >= 2, "fused, each moves at most half the bytes, with the same results")
lesson.holds(rows[0][2] == 34 * 4, "an eager ELU moves 34 bytes for each number, fused 8")
if compiles:
    lesson.holds(speedup["elu"] > 1.5, "and the ELU is at least 1.5 times as fast")
else:
    print("so the fused times are left out")

# %% [markdown]
# A graph ends where Python must see a number: `.item()` in the middle makes two graphs of one.

# %%
mlp = MLP(GPTConfig(n_embd=64, mlp_hidden=256))


def with_item(x):
    h = mlp.up(x)
    if h.max().item() > 1e9:
        h = h * 0
    return mlp.down(torch.relu(h).square())


whole, broken = (torch._dynamo.explain(f)(torch.randn(4, 64)) for f in (mlp, with_item))
graphs = [(e.graph_count, e.graph_break_count) for e in (whole, broken)]
lesson.holds(graphs == [(1, 0), (2, 1)], "model.MLP is one graph, with .item() it is two")

# %% [markdown]
# ## Fewer bytes each
# The other way to move less is smaller numbers. A float of 8 bits (e4m3) ends at 448, one of 4 bits
# (e2m1) has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6, and int8 has 127 equal steps. A *scale*
# brings the largest value of a tensor, or of 32 neighbours, to the end of the range. Here one value
# in 1,000 is 100 times larger than usual, as in the activations of a language model.

# %%
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def to_e2m1(x):
    nearest = (x.abs()[..., None] - E2M1).abs().argmin(-1)
    return x.sign() * E2M1[nearest]


FORMATS = {  # name -> largest value, rounding
    "fp8 e4m3": (448.0, lambda x: x.to(torch.float8_e4m3fn).float()),
    "int8": (127.0, torch.round),
    "fp4 e2m1": (6.0, to_e2m1),
}


def cast(x, name: str, block: int):
    """Round x in blocks of neighbours, each with a scale of its own."""
    largest, rounding = FORMATS[name]
    parts = x.reshape(-1, block)
    scale = parts.abs().amax(1, keepdim=True) / largest
    return (rounding(parts / scale) * scale).view_as(x)


w = torch.randn(512, 512)
x = torch.where(torch.rand(512, 512) < 1e-3, 100.0, 1.0) * torch.randn(512, 512)
usual = x.abs().amax(1) < 10  # rows without an outlier: what the tensor's scale does to them
exact = (x.double() @ w.double())[usual]


def error(x, w) -> float:
    """Of the product, relative; fp32 sums."""
    return ((x.float() @ w.float())[usual] - exact).norm().item() / exact.norm().item()


rows, loss = [], {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    info, name = torch.finfo(dtype), str(dtype).removeprefix("torch.")
    loss[name] = error(x.to(dtype), w.to(dtype))
    rows.append((name, info.bits, f"{info.eps:.2g}", f"{info.max:.2g}", loss[name]))
for name, (largest, _) in FORMATS.items():
    step = {"fp8 e4m3": "0.12", "int8": "-", "fp4 e2m1": "0.5"}[name]
    for block, scales in ((32, "per 32"), (x.numel(), "per tensor")):
        loss[f"{name}, {scales}"] = error(cast(x, name, block), cast(w, name, block))
        bits = 4 if "fp4" in name else 8
        rows.append((f"{name}, {scales}", bits, step, f"{largest:.3g}", [*loss.values()][-1]))
lesson.table(["format", "bits", "step at 1", "largest", "error of x @ w"], rows)
fp8 = [loss["fp8 e4m3, per 32"], loss["fp8 e4m3, per tensor"]]
order = [loss["float32"], loss["bfloat16"], *fp8]
lesson.holds(order == sorted(order), "fp32 < bf16 < fp8 with a scale for 32 < fp8 with one for all")
equal = [loss[f"{name}, per tensor"] / loss[f"{name}, per 32"] for name in FORMATS]
lesson.holds(equal[0] < 2 and min(equal[1:]) > 4, "one scale is enough for fp8, not for int8, fp4")

# %% [markdown]
# A float carries a scale of its own, its exponent, so an outlier costs fp8 little. But exponents
# are limited: 1e-8 becomes 0 in fp16. Multiply the loss by 2^14 (a *gradient scaler*), and
# divide before the step. bf16 has the exponents of fp32 and needs none of this.

# %%
small = torch.tensor(1e-8)
in_fp16, scaled = small.half(), (small * 2**14).half()
lesson.holds(in_fp16 == 0 and abs(scaled.float() / 2**14 / small - 1) < 1e-3, "times 2^14 it stays")
lesson.holds(abs(small.bfloat16().float() / small - 1) < 2**-8, "bf16 keeps it as it is")

# %%
fig = lesson.figure(8, 3)
left, right = fig.subplots(1, 2)
lengths = [1, 3, 6]
series = list(zip(*(times[f"chain {k}"] for k in lengths)))
for name, y, color in zip(("eager", "fused"), series, ("crimson", "tab:blue")):
    left.plot(lengths, y, "o-", color=color, label=name)
left.set(xlabel="operations in the chain", ylabel="ms, 4M numbers", ylim=(0, None))
left.legend()
right.barh(list(loss), list(loss.values()), color=["silver"] * 3 + ["tab:blue", "crimson"] * 3)
right.set(xscale="log", xlim=(1e-7, 3), title="error of x @ w"), right.invert_yaxis()
lesson.save(fig, "16_compile")

# %% [markdown]
# ## Trap
# Compiled code is made for a shape. With `dynamic=False` each new shape compiles again, and after
# eight torch gives up: the rest runs eager, and all you see is a warning in the log.

# %%
compiled = []


def counting(graph, inputs):
    compiled.append(inputs)
    return graph.forward


torch._dynamo.reset()  # the limit is one for all that was compiled from the same lines
f = torch.compile(chain(2), backend=counting, dynamic=False)
for n in [*range(2, 14), *range(2, 14)]:
    f(torch.randn(n))
lesson.holds(len(compiled) == 8, "12 shapes, 24 calls: 8 compilations, then no more")
torch._dynamo.reset()
any_shape = torch.compile(chain(2), backend=counting, dynamic=True)
for n in range(2, 14):
    any_shape(torch.randn(n))
lesson.holds(len(compiled) == 9, "dynamic=True: one compilation for all of them")

# %% [markdown]
# ## Exercise
# `exercises/ex16.py`: eight bits and a scale for each block. `python course/check.py 16`
