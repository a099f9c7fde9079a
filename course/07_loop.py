# %% [markdown]
# # 7. The loop: what a training step does, and in which order
#
# **Afterwards** you can write the loop that every training run has, in passes that fit into memory,
# and you know which of its mistakes no curve shows.
#
# **Question.** A training step is five lines. What happens if one of them is missing, or stands in
# the wrong place, and how would you notice?
#
# Source: D. P. Kingma, J. Ba, Adam: a method for stochastic optimization (2014). Core file:
# `train.py`, `take_steps`. Before: lesson 6. Next: lesson 8. Takes 25 seconds on two cores.

# %%
import lesson
import torch
import torch.nn.functional as F

CONTEXT = 8
ROWS = 256
MICRO = 96
STEPS = 250
torch.set_num_threads(1)
lesson.begin(7, "the loop")
training, held = (torch.from_numpy(text) for text in lesson.exam())

# %% [markdown]
# ## Something small to train
# A GPT is slow, and the loop does not care what it trains. Here it is a model of Y. Bengio and
# others (2003): the vectors of the last eight bytes, side by side, go through a matrix, a relu, and
# one more matrix to 256 scores. A row is eight bytes and the one that came next.


# %%
def initial(seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    embed = torch.randn(256, 16, generator=draw)
    up = torch.randn(CONTEXT * 16, 96, generator=draw) * (CONTEXT * 16) ** -0.5
    head = torch.randn(96, 256, generator=draw) * 0.01
    return [weight.requires_grad_() for weight in (embed, up, head)]


def loss(weights: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """rows (N, 9) -> the mean of their losses, in nats (natural logarithms)."""
    embed, up, head = weights
    vectors = embed[rows[:, :CONTEXT]].flatten(1)  # (N, 8 * 16)
    return F.cross_entropy(torch.relu(vectors @ up) @ head, rows[:, CONTEXT])


def rows_at(text: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return text[places[:, None] + torch.arange(CONTEXT + 1)]


exam = rows_at(held, torch.arange(0, len(held) - CONTEXT, 16))

# %% [markdown]
# ## The five lines
# 1. **Rows** of this step.
# 2. **Clear** the gradients. `backward` does not set `.grad`, it *adds* to it.
# 3. **Forward and backward**, in passes. 256 rows may not fit into memory at once: backward needs
#    what forward has kept. Gradients add up, so take a part of the rows, go forward and backward,
#    take the next part: **gradient accumulation**. One thing must be right. The gradient of a mean
#    over 256 rows is not the sum of the gradients of three means: each pass is weighted by its
#    share of the rows, here 96, 96 and 64 of 256.
# 4. **Update** the weights, once, when all gradients are there.
# 5. **Note the loss** as a number. The tensor holds the **graph**: what torch noted for backward.


# %%
def step(weights, rows, update, fault="right") -> float:
    """A training step, or what it becomes with a fault."""
    if fault == "updates too early":
        update()
    if fault != "never clears":
        for weight in weights:
            weight.grad = None
    total = 0.0
    for part in rows.split(MICRO):
        share = len(part) / len(rows)
        if fault == "adds up the means":
            share = 1.0
        if fault == "counts passes alike":
            share = MICRO / len(rows)
        if fault == "clears in each pass":
            for weight in weights:
                weight.grad = None
        part_loss = loss(weights, part)
        (part_loss * share).backward()
        total += part_loss.item() * len(part) / len(rows)
    if fault != "updates too early":
        update()
    return total


# %% [markdown]
# What do passes save? Count the numbers that forward keeps for backward.

# %%
weights = initial(0)
rows = rows_at(training, 3000 * torch.arange(ROWS))
whole = torch.autograd.grad(loss(weights, rows), weights)  # of all rows at once: for later


def kept(part: torch.Tensor) -> int:
    """Numbers that forward keeps for backward, without the weights themselves."""
    sizes = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(weights, part)
    return sum(sizes) - sum(w.numel() for w in weights[1:])


passes = [(size, kept(rows[:size])) for size in (256, 96, 32)]
lesson.table(["rows in a pass", "numbers kept"], passes, "what forward keeps for backward")
lesson.holds(passes[1][1] < 0.45 * passes[0][1], "passes of 96 rows keep under half of what 256 do")

# %% [markdown]
# ## Five mistakes
# Train with each by SGD (gradient descent) and by Adam, three seeds, one rate for each optimizer.
# (Adam keeps running means of each weight's gradient and of its square, and steps by their ratio.)

# %%
FAULTS = ("right", "never clears", "updates too early", "adds up the means")
FAULTS += ("counts passes alike", "clears in each pass")
RATES = {"SGD": 0.5, "Adam": 0.005}


def trained(kind: str, fault: str, seed: int, times: float = 1.0) -> tuple[float, list[float]]:
    """-> bits per byte of the exam, and of the batches on the way."""
    weights = initial(seed)
    draw = torch.Generator().manual_seed(100 + seed)
    maker = torch.optim.SGD if kind == "SGD" else torch.optim.Adam
    optimizer = maker(weights, lr=times * RATES[kind])
    curve = []
    for _ in range(STEPS):
        places = torch.randint(len(training) - CONTEXT, (ROWS,), generator=draw)
        curve.append(step(weights, rows_at(training, places), optimizer.step, fault))
    with torch.no_grad():
        end = loss(weights, exam).nan_to_num(torch.inf)  # NaN: it has diverged
    return float(end) / 0.6931, [nats / 0.6931 for nats in curve]  # log(2)


bits = {}
curves = {}
table = []
for fault in FAULTS:
    cells = []
    for kind in RATES:
        runs = [trained(kind, fault, seed) for seed in range(3)]
        ends = [run[0] for run in runs]
        bits[kind, fault] = ends
        curves[kind, fault] = runs[0][1]
        cells.append(f"{sum(ends) / 3:.2f} ({min(ends):.2f} to {max(ends):.2f})")
    table.append((fault, *cells))
lesson.table(["loop", *RATES], table, "bits per byte of the exam, three seeds (least to most)")


def worse(kind: str, fault: str) -> list[float]:
    """Bits by which a fault is worse, for each seed."""
    return [wrong - right for wrong, right in zip(bits[kind, fault], bits[kind, "right"])]


shown = min(worse("Adam", "never clears") + worse("SGD", "never clears"))
lesson.holds(shown > 0.1, "without clearing, both are worse by over 0.1 bits with every seed")
quiet = [fault for fault in FAULTS[2:] if max(map(abs, worse("Adam", fault))) < 0.08]
print("under Adam within 0.08 bits of the right loop with every seed:", *quiet, sep="\n  ")
lesson.holds(len(quiet) >= 3, "of the other four faults, Adam's curve shows one at most")

# %% [markdown]
# Adam divides each gradient by its size, so one that is three times too large makes no difference.
# A pass that counts too much, or rows left out, make it a bit noisier. An update that comes too
# early uses the last step's gradient, which fits the weights as they are: the right run, one update
# short. Such runs go well, or a bit worse than they should, and you compare your next idea to them.
#
# Under SGD one of the faults even *wins*: the sum of three means is about three times the gradient,
# so SGD takes steps three times as long, and 0.5 was not its best rate. If that is the reason, the
# right loop at three times the rate must win too (by the median, as a seed may diverge):

# %%
faster = [trained("SGD", "right", seed, 3)[0] for seed in range(3)]
print("SGD, the right loop at a rate of 1.5:", *(f"{end:.2f}" for end in faster))
medians = [sorted(x)[1] for x in (faster, bits["SGD", "adds up the means"], bits["SGD", "right"])]
wins = max(medians[:2]) < medians[2] - 0.03
lesson.holds(wins, "SGD: the fault wins in the median, as does 'right' at 3 times the rate")

# %% [markdown]
# ## A test instead of a curve
# So do not look at the curve. Compare, at the moment of the update, the gradient with that of the
# mean over all rows. It takes one step:

# %%
table = []
errors = {}
for fault in FAULTS:
    weights = initial(0)
    found = []
    for w in weights:
        w.grad = torch.ones_like(w)  # left by somebody before
    keep = lambda weights=weights, found=found: found.extend(w.grad.clone() for w in weights)
    step(weights, rows, keep, fault)
    off = sum(float((a - b).square().sum()) for a, b in zip(found, whole))
    errors[fault] = (off / sum(float(b.square().sum()) for b in whole)) ** 0.5
    table.append((fault, errors[fault]))
lesson.table(
    ["loop", "relative error"], table, "the gradient at the update, against that of all rows"
)
least = min(errors[fault] for fault in FAULTS[1:])
lesson.holds(
    errors["right"] < 1e-4 < 0.05 < least, "one step tells every fault from the right loop"
)

# %%
fig = lesson.figure(8, 3.2)
left, right = fig.subplots(1, 2)
means = {key: torch.tensor(curve).view(-1, 10).mean(1) for key, curve in curves.items()}
at = range(5, STEPS, 10)
for fault in FAULTS:
    style = dict(color="black", lw=3) if fault == "right" else {}
    left.plot(at, means["SGD", fault], label=fault, **style)
    right.plot(at, means["Adam", fault] - means["Adam", "right"], **style)
left.set(xlabel="step", ylabel="bits per byte, training", ylim=(2.8, 8), title="SGD")
left.legend(fontsize=7)
right.set(
    xlabel="step", ylabel="bits per byte", ylim=(-0.1, 0.6), title="Adam: loss minus that of right"
)
lesson.save(fig, "07_loop")

# %% [markdown]
# ## Trap
# `losses.append(loss)` keeps each step's graph. In training, backward has freed what forward kept;
# in an evaluation without `torch.no_grad()` nothing has, and memory runs out. Keep `loss.item()`.
#
# ## The whole run
# What else does a run have? Read [one_file.py](one_file.py): the training run of this project, data
# to samples, in one file and without a seat belt; each comment names the file that guards the line.
#
# ## Exercise
# `exercises/ex07.py`: the loop. It is a part of your trainer: `python course/yours.py` runs it.
# `python course/check.py 7`
