# %% [markdown]
# # 21. MFU: what was counted?
#
# **Afterwards** you can count a model's FLOPs by hand, and find out what a published MFU means.
#
# **Question.** The same run is called 32% and 41% of what the hardware can do: what was counted?
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "MFU" (equation 3.2), "Iniciando um
# Pré-Treino", "Tabela 7.1", "Tabela 7.2", "Nemotron-4 340B Technical Report (Aug, 2024)" (three
# speeds), "Propondo um novo pré-treino", "Comparação de Performance", "Finalização do Pré-treino";
# *nanobot pre-train*, "MFU(模型FLOPs利用率)监控". Core file: `flops.py`. Before: lesson 7. Next:
# lesson 22. Takes 4 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import math
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from config import PRESETS, GPTConfig
from flops import mfu, peak_flops
from model import GPT
from published import TABLE_7_1, TABLE_7_2

H100 = peak_flops("NVIDIA H100 80GB HBM3")
DATASHEET = 989.4e12
B200 = 2250e12
FP8 = 1979e12  # of an H100, dense; sparse bf16 has the same figure
lesson.begin(21, "MFU")

# %% [markdown]
# ## Count by hand
# **MFU**, model FLOPs utilization, is the arithmetic that a model needs per second, divided by the
# most that the device can do (its **peak**). You find the denominator on the vendor's datasheet.
# The numerator is tokens per second, which a clock tells you, times FLOPs per token, which somebody
# has to count:
#
# - each weight of a matmul costs a token 2 FLOPs forward (multiply, add) and 4 backward: 6;
# - a table that you only look up costs nothing;
# - scores have no weights: each query meets T keys, twice (for the scores, then for the values).
#   With backward that is 12 x heads x head_dim x T per layer.
#
# **This is where two conventions part:** `full` counts all T keys (PaLM), `causal` the half of them
# that a query may see (Megatron).


# %%
def flops_by_hand(c: GPTConfig, causal: bool = False) -> dict[str, int]:
    """Part -> FLOPs per token, forward and backward."""
    heads = c.n_head * c.head_dim
    groups = c.n_kv_head * c.head_dim
    matrices = 3 if c.mlp == "swiglu" else 2
    return {
        "q, k, v, out": 6 * c.n_layer * c.n_embd * (2 * heads + 2 * groups),
        "MLP": 6 * c.n_layer * matrices * c.n_embd * c.mlp_hidden,
        "head": 6 * c.n_embd * c.vocab_size,
        "scores": 12 * c.n_layer * heads * c.seq_len // (2 if causal else 1),
    }


def in_both(c: GPTConfig) -> list[int]:
    """FLOPs per token, full and causal."""
    return [sum(flops_by_hand(c, causal).values()) for causal in (False, True)]


tiny = GPTConfig(128, 256, 2, 4, 2, 16, 64, mlp_hidden=192)
models = {name: PRESETS[name].model for name in ("d12", "d20", "d24", "smol-135m", "biatron-345m")}
models["nanochat d20"] = replace(models["d20"], vocab_size=65_536)
rows = []
cost = {}
counted = {}
for name, config in models.items():
    config = replace(config, extras=())
    with torch.device("meta"):  # no weight takes memory
        model = GPT(config)
    cost[name] = in_both(config)
    counted[name] = [model.flops_per_token(causal=causal) for causal in (False, True)]
    share = 100 * flops_by_hand(config)["scores"] / cost[name][0]
    rows.append((name, sum(p.numel() for p in model.parameters()), *cost[name], share))
columns = ["model", "parameters", "full", "causal", "scores % of full"]
lesson.table(columns, rows, "FLOPs per token")
lesson.holds(cost == counted, "for six models model.py counts the FLOPs that were counted by hand")
weights = rows[-1][1]  # of nanochat's d20

model = GPT(tiny)
idx = torch.randint(256, (3, 128))
with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
    model(idx, idx).backward()
by_hand = idx.numel() * in_both(tiny)[0]
exact = counter.get_total_flops() == by_hand
lesson.holds(exact, f"torch's own counter finds the {by_hand:,} FLOPs of `full`, exactly")

# %% [markdown]
# ## Eight published runs
# One of them was a disappointment: on *one* H100, nanochat's code printed 17,535 tokens/s, where
# its author had 134,692 per GPU on eight. But how can the same line say 49.5% MFU? A step had eight
# micro-batches (lesson 7's parts of a batch), and the speed counted the tokens of one: 65,536
# tokens / 3.73735 s.

# %%
shape = dict(n_layer=96, n_embd=18_432, mlp_hidden=73_728, n_head=96, n_kv_head=8, head_dim=192)
cost["nemotron"] = in_both(GPTConfig(4096, 256_000, mlp="relu2", **shape))
eight = 8 * 65_536 / 3.73735
lesson.arithmetic(round(eight / 8) == 17_535, f"17,535 tok/s were {eight:,.0f}")
runs = [  # run, model, tokens/s, GPUs, MFU % as published
    ("biatron-345m, Megatron", "biatron-345m", 2_097_152 / 18.703, 1, 32.0),
    ("nanochat d20, its author", "nanochat d20", 1_075_000, 8, 47.4),
    ("nanochat d20, one GPU", "nanochat d20", eight, 1, 49.5),
    ("SmolLM2-135M, Megatron", "smol-135m", 50.3e9 / (2.73 * 86_400), 1, 21.7),
]
steps = (1536, 10.3, 768, 42.4), (3072, 10.3, 1536, 42.3), (6144, 8.0, 2304, 41.0)
for gpus, seconds, rows_a_step, said in steps:
    runs.append((f"Nemotron-4 340B, {gpus}", "nemotron", rows_a_step * 4096 / seconds, gpus, said))
rows = [
    (run, speed, gpus, *(100 * mfu(speed, flops, H100, gpus) for flops in cost[model]), said)
    for run, model, speed, gpus, said in runs
]
speed = 57 * 2_097_152 / 2400  # 6 N: this source counts no scores at all
rows.append(("Transformers, 120M (6 N)", speed, 1, None, 100 * mfu(speed, 720e6, DATASHEET), 3.6))
columns = ["run", "tokens/s", "GPUs", "full %", "causal %", "published %"]
lesson.table(columns, rows, "MFU in both conventions, and as published")
full, causal, said = ([row[i] for row in rows[:7]] for i in (3, 4, 5))
near = lambda a, b: abs(a - b) < 0.3
megatron = [near(causal[i], said[i]) and not near(full[i], said[i]) for i in (0, 3)]
others = [near(full[i], said[i]) and not near(causal[i], said[i]) for i in (1, 2, 4, 5, 6)]
lesson.holds(all(megatron), "what Megatron published for two models is causal, not full")
lesson.holds(all(others), "two runs of nanochat, three of Nemotron-4: full, not causal")
budget = 21_400 * 524_288
each = round(budget / weights, 2)
lesson.arithmetic(each == 20, "nanochat: 21,400 steps of 524,288 tokens are 20 for each weight,")
flops_in_all = f"{budget * cost['nanochat d20'][0]:.4g}"
lesson.arithmetic(flops_in_all == "3.918e+19", "3.918e19 FLOPs, as its log says;")
first = round(math.log(65_536), 4)
lesson.arithmetic(first == 11.0904, "and its first loss, 11.0904, is ln 65,536: it knows nothing")

# %%
fig = lesson.figure(7, 2.8)
ax = fig.subplots()
for y, (_, _, _, full, causal, said) in enumerate(rows[:4]):
    ax.plot([causal, full], [y, y], color="silver", lw=3, zorder=0)
    ax.scatter([causal], [y], color="tab:blue", s=60, label=None if y else "causal")
    ax.scatter([full], [y], color="tab:orange", s=60, label=None if y else "full")
    ax.scatter([said], [y], s=200, fc="none", ec="k", label=None if y else "published")
ax.set_yticks(range(4), [row[0] for row in rows[:4]])
ax.set(xlabel="MFU, % of an H100's 989 TFLOP/s", ylim=(3.5, -0.5), xlim=(15, 55))
ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
lesson.save(fig, "21_mfu")

# %% [markdown]
# ## Trap
# Search a table of peaks by substring, and you take an "RTX A4000" for an A40 and an "L40" for an
# L4. And if the table says infinity for an unknown GPU, you print 0% MFU as if you had measured it.

# %%
PEAKS = {"A40": 149.7e12, "L40S": 362e12, "L4": 121e12, "H800": 756e12}
TRUE = {"RTX A4000": None, "L40": 181e12, "H800": 989e12, "GTX 1080": None}


def by_substring(name: str) -> float:
    return next((peak for key, peak in PEAKS.items() if key in name), math.inf)


for name in TRUE:
    print(f"{name}: by substring {by_substring(name):.3g} FLOP/s, in flops.py {peak_flops(name)}")
right = TRUE == {name: peak_flops(f"NVIDIA {name}") for name in TRUE}
lesson.holds(right, "flops.py knows two of these cards, and returns None for the others")
shown = mfu(1e5, 1e9, by_substring("GTX 1080")), mfu(1e5, 1e9, peak_flops("GTX 1080"))
lesson.holds(shown == (0, None), "an unknown card has MFU 0 by infinity, and None in flops.py")

# %% [markdown]
# ## Exercise
# `exercises/ex21.py`: find the wrong field of a log line. `python course/check.py 21`

# %% [markdown]
# ## Appendix: two tables, audited
# A row states its speed, its FLOP/s and its MFU: three numbers with two unknowns, so they can
# disagree. What follows is arithmetic on what the source prints.

# %%
audit = []
for _, params, gpu, gpus, tflops, info, speed, said in TABLE_7_1:
    peak = B200 if gpu == "B200" else FP8 if "FP8" in info else DATASHEET
    run = f"{params} {gpus} x {gpu} {info[:4]}"
    audit.append((run, said, 100 * tflops * 1e12 / peak, tflops * 1e6 * gpus / speed))
lesson.table(["run", "published %", "MFU %", "MFLOPs/token"], audit, "table 7.1")
off = [abs(said - computed) > 0.1 for _, said, computed, _ in audit if said]
lesson.arithmetic(off.count(True) == 2, "by its TFLOP/s, two MFUs of table 7.1 are off by over 0.1")
small = [round(row[3]) for row in audit if row[0].startswith("89M") and "FP8" not in row[0]]
lesson.arithmetic(small == [788, 857, 856, 785], "the rows called 89M are not one model")
ratio = []
for params, _, _, speed, tflops, said, days in TABLE_7_2:
    assert abs(tflops * 1e14 / B200 - said) < 0.01 and abs(1e11 / speed / 86_400 - days) < 0.01
    ratio.append(tflops * 1e12 * 8 / speed / (6 * params * 1e9))
between = 0.95 < min(ratio) and max(ratio[:-1]) < 1.19 and round(ratio[-1], 2) == 1.93
lesson.arithmetic(between, "table 7.2: 0.96 to 1.18 times 6 N, but 1.93 times for 58B")
