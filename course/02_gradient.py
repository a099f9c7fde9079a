# %% [markdown]
# # 2. One matrix: the table of pairs, learned instead of counted
#
# **Afterwards** you can train a model: you know what a gradient, a learning rate and a batch are.
#
# **Question.** Can a program find the table of lesson 1 without counting, only by making its loss
# smaller?
#
# Source: D. P. Kingma, J. Ba, Adam: a method for stochastic optimization (2014). Core file:
# `optim.py`. Before: lesson 1. Next: lesson 3. Takes 2 seconds on two cores.

# %%
import json
import math

import lesson
import numpy as np
import torch  # arrays like numpy's that can also compute gradients: see below
import torch.nn.functional as F

SMOOTH = 0.1
NUDGE = 0.01
torch.set_num_threads(1)
lesson.begin(2, "one matrix")
training, held = (torch.from_numpy(text) for text in lesson.exam())  # tensors: torch's arrays
before, after = training[:-1], training[1:]  # the pairs of the training text

# %% [markdown]
# ## A table of scores
# The model is again a table of 256 x 256 numbers, a **matrix**. Row a belongs to the byte a and
# holds a **score** for each byte that may come next. A score can be any number: the larger, the
# likelier. Two steps turn a row of scores into probabilities: raise e = 2.718... to the power of
# each score, which makes every number positive, then divide by their sum. This is called
# **softmax**:


# %%
def softmax(scores: torch.Tensor) -> torch.Tensor:
    powers = torch.exp(scores)
    return powers / powers.sum(-1, keepdim=True)  # -1: over the last dimension, here the row


example = torch.tensor([2.0, 1.0, 0.0])
shares = [round(p, 3) for p in softmax(example).tolist()]
print("scores", example.tolist(), "-> probabilities", shares)

# %% [markdown]
# Why "matrix"? Write the byte a as a row of 256 numbers: 1 at place a and 0 everywhere else. The
# **matrix product** of a row x and a matrix W is a new row: its number j is the sum, over all i, of
# x[i] times W[i][j]. With a single 1 in x, only one row of W is left: to look up row a is to take a
# matrix product. (If x has several rows, each of them gives one row of the result.) Python's
# operator for this product is `@`.

# %%
W = torch.randn(256, 256)  # random numbers
one = torch.zeros(256)
one[ord("q")] = 1
same = torch.equal(one @ W, W[ord("q")])
lesson.holds(same, "a row with a single 1, times the matrix, is one row of the matrix")

# %% [markdown]
# ## What a gradient is
# The numbers in the table, the ones that will change, are the model's **weights** (or parameters);
# **training** means changing them until the loss is small. They begin at 0: all probabilities are
# equal, and the loss is 8 bits. Now pick one weight, nudge it up a little, and see how the loss
# changes. The change of the loss divided by the nudge is the **slope** for this weight: the
# derivative you know from school, of the loss with respect to this one number. If the slope is
# negative, a larger weight is better.


# %%
def loss(W: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Bits per byte of the bytes `after`, each predicted from the byte before it."""
    p = softmax(W)[before, after]  # the probability that each byte was given
    return -torch.log2(p).mean()


some = slice(0, 5000)  # the first 5,000 pairs: before[some] is before[0:5000]
W = torch.zeros(
    256, 256, dtype=torch.float64
)  # twice the usual digits, so that tiny changes are not lost
slopes = {}
for pair in ("in", "qu", "zx"):
    nudged = W.clone()
    nudged[ord(pair[0]), ord(pair[1])] += NUDGE
    change = loss(nudged, before[some], after[some]) - loss(W, before[some], after[some])
    slopes[pair] = float(change) / NUDGE

# %% [markdown]
# The slopes of all the weights together are the **gradient**: a matrix as large as W. To find it by
# nudging, we would compute the loss 65,537 times. Torch finds it in about the time that three
# losses take: it notes each operation on the way to the loss, then goes back through its notes with
# the chain rule. (Lesson 3 shows how.) `requires_grad_` asks for the gradient, `backward` computes
# it, `grad` holds it.

# %%
W.requires_grad_()
loss(W, before[some], after[some]).backward()
exact = {pair: float(W.grad[ord(pair[0]), ord(pair[1])]) for pair in slopes}
rows = [(repr(pair), slopes[pair], exact[pair]) for pair in slopes]
lesson.table(["weight of the pair", "by nudging", "by torch"], rows, "slopes of the loss")
close = all(abs(slopes[p] - exact[p]) < 0.02 * abs(exact[p]) + 1e-9 for p in slopes)
lesson.holds(close, "torch's slopes and those found by nudging agree within 2%")
lesson.holds(exact["in"] < 0, "raising the score of a frequent pair lowers the loss")

# %% [markdown]
# ## Two letters, by hand
# Where do such numbers come from? Take an alphabet of two letters with the scores a and b. Say
# softmax turns them into p = 0.7 and 0.3, and the *second* letter comes. With the natural
# logarithm, ln, which has the simplest derivative, the loss is
#
#     -ln(0.3) = -ln(e^b / (e^a + e^b)) = ln(e^a + e^b) - b
#
# The derivative of ln(u) is u' / u, where u' is the derivative of u. So the slopes are
#
#     for a:   e^a / (e^a + e^b)     = 0.7               a larger a makes the loss larger
#     for b:   e^b / (e^a + e^b) - 1 = 0.3 - 1 = -0.7    a larger b makes it smaller
#
# If the second letter had had p = 1, both slopes would be 0: there is nothing left to learn. (In
# bits, divide the loss and the slopes by ln 2.)

# %%
two = torch.tensor([0.7, 0.3]).log().requires_grad_()  # scores whose softmax is (0.7, 0.3)
(-softmax(two)[1].log()).backward()  # [1]: the second letter came
right = torch.allclose(two.grad, torch.tensor([0.7, -0.7]))
lesson.holds(right, "p is 0.7 and 0.3, the second letter comes: slopes of 0.7 and -0.7")

# %% [markdown]
# ## One step downhill
# The gradient says in which direction the loss grows. So subtract from each weight a small multiple
# of its slope, and the loss falls. Do it again and again, and you have **gradient descent**; the
# multiple is called the **learning rate**. If the rate is too small, nothing moves. If it is too
# large, the step crosses the valley and climbs the other side, because the slope is right only
# nearby.
#
# A trick for this lesson: the same pair has the same loss wherever it stands. So instead of going
# over a million bytes, we sum over the 65,536 possible pairs, each with its share of the text.

# %%
numbers = 256 * before + after  # each pair as one whole number
counted = torch.bincount(numbers, minlength=65_536).view(256, 256)  # a row for each byte before
share = counted / len(before)


def loss_of_all(W: torch.Tensor) -> torch.Tensor:
    """`loss` over the whole training text. log_softmax is the natural logarithm of softmax, with no
    numbers too large for the computer. Divided by the logarithm of 2, it becomes log2."""
    return -(share * F.log_softmax(W, dim=-1)).sum() / math.log(2)


def descend(rate: float, steps: int) -> torch.Tensor:
    """Gradient descent from 0 -> the weights."""
    W = torch.zeros(256, 256, requires_grad=True)
    for _ in range(steps):
        (gradient,) = torch.autograd.grad(loss_of_all(W), W)
        with torch.no_grad():  # torch need not note the step itself
            W -= rate * gradient
    return W.detach()  # without torch's notes


rates = {rate: float(loss_of_all(descend(rate, 200))) for rate in (0.01, 10.0, 1000.0)}
lesson.table(
    ["learning rate", "bits per byte"],
    [*rates.items()],
    "loss after 200 steps of gradient descent, from 8 bits",
)
slow, fair, wild = rates.values()
lesson.holds(slow > fair + 1, "at a rate of 0.01 the loss ends over a bit higher than at 10")
lesson.holds(wild > fair + 1, "at 1,000 it ends over a bit higher than at 10: the steps overshoot")

# %% [markdown]
# ## A batch
# A real model cannot use the whole text for every step. It takes a **batch**: a few examples, drawn
# at random. The gradient of a batch is a guess at the gradient of the whole text. How good a guess?
# Think of both as arrows, in a space with one direction for each of the 65,536 weights, and compare
# where they point: the **cosine** of the angle between them is 1 if they point the same way, and 0
# if they have nothing to do with each other.

# %%
torch.manual_seed(0)  # the seed of torch's random numbers
W = descend(10.0, 20).requires_grad_()
(whole,) = torch.autograd.grad(loss_of_all(W), W)
rows = []
for size in (16, 256, 4096):
    cosines = []
    for _ in range(10):
        drawn = torch.randint(len(before), (size,))
        (guess,) = torch.autograd.grad(loss(W, before[drawn], after[drawn]), W)
        cosines.append(float(F.cosine_similarity(guess.flatten(), whole.flatten(), dim=0)))
    rows.append((size, float(np.mean(cosines))))
lesson.table(
    ["pairs in the batch", "cosine"],
    rows,
    "how far the gradient of a batch agrees with that of the whole text",
)
small, middle, large = (cosine for _, cosine in rows)
lesson.holds(large > 0.85, "4,096 pairs of a million point nearly the same way as all of them")
lesson.holds(large > middle + 0.1 > small + 0.2, "the larger the batch, the better its direction")

# %% [markdown]
# ## A learning rate for each weight
# Few pairs begin with a rare byte, so the slopes in its row are small, and gradient descent hardly
# moves it: see the row of "Z" below, after 200 steps. The rule that turns gradients into steps is
# called an **optimizer**, and there are better ones. **Adam** gives each weight a rate of its own.
# For each, it keeps an average of the last ten slopes or so, and one of the squares of the last
# hundred or so. Its step is the learning rate times the first, divided by the root of the second:
# so each weight moves by about the learning rate, however large or small its slopes are.
#
# In the code below, the averages are `mean` and `square`. Both begin at 0, so they are too small at
# first: after step 1, `mean` is a tenth of the slope, because 1 - 0.9 is 0.1. To make up for that,
# divide it by `1 - 0.9**n` after step n, and `square` by `1 - 0.99**n`. (The `1e-8` prevents a
# division by 0.)


# %%
def adam(rate: float, steps: int) -> tuple[torch.Tensor, list[float]]:
    """Like `descend`, with Adam's step -> the weights, the loss before each step."""
    W = torch.zeros(256, 256, requires_grad=True)
    mean = torch.zeros(256, 256)
    square = torch.zeros(256, 256)
    curve = []
    for step in range(1, steps + 1):
        total = loss_of_all(W)
        curve.append(total.item())
        (gradient,) = torch.autograd.grad(total, W)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.99 * square + 0.01 * gradient**2
        m = mean / (1 - 0.9**step)
        s = square / (1 - 0.99**step)
        with torch.no_grad():
            W -= rate * m / (s.sqrt() + 1e-8)
    return W.detach(), curve


plain = descend(10.0, 200)
learned, curve = adam(0.05, 800)
short, _ = adam(0.05, 200)
moved = float(plain[ord("Z")].abs().max()), float(short[ord("Z")].abs().max())
print(f'largest weight in the row of "Z": gradient descent {moved[0]:.2g}, Adam {moved[1]:.2g}')
lesson.holds(moved[1] > 5 * moved[0], 'Adam moves the row of "Z" over five times as far')

# %% [markdown]
# ## The learned table is the counted one
# What should come out? The best probabilities are the shares in the text (remember the coin of
# lesson 1): the table you get by counting. No table has a lower loss on the training text. Compare
# the two there, and on the held-out text with the bigram model of lesson 1:

# %%
smoothed = torch.log(share * len(before) + SMOOTH)  # scores whose softmax is the smoothed table
raw = share / share.sum(1, keepdim=True)  # the counted probabilities, without smoothing
best = float(-(share * torch.log2(raw))[share > 0].sum())
tables = {"counted": smoothed, "gradient descent, 200 steps": plain, "Adam, 800 steps": learned}
rows = [
    (name, float(loss_of_all(W)), float(loss(W, held[:-1], held[1:]))) for name, W in tables.items()
]
lesson.table(["table", "training text", "held-out text"], rows, "bits per byte")
(_, _, count_held), _, (_, own, own_held) = rows
lesson.holds(best - 1e-4 < own < best + 0.01, "Adam ends within 0.01 bits of the best table")
lesson.holds(
    abs(own_held - count_held) < 0.02,
    "on held-out text, the learned and the counted table are within 0.02 bits",
)
common = share > 1e-4  # pairs that come over 100 times in the text
apart = float((softmax(learned) - raw)[common].abs().max())
lesson.holds(apart < 0.01, "no frequent pair has probabilities, learned and counted, 0.01 apart")

# %%
fig = lesson.figure(8, 3.2)
left, right = fig.subplots(1, 2)
left.plot(curve, color="crimson")
left.axhline(best, color="silver")
left.text(100, best - 0.35, "the counted table", color="gray")
left.set(xlabel="steps of Adam", ylabel="bits per byte", ylim=(2.5, 8.2), title="training text")
right.plot(raw[common], softmax(learned)[common], ".", color="crimson", markersize=3)
right.set(xlabel="counted", ylabel="learned", title="probabilities of frequent pairs")
lesson.save(fig, "02_gradient")
one_matrix = {"one matrix, learned": own_held}
(lesson.OUT / "02_losses.json").write_text(json.dumps(one_matrix))  # for a table in lesson 5

# %% [markdown]
# ## Trap
# At the learning rate of 1,000, a hundred times too large, nothing stopped and no error was
# printed: the loss was still a number, but a bad one. Before you decide that a model cannot learn
# something, train it with a third of the rate, and with three times the rate.
#
# ## Exercise
# `exercises/ex02.py`: work out the gradient yourself, without torch's `backward`, first for this
# table, then for two matrices whose product is the table. `python course/check.py 2`
#
# How does your function become part of a training run? Your trainer hands it the last matrix of its
# model as U, and as E the vectors that reach that matrix, a row for each place (so x is 0, 1, 2,
# ...). In `spine.py`, the class `Loss` tells torch about it: forward is your function, and backward
# returns the dE and dU you have worked out. From dE, torch carries on backwards through the rest of
# the model, so your gradient drives every weight of your trainer.
