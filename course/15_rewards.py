# %% [markdown]
# # 15. Rewards: learning from a verdict instead of a text
#
# **Afterwards** you can train a model on a reward that a program computes, say how far it went for
# it, and see that it was paid for the wrong thing.
#
# **Question.** Nobody shows the model a right answer. A program only says "good" or "bad" about
# what the model wrote. How does a model learn from that, and what else does it do for a reward?
#
# Source: R. Williams, Simple statistical gradient-following algorithms (1992), for the gradient;
# D. Ziegler et al., Fine-tuning language models from human preferences (2019), for the reference;
# R. Rafailov et al., Direct preference optimization (2023). Core file: `model.py` (`generate`).
# Before: lesson 14. Next: lesson 16. Takes 25 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import copy
import math
import random

import torch
import torch.nn.functional as F
from torch import Tensor

from config import GPTConfig
from model import GPT

torch.set_num_threads(1)
DEPTH = torch.tensor([0, 1, -1, 0])  # what a blank, (, ) and START add to the open brackets
START = 3
LENGTH = 16
ROWS = 128
STEPS = 100
BETA = 0.2
rng = random.Random(0)
lesson.begin(15, "rewards")

# %% [markdown]
# ## A model that makes mistakes
# Pretraining first: 300 steps on strings of up to six pairs of brackets, with blanks behind them up
# to 16 characters. In half of them one bracket points the wrong way, so the model learns to write
# balanced strings and others. A model that has read the internet is like that too: it can write
# right answers and wrong ones.


# %%
def written() -> list:
    """START, and a string of the training text: 0 is a blank, 1 opens, 2 closes."""
    text = []
    for _ in range(rng.randint(0, 6)):
        at = rng.randint(0, len(text))
        text[at:at] = [1, 2]  # a pair, anywhere
    if text and rng.random() < 0.5:
        at = rng.randrange(len(text))
        text[at] = 3 - text[at]
    return [START, *text, *[0] * (LENGTH - len(text))]


def logp(model: GPT, texts: Tensor) -> Tensor:
    """(B,): the log of the probability of each string, a sum over its characters."""
    return -model(texts[:, :-1], texts[:, 1:], reduction="none").sum(1)


torch.manual_seed(0)
config = GPTConfig(
    seq_len=LENGTH + 1, vocab_size=4,
    n_layer=2, n_embd=32, n_head=2, n_kv_head=2, head_dim=16, mlp_hidden=64,
)  # fmt: skip
reference = GPT(config)
reference.init_weights()
optimizer = torch.optim.Adam(reference.parameters(), lr=3e-3)
for _ in range(300):
    optimizer.zero_grad()
    texts = torch.tensor([written() for _ in range(ROWS)])
    (-logp(reference, texts)).mean().backward()
    optimizer.step()

# %% [markdown]
# ## A reward, and its gradient
# The **reward** r is 1 if a string is balanced, else 0. A program computes it, and the string was
# drawn at random: neither step can be differentiated. But the *mean* reward is the sum over all
# strings x of p(x) r(x), and p has a gradient: p times the gradient of log p. Therefore, with a
# mean over strings that are drawn from p,
#
#     gradient of the mean reward = mean of (r times the gradient of log p)
#
# So draw strings, and raise the log p of each by what it was worth. This is **REINFORCE**, a
# **policy gradient**: in this field the model is called a *policy*. Two things are added.
# - All probabilities sum to 1, whatever the weights are, so the mean gradient of log p itself is 0.
#   A constant may therefore be subtracted from r. Take the mean reward of the batch, the
#   **baseline**: what is better than usual goes up, the rest goes down, with far less noise.
# - The **reference** is the model as it was. log p - log p_ref says how far the model has moved at
#   a string. The mean of that, over strings that the model draws, is the **KL divergence** from the
#   reference. Subtract `beta` times it from the reward: so it costs something to go far.


# %%
def sample(model: GPT, n: int) -> Tensor:
    return model.generate(torch.full((n, 1), START), LENGTH, temperature=1.0, top_k=0)


def reward(texts: Tensor) -> Tensor:
    depth = DEPTH[texts].cumsum(1)  # (B, LENGTH + 1): brackets that are open
    return ((depth >= 0).all(1) & (depth[:, -1] == 0)).float()


def moved(model: GPT, texts: Tensor) -> Tensor:
    """(B,): log p - log p_ref. Its gradient is that of log p, as the reference stays."""
    with torch.no_grad():
        before = logp(reference, texts)
    return logp(model, texts) - before


def reinforce(model: GPT, beta: float) -> tuple:
    """The loss of a step; the reward of each string, how far it moved."""
    texts = sample(model, ROWS)
    r = reward(texts)
    far = moved(model, texts)
    total = (r - beta * far).detach()
    return -((total - total.mean()) * far).mean(), r, far


# %% [markdown]
# ## When there are only preferences
# Often there is no such program, only people who say which of two answers they prefer. One can
# train a model of the reward on their verdicts, and then do as above. **DPO**, direct preference
# optimization, needs neither that model nor new samples. For a reward r and a price beta the best
# model is known:
# p(x) = p_ref(x) exp(r(x) / beta) / Z, where Z makes the sum 1. Solved for r, that is
# beta (log p - log p_ref), plus a constant. So the model itself is a model of a reward, and can be
# taught, as a classifier is, that the chosen answer has more of it than the rejected one:
#
#     loss = -log sigmoid(beta * (moved(chosen) - moved(rejected)))
#
# The reference draws as many strings as REINFORCE does, once, before the training. A pair is a
# balanced one of them and another one.

# %%
pool = sample(reference, STEPS * ROWS)
good = pool[reward(pool) == 1]
bad = pool[reward(pool) == 0]


def dpo(model: GPT, beta: float) -> tuple:
    """The loss of a step; how far the chosen strings moved, and the rejected ones."""
    chosen = moved(model, good[torch.randint(len(good), (ROWS // 2,))])
    rejected = moved(model, bad[torch.randint(len(bad), (ROWS // 2,))])
    return -F.logsigmoid(beta * (chosen - rejected)).mean(), chosen, rejected


rows = []
curves = []
for name, loss, beta, steps in (
    ("reference", reinforce, 0.0, 0),
    ("reward alone", reinforce, 0.0, STEPS),
    ("reward and KL", reinforce, BETA, STEPS),
    ("DPO", dpo, BETA, STEPS),
):
    model = copy.deepcopy(reference)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    curve = []
    for _ in range(steps):
        optimizer.zero_grad()
        value, *seen = loss(model, beta)
        value.backward()
        optimizer.step()
        curve.append([x.mean().item() for x in seen])
    curves.append(curve)
    texts = sample(model, 2048)
    # the second: is there nothing but blanks behind START?
    each = reward(texts), texts.sum(1) == START, moved(model, texts), -logp(model, texts)
    rows.append((name, *(x.float().mean().item() for x in each)))
    strings = ["".join(" ()s"[i] for i in text).strip() for text in texts[:8, 1:].tolist()]
    print(f"{name}: {strings}"[:80])
columns = ["model", "balanced", "empty", "KL", "entropy"]
lesson.table(columns, rows, "2,048 strings of each: shares; KL and entropy in nats")
_, balanced, empty, kl, entropy = zip(*rows)
lesson.holds(empty[1] > 0.8, "paid for balance alone, it writes nothing in over 80% of cases")
kept = balanced[2] > 0.9 and entropy[2] > 4 * entropy[1]
lesson.holds(kept, "with the KL over 90% are balanced, with over four times the entropy")

# %% [markdown]
# ## How far must it go?
# The second row has a nearly perfect reward, and is useless: the model has fallen silent. The empty
# string is balanced, it is short, and nothing can go wrong in it. Whoever wrote the reward did not
# think of it. To be paid for something that nobody wanted is called **reward hacking**; that the
# model always writes the same is the **collapse** of its entropy.
#
# With the KL it costs a little reward to keep nearly everything else, and we can say how much must
# go. The best model, above, is the reference with each balanced string exp(1 / beta) times as
# likely, compared with the others. *Among themselves* the balanced strings keep their shares. So
# let a model write no unbalanced string at all, and change nothing else: if the reference writes
# balanced strings with probability s, each of them becomes 1 / s times as likely, and the KL is
# log(1 / s). Whatever goes beyond that, the reward did not ask for.

# %%
asked = -math.log(reward(pool).mean().item())
chosen, rejected = torch.tensor(curves[3][-20:]).mean(0).tolist()
print(f"asked for: {asked:.3f}; DPO moved the chosen by {chosen:.1f}, the rejected {rejected:.1f}")
lesson.holds(abs(kl[2] - asked) < 0.3, "with the KL it goes as far as the reward asks, to 0.3 nats")
lesson.holds(kl[1] > 2 * asked, "without, over twice as far")
lesson.holds(rejected < chosen < 0, "DPO lowers the probability of the chosen strings, too")
fig = lesson.figure(8)
axes = fig.subplots(1, 2)
for name, curve in zip(("reward alone", "reward and KL"), curves[1:]):
    for axis, values in zip(axes, zip(*curve)):
        axis.plot(values, label=name)
axes[0].set_title("share balanced, by step")
axes[1].set_title("KL from the reference, nats, by step")
axes[1].axhline(asked, color="black", linestyle="--", label="asked for: log(1 / s)")
axes[1].legend()
lesson.save(fig, "15_rewards")

# %% [markdown]
# ## Trap
# DPO has the price beta in its formula, and strays far all the same. Our pairs never contradict
# each other: of a balanced string and another one the first is always preferred. Then no difference
# is large enough, and the loss goes on falling while *both* strings of a pair lose probability, the
# rejected one faster. Where it goes, no pair says: mostly to the empty string. (An "s" among the
# samples is a second START, which no text ever had.) People's preferences contradict each other,
# which helps; so do a larger beta, and fewer steps. The loss shows nothing of this. Look at the KL,
# and read samples.
#
# ## Exercise
# `exercises/ex15.py`: advantages among the answers to one question, the loss of a policy gradient
# with a KL, and that of DPO. `python course/check.py 15`
