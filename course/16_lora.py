# %% [markdown]
# # 16. LoRA: a small change of weights
#
# **Afterwards** you can teach a model something with one percent of its numbers, hand only those
# over, and say what it has forgotten.
#
# **Question.** A model of 7 million weights is to learn something. How many numbers must change,
# and what happens to what it knew?
#
# Source: E. Hu et al., LoRA: low-rank adaptation of large language models (2021); D. Biderman et
# al., LoRA learns less and forgets less (2024). Core file: `preparation/stdlib_chats.py`. Before:
# lesson 15. Next: your own run, or the reading room. Takes 40 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import copy
import io
import random
import sysconfig
from contextlib import redirect_stdout
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import data
import eval
import judging
from machinery import trained
from model import GPT
from preparation.stdlib_chats import conversations

torch.set_num_threads(1)
LENGTH = 48
ROWS = 12
STEPS = 25
SCALE = 2.0
RATES = {1: 2e-2, 4: 1e-2, 16: 1e-2, 0: 2e-3}  # by rank, 0 for all weights: each about the best
lesson.begin(16, "LoRA")
config = trained.EvalConfig(run_dir=str(lesson.tiny_run()), device="cpu", dtype="fp32")
with redirect_stdout(None):  # it says which checkpoint it reads, in a long line
    loaded = eval.load_model(config)
base = loaded.model
encode = loaded.tokenizer.encode

# %% [markdown]
# ## Two thin matrices
# A layer multiplies by a matrix W of, say, 1,024 x 256 numbers. Leave W as it is, and train what is
# added to it. That would be as many numbers; but let the change be a product B A, where B is
# 1,024 x r and A is r x 256: for r = 4 that is 5,120 numbers in place of 262,144. Such a product
# has **rank** r at most: whatever comes in, what is added lies in r directions. This is **LoRA**,
# low-rank adaptation:
#
#     W x + scale * B (A x)
#
# A begins with random numbers and B with zeros: the first step begins with exactly the old model,
# and B gets a gradient, since A is not 0. (With both at 0, neither would ever get one.) Adam keeps
# two more numbers for each that is trained, so its memory shrinks as well.
#
# `parametrize` is torch's way to compute a weight from another each time it is used. All matrices
# of the model get a change of their own, the output head as well; the tables of embeddings stay.


# %%
class LowRank(nn.Module):
    def __init__(self, rows: int, columns: int, rank: int):
        super().__init__()
        self.A = nn.Parameter(torch.randn(rank, columns) * columns**-0.5)
        self.B = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + SCALE * self.B @ self.A


def adapt(model: GPT, rank: int) -> None:
    """Freeze the model, and give each matrix a change of this rank."""
    model.requires_grad_(False)
    for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        change = LowRank(*layer.weight.shape, rank)
        parametrize.register_parametrization(layer, "weight", change)


# %% [markdown]
# ## Something new, something old
# The new thing is to answer: one question and its answer of the conversations that `tiny-chat` is
# trained on, as ids and targets by the functions of exercise 14; the loss is that of the answers.
# The old thing is code: 2,048 tokens that were held out when `tiny` was trained.

# %%
chat = judging.load(lesson.COURSE / "solutions/ex14.py")
pairs = []
for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
    for talk in conversations(f"stdlib/{path.name}", path.read_bytes()):
        turns = [(t["role"], t["content"]) for t in talk if t["role"] != "system"]
        pairs.append(chat.shifted(*chat.render(turns[:2], encode), LENGTH))
random.Random(0).shuffle(pairs)
pairs = torch.tensor(pairs)  # (conversations, 2, LENGTH): inputs, targets
held = pairs[:64]
taught = pairs[64:].split(ROWS)
code, following, _ = next(data.val_batches(loaded.data, 4, 4))


def nats(model: GPT, some: Tensor) -> Tensor:
    inputs, targets = some.unbind(1)
    return model(inputs, targets, reduction="none").sum() / (targets != chat.IGNORED).sum()


def tune(model: GPT, rate: float) -> None:
    """Train what asks for gradients."""
    weights = [w for w in model.parameters() if w.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=rate)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 5) * (1 - step / STEPS)
        optimizer.zero_grad()
        nats(model, taught[step]).backward()
        optimizer.step()


@torch.no_grad()
def measured(model: GPT) -> tuple[float, float]:
    return nats(model, held).item(), model(code, following).item()


rows = [("before", 0, 0, *measured(base))]
for rank, rate in RATES.items():
    torch.manual_seed(0)
    model = copy.deepcopy(base)
    if rank:
        adapt(model, rank)
    name = f"rank {rank}" if rank else "all weights"
    tune(model, rate)
    changed = {n: w for n, w in model.named_parameters() if w.requires_grad}
    numbers = sum(w.numel() for w in changed.values())
    file = io.BytesIO()
    torch.save(changed, file)
    rows.append((name, numbers, file.tell() // 1000, *measured(model)))
    if rank == 4:
        adapted = model
columns = ["trained", "numbers", "file, kB", "answers", "code"]
lesson.table(columns, rows, f"after {STEPS} steps: mean loss in nats, held out")
_, numbers, _, new, old = zip(*rows)
gained = [(new[0] - loss) / (new[0] - new[4]) for loss in new]  # compared with all weights
lesson.holds(gained[1] > 0.75, "with 0.3% of the numbers, 3/4 of the gain of all weights")
lesson.holds(gained[3] > 0.93, "with 5% of them, over 93% of it")
lesson.holds(min(old[1:]) > old[0] + 0.15, "each forgets: code costs at least 0.15 nats more")
alike = old[3] - old[0] > 0.6 * (old[4] - old[0])
lesson.holds(alike, "rank 16 forgets over 60% of what all weights forget")

# %% [markdown]
# ## What is kept
# The last column may surprise: the old weights are all still there, and yet the model forgets. A
# change that is small in *numbers* need not be small in what it does. Where it learns as much as
# all weights do, it forgets about as much. What helps against forgetting is to stop early, or to
# mix old text into the new.
#
# What LoRA keeps is the way back. The change is a file of its own: without it, the old model is
# here again, to the bit, and for another task one loads another file. Or it is added to the weights
# for good, which is called **merging**. The merged model has the old one's shape and speed, and no
# program can tell how it was trained.

# %%
before = adapted(code)
for module in [*adapted.modules()]:
    if parametrize.is_parametrized(module):
        parametrize.remove_parametrizations(module, "weight")  # what it computes becomes the weight
same = [*adapted.state_dict()] == [*base.state_dict()]
far = (adapted(code) - before).abs().max().item()
lesson.holds(same and far < 1e-4, "merged, rank 4 has the old model's shape and the same scores")

# %%
fig = lesson.figure(8, 3.2)
axes = fig.subplots(1, 2)
for axis, losses, title in zip(axes, (new, old), ("the new: answers, nats", "the old: code, nats")):
    axis.plot(numbers[1:], losses[1:], "o-")
    for row, loss in zip(rows[1:], losses[1:]):
        axis.annotate(row[0], (row[1], loss), (0, 7), textcoords="offset points", ha="center")
    axis.axhline(losses[0], color="black", linestyle="--", label="before")
    axis.set(xscale="log", xlim=(8e3, 3e7), ylim=(0, 7), title=title, xlabel="numbers trained")
    axis.legend()
axis.set_ylim(2, 4)
lesson.save(fig, "16_lora")

# %% [markdown]
# ## Trap
# Whoever compares ranks at one learning rate compares learning rates. The best one falls as the
# rank grows: at 0.02, a good rate for rank 1, rank 16 learned less than rank 1 and forgot most of
# its code (two seeds, not shown). The scale is part of this. The paper writes it as alpha / r,
# programs differ in what they make of it, and a file of A and B without its scale is worth nothing.
#
# ## Exercise
# `exercises/ex16.py`: a layer with such a change, to be put in the place of another, merged and
# taken apart again. `python course/check.py 16`
