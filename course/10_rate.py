# %% [markdown]
# # 10. The rate: why it rises first and falls at the end
#
# **Afterwards** you can say what warmup and decay of a learning rate do, and what each is worth.
#
# **Question.** Nearly every training run begins with small steps and ends with small steps. Why
# not take the best rate all the time?
#
# The **learning rate** is the factor on every step. How it changes during a run is its
# **schedule**: it rises (**warmup**), it stays, it falls (**decay**).
#
# Sources: Robbins and Monro 1951 (decay), Hägele et al. 2024 (a constant rate, then decay).
# Core file: `optim.py`, `lr_at`. Before: lesson 9. Next: lesson 11. Takes 20 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
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
# Take the simplest thing that can be trained: two weights, whose best values are 0. The loss is
# half of bend x weight^2, summed over both, with a bend of 1 for the first weight and of 0.03 for
# the second: a long valley, steep across and nearly flat along. Its slope is bend x weight. A batch
# shows the slope with noise, since it is not the whole text. 1,000 runs start at the same place:

# %%
bend = torch.tensor([1.0, 0.03])


def descend(rates: list[float]) -> list[float]:
    """The mean loss of 1,000 runs after each step."""
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
# A large rate gets along the flat valley, but never comes to rest: each step follows the noise of
# its batch, and the weights tremble around the best place, the more the larger the rate. A small
# rate trembles less, but is still far away. So take large steps while there is a way to go, and
# small ones at the end: then the trembling dies down, and little of the way is lost.
#
# ## Why it rises
# Adam keeps a mean of each weight's gradients and one of their squares, and steps by the rate times
# mean / root of the mean square. At the first step both come from one gradient, so that ratio is
# +1 or -1: *every* weight moves by the whole rate, those too whose gradient was nearly nothing.
# Later, gradients of changing sign cancel in the mean, but not in the squares, and steps become
# shorter. So the first steps are the longest, taken when least is known.
#
# We measure it with the model of lesson 7 made deeper: four matrices, not one, between the vectors
# of eight bytes and the last matrix. In a deep model all layers move at once, and each must cope
# with what the layers before it have become. Four schedules, two rates, three seeds:

# %%
training, held = (torch.from_numpy(text) for text in lesson.exam())
SCHEDULES = {  # steps in which it rises, share of the run in which it falls
    "constant": (0, 0.0),
    "warmup": (40, 0.0),
    "decay": (0, 0.5),
    "both": (40, 0.5),
}


def rows_at(text: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return text[places[:, None] + torch.arange(CONTEXT + 1)]


def bits(weights: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    embed, *hidden, head = weights
    x = embed[rows[:, :CONTEXT]].flatten(1)  # (N, 8 * 16)
    for matrix in hidden:
        x = torch.relu(x @ matrix)
    return F.cross_entropy(x @ head, rows[:, CONTEXT]) / 0.6931  # log(2)


def train(peak: float, schedule: str, seed: int) -> tuple[float, list[float], list[float]]:
    """-> bits per byte of the exam, of each batch; the size of each step of a matrix, in rates."""
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
        places = torch.randint(len(training) - CONTEXT, (64,), generator=draw)
        loss = bits(weights, rows_at(training, places))
        loss.backward()
        before = inner.clone()
        optimizer.step()
        curve.append(loss.item())
        sizes.append(float((inner - before).square().mean().sqrt()) / rate)
    with torch.no_grad():
        return float(bits(weights, rows_at(held, torch.arange(0, len(held) - 8, 16)))), curve, sizes


PEAKS = (0.02, 0.08)
runs = {(s, p): [train(p, s, seed) for seed in range(3)] for s in SCHEDULES for p in PEAKS}
sizes = runs["constant", 0.02][0][2]
print("Adam's steps, in rates:", *(f"{t}: {sizes[t - 1]:.2f}" for t in (1, 2, 5, 20, 100)))
lesson.holds(sizes[0] > 0.9 and sizes[99] < 0.4, "the first step is over twice the hundredth")

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
lesson.table(columns, rows, "bits per byte of the exam; of batches: the highest. Three seeds")
gain = min(a - b for a, b in zip(exams["constant", 0.02], exams["decay", 0.02]))
lesson.holds(gain > 0.08, "decay is worth over 0.08 bits per byte with every seed")
jumps = max(jump["decay"]) > 12 > 10 > max(jump["both"])
lesson.holds(jumps, "without warmup the loss jumps above 12 bits with some seed, else never")
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
right.set(xlabel="step", ylabel="bits per byte, training", title="rate 0.08")
right.legend()
lesson.save(fig, "10_rate")

# %% [markdown]
# Decay is worth over 0.08 bits per byte with every seed. Warmup is worth nothing here that three
# seeds can show: the means differ by less than the seeds do. What it does is seen at the higher
# rate. A model that knows nothing has 8 bits per byte, and in its first steps without warmup the
# loss jumps far above that. This model recovers within ten steps. A larger one may not, and a run
# of a month that diverges costs more than a few small steps. So warmup is an insurance against a
# rate that is too high at the start, and a cheap one: 1 or 2% of the steps. (A GPT whose blocks
# begin by adding nothing, as in lesson 5, needs less of it.)
#
# ## Trap
# Decay shows its worth only at the end. Halfway, a run that will decay has the loss of a constant
# one, and a run that you stop early never gets what was promised. So never compare the loss at step
# 600 of a run of 1,200 with that of a run of 600, and choose the number of steps first. A run that
# should go on must go on from before its decay: that is why the rate stays constant for so long.
#
# ## Exercise
# `exercises/ex10.py`: the schedule of your trainer. `python course/check.py 10`
