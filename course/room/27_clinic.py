# %% [markdown]
# # 27. A clinic: what is wrong with this run?
#
# **Afterwards** you can say from a run's log which of ten common faults it has, and you know which
# numbers to log so that it can be said.
#
# **Question.** Which number shows a fault that the loss does not show?
#
# Source: Karpathy, A Recipe for Training Neural Networks (2019); Zhang et al., OPT: Open
# Pre-trained Transformer Language Models (2022), whose logbook lists a run's illnesses; *Pré-Treino
# Eficiente de Modelos de Linguagem*, "Tabela 6.1" (a run that did not learn).
# Core file: `machinery/log.py` (what this project logs). Before: lesson 26. Next: lesson 28.
# Takes 10 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import numpy as np
import torch

import clinic

torch.set_num_threads(1)
lesson.begin(27, "clinic")

# %% [markdown]
# ## Ten faults, and a loss that falls in all of them
# `course/clinic.py` trains small models (one layer, three heads, Adam) on artificial text, many at
# the same time. It can plant ten faults; read its list `SICK`, a line each. Here is one run with
# each fault, all with seed 0, and three more healthy runs: by how much do *they* differ?

# %%
SEEDS = range(4)
cases = [(kind, 0) for kind in clinic.SICK]
cases += [(k, s) for k in ("healthy", "doubled_rate", "not_shuffled", "no_rope") for s in SEEDS]
run = dict(zip(cases, clinic.train(cases)))
final = {case: float(run[case]["loss"][-10:].mean()) for case in run}
healthy = [final["healthy", s] for s in SEEDS]
rows = [
    (kind, final[kind, 0], final[kind, 0] - final["healthy", 0], run[kind, 0]["val_loss"][-1])
    for kind in clinic.KINDS
]
columns = ["run", "training loss", "beyond healthy", "validation loss"]
lesson.table(columns, rows, "Nats per symbol at the end, seed 0")
print(f"healthy, seeds 0 to 3: {min(healthy):.2f} to {max(healthy):.2f} at the end")

falls = [run[kind, 0]["loss"][:5].mean() - final[kind, 0] for kind in clinic.SICK]
lesson.holds(sum(fall > 0.2 for fall in falls) >= 8, "the loss falls in at least 8 of 10 sick runs")
hidden = [k for k in clinic.SICK if final[k, 0] < max(healthy) + 0.1]
lesson.holds(len(hidden) >= 5, "at least 5 of the 10 end no worse than 0.1 above a healthy run")
better = [final["healthy", s] - final["doubled_rate", s] for s in SEEDS]
lesson.holds(min(better) > 0.05, "with twice the rate all four seeds end lower than without")

# %% [markdown]
# A sick run may even look better. Here the rate that was configured was too low, so the program
# that doubles it by mistake wins, until somebody tunes the rate, finds half of the true value, and
# takes it to another program. To find such a fault, one needs numbers whose value in a healthy run
# is known beforehand. Here are three kinds of them.
#
# ## 1. A ruler: a number that theory gives
# Adam divides a mean of gradients by the root of a mean of squares. At the first step both means
# hold one gradient, and each weight moves by rate x g / |g|, that is, by the rate. So a matrix of n
# weights takes a first step of norm rate x sqrt(n), whatever the loss is. Later gradients disagree
# and partly cancel in the mean, so the steps get shorter than that; never much longer.


# %%
def pace(r: dict) -> np.ndarray:
    """The norm of each matrix's step, over rate x sqrt(n): (matrices, steps)."""
    sizes = {name: pair[0].size for name, pair in r["weights"].items()}
    return np.stack([r["update"][name] / r["lr"] / n**0.5 for name, n in sizes.items()])


names = ("healthy", "doubled_rate", "rate_spike", "frozen_weight")
rows = []
for name in names:
    p = pace(run[name, 0])
    rows.append((name, p[:, 0].min(), p[:, 0].max(), p.max(), int(p.max(0).argmax())))
columns = ["run", "step 0, least", "step 0, most", "most of all", "at step"]
lesson.table(columns, rows, "Steps over rate x sqrt(n), of eight matrices, seed 0")
first = {name: pace(run[name, s])[1:, 0] for name in names[:2] for s in SEEDS}
lesson.holds(np.allclose(first["healthy"], 1, rtol=0.01), "a healthy first step is the rate, to 1%")
lesson.holds(np.allclose(first["doubled_rate"], 2, rtol=0.01), "a doubled rate shows as 2, to 1%")
spike = pace(run["rate_spike", 0]).max(0)
lesson.holds(np.sum(spike > 3) == 1, "the spike is one step of 120, at more than 3 instead of 1")

# %% [markdown]
# ## 2. An echo: what shuffling promises
# In shuffled training each batch is a fresh draw, so how far a batch's loss is above or below the
# trend says nothing about the next batch. In the order of the documents, neighbours are alike, and
# a hard batch is followed by a hard one. Take the trend away and correlate the rest with itself one
# step later; of n independent numbers that correlation is 0, give or take 1 / sqrt(n) = 0.09.


# %%
def echo(loss: np.ndarray, lag: int) -> float:
    steps = np.arange(len(loss))
    rest = loss - np.polyval(np.polyfit(steps, loss, 3), steps)  # the trend: a cubic
    return float((rest[lag:] * rest[:-lag]).sum() / (rest * rest).sum())


echoes = {
    name: [echo(run[name, s]["loss"], 1) for s in SEEDS] for name in ("healthy", "not_shuffled")
}
rows = [(name, *values) for name, values in echoes.items()]
columns = ["run", *(f"seed {s}" for s in SEEDS)]
lesson.table(columns, rows, "Correlation of the loss, less its trend, with the next step's")
apart = min(echoes["not_shuffled"]) > max(echoes["healthy"])
lesson.holds(apart, "every run on unshuffled rows has more echo than every healthy run")

# %% [markdown]
# ## 3. A probe: an input made for one question
# Does the model know the order of what it reads? Give it a row, then the same row with all symbols
# before the last in reverse, and compare what it expects next. Attention without positions is a
# weighted mean, which does not depend on the order: the two answers agree to the last digits, in
# every state of training. No loss is needed.

# %%
probe = {name: [run[name, s]["order"] for s in SEEDS] for name in ("healthy", "no_rope")}
rows = [
    (name, *(x for s in SEEDS[:2] for x in (probe[name][s][0], probe[name][s][-1])))
    for name in probe
]
columns = ["run", "seed 0, before", "after", "seed 1, before", "after training"]
lesson.table(columns, rows, "Change of the last logits when the past is reversed (RMS)")
blind = max(x.max() for x in probe["no_rope"])
sees = min(x[-1] for x in probe["healthy"])
lesson.holds(sees > 1000 * blind, "without RoPE the order changes nothing; with it, 1,000 x more")

# %% [markdown]
# ## 4. Step over weight: a run that is well, and does not learn
# The thesis's first run (120M weights, AdamW, a constant rate of 3e-6, 3.6% MFU) read 20B tokens,
# some 9,500 steps of 2.1M, and its checkpoints had not learned the language. That was observed;
# the thesis names no cause. Its next run learned, with another library, model, tokenizer and
# language, and with twenty times the rate (table 8.1: 6e-5). That the rate was the fault is *our*
# guess. Here is what speaks for it: in these models such a rate alone does it, and the first ruler
# finds nothing, as each step is the rate. What shows it is a step's length over the *weight*'s.

# %%
well = [run["healthy", s] for s in SEEDS]
clinic.LR /= 20
slow = clinic.train([("healthy", s) for s in SEEDS])
clinic.LR *= 20


def share(r: dict) -> float:
    """The longest step of a matrix over the norm that it began with, in %; of the median matrix."""
    return 100 * np.median(
        [r["update"][n].max() / np.linalg.norm(w[0]) for n, w in r["weights"].items()]
    )


rows = []
for name, runs in (("the rate as it was", well), ("a twentieth of it", slow)):
    ends = [r["loss"][-10:].mean() for r in runs]
    first_steps = np.concatenate([pace(r)[:, 0] for r in runs[1:]])
    rows.append((name, min(ends), max(ends), first_steps.max(), max(map(share, runs))))
columns = ["four healthy runs", "best loss", "worst loss", "step / rate", "step / weight, %"]
lesson.table(columns, rows, "nats at the end; the longest steps")
lesson.holds(abs(rows[1][3] - 1) < 0.01, "the ruler of the rate finds nothing")
lesson.holds(rows[1][1] > rows[0][2] + 0.5, "the best slow run ends 0.5 above the worst other")
lesson.holds(10 < rows[0][4] / rows[1][4] < 30, "step over weight is a twentieth")

# %%
fig = lesson.figure(8, 2.6)
a, b, c = fig.subplots(1, 3)
for name, color in (("healthy", "tab:blue"), ("doubled_rate", "crimson")):
    a.plot(pace(run[name, 0])[1:].max(0), color=color, label=name)
a.plot(spike, color="tab:orange", label="rate_spike", zorder=0)
a.set(yscale="log", title="step / (rate x sqrt(n))", xlabel="step"), a.legend()
b.plot(run["healthy", 0]["loss"], color="tab:blue", label="healthy")
b.plot(run["not_shuffled", 0]["loss"], color="crimson", label="not_shuffled")
b.set(title="loss", xlabel="step", ylim=(1.6, None)), b.legend(loc="lower left")
for s in SEEDS:
    c.plot(probe["healthy"][s], color="tab:blue", label=None if s else "healthy")
    c.plot(probe["no_rope"][s], color="crimson", label=None if s else "no_rope")
c.set(yscale="log", title="the past reversed: change", xlabel="step / 10"), c.legend()
lesson.save(fig, "27_clinic")

# %% [markdown]
# ## Trap
# One fault shows in several instruments. A spike of the rate throws the loss up, and it takes some
# steps to come down: that is an echo, though the rows are shuffled. So ask first the questions
# whose answer does not depend on chance (is a step twice the rate? is a number exactly 0?), and
# read a correlation only when they are answered.

# %%
rows = [(kind, echo(run[kind, 0]["loss"], 1), kind == "not_shuffled") for kind in clinic.KINDS]
rows = sorted(rows, key=lambda row: -row[1])[:4]
rows = [(kind, value, "yes" if guilty else "no") for kind, value, guilty in rows]
lesson.table(["run", "echo", "unshuffled"], rows, "The four loudest echoes, seed 0")
innocent = [value for kind, value, guilty in rows if guilty == "no"]
lesson.holds(max(innocent) > max(echoes["healthy"]), "an echo without unshuffled rows: not proof")

# %% [markdown]
# ## Exercise
# `exercises/ex27.py`: name the fault of a run that you have not seen, for all ten. The seven that
# this page left alone need other numbers of the log. `python course/check.py 27`
