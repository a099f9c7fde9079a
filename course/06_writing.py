# %% [markdown]
# # 6. Writing: what a model does with its probabilities
#
# **Afterwards** you can let a model write, and choose how: by the likeliest byte, colder or hotter,
# without the unlikely tail.
#
# **Question.** A model says how likely each next byte is. Which one should be written?
#
# Source: A. Holtzman et al., The curious case of neural text degeneration (2020). Core file:
# `model.py`, `GPT.stream`. Before: lesson 5. Next: lesson 7. Takes 30 seconds on two cores.

# %%
import re

import lesson
import torch
from torch import Tensor

import optim
from config import GPTConfig, TrainConfig
from model import GPT

LENGTH = 64
STEPS = 600
WRITTEN = 200
torch.set_num_threads(1)
lesson.begin(6, "writing")

# %% [markdown]
# ## A model
# The same GPT as in lesson 5, three blocks of width 64, here from the project's own files. It is
# trained for a quarter of a minute on the same text, and somewhat better, as its optimizer is the
# one of lesson 12.

# %%
training, held = (torch.from_numpy(text) for text in lesson.exam())
torch.manual_seed(0)
shape = dict(n_layer=3, n_head=4, n_kv_head=4, head_dim=16, n_embd=64, mlp_hidden=256)
model = GPT(GPTConfig(seq_len=LENGTH, vocab_size=256, logit_softcap=0, **shape))
model.init_weights()
optimizers = optim.build(model.param_groups(), TrainConfig(), 64)
for step in range(STEPS):
    rows = lesson.draw(training, LENGTH, 8, None)  # (8, 65)
    model(rows[:, :-1], rows[:, 1:]).backward()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()

# %% [markdown]
# ## One distribution, several rules
# After a text the model gives 256 scores, and softmax makes probabilities of them. From here on
# nothing is learned, and there is a choice:
# - draw each byte with its probability, as in lesson 1. This is plain **sampling**;
# - take the likeliest byte, always: **greedy**;
# - divide the scores by a **temperature** T before softmax. Below 1 the likely bytes become
#   likelier still (T near 0 is greedy), above 1 all become more alike. A score that is 2 above
#   another makes a byte e^2 = 7.4 times as likely; with T = 0.5 it is e^4 = 55 times;
# - cut off the tail. **Top-p**: sort the bytes, likeliest first, keep them until their sum reaches
#   p, and draw among those only. (**Top-k** keeps the k likeliest, however likely they are.)


# %%
def distribution(scores: Tensor, temperature: float, top_p: float) -> Tensor:  # (B, 256) each
    p = torch.softmax(scores / max(temperature, 1e-4), dim=-1)
    largest, bytes_ = p.sort(dim=-1, descending=True)
    before = largest.cumsum(-1) - largest  # what the likelier bytes have together
    kept = p.scatter(-1, bytes_, largest * (before < top_p))
    return kept / kept.sum(-1, keepdim=True)


RULES = {  # name -> temperature, top_p
    "greedy": (0.0, 1.0),
    "T 0.3": (0.3, 1.0),
    "T 0.8": (0.8, 1.0),
    "T 1": (1.0, 1.0),
    "T 1.2": (1.2, 1.0),
    "top-p 0.9": (1.0, 0.9),
}

# %% [markdown]
# ## Draw, append, and again
# The drawn byte is appended, and the model reads the longer text. So it reads what it has written,
# and a byte once written is never taken back: one strange byte, and all that follows has a strange
# past. 16 texts go on from the beginnings of held-out ones. Beside them stands the real text, which
# the same function reads byte by byte instead of drawing.
#
# Three measures: the bits per byte that the model itself (with T = 1) gives to what was written;
# the share of words that stand in the training text; and the share of eight bytes in a row that
# stood in the same text before.


# %%
@torch.no_grad()
def go_on(text: Tensor, choose) -> tuple[Tensor, float]:
    """Append WRITTEN bytes to each row of text (B, T); choose(scores, i) is the i-th of them, (B,
    1). -> what was appended, (B, WRITTEN); its bits per byte."""
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
whole = lesson.draw(held, LENGTH + WRITTEN - 1, 16, None)  # (16, 264)
prompts, real = whole.split([LENGTH, WRITTEN], dim=1)
choices = {"real": lambda scores, i: real[:, i : i + 1]}
for name, rule in RULES.items():
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
lesson.holds(again["greedy"] > again["real"] + 20, "the likeliest byte, always, ends in loops")
lesson.holds(bits["greedy"] < bits["real"] / 2, "it has less than half the bits of real text")
lesson.holds(
    abs(bits["T 1"] - bits["real"]) < 0.6, "at T = 1, bits per byte are near the real ones"
)
lesson.holds(found["T 0.3"] > found["T 1"] > found["T 1.2"], "the hotter, the fewer real words")
cut = found["top-p 0.9"] > found["T 1"] and again["top-p 0.9"] < again["T 0.3"]
lesson.holds(cut, "top-p: more real words than at T = 1, fewer loops than at T = 0.3")

# %% [markdown]
# Look at the samples first, and then at what the numbers say of them (`\n` is the end of a line).
# Text that people write is not the likeliest text. It has surprises, about as many as its bits per
# byte say. Greedy writing has none, and having written the same thing twice makes a third time
# likelier. Plain sampling has as many as it should, but this model's tail is mostly noise: each of
# 250 bytes that make no sense has a little probability, together they have much, and in 200 bytes
# one of them is drawn. Top-p cuts off just those. It is a repair of a weak model: the better the
# model, the less its tail needs cutting.

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
# Do not judge a text by its probability: the rule with the fewest bits per byte is the one that
# loops. And do not judge a model by one sample: the same model reads like a better one or a worse
# one with another temperature. A sample without its temperature, top-p and seed says little; the
# loss on held-out text has none of the three.
#
# ## Exercise
# `exercises/ex06.py`: let any model write, by any of these rules, one draw for each token: your
# trainer's samples are drawn by it. `python course/check.py 6`
