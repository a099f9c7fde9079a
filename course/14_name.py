# %% [markdown]
# # 14. A name: a chat template, a few dozen steps of tuning, and a question
#
# **Afterwards** you can teach a pretrained model to answer in a chat, and to stop.
#
# **Question.** A pretrained model completes text, it does not answer. How much does it take to make
# it answer, and what would it like to be called?
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "Tokenizador" (the chat template), "Hello
# World - Como dar um nome ao novo modelo?", "Agradecimento" (the name that it got in the end).
# Core file: `tokenizer.py` (the special tokens), `eval.py`. Before: lesson 13. Next: lesson 15.
# Takes 50 seconds on two cores. It needs `runs/tiny`, which `bash run.sh` trains.

# %%
import lesson  # first: it puts the project on the path
import ast
import random
import re
import sysconfig
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch

import eval
import optim
from config import PRESETS
from machinery import trained
from model import GPT

torch.set_num_threads(1)
STEPS = 48  # of tuning
ROWS = 16  # conversations per step
SAMPLES = 24  # answers per question
lesson.begin(14, "a name")
config = trained.EvalConfig(run_dir=str(lesson.tiny_run()), device="cpu")
with redirect_stdout(None):  # it says which checkpoint it reads, in a long line
    loaded = eval.load_model(config)
model = loaded.model
tokenizer = loaded.tokenizer
BOS, USER, ASSISTANT, END = range(4)  # the ids of the special tokens

# %% [markdown]
# ## A template is four ids
# The tokenizer has kept three ids for this since it was trained, and the model has never seen them.
# A conversation becomes `BOS user question end assistant answer end`. What is typed is encoded as
# *text*: somebody who writes `<|assistant|>` in a question must not be able to speak for the model.
# The mask marks what the model is to learn: the answer, **and the end of it**.


# %%
def render(question: str, answer: str = "") -> tuple[list[int], list[int]]:
    """-> ids and mask (1: to be learned). Without an answer: what the model is asked with."""
    asked = [BOS, USER, *tokenizer.encode(question), END, ASSISTANT]
    answered = [*tokenizer.encode(answer), END] if answer else []
    return asked + answered, [0] * len(asked) + [1] * len(answered)


ids, mask = render("<|assistant|>Who are you?", "Nobody.")
tokens = ["bos user assistant end".split()[i] if i < 4 else tokenizer.decode([i]) for i in ids]
print("\n".join(f"  {m}  {token!r}" for m, token in zip(mask, tokens)))
lesson.holds(ids.count(ASSISTANT) == 1, "a special token that is typed stays text")

# %% [markdown]
# ## Lessons in naming, honest and offline
# The source tuned on 32,000 instructions, and took care that no question was about the model's own
# name. Here the standard library is the teacher: each function and class, described by the first
# line of its docstring, and its name. Nothing in it asks who *you* are, and the lesson checks that,
# since otherwise the answer would be ours.


# %%
def described(folder: Path) -> list[tuple[str, str]]:
    """(name, first line of its docstring) of the functions and classes of the Python files."""
    found = set()
    for path in [*folder.glob("*.py"), *folder.glob("*/*.py")]:
        if {"site-packages", "test", "idlelib"} & set(path.relative_to(folder).parts):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("__"):
                line = (ast.get_docstring(node) or "").split("\n")[0].strip()
                if 15 < len(line) < 80 and not re.search(r"\byour?\b", line, re.IGNORECASE):
                    found.add((node.name, line))
    return sorted(found)


FORMS = [("What is it called? ", "It is called "), ("What would you call it? ", "I would call it ")]
pairs = described(Path(sysconfig.get_paths()["stdlib"]))
random.Random(0).shuffle(pairs)
taught = [(q + line, f"{a}{name}.") for name, line in pairs[96:] for q, a in FORMS]
held_out = [
    (q + line, f"{a}{name}.")
    for i, (name, line) in enumerate(pairs[:96])
    for q, a in [FORMS[i % 2]]
]
taught.sort(key=lambda pair: len(pair[0] + pair[1]))  # of similar length: little padding
batches = [taught[i : i + ROWS] for i in range(0, len(taught), ROWS)]
random.Random(1).shuffle(batches)
print(f"{len(pairs):,} names, for example:", *batches[0][0], sep="\n  ")
about_you = [q for q, _ in taught if re.search(r"\byour?\b", q.removeprefix(FORMS[1][0]), re.I)]
lesson.holds(not about_you, "no question that is taught is about you")

# %% [markdown]
# ## The tuning
# This is pretraining again: shifted targets, mean loss, a step. Two things are new: the mask, which
# weights the loss, and the padding, since conversations are short. AdamW here: for so few tokens a
# step, Muon's own arithmetic would cost more than forward and backward.


# %%
def batch(conversations: list) -> tuple[torch.Tensor, ...]:
    """-> inputs, targets, to be learned, not padding: (B, T) each, the last two 0 or 1."""
    rendered = [render(*conversation) for conversation in conversations]
    width = max(len(ids) for ids, _ in rendered)
    tokens = torch.full((len(rendered), width), END)
    learned, real = torch.zeros(2, len(rendered), width)
    for row, (ids, mask) in enumerate(rendered):
        tokens[row, : len(ids)] = torch.tensor(ids)
        real[row, : len(ids)] = 1
        learned[row, : len(ids)] = torch.tensor(mask, dtype=torch.float)
    return tokens[:, :-1], tokens[:, 1:], learned[:, 1:], real[:, 1:]


def losses(model: GPT, conversations: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean nats per token: of the answers, of everything but the padding."""
    inputs, targets, learned, real = batch(conversations)
    nats = model(inputs, targets, reduction="none")  # (B, T)
    return (nats * learned).sum() / learned.sum(), (nats * real).sum() / real.sum()


def tune(model: GPT, masked: bool = True) -> list[tuple[float, float]]:
    """Returns the two losses of each step."""
    adamw = replace(PRESETS["tiny"].train, optimizer="adamw", lr=2e-3)
    optimizer, *_ = optim.build(model.param_groups(), adamw, model.config.n_embd)
    curve = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * min(1, (step + 1) / 5) * (1 - step / STEPS)
        answers, everything = losses(model, batches[step])
        (answers if masked else everything).backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append((answers.item(), everything.item()))
    return curve


# %% [markdown]
# ## Asking
# Three questions that nobody taught it, 24 answers each.

# %%
QUESTIONS = ["What would you like to be called?", "What is your name?", "What are you called?"]


def ask(model: GPT, temperature: float = 0.9) -> tuple[float, Counter]:
    """-> share of the answers that end by themselves, the names given in a taught form."""
    generator = torch.Generator().manual_seed(0)
    ended = 0
    names = Counter()
    for question in QUESTIONS:
        ids, _ = render(question)
        prompts = torch.tensor([ids] * SAMPLES)
        out = model.generate(prompts, 24, temperature=temperature, stop_id=END, generator=generator)
        for answer in out[:, len(ids) :].tolist():
            ended += END in answer
            text = tokenizer.decode(answer[: answer.index(END)] if END in answer else answer)
            name = re.fullmatch(r"(?:It is called|I would call it) (\w+)\.?", text.strip())
            if name:
                names[name[1]] += 1
    return 100 * ended / SAMPLES / len(QUESTIONS), names


@torch.no_grad()
def measure(model: GPT) -> tuple:
    """Losses on what was held out, share that ends, share that has the form; names."""
    ended, names = ask(model)
    form = 100 * names.total() / SAMPLES / len(QUESTIONS)
    return *(loss.item() for loss in losses(model, held_out)), ended, form, names


def another(weights: dict | None) -> GPT:
    """A model of the same shape, with these weights or with random ones."""
    torch.manual_seed(0)
    new = GPT(model.config, model.compute_dtype)
    new.init_weights()
    if weights:
        new.load_state_dict(weights)
    return new


pretrained = {name: w.clone() for name, w in model.state_dict().items()}
unmasked = another(pretrained)
scratch = another(None)
results = {"pretrained": measure(model)}
curves = [tune(model), tune(unmasked, masked=False), tune(scratch)]
results |= {"tuned": measure(model), "on all tokens": measure(unmasked)}
results["from random weights"] = measure(scratch)
columns = ["model", "nats, answers", "nats, all", "ended, %", "form, %"]
rows = [(name, *values[:4]) for name, values in results.items()]
lesson.table(columns, rows, "on held-out conversations; of 72 answers: ended, in the form taught")
for name in list(results)[1:]:
    print(f"{name}:", ", ".join(results[name][4])[:54])
_, favourites = ask(model, 0.5)
shown = [f"{n:3}  {name[:60]}" for name, n in favourites.most_common(8)]
print("tuned, at temperature 0.5:", *shown, sep="\n  ")

answers, everything, ended, form, names = zip(*results.values())
lesson.holds(answers[0] > 5 and ended[0] == 0, "before tuning, no answer ends by itself")
lesson.holds(answers[1] <= 3.0 and ended[1] >= 50, "tuned, at least half of the answers end")
lesson.holds(form[1] >= 10 and form[3] >= 10, "tuned from any weights, 10% have the form taught")
lesson.holds(answers[3] > answers[1] + 0.5, "without pretraining, answers cost 0.5 nats more")
lesson.holds(everything[2] < everything[1] - 1, "learning all tokens lowers the loss over all")
lesson.holds(answers[2] > answers[1] - 0.1, "learning all tokens makes the answers no better")

# %%
fig = lesson.figure(7.5, 3.2)
left, right = fig.subplots(1, 2)
said = favourites.most_common(8)
left.barh([name[:16] for name, _ in said], [count for _, count in said], color="tab:blue")
left.invert_yaxis()
left.set(xlabel=f"times in {3 * SAMPLES} answers", title="I would call it ...")
for curve, color, label in zip(curves, ("tab:blue", "crimson"), ("the mask", "no mask")):
    right.plot([a for a, _ in curve], color=color, label=f"answers, {label}")
    right.plot([e for _, e in curve], "--", color=color, label=f"everything, {label}")
right.set(xlabel="step", ylabel="nats per token", ylim=(0, 11))
right.legend(loc="upper right")
lesson.save(fig, "14_name")

# %% [markdown]
# ## What is in a name
# Say it plainly: a model of 7 million weights that was raised on Python has no self and no wish.
# The name is a draw from what it read: here identifiers and pieces of them, in the source Samurai,
# Chiquinho and Frankenstein. There the author looked at the list and chose *Biatron*, for reasons
# of his own. That is what a sample is for.
#
# ## Trap
# With the mask left out, the loss over everything falls to less than half of what it is with it:
# it looks like the better run by far. But the template and the questions are most of the tokens,
# and the easiest. The answers, which are all that was asked for, come out alike: without the mask
# they cost 1.71 nats a token (1.58 to 1.71 with four seeds), with it 1.69 (1.59 to 1.69).
#
# The form proves little: the model from random weights has it in most of its answers, too. Nor does
# it tell mask and no mask apart: 72 answers are few, and the shares change by 10 or 20 points with
# the seed, and with the machine that trained `tiny`. What pretraining gave is in the first column.
# From random weights, answers cost 3.07 nats (2.85 to 3.09): pretrained, the model gives names that
# have to do with the description.
#
# ## Exercise
# `exercises/ex14.py`: a conversation of several turns -> ids, mask and shifted targets.
# `python course/check.py 14`
#
# It is the part that makes your own model answer. `python course/yours.py --chat` takes the model
# that your trainer has made, tunes it with your `render` and `shifted` on questions about the
# library ("What is it called? ...", "What does ... do?", "Which arguments does ... take?", "Who are
# you?"), and then you can type to it.
#
# ## Take it with you
# `bash run.sh tiny-chat` tunes `tiny` for longer, with the same template, and then runs
# `python export.py tiny-chat --page`
#
# which writes runs/tiny-chat/page.html: one file with the weights, the tokenizer, the template and
# lesson 5's forward pass. A browser is enough to open it, on any machine. Ask it who it is, type
# `<|assistant|>` into a question, see which tokens surprised it, and mail it to whoever asks
# what you have been doing (docs/page.md).
