# %% [markdown]
# # 7. The loop: what a training step does, and in which order
#
# **Afterwards** you can write the loop at the heart of every training run, in passes that fit into
# memory, and you know which of its mistakes no curve shows.
#
# **Question.** A training step is five lines. What happens when one of them is missing, or is in
# the wrong place, and how would you notice?
#
# Source: D. P. Kingma, J. Ba, Adam: a method for stochastic optimization (2014). Core file:
# `train.py`, `take_steps`. Before: lesson 6. Next: lesson 8. Takes 25 seconds on two cores.

# %%
import math

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
# A GPT is slow, and the loop doesn't care what it trains. So you train a model of Y. Bengio and
# others (2003): the vectors of the last eight bytes, side by side, go through a matrix, a relu, and
# one more matrix to 256 scores. A row is eight bytes and the byte that came next.


# %%
def initial(seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    embed = torch.randn(256, 16, generator=draw)
    up = torch.randn(CONTEXT * 16, 96, generator=draw) * (CONTEXT * 16) ** -0.5
    head = torch.randn(96, 256, generator=draw) * 0.01
    return [weight.requires_grad_() for weight in (embed, up, head)]


def loss(weights: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """rows (N, 9) -> their mean loss, in nats (natural logarithms)."""
    embed, up, head = weights
    vectors = embed[rows[:, :CONTEXT]].flatten(1)  # (N, 8 * 16)
    return F.cross_entropy(torch.relu(vectors @ up) @ head, rows[:, CONTEXT])


exam = held.unfold(0, CONTEXT + 1, 16)  # (N, 9): a row begins at every 16th byte

# %% [markdown]
# ## The five lines
# 1. **Take the rows** of this step.
# 2. **Clear** the gradients. `backward` does not set `.grad`, it *adds* to it.
# 3. **Go forward and backward**, in passes. 256 rows may not fit into memory at once, because
#    backward needs what forward has kept. But gradients add up: take some of the rows, go forward
#    and backward, take the next ones. This is **gradient accumulation**, and there is one thing you
#    must get right. The gradient of the mean over 256 rows is neither the sum nor the plain average
#    of the gradients of three means: weight each pass by its share of the rows, here 96, 96 and 64
#    of 256.
# 4. **Update** the weights, once, when all gradients are there. (Lesson 10 says what **gradient
#    clipping** and **weight decay** do at this point.)
# 5. **Note the loss** as a number. The tensor holds the **graph**: what torch noted for backward.


# %%
def step(weights, rows, update, fault="right") -> float:
    """A training step, or what a fault makes of it."""
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
rows = training.unfold(0, CONTEXT + 1, 3000)[:ROWS]  # one at every 3,000th byte
whole = torch.autograd.grad(loss(weights, rows), weights)  # of all rows at once, for later
whole = torch.cat([gradient.flatten() for gradient in whole])


def kept(part: torch.Tensor) -> int:
    """How many numbers forward keeps for backward, not counting the weights."""
    sizes = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    # torch calls `keep` with each tensor that forward saves
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(weights, part)
    return sum(sizes) - sum(w.numel() for w in weights[1:])


passes = [(size, kept(rows[:size])) for size in (256, 96, 32)]
lesson.table(["rows in a pass", "numbers kept"], passes, "what forward keeps for backward")
lesson.holds(
    passes[1][1] < 0.45 * passes[0][1], "passes of 96 rows keep under half of what 256 keep"
)

# %% [markdown]
# ## Five mistakes
# Train with each mistake under SGD (gradient descent) and under Adam, with three seeds and one rate
# for each optimizer. (Adam keeps a running mean of each weight's gradients and one of their
# squares, and steps by the first over the root of the second.)

# %%
FAULTS = ("right", "never clears", "updates too early", "adds up the means")
FAULTS += ("counts passes alike", "clears in each pass")
RATES = {"SGD": 0.5, "Adam": 0.005}


def trained(kind: str, fault: str, seed: int, times: float = 1.0) -> tuple[float, list[float]]:
    """-> bits per byte on the exam, and on each batch along the way."""
    weights = initial(seed)
    draw = torch.Generator().manual_seed(100 + seed)
    maker = torch.optim.SGD if kind == "SGD" else torch.optim.Adam
    optimizer = maker(weights, lr=times * RATES[kind])
    curve = []
    for _ in range(STEPS):
        rows = lesson.draw(training, CONTEXT, ROWS, draw)
        curve.append(step(weights, rows, optimizer.step, fault))
    with torch.no_grad():
        end = loss(weights, exam).nan_to_num(torch.inf)  # NaN: it has diverged
    return float(end) / math.log(2), [nats / math.log(2) for nats in curve]


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
lesson.table(["loop", *RATES], table, "bits per byte on the exam, three seeds (least to most)")


def worse(kind: str, fault: str) -> list[float]:
    """By how many bits a fault is worse, for each seed."""
    return [wrong - right for wrong, right in zip(bits[kind, fault], bits[kind, "right"])]


shown = min(worse("Adam", "never clears") + worse("SGD", "never clears"))
lesson.holds(shown > 0.1, "without clearing, both are over 0.1 bits worse with every seed")
quiet = [fault for fault in FAULTS[2:] if max(map(abs, worse("Adam", fault))) < 0.08]
print("under Adam, within 0.08 bits of the right loop with every seed:", *quiet, sep="\n  ")
lesson.holds(len(quiet) >= 3, "apart from 'never clears', Adam shows at most one of the faults")

# %% [markdown]
# Adam divides each gradient by its size, so a gradient three times too large makes no difference. A
# pass that counts too much only makes it a bit noisier. An update that comes too early uses the
# last step's gradient, which still fits the weights: it is the right run, one update short. So
# three of the five faults stay hidden, in the table and in the figure, where their lines lie on top
# of one another. Clearing in each pass leaves out 192 of 256 rows, and that does cost: about 0.3
# bits under Adam with every seed. But you see it only beside the right run: alone, its
# curve falls like any other, and then you compare your next idea to it.
#
# Under SGD one of the faults even *wins*: the sum of three means is about three times the gradient,
# so SGD takes steps three times as long, and 0.5 was not its best rate. If that is the reason, the
# right loop at three times the rate must win too (in the median, because a seed may diverge):

# %%
faster = [trained("SGD", "right", seed, 3)[0] for seed in range(3)]
print("SGD, the right loop at rate 1.5:", *(f"{end:.2f}" for end in faster))
medians = [sorted(x)[1] for x in (faster, bits["SGD", "adds up the means"], bits["SGD", "right"])]
wins = max(medians[:2]) < medians[2] - 0.03
lesson.holds(wins, "SGD: in the median the fault wins, and so does 'right' at 3 x the rate")

# %% [markdown]
# ## A test instead of a curve
# So don't trust the curve. At the moment of the update, compare the gradient with the gradient of
# the mean over all rows. One step is enough:


# %%
def error(fault: str) -> float:
    """How far the gradient at the update is from `whole`, as a share of its length."""
    weights = initial(0)
    found = []
    for w in weights:
        w.grad = torch.ones_like(w)  # left over from before
    step(weights, rows, lambda: found.extend(w.grad.flatten() for w in weights), fault)
    return float((torch.cat(found) - whole).norm() / whole.norm())


errors = {fault: error(fault) for fault in FAULTS}
lesson.table(["loop", "relative error"], errors.items(), "the gradient at the update")
good, *bad = errors.values()
lesson.holds(good < 1e-4 < 0.05 < min(bad), "one step tells every fault from the right loop")

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
# `losses.append(loss)` keeps each step's graph. In training, backward frees what forward kept. In
# an evaluation without `torch.no_grad()` nothing frees it, and memory runs out. Keep `loss.item()`.
#
# ## The whole run
# What else is in a run? [one_file.py](one_file.py) has all of it, from data to samples, in one file
# and without a seat belt; each comment names the file that guards the line. Many of its words come
# in later lessons, so don't read it now: skim it after the second weekend.
#
# ## Exercise
# `exercises/ex07.py`: the loop, a part of your trainer. `python course/yours.py` runs it.
# `python course/check.py 7`
