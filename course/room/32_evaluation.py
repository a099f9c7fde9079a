# %% [markdown]
# # 32. Evaluation: below chance is not chance
#
# **Afterwards** you can tell a score from chance, from a constant answer and from noise, and choose
# a measure that shows a small model learning.
#
# **Question.** A multiple-choice exam says 23% where guessing gives 25, from the first checkpoint
# to the last. How do you see that a small model learns?
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "Avaliação dos Checkpoints", "Tabela 9.1"
# (the tournament), "Avaliação", "Tabela 10.2". Core files: `choice.py` and `judge.py` of
# instruments/exams/; `bits_per_byte.py` (lesson 13). Before: lesson 13. Next: lesson 33.
# Takes 30 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import math

import numpy as np
import torch

import optim
from config import GPTConfig, TrainConfig
from bits_per_byte import score_text
from instruments.exams import choice, judge
from model import GPT
from published import ALWAYS_A, MMLU, TABLE_9_1

torch.set_num_threads(1)
lesson.begin(32, "evaluation")

# %% [markdown]
# ## 23% is not near 25%
# There are 14,042 questions with four options each. Guess, and you get a quarter of them right,
# with a standard deviation (sd) of sqrt(n p (1 - p)) = 51. How many of these is the source's
# checkpoint away from a quarter? That is z; beyond 2, it is hardly an accident. For comparison,
# here is a model that answers A to everything.

# %%
n = sum(count for _, count, _ in MMLU.values())
hits = {"the checkpoint": sum(round(rate * count) for rate, count, _ in MMLU.values())}
hits["always A"] = sum(round(ALWAYS_A[subject] * count) for subject, (_, count, _) in MMLU.items())
sd = math.sqrt(n * 0.25 * 0.75)
rows = [(who, right, right / n, (right - n / 4) / sd) for who, right in hits.items()]
lesson.table(["who", "right", "share", "z"], rows, f"{n:,} questions; one sd is {sd:.1f}")
lesson.arithmetic(round(rows[0][3], 1) == -5.5, "the source's checkpoint is at z = -5.5")
equal = sum(MMLU[subject][0] == ALWAYS_A[subject] for subject in MMLU)
lesson.arithmetic(equal == 51, "in 51 of 57 subjects the checkpoint scores what 'always A' does")
golds = [0] * hits["always A"] + [1] * (n - hits["always A"])
figures = choice.statistics([0] * n, golds, [4] * n)
lesson.holds(abs(figures["z"] - rows[1][3]) < 1e-9, "exams/choice.py computes the same z")
found = choice.verdict(figures, 2, letters=True).startswith("a constant answer")
lesson.holds(found, "and reports a constant answer")

# %% [markdown]
# So the model did not guess. It looks as if **it always gave the same letter**. That is a question,
# not a finding: the source says that whole alternatives were scored, and if so, the same place in
# all 57 subjects would be a bug in the program. Who else does this? The source's second table
# has seven models, Qwen3-0.6B among them. In how many subjects does that one score, to the table's
# two digits, what "always A" does?

# %%
equal = sum(abs(MMLU[subject][2] - ALWAYS_A[subject]) < 0.00501 for subject in MMLU)
lesson.arithmetic(equal == 57, "Qwen3-0.6B scores what 'always A' does in all 57")

# %% [markdown]
# So standing above or below it in that table says nothing about either model.
#
# ## The source's tournament
# 46 checkpoints, 100 matches between random pairs, Elo ratings. "There is a tendency to improve",
# and there is. But where does it end? And how far apart would *equal* players have drifted?


# %%
def spearman(a, b):
    """The correlation of the ranks; equal values share their mean rank."""
    rank = [(np.less.outer(x, x).sum(0) + np.less_equal.outer(x, x).sum(0)) / 2 for x in (a, b)]
    return np.corrcoef(*rank)[0, 1]


def equal_players():
    """Elo of 46 players after 100 matches between random pairs, each decided by a coin."""
    points = np.full(46, 1000.0)
    for _ in range(100):
        i, j = rng.choice(46, 2, replace=False)
        gain = 32 * (rng.integers(2) - 1 / (1 + 10 ** ((points[j] - points[i]) / 400)))
        points[[i, j]] += gain, -gain
    return points


rng = np.random.default_rng(0)
steps, points = (np.array(x) for x in zip(*sorted(TABLE_9_1.items())))
late = steps >= 12_500
whole = spearman(steps, points)
shuffled = [abs(spearman(steps, rng.permutation(points))) for _ in range(2000)]
equals = np.mean([equal_players().std() for _ in range(200)])
second_half = spearman(steps[late], points[late])
spread = points.std()
rows = [
    ("rank correlation with the step", whole, f"of 2,000 shuffled: {max(shuffled):.2f} at most"),
    ("the same, from step 12,500 on", second_half, "0: no order"),
    ("spread of the points", spread, f"46 equal players: {equals:.0f}"),
]
lesson.table(["of table 9.1", "value", "to compare with"], rows, "46 checkpoints, 100 matches")
as_high = sum(one >= whole for one in shuffled)
lesson.holds(as_high <= 2, "at most 2 of 2,000 shuffles correlate as well with the step")
lesson.arithmetic(abs(second_half) < 0.05, "from step 12,500 on, ratings do not follow the step")
lesson.holds(0.67 < equals / spread < 0.87, "equal players spread three quarters as far as these")

# %% [markdown]
# ## Four measures of one training run
# A byte model learns Python, and is examined six times: by letter (it sees the options: which
# letter is likeliest?), by answer (which of four continuations is likeliest?), by bits per byte of
# held-out text (lesson 13), and by a tournament, judged by the same model after more steps.

# %%
torch.manual_seed(0)
EXAMS = (0, 20, 40, 80, 160, 300)
LAST = 360
ASKED = 400
CONTEXT = 32
ANSWER = 16
shape = dict(n_layer=2, n_head=2, n_kv_head=2, head_dim=32, n_embd=64, mlp_hidden=256)
model = GPT(GPTConfig(seq_len=128, vocab_size=256, logit_softcap=0, **shape))
model.init_weights()
text = torch.from_numpy(lesson.bytes_of_stdlib(1_000_000))
text, held_out = text[:-100_000], text[-100_000:]
optimizer, *_ = optim.build(model.param_groups(), TrainConfig(optimizer="adamw", lr=3e-3), 64)
snapshots = {}
for step in range(LAST + 1):
    if step in (*EXAMS, LAST):
        snapshots[step] = {name: w.clone() for name, w in model.state_dict().items()}
    rows = text[torch.randint(len(text) - 129, (8, 1)) + torch.arange(129)]  # (8, 129)
    model(rows[:, :-1], rows[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()


def excerpts(count, length):
    return held_out[torch.randint(len(held_out) - length, (count, 1)) + torch.arange(length)]


whole = excerpts(ASKED, CONTEXT + ANSWER)  # a question is the beginning of an excerpt
options = torch.stack([whole[:, CONTEXT:], *(excerpts(ASKED, ANSWER) for _ in range(3))], 1)
order = torch.rand(ASKED, 4).argsort(1)  # place -> option; option 0 is right
options = options.gather(1, order[..., None].expand(-1, -1, ANSWER))  # (N, 4, ANSWER)
gold = order.argmin(1)


@torch.no_grad()
def by_letter(options):
    """Picks (N,): the model sees the options, and the likeliest letter wins."""
    parts = [whole[:, :CONTEXT]]
    for place, letter in enumerate("ABCD"):
        parts += [torch.tensor([list(f"\n{letter}. ".encode())] * ASKED), options[:, place]]
    parts += [torch.tensor([list(b"\nAnswer: ")] * ASKED)]
    shown = torch.cat(parts, 1).split(40)  # portions that fit in the cache
    return torch.cat([model(rows)[:, -1, list(b"ABCD")] for rows in shown]).argmax(1)


@torch.no_grad()
def by_answer():
    """Picks (N,): the model sees no options, and the likeliest continuation wins."""
    context = whole[:, None, :CONTEXT].expand(-1, 4, -1)
    rows = torch.cat([context, options], 2).flatten(0, 1)  # (4N, CONTEXT + ANSWER)
    nats = [model(part[:, :-1], part[:, 1:], reduction="none") for part in rows.split(80)]
    return torch.cat(nats)[:, -ANSWER:].sum(1).view(ASKED, 4).argmin(1)


prompts, human = excerpts(32, 96).split(48, 1)  # (32, 48) each
batches = [(row[:, :-1], row[:, 1:], [0] * 16) for row in excerpts(128, 129).split(16)]
table = []
players = {}
one_byte = torch.ones(256, dtype=torch.long)
for step in EXAMS:
    model.load_state_dict(snapshots[step])
    picks = by_letter(options).tolist(), by_answer().tolist()
    letter, answer = (choice.statistics(p, gold.tolist(), [4] * ASKED) for p in picks)
    shares = letter["accuracy"], letter["most_picked_share"], answer["accuracy"], answer["stderr"]
    bits = [score_text(model, [batch], one_byte)[1] for batch in batches]
    draws = torch.Generator().manual_seed(0)
    texts = model.generate(prompts, 48, temperature=1.0, top_k=0, generator=draws)
    players[f"step {step}"] = texts[:, 48:].tolist()
    error = np.std(bits, ddof=1) / len(bits) ** 0.5
    table.append((step, *(100 * share for share in shares), np.mean(bits), error))
turned = [(by_letter(options.roll(k, 1)) == (gold + k) % 4).float().mean() for k in range(4)]
players |= {"human": human.tolist(), "loop": [p[-4:] * 12 for p in prompts.tolist()]}

model.load_state_dict(snapshots[LAST])
likelihood = [judge.novel_mean(model, prompts.tolist(), texts) for texts in players.values()]
wins = judge.compare(likelihood)  # (prompts, players, players)
rating = judge.bradley_terry(wins.sum(0))
low, high = judge.interval(wins, 300)
columns = "step|letter %|top letter %|answer %|se, %|bits/byte|se, bits".split("|")
lesson.table(columns, table, f"{ASKED} questions, six times; se: standard error")
rated = list(zip(players, rating, low, high))
lesson.table(["player", "rating", "from", "to"], rated, "the tournament, with 95% intervals")

# %% [markdown]
# By letter, each model gives the same letter nearly all the time (88% to 100% of its answers, with
# four seeds), and its score is how often that letter is right. Move the options one place on, and
# it is how often another letter is; over all four places, a constant answer gets exactly a quarter.
# The full answer climbs slowly out of its standard error. Bits per byte and the tournament see
# every stage, and the tournament ranks human text high and a loop low, as it must.

# %%
_, letter, top, answer, spread, bits, error = (np.array(x) for x in zip(*table))
lesson.holds(top.min() > 75, "by letter, each of the six gives one letter over 3 times in 4")
lesson.holds(abs(letter[-1] - 25) < 2.5 * spread[-1], "by letter, step 300 is at chance")
print("with the options moved by 0 to 3 places:", [f"{100 * x:.1f}%" for x in turned])
lesson.holds(abs(np.mean(turned) - 0.25) < 0.02, "over those four places it gets a quarter right")
lesson.holds(answer[-1] - 25 > 2.5 * spread[-1], "by full answer, step 300 beats chance")
falls = np.diff(bits).max() < 0 and bits[0] - bits[-1] > 20 * error.max()
lesson.holds(falls, "bits per byte fall at each exam, in all by over 20 standard errors")
lesson.holds(spearman(EXAMS, rating[:6]) >= 0.8, "the tournament ranks the steps in order")
known = rating[6] > rating[:5].max() and rating[7] < rating[4]
lesson.holds(known, "it puts human text above the first 5 exams, the loop below step 160")

# %%
gains = {
    "by letter": (letter - letter[0]) / spread,
    "by answer": (answer - answer[0]) / spread,
    "bits per byte": (bits[0] - bits) / error,
    "tournament": (rating[:6] - rating[0]) / ((high - low)[:6] / 4),
}
fig = lesson.figure()
axes = fig.subplots()
axes.axhspan(-2, 2, color="whitesmoke")
axes.text(0.6, 1.45, "within two standard errors of the untrained model")
for name, gain in gains.items():
    axes.plot(gain, ".-")
    axes.text(5.3, gain[-1], name, va="center")
axes.set(xticks=range(6), xticklabels=EXAMS, xlabel="training steps")
axes.set(yscale="symlog", ylim=(-3, 200), ylabel="gain, in standard errors")
axes.set_yticks([-2, 0, 2, 10, 100], [-2, 0, 2, 10, 100])
lesson.save(fig, "32_evaluation")

# %% [markdown]
# ## Trap
# 23.0% was called "near random". It is 5.5 standard deviations *below* chance, so something other
# than guessing produced it. Before you compare with chance, compare with a constant answer, and
# with the same options in other places. And before you believe a tournament, let equal players play
# it: of the spread of 39 points, about 30 (30 to 31 with four seeds) would be there if all 46
# checkpoints were the same.
#
# ## Exercise
# `exercises/ex32.py`: test for chance, detect a constant answer, and, if you like, rate a
# tournament. `python course/check.py 32`
