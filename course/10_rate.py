# %% [markdown]
# # 10. The rate: why it rises first and falls at the end
#
# **Afterwards** you can say what a learning rate's warmup and decay do, and what each is worth.
#
# **Question.** Nearly every training run begins with small steps and ends with small steps. Why
# not take the best rate all the time?
#
# The **learning rate** is the factor on every step. How it changes during a run is its
# **schedule**. Here it rises (**warmup**), stays (stable), and falls (**decay**); this schedule is
# called **wsd**, after the three. It is the project's default. The other common one, **cosine**,
# starts to fall as soon as the warmup ends, in the shape of half a cosine wave.
#
# Sources: Robbins and Monro 1951 (decay), Hägele et al. 2024 (a constant rate, then decay),
# Loshchilov and Hutter 2019 (AdamW). Core file: `optim.py`, `lr_at`. Before: lesson 9.
# Next: lesson 11. Takes 20 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import math

import torch
import torch.nn.functional as F

from optim import lr_at

CONTEXT = 8
WIDTH = 64
STEPS = 400
torch.set_num_threads(1)
lesson.begin(10, "the rate")

# %% [markdown]
# ## Why it falls
# Take the simplest thing you can train: two weights whose best values are 0. The loss is half of
# bend * weight^2, summed over both. The bend is 1 for the first weight and 0.03 for the second: a
# long valley, steep across and nearly flat along. Its slope is bend * weight. A batch shows you the
# slope with noise, because it is not the whole text, and with more noise where the valley is steep:
# take sqrt(bend) for its size. 1,000 runs start at the same place:

# %%
bend = torch.tensor([1.0, 0.03])


def descend(rates: list[float]) -> list[float]:
    """The mean loss of 1,000 runs, after each step."""
    draw = torch.Generator().manual_seed(0)
    w = torch.full((1000, 2), 10.0)
    losses = []
    for rate in rates:
        noise = torch.randn(w.shape, generator=draw)
        w = w - rate * (bend * w + bend.sqrt() * noise)
        losses.append(float((bend * w.square()).sum(1).mean() / 2))
    return losses


valley = {f"constant, {rate}": descend([rate] * 200) for rate in (0.02, 0.1, 0.3, 0.5)}
falling = [0.5 * lr_at(step, 200, "wsd", warmup=0, decay=0.5, final=0.0) for step in range(200)]
valley["0.5, then falling"] = descend(falling)
rows = [(name, losses[19], losses[99], losses[199]) for name, losses in valley.items()]
columns = ["rate", "after 20 steps", "100", "200"]
lesson.table(columns, rows, "loss in the valley; the last rate falls to 0 over steps 100 to 200")
*constant, last = [row[3] for row in rows]
lesson.holds(min(constant) > 2 * last, "every constant rate ends over twice as high")

# %% [markdown]
# A large rate gets along the flat valley but never comes to rest: each step follows the noise of
# its batch, and the weights tremble around the best place. The larger the rate, the more they
# tremble. A small rate trembles less, but is still far away. So take large steps while there is a
# long way to go and small ones at the end: the trembling dies down, and you lose little ground.
#
# ## Why it rises
# Adam keeps a mean of each weight's gradients and one of their squares. It divides the first by the
# root of the second, and steps by the rate times this ratio. At the first step both means come from
# one gradient, so the ratio is +1 or -1: *every* weight moves by the whole rate, even one whose
# gradient was nearly nothing. Later, gradients of changing sign cancel in the mean but not in the
# squares, and the steps get shorter. The first steps are the longest, and you take them when you
# know least.
#
# Measure it with lesson 7's model made deeper: four matrices, not one, between the vectors of eight
# bytes and the last matrix. In a deep model all layers move at once, and each must cope with what
# the layers before it have become. Four schedules, two rates, three seeds:

# %%
training, held = (torch.from_numpy(text) for text in lesson.exam())
SCHEDULES = {  # steps of warmup, share of the run in which the rate falls
    "constant": (0, 0.0),
    "warmup": (40, 0.0),
    "decay": (0, 0.5),
    "both": (40, 0.5),
}


def bits(weights: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    embed, *hidden, head = weights
    x = embed[rows[:, :CONTEXT]].flatten(1)  # (N, 8 * 16)
    for matrix in hidden:
        x = torch.relu(x @ matrix)
    return F.cross_entropy(x @ head, rows[:, CONTEXT]) / math.log(2)


def train(peak: float, schedule: str, seed: int) -> tuple[float, list[float], list[float]]:
    """-> bits per byte on the exam, and on each batch; how far a matrix moves, over the rate."""
    draw = torch.Generator().manual_seed(seed)
    weights = [torch.randn(256, 16, generator=draw)]
    for n in (CONTEXT * 16, WIDTH, WIDTH, WIDTH):
        weights.append(torch.randn(n, WIDTH, generator=draw) * (2 / n) ** 0.5)
    weights.append(torch.randn(WIDTH, 256, generator=draw) * 0.01)
    optimizer = torch.optim.Adam([weight.requires_grad_() for weight in weights])
    inner = weights[2].detach()  # the same numbers, without a gradient
    curve = []
    sizes = []
    for step in range(STEPS):
        warmup, decay = SCHEDULES[schedule]
        rate = peak * lr_at(step, STEPS, "wsd", warmup, decay, final=0.0)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = bits(weights, lesson.draw(training, CONTEXT, 64, draw))
        loss.backward()
        before = inner.clone()
        optimizer.step()
        curve.append(loss.item())
        sizes.append(float((inner - before).square().mean().sqrt()) / rate)
    with torch.no_grad():
        return float(bits(weights, held.unfold(0, CONTEXT + 1, 16))), curve, sizes


PEAKS = (0.02, 0.08)
runs = {(s, p): [train(p, s, seed) for seed in range(3)] for s in SCHEDULES for p in PEAKS}
sizes = runs["constant", 0.02][0][2]
shown = (f"step {t}: {sizes[t - 1]:.2f}" for t in (1, 2, 5, 20, 100))
print("the size of Adam's steps, divided by the rate:", *shown, sep="\n  ")
lesson.holds(
    sizes[0] > 0.9 and sizes[99] < 0.4, "the first step is over twice as long as the hundredth"
)

# %% [markdown]
# ## What each is worth

# %%
exams = {key: [run[0] for run in three] for key, three in runs.items()}
rows = []
jump = {}
for name in SCHEDULES:
    ends = [exams[name, peak] for peak in PEAKS]
    jump[name] = [max(run[1][:60]) for run in runs[name, 0.08]]
    said = [f"{sum(end) / 3:.2f} ({min(end):.2f} to {max(end):.2f})" for end in ends]
    rows.append((name, *said, f"{min(jump[name]):.1f} to {max(jump[name]):.1f}"))
columns = ["schedule", "rate 0.02", "rate 0.08", "highest loss, 0.08"]
lesson.table(columns, rows, "bits per byte on the exam, then the highest of any batch; three seeds")
gains = [a - b for a, b in zip(exams["constant", 0.02], exams["decay", 0.02])]
helps = min(gains) > 0.03 and sum(gains) / 3 > 0.1
lesson.holds(helps, "decay helps with every seed, by over 0.1 bits per byte on average")
jumps = max(jump["decay"]) > 12 > max(jump["both"])
lesson.holds(jumps, "without warmup the loss jumps above 12 bits with some seed, with it never")
worth = abs(sum(exams["decay", 0.02]) - sum(exams["both", 0.02])) / 3
lesson.holds(worth < 0.06, "at the lower rate warmup changes the mean by less than 0.06 bits")

# %%
fig = lesson.figure(8, 3.2)
left, right = fig.subplots(1, 2)
for name in ("constant, 0.1", "constant, 0.5", "0.5, then falling"):
    left.plot(valley[name], label=name)
left.set(yscale="log", xlabel="step", ylabel="loss", title="a noisy valley")
left.legend()
for name, label in (("decay", "no warmup"), ("both", "warmup of 40 steps")):
    right.plot(runs[name, 0.08][0][1][:80], label=label)
right.set(yscale="log", xlabel="step", ylabel="bits per byte, training", title="rate 0.08")
right.legend()
lesson.save(fig, "10_rate")

# %% [markdown]
# Decay helps with every seed, by over 0.1 bits per byte on average. Warmup is worth nothing here
# that three seeds can show: the means differ by less than the seeds do. What it does shows in the
# table's last column, at the higher rate. A model that knows nothing has 8 bits per byte, and in
# the first steps without warmup the loss jumps far above that. This model recovers within ten
# steps. A larger one may not, and a month's run that diverges costs more than a few small steps. So
# warmup insures you against a rate that is too high at the start, and it is cheap: 1 or 2% of the
# steps. (A GPT whose blocks begin by adding nothing, as in lesson 5, needs less of it.)
#
# ## Two more brakes
# You will meet both in nearly every training run. Here you only read what they do.
#
# **Gradient clipping** insures you against a single strange batch. After backward and before the
# update, compute the norm of all gradients together: the root of the sum of their squares. If it is
# above a bound, often 1, multiply every gradient by bound / norm. The direction stays, and an
# ordinary step is not touched. The project's default is `--grad_clip 0`, no clipping: Muon, its
# optimizer for matrices, gives each step a length of its own (lesson 12). Its two presets with
# AdamW alone clip at 1.
#
# **Weight decay**, in spite of its name, is not about the rate. Each step also shrinks each weight
# by a small share, rate x decay, so a weight that no gradient holds up fades toward 0. You could
# add decay x weight to the gradient instead, and under gradient descent that is the same. Under
# Adam it is not: Adam divides what you added by the size of the gradient, so the weights with the
# largest gradients hardly shrink. **AdamW** is Adam with the weight decay kept out of the gradient
# (decoupled); that is its W. In the project, `--optimizer adamw` shrinks all matrices and tables,
# with a decay of 0.1 by default. With Muon, the decay of the matrices is *cautious*: it acts only
# on weights that the update moves toward 0 anyway (`optim.py`).
#
# ## Trap
# A falling rate shows its worth only at the end. Halfway, a run that will decay has the same loss
# as one that won't, and if you stop it early you never get what it promised. So choose the number
# of steps first, and never compare step 600 of a run of 1,200 with the end of a run of 600. To
# extend a run, restart it from a checkpoint saved before its decay: that is why the rate stays
# constant for so long.
#
# ## Exercise
# `exercises/ex10.py`: your trainer's schedule. `python course/check.py 10`
