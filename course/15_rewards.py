# %% [markdown]
# # 15. Rewards: learning from a verdict instead of a text
#
# **Afterwards** you can train a model on a reward that a program computes, say how far it moved for
# it, notice when it was paid for the wrong thing, and say what makes a reasoning model.
#
# **Question.** Nobody shows the model a right answer. A program only says "good" or "bad" about
# what the model wrote. How does a model learn from that, and what else will it do for a reward?
#
# Source: R. Williams, Simple statistical gradient-following algorithms (1992), for the gradient;
# D. Ziegler et al., Fine-tuning language models from human preferences (2019), for the reference;
# R. Rafailov et al., Direct preference optimization (2023); D. Guo et al., DeepSeek-R1 (2025).
# Core file: `model.py` (`generate`). Before: lesson 14. Next: lesson 16.
# Takes 35 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import copy
import random

import torch
import torch.nn.functional as F

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
# ## What you have heard of
# Reasoning models such as DeepSeek-R1 (2025) write a long train of thought before they answer. Its
# forerunner, R1-Zero, was never shown such thoughts: a program checked its answers, and the right
# ones were rewarded. This lesson does that with two models that train in seconds. You will meet
# these names:
# - **RLHF**, reinforcement learning from human feedback (2017), made chatbots out of models that
#   complete text. People say which of two answers they prefer; a second model learns to predict
#   their verdict; its prediction is the reward.
# - **PPO**, proximal policy optimization (2017), is the usual way to train on that reward. It takes
#   several steps on the same answers, and stops pushing an answer whose probability has changed
#   enough. A third model, the critic, predicts each reward, so that only surprises count.
# - **RLOO**, REINFORCE leave-one-out (2019), needs no critic: draw several answers to the same
#   question, and compare the reward of each with the mean reward of the *others*. The first
#   function of this lesson's exercise does exactly that.
# - **GRPO**, group relative policy optimization (2024), is what R1 uses, and one division away:
#   compare each reward with the mean of the group, then divide by the group's standard deviation.
# - **Verifiable rewards** (RLVR, 2024) come from a program, not from a model of people's taste: the
#   sum is right, the tests pass. Both rewards of this lesson are of this kind.
#
# ## A model that makes mistakes
# Pretraining comes first: 300 steps on strings of up to six pairs of brackets, filled up with
# blanks to 16 characters. In half of them one bracket points the wrong way, so the model learns to
# write balanced strings and unbalanced ones. A model that has read the internet is like that too:
# it can write right answers and wrong ones.


# %%
def written():
    """START, and a string of the training text: 0 is a blank, 1 opens, 2 closes."""
    text = []
    for _ in range(rng.randint(0, 6)):
        at = rng.randint(0, len(text))
        text[at:at] = [1, 2]  # a pair, anywhere
    if text and rng.random() < 0.5:
        at = rng.randrange(len(text))
        text[at] = 3 - text[at]
    return [START, *text, *[0] * (LENGTH - len(text))]


def logp(model, texts, given=1):
    """(B,): the log of the probability of each string, a sum over its characters behind those that
    are given."""
    return -model(texts[:, :-1], texts[:, 1:], reduction="none")[:, given - 1 :].sum(1)


def some(texts, n):
    return texts[torch.randint(len(texts), (n,))]


def trained(model, loss, steps, rate=1e-3):
    """Train -> for each step, the means of what `loss` returned behind the loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    curve = []
    for _ in range(steps):
        optimizer.zero_grad()
        value, *seen = loss(model)
        value.backward()
        optimizer.step()
        curve.append([x.mean().item() for x in seen])
    return curve


def pretrained(texts, given, rate):
    """A small GPT after 300 steps on these texts, whose first `given` characters it need not say.
    17 positions are enough for both models of this lesson."""
    model = GPT(GPTConfig(
        seq_len=LENGTH + 1, vocab_size=int(texts.max()) + 1,
        n_layer=2, n_embd=32, n_head=2, n_kv_head=2, head_dim=16, mlp_hidden=64,
    ))  # fmt: skip
    model.init_weights()
    trained(model, lambda model: [-logp(model, some(texts, ROWS), given).mean()], 300, rate)
    return model


torch.manual_seed(0)
reference = pretrained(torch.tensor([written() for _ in range(300 * ROWS)]), 1, 3e-3)

# %% [markdown]
# ## A reward, and its gradient
# The **reward** r is 1 if a string is balanced, else 0. A program computes it, and the string was
# drawn at random: you cannot differentiate either step. But the *mean* reward is the sum over all
# strings x of p(x) r(x), and p has a gradient: p times the gradient of log p. So, averaging over
# strings drawn from p,
#
#     gradient of the mean reward = mean of (r times the gradient of log p)
#
# Draw strings, then, and raise the log p of each by what it was worth. This is **REINFORCE**, a
# **policy gradient**: in this field the model is called a *policy*. Two things are added.
# - The **baseline** is subtracted from r: the mean reward of the batch. What is better than usual
#   goes up, the rest goes down, with far less noise. May we do that? All probabilities sum to 1,
#   whatever the weights are, so the mean gradient of log p itself is 0, and subtracting a constant
#   changes nothing on average. The mean of the batch is not quite a constant, because it contains
#   the string's own reward. That shrinks the gradient by the factor (n - 1) / n, here 127/128. The
#   mean of the *other* strings, which RLOO takes, has no such flaw.
# - The **reference** is the model as it was. log p - log p_ref says how far the model has moved at
#   one string. The mean of that over strings drawn from the model is the **KL divergence** from the
#   reference. Subtract `beta` times it from the reward, and going far has a price.


# %%
def sample(model, n):
    return model.generate(torch.full((n, 1), START), LENGTH, temperature=1.0, top_k=0)


def reward(texts):
    depth = DEPTH[texts].cumsum(1)  # (B, LENGTH + 1): brackets that are open
    return ((depth >= 0).all(1) & (depth[:, -1] == 0)).float()


def moved(model, texts):
    """(B,): log p - log p_ref. Its gradient is that of log p, because the reference stays."""
    with torch.no_grad():
        before = logp(reference, texts)
    return logp(model, texts) - before


def reinforce(model, beta=0.0):
    """The loss of a step; how far each string moved."""
    texts = sample(model, ROWS)
    far = moved(model, texts)
    total = (reward(texts) - beta * far).detach()
    return -((total - total.mean()) * far).mean(), far


# %% [markdown]
# ## When there are only preferences
# Often there is no such program, only people who say which of two answers they prefer. You can
# train a model of the reward on their verdicts, and go on as above: that is RLHF. **DPO**, direct
# preference optimization, needs neither that model nor new samples. It starts from this: for a
# reward r and a price beta, the best model of all is p* = p_ref exp(r / beta) / Z, where Z makes
# the probabilities sum to 1. Here is why. Solve for r, then take means over strings drawn from p:
#
#     r = beta (log p* - log p_ref) + beta log Z
#     mean of r - beta KL(p from p_ref) = mean of (r - beta (log p - log p_ref))
#                                       = beta log Z - beta KL(p from p*)
#
# A KL is 0 if the two models are equal, and positive otherwise. So p = p* is the best. Now read the
# first line backwards: up to a constant, beta (log p - log p_ref) is the reward for which p is the
# best model. The model itself is a model of a reward! So teach it, as you would a classifier, that
# the chosen answer has more reward than the rejected one:
#
#     loss = -log sigmoid(beta * (moved(chosen) - moved(rejected)))
#
# **sigmoid**(y) is 1 / (1 + exp(-y)), which turns any number into a probability: 1/2 at y = 0,
# nearly 1 far above, nearly 0 far below. To take it as the probability that people choose the
# first answer is an assumption about how they choose, the Bradley-Terry model (1952): only the
# difference of the two rewards counts, and nobody is ever quite sure.
#
# The reference draws as many strings as REINFORCE does, once, before the training. A pair is a
# balanced string and an unbalanced one. The table gives the KL, and the **entropy**: the mean of
# -log p over what a model writes. It says how much choice is left, and is 0 if the model always
# writes the same thing.

# %%
pool = sample(reference, STEPS * ROWS)
good = pool[reward(pool) == 1]
bad = pool[reward(pool) == 0]


def dpo(model):
    """The loss of a step; how far the chosen strings moved, and the rejected ones."""
    chosen = moved(model, some(good, ROWS // 2))
    rejected = moved(model, some(bad, ROWS // 2))
    return -F.logsigmoid(BETA * (chosen - rejected)).mean(), chosen, rejected


rows = []
curves = []
for name, loss, steps in (
    ("reference", reinforce, 0),
    ("reward alone", reinforce, STEPS),
    ("reward and KL", lambda model: reinforce(model, BETA), STEPS),
    ("DPO", dpo, STEPS),
):
    model = copy.deepcopy(reference)
    curves.append(trained(model, loss, steps))
    texts = sample(model, 2048)
    # the second: is there nothing but blanks behind START?
    each = reward(texts), texts.sum(1) == START, moved(model, texts), -logp(model, texts)
    rows.append((name, *(x.float().mean().item() for x in each)))
    strings = ["".join(" ()s"[i] for i in text).strip() for text in texts[:8, 1:].tolist()]
    print(f"{name}: {strings}"[:80])
lesson.table(
    ["model", "balanced", "empty", "KL", "entropy"],
    rows,
    "2,048 strings of each: shares; KL and entropy in nats",
)
_, balanced, empty, kl, entropy = zip(*rows)
lesson.holds(empty[1] > 0.8, "paid for balance alone, it writes nothing in over 80% of cases")
lesson.holds(
    balanced[2] > 0.9 and entropy[2] > 4 * entropy[1],
    "with the KL over 90% are balanced, with over four times the entropy",
)

# %% [markdown]
# ## How far must it go?
# The second row has a nearly perfect reward, and is useless: the model has fallen silent. The empty
# string is balanced, it is short, and nothing can go wrong in it. The author of the reward did not
# think of that. Earning a reward for something nobody wanted is called **reward hacking**. When a
# model ends up writing the same thing every time, its entropy has **collapsed**.
#
# With the KL it gives up a little reward and keeps nearly everything else, and we can say how much
# had to go. The best model, above, is the reference with each balanced string exp(1 / beta) times
# as likely, compared with the others. *Among themselves* the balanced strings keep their shares. So
# let a model write no unbalanced string at all, and change nothing else: if the reference writes
# balanced strings with probability s, each of them becomes 1 / s times as likely, and the KL is
# log(1 / s). Anything beyond that, the reward did not ask for.

# %%
asked = -reward(pool).mean().log().item()
chosen, rejected = torch.tensor(curves[3][-20:]).mean(0).tolist()
print(f"asked for: {asked:.3f}; DPO moved the chosen by {chosen:.1f}, the rejected {rejected:.1f}")
lesson.holds(
    abs(kl[2] - asked) < 0.3 and kl[1] > 2 * asked,
    "with the KL it goes as far as asked, to 0.3 nats; without, over twice",
)
lesson.holds(rejected < chosen < 0, "DPO lowers the probability of the chosen strings, too")

# %% [markdown]
# ## A model that thinks before it answers
# Now what R1 does, with a question that fits here. A ball lies under cup 0 of three cups that stand
# in a circle. Eight times it moves on, by 3, 4 or 5 cups. Where is it then? There are 6,561 such
# questions. 512 of them are **held out**: no training ever sees them.
#
# The model may answer at once, `43554345?0`. Or it may first write where the ball is after each
# move, `43554345?11020010`: a **chain of thought**, whose last place is the answer. Pretraining
# shows it both; one answer in four thinks. Then comes the reward: 1 if the answer is right. How it
# was found is not paid for. Each step asks 16 questions, draws eight answers to each, and takes
# GRPO's advantages.
#
# There is another way to get better answers from a model. Draw several, and take the one that comes
# most often: a **majority vote**. It changes no weight, and the computing is done when the model
# answers instead of when it is trained. That is called **test-time compute**. Thinking is test-time
# compute too.

# %%
N = 8
END = 7  # 0 to 2 are places, 3 to 5 moves; 6 asks for the answer
VOTERS = range(1, 17)
moves = torch.cartesian_prod(*[torch.arange(3, 6)] * N)
every = F.pad(moves[torch.randperm(3**N)], (0, 1), value=6)  # (6561, N + 1)
held = every[:512].repeat_interleave(16, 0)
training = every[512:]


def places(questions):
    """(B, N + 1) -> (B, N): where the ball is after each move."""
    return questions[:, :N].cumsum(1) % 3


def answered(model, questions):
    """Texts (B, 2N + 1); the answer of each; which are right, and which think: 1 or 0."""
    texts = model.generate(questions, N, temperature=1.0, top_k=0)
    thinks = texts[:, N + 2] != END
    last = torch.where(thinks, texts[:, -1], texts[:, N + 1])
    return texts, last, (last == places(questions)[:, -1]).float(), thinks.float()


def grpo(model):
    """The loss of a step; which answers are right, which think."""
    questions = some(training, 16).repeat_interleave(8, 0)
    texts, _, right, thinks = answered(model, questions)
    r = right.view(16, 8)
    better = (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)
    # The question is in logp, too. That cancels: the eight numbers of `better` sum to 0.
    return -(better.flatten() * logp(model, texts)).mean(), right, thinks


path = places(training)
answers = F.pad(path[:, -1:], (0, N - 1), value=END)  # at once
answers[::4] = path[::4]  # one in four thinks
model = pretrained(torch.cat([training, answers], 1), N + 1, 1e-2)
progress = []
rows = []
votes = []
for name, steps in (("pretrained", 0), ("then rewarded", STEPS)):
    progress += trained(model, grpo, steps)
    _, last, right, thinks = answered(model, held)
    said = last.view(-1, 16)
    truth = places(held)[::16, -1]
    vote = [(said[:, :n].mode(1).values == truth).float().mean().item() for n in VOTERS]
    votes.append(vote)
    groups = thinks, right, right[thinks == 0], right[thinks == 1]
    rows.append((name, *(x.mean().item() for x in groups), vote[-1]))
lesson.table(
    ["model", "thinks", "right", "if at once", "if it thinks", "vote of 16"],
    rows,
    "16 answers to each of 512 held-out questions: shares",
)
_, thinks, right, *_, vote = zip(*rows)
lesson.holds(thinks[1] > 0.9, "paid for right answers alone, the model comes to think")
lesson.holds(right[1] > right[0] + 0.3, "it is right far more often on held-out questions")
lesson.holds(vote[0] > right[0] + 0.1, "without any training, a vote helps as well")

# %%
fig = lesson.figure(9, 3.2)
axes = fig.subplots(1, 3)
distances = torch.tensor(curves[1:3])[:, :, 0].T  # (STEPS, 2)
axes[0].plot(distances, label=["reward alone", "reward and KL"])
axes[0].axhline(asked, color="black", linestyle="--", label="asked for: log(1 / s)")
axes[0].set_title("brackets: KL, nats, by step")
axes[1].plot(progress, label=["right", "think"])
axes[1].set_title("cups: share of answers, by step")
axes[2].plot(VOTERS, torch.tensor(votes).T, label=["pretrained", "then rewarded"])
axes[2].set_title("cups: right by vote, held out")
for axis in axes:
    axis.legend()
lesson.save(fig, "15_rewards")

# %% [markdown]
# ## What the reward taught
# An answer at once is a guess, right one time in three (the few that are left after the reward say
# little). In 300 steps, two blocks do not learn to add up eight moves on the way to a single
# token; when every text answered at once, they still guessed, with each of four seeds. To think,
# they need only one small step for each token, and each token starts another pass, which can build
# on what is written.
#
# The reward says nothing about thinking. But answers that think are right more often, so they are
# the ones that go up, until nearly every answer thinks. R1's report shows the same thing: answers
# that grow longer as training goes on. Now see what has changed far less: how often an answer is
# right *if* it thinks. The model could think before; the reward taught it to do so. When we tried
# questions that pretraining had not taught it to think about, the reward left it guessing: it had
# nothing to choose from. How much more than this a reward teaches a large model is under debate.
#
# A vote helps the pretrained model without any training. Three quarters of its answers are guesses,
# but guesses spread over the three places, and those that think nearly all say the same. After the
# reward, little is left for a vote to gain.
#
# ## Trap
# DPO has the price beta in its formula, and strays far all the same. Our pairs never contradict
# each other: of a balanced string and an unbalanced one, the first is always preferred. So no
# difference is large enough, and the loss goes on falling while *both* strings of a pair lose
# probability, the rejected one faster. No pair says where that probability goes: here, mostly to
# the empty string. (An "s" among the samples is a second START, which no text ever had.) People's
# preferences do contradict each other, which helps; so do a larger beta and fewer steps. The loss
# shows none of this. Look at the KL, and read samples.
#
# ## Exercise
# `exercises/ex15.py`: advantages among the answers to one question, which is RLOO's baseline; the
# loss of a policy gradient with a KL; and that of DPO. `python course/check.py 15`
