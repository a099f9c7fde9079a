# %% [markdown]
# # 6. Writing: what a model does with its probabilities
#
# **Afterwards** you can let a model write, and choose how: always the likeliest byte, bolder
# or more cautious, with or without the unlikely tail.
#
# **Question.** A model says how likely each next byte is. Which one should you write?
#
# Source: A. Holtzman et al., The curious case of neural text degeneration (2020). Core file:
# `model.py`, `GPT.stream`. Before: lesson 5. Next: lesson 7. Takes 30 seconds on two cores.

# %%
import re

import lesson
import torch
from torch import Tensor

LENGTH = 64
STEPS = 600
WRITTEN = 200
torch.set_num_threads(1)
lesson.begin(6, "writing")

# %% [markdown]
# ## A model
# You have one already: the GPT of lesson 5, three blocks of width 64, trained on the same text
# for 600 steps. `names_of(5)` fetches that lesson's functions and classes without running the
# lesson.

# %%
five = lesson.names_of(5)
training, held = (torch.from_numpy(text) for text in lesson.exam())
torch.manual_seed(0)
model = five.GPT()
five.trained(model, STEPS, training)

# %% [markdown]
# ## One distribution, several rules
# After a text the model gives 256 scores, and softmax turns them into probabilities. From here on
# nothing is learned. You choose:
# - draw each byte with its probability, as in lesson 1: plain **sampling**;
# - always take the likeliest byte (of several, the smallest number): **greedy**;
# - divide the scores by a **temperature** before softmax. Below 1 the likely bytes become likelier
#   still (near 0 you are back at greedy), above 1 all become more alike. A byte whose score is 2
#   above another's is e^2 = 7.4 times as likely; at temperature 0.5 it is e^4 = 55 times as likely;
# - cut off the tail: **top-p**. Sort by probability, the likeliest first. A byte is kept if the sum
#   of those before it is below p, so the likeliest always stays. The others get 0, and what is left
#   is divided by its sum. With p = 1 nothing is cut. (**Top-k** keeps the k likeliest, however
#   likely they are.)


# %%
def distribution(scores: Tensor, temperature: float, top_p: float) -> Tensor:  # (B, 256) each
    if temperature == 0:
        return torch.eye(256)[scores.argmax(-1)]
    p = torch.softmax(scores / temperature, dim=-1)
    largest, bytes_ = p.sort(dim=-1, descending=True, stable=True)  # of equal ones, smaller first
    before = largest.cumsum(-1) - largest  # the sum of those before it
    kept = p.scatter(-1, bytes_, largest * ((before < top_p) | (top_p == 1)))
    return kept / kept.sum(-1, keepdim=True)


RULES = {  # name -> temperature, top_p
    "greedy": (0.0, 1.0),
    "temp 0.3": (0.3, 1.0),
    "temp 0.8": (0.8, 1.0),
    "temp 1": (1.0, 1.0),
    "temp 1.2": (1.2, 1.0),
    "top-p 0.9": (1.0, 0.9),
}

# %% [markdown]
# ## Draw, append, and again
# Append the byte you drew, and let the model read the longer text. It now reads its own writing,
# and nothing takes a byte back: after one strange byte, everything that follows has a strange past.
# You continue 16 held-out texts from their beginnings. Beside them stands the real text: the same
# function reads it byte by byte instead of drawing.
#
# Three measures: the bits per byte that the model itself (at temperature 1) gives to what was
# written; the share of words that occur in the training text; and the share of runs of eight bytes
# that occurred earlier in the same text.


# %%
@torch.no_grad()
def go_on(text: Tensor, choose) -> tuple[Tensor, float]:
    """Append WRITTEN bytes to each row of text (B, T); choose(scores, i) gives byte i, (B, 1).
    -> what was appended, (B, WRITTEN); its bits per byte."""
    bits = 0.0
    for i in range(WRITTEN):
        scores = model(text[:, -LENGTH:])[:, -1]  # (B, 256)
        new = choose(scores, i)
        bits -= float(torch.log2(torch.softmax(scores, -1).gather(1, new)).mean())
        text = torch.cat([text, new], dim=1)
    return text[:, -WRITTEN:], bits / WRITTEN


def words(text: bytes) -> list[bytes]:
    return re.findall(rb"[A-Za-z]{4,}", text)


known = {*words(bytes(training.tolist()))}
whole = lesson.draw(held, LENGTH + WRITTEN - 1, 16, None)  # (16, 263 + 1); None: torch's own seed
prompts, real = whole.split([LENGTH, WRITTEN], dim=1)
choices = {"real": lambda scores, i: real[:, i : i + 1]}
for name, rule in RULES.items():  # rule=rule: this one; without it, all would use the last
    choices[name] = lambda s, i, rule=rule: torch.multinomial(distribution(s, *rule), 1)
table = []
for name, choose in choices.items():
    made, bits = go_on(prompts, choose)
    texts = [bytes(row) for row in made.tolist()]
    found = [word in known for text in texts for word in words(text)]
    again = [t[i : i + 8] in t[: i + 7] for t in texts for i in range(WRITTEN - 8)]
    table.append((name, bits, 100 * sum(found) / len(found), 100 * sum(again) / len(again)))
    print(f"{name:10}{texts[0]}"[:79])
columns = ["rule", "bits per byte", "known words, %", "repeated, %"]
lesson.table(columns, table, f"16 texts of {WRITTEN} bytes for each rule")
bits, found, again = ({row[0]: row[i] for row in table} for i in (1, 2, 3))
lesson.holds(again["greedy"] > again["real"] + 20, "always the likeliest byte: it ends in loops")
lesson.holds(bits["greedy"] < bits["real"] / 2, "and it has under half the bits of real text")
near = abs(bits["temp 1"] - bits["real"]) < bits["real"] / 3
lesson.holds(near, "at temperature 1, the bits are within a third of those of real text")
hotter = found["temp 0.3"] > found["temp 1"] > found["temp 1.2"]
lesson.holds(hotter, "the hotter, the fewer real words")
cut = all(x["temp 1"] < x["top-p 0.9"] < x["temp 0.3"] for x in (found, again))
lesson.holds(cut, "top-p: more real words and more loops than temperature 1, fewer than 0.3")

# %% [markdown]
# Look at the samples first, and then at what the numbers say about them (`\n` is the end of a
# line). The text people write is not the likeliest text. It holds surprises, about as many as its
# bits per byte say. Greedy writing holds none, and once it has said a thing twice, a third time is
# likelier still. Plain sampling holds nearly as many, but this model's tail is mostly noise: at
# most places some 250 bytes make no sense. Each has a little probability, together they have
# enough, and sooner or later you draw one.
#
# Two rules make that rarer. Top-p drops the tail alone: what it keeps stays in proportion. A lower
# temperature changes all: the less likely a byte, the more it loses. Both buy real words and pay
# with loops, at about the same price here: in the figure, top-p 0.9 lies close to the line from
# temperature 1 to 0.8. The better the model, the less of this it needs.

# %%
fig = lesson.figure()
axes = fig.subplots()
for name, _, share, loops in table:
    axes.plot(loops, share, "o", color="crimson" if name == "real" else "black")
    axes.annotate(name, (loops, share), (6, 4), textcoords="offset points")
axes.set(xlabel="repeated, %", ylabel="known words, %", title="six ways to write, and real text")
axes.margins(0.15)
lesson.save(fig, "06_writing")

# %% [markdown]
# ## Trap
# Don't judge a text by its probability: the rule with the fewest bits per byte is the one that
# loops. And don't judge a model by one sample: at another temperature the same model reads like a
# better one, or a worse one. A sample without its temperature, top-p and seed says little; the loss
# on held-out text needs none of the three.
#
# ## Exercise
# `exercises/ex06.py`: let any model write by any of these rules, one draw for each token. Your
# trainer will draw its samples with it. `python course/check.py 6`
