# %% [markdown]
# # 17. MFU: every published number, recomputed
#
# **Question.** The same run is called 32% and 41% of what the hardware can do: what was counted?
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "MFU" (equation 3.2), "Iniciando um
# Pré-Treino", "Tabela 7.1", "Tabela 7.2", "Propondo um novo pré-treino", "Comparação de
# Performance", "Finalização do Pré-treino"; *nanobot pre-train*, "MFU(模型FLOPs利用率)监控". Core
# file: `flops.py`. Before: lesson 16. Next: lesson 19. Takes 5 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import math
from dataclasses import replace

import torch

from config import PRESETS, GPTConfig
from flops import mfu, peak_flops
from model import GPT
from published import TABLE_7_1, TABLE_7_2

H100, DATASHEET, B200 = peak_flops("NVIDIA H100 80GB HBM3"), 989.4e12, 2250e12
FP8 = 1979e12  # of an H100, dense; sparse bf16 has the same figure
lesson.begin(17, "MFU")

# %% [markdown]
# ## Count by hand
# A weight of a matmul costs a token 2 FLOPs forward (multiply, add) and 4 backward: 6. A table
# that is only looked up costs nothing. Attention has no weights: each query meets T keys, twice
# (scores, then values), 12 x heads x head_dim x T per layer with backward. **Here are the two
# conventions:** `full` counts all T keys (PaLM), `causal` the half that a query may see (Megatron).


# %%
def flops_by_hand(c: GPTConfig, causal: bool = False) -> dict[str, int]:
    """Part -> FLOPs per token, forward and backward."""
    heads, groups = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    matrices = 3 if c.mlp == "swiglu" else 2
    return {
        "q, k, v, out": 6 * c.n_layer * c.n_embd * (2 * heads + 2 * groups),
        "MLP": 6 * c.n_layer * matrices * c.n_embd * c.mlp_hidden,
        "head": 6 * c.n_embd * c.vocab_size,
        "scores": 12 * c.n_layer * heads * c.seq_len // (2 if causal else 1),
    }


models = {name: PRESETS[name].model for name in ("d12", "d20", "d24", "smol-135m", "biatron-345m")}
models["nanochat d20"] = replace(models["d20"], vocab_size=65_536)
golden = {  # parameters, FLOPs per token full and causal
    "d12": (135_266_304, 887_095_296, 773_849_088),
    "d20": (477_102_080, 3_240_099_840, 2_925_527_040),
    "d24": (780_140_544, 5_284_823_040, 4_831_838_208),
    "smol-135m": (134_479_872, 1_231_552_512, 1_019_215_872),
    "biatron-345m": (345_292_800, 3_581_706_240, 2_826_731_520),
    "nanochat d20": (560_988_160, 3_491_758_080, 3_177_185_280),
}
rows, cost = [], {}
for name, config in models.items():
    config = replace(config, extras=())
    with torch.device("meta"):  # no weight takes memory
        model = GPT(config)
    by_hand = [sum(flops_by_hand(config, causal).values()) for causal in (False, True)]
    counted = [model.flops_per_token(), model.flops_per_token(causal=True)]
    assert by_hand == counted, f"{name}: {by_hand} by hand, {counted} in model.py"
    share = 100 * flops_by_hand(config)["scores"] / by_hand[0]
    rows.append((name, sum(p.numel() for p in model.parameters()), *by_hand, share))
    cost[name] = tuple(by_hand)
columns = ["model", "parameters", "full", "causal", "scores % of full"]
lesson.table(columns, rows, "FLOPs per token")
lesson.holds({row[0]: row[1:4] for row in rows} == golden, "six models, to the last digit")

# %% [markdown]
# ## Five published runs
# One was disappointing: nanochat's code on *one* H100 printed 17,535 tokens/s, while its author had
# 134,692 per GPU on eight. But 49.5% MFU in the same line? Its step had eight micro-batches, and
# the speed was that of one: 65,536 tokens / 3.73735 s.

# %%
one, eight = 65_536 / 3.73735, 8 * 65_536 / 3.73735
lesson.holds((round(one), round(eight)) == (17_535, 140_283), "17,535 tok/s were 140,283")
runs = [  # run, model, tokens/s, GPUs, MFU % as published
    ("biatron-345m, Megatron", "biatron-345m", 2_097_152 / 18.703, 1, 32.0),
    ("nanochat d20, its author", "nanochat d20", 1_075_000, 8, 47.4),
    ("nanochat d20, one GPU", "nanochat d20", eight, 1, 49.5),
    ("SmolLM2-135M, Megatron", "smol-135m", 50.3e9 / (2.73 * 86_400), 1, 21.7),
]
rows = [
    (run, speed, gpus, *(100 * mfu(speed, flops, H100, gpus) for flops in cost[model]), said)
    for run, model, speed, gpus, said in runs
]
speed = 57 * 2_097_152 / 2400  # 6 N: this source counts no scores at all
share = 100 * mfu(speed, 6 * 120e6, DATASHEET)
rows.append(("Transformers, 120M (6 N, no scores)", speed, 1, None, share, 3.6))
lesson.table(["run", "tokens/s", "GPUs", "full %", "causal %", "published %"], rows)
found = [f"{full:.1f} {causal:.2f}" for _, _, _, full, causal, _ in rows[:4]]
golden = ["40.6 32.05", "47.4 43.17", "49.5 45.07", "26.6 21.98"]
lesson.holds(
    found == golden, "Megatron publishes causal (32.05, 21.98), nanochat full (47.4, 49.5)"
)
lesson.holds(f"{rows[4][4]:.2f} {speed:.2f}" == "3.62 49807.36", "120M: 3.62% at 49,807 tok/s")
lesson.holds(round(2_097_152 / 16.6581) == 125_894, "Megatron's line there: 125,894 tok/s")
lesson.holds(round(100e9 / speed / 86_400, 1) == 23.2, "100B tokens at that speed: 23.2 days")
total = 152_000 * 2_097_152  # an upper bound: some steps had 480 rows, as 3, 5, 6 GPUs need
lesson.holds(total == 318_767_104_000 and round(total / 2_854_434) == 111_674, "the long run")

# %% [markdown]
# ## Two tables, audited
# Speed, FLOP/s and MFU of one row are three numbers with two unknowns: they can disagree.

# %%
audit = []
for _, params, gpu, gpus, tflops, info, speed, said in TABLE_7_1:
    peak = B200 if gpu == "B200" else FP8 if "FP8" in info else DATASHEET
    run, per_token = f"{params} {gpus} x {gpu} {info[:4]}", tflops * 1e6 * gpus / speed
    audit.append((run, said, 100 * tflops * 1e12 / peak, per_token))
lesson.table(["row", "published %", "MFU %", "MFLOPs/token"], audit, "table 7.1")
computed = [round(row[2], 2) for row in audit]
lesson.holds(computed == [21.78, 21.52, 11.25, 18.52, 43.61, 44.9, 3.62, 12.57], "7.1 recomputed")
small = [round(row[3]) for row in audit if row[0].startswith("89M") and "FP8" not in row[0]]
lesson.holds(small == [788, 857, 856, 785], "the rows called 89M are not one model")
ratio = []
for params, _, _, speed, tflops, said, days in TABLE_7_2:
    assert abs(tflops * 1e14 / B200 - said) < 0.01 and abs(1e11 / speed / 86_400 - days) < 0.01
    ratio.append(tflops * 1e12 * 8 / speed / (6 * params * 1e9))
lesson.holds(0.95 < min(ratio) <= max(ratio[:-1]) < 1.19, "7.2: 0.96 to 1.18 times 6 N")
lesson.holds(round(ratio[-1], 2) == 1.93, "but 58B: half the tokens/s, or twice the TFLOP/s")

# %%
fig = lesson.figure(8, 3)
ax = fig.subplots()
for y, (_, _, _, full, causal, said) in enumerate(rows[:4]):
    ax.plot([causal, full], [y, y], color="silver", lw=3, zorder=0)
    ax.scatter([causal], [y], color="tab:blue", s=60, label=None if y else "causal")
    ax.scatter([full], [y], color="tab:orange", s=60, label=None if y else "full")
    ax.scatter([said], [y], s=200, fc="none", ec="k", label=None if y else "published")
ax.set_yticks(range(4), [row[0] for row in rows[:4]])
ax.set(xlabel="MFU, % of an H100's 989 TFLOP/s", ylim=(3.5, -0.5), xlim=(15, 55))
ax.legend(loc="lower right")
lesson.save(fig, "17_mfu")

# %% [markdown]
# ## Trap
# A table of peaks that is searched by substring reads "RTX A4000" as an A40 and "L40" as an L4, and
# with infinity for an unknown GPU prints 0% MFU as if that had been measured.

# %%
PEAKS = {"A40": 149.7e12, "L40S": 362e12, "L4": 121e12, "H800": 756e12}


def by_substring(name: str) -> float:
    return next((peak for key, peak in PEAKS.items() if key in name), math.inf)


for name, truth in (("RTX A4000", None), ("L40", 181e12), ("H800", 989e12), ("GTX 1080", None)):
    assert by_substring(f"NVIDIA {name}") != peak_flops(f"NVIDIA {name}") == truth
lesson.holds(mfu(1e5, 1e9, math.inf) == 0 and mfu(1e5, 1e9, None) is None, "unknown is not 0%")

# %% [markdown]
# ## Exercise
# `exercises/ex17.py`: name the field of a log line that is wrong. `python course/check.py 17`
