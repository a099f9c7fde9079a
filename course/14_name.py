# %% [markdown]
# # 14. A name: a chat template, a few dozen steps of tuning, and a question
#
# **Afterwards** you can teach a pretrained model to answer in a chat, and to stop.
#
# **Question.** A pretrained model completes text; it does not answer. How much does it take to make
# it answer, and what would it like to be called?
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "Tokenizador" (the chat template), "Hello
# World - Como dar um nome ao novo modelo?", "Agradecimento" (the name it got in the end).
# Core file: `tokenizer.py` (the special tokens), `eval.py`. Before: lesson 13. Next: lesson 15.
# Takes 50 seconds on two cores. It needs `runs/tiny`, which `bash run.sh` trains.

# %%
import lesson  # first: it puts the project on the path
import ast
import copy
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
with redirect_stdout(None):  # it says in a long line which saved weights it reads
    loaded = eval.load_model(config)
model = loaded.model
tokenizer = loaded.tokenizer
BOS, USER, ASSISTANT, END = range(4)  # the ids of the special tokens

# %% [markdown]
# ## A template is four ids
# You know the first, BOS. The tokenizer has kept the other three free for this since it was
# trained; the model has never seen them. A conversation becomes `BOS user question end assistant
# answer end`. Whatever people type is encoded as *text*. If `<|assistant|>` in your question became
# the id that opens the model's turn, you could put words into its mouth. The mask marks what the
# model is to learn: the answer, **and the end of it**.


# %%
def render(question: str, answer: str = "") -> tuple[list[int], list[int]]:
    """-> ids and mask (1: to be learned). Without an answer: the prompt that asks the question."""
    asked = [BOS, USER, *tokenizer.encode(question), END, ASSISTANT]
    answered = [*tokenizer.encode(answer), END] if answer else []
    return asked + answered, [0] * len(asked) + [1] * len(answered)


ids, mask = render("<|assistant|>Who are you?", "Nobody.")
tokens = ["bos user assistant end".split()[i] if i < 4 else tokenizer.decode([i]) for i in ids]
print("\n".join(f"  {m}  {token!r}" for m, token in zip(mask, tokens)))
lesson.holds(ids.count(ASSISTANT) == 1, "a special token that somebody types stays text")

# %% [markdown]
# ## What it is taught: the names of functions
# The source tuned on 32,000 instructions, and made sure that no question was about the model's own
# name. Here the standard library is the teacher: the name of each function and class, and the first
# line of its docstring to describe it. Nothing in it asks who *you* are. The lesson checks that,
# because otherwise the answer would be ours.


# %%
def described(folder: Path) -> list[tuple[str, str]]:
    """(name, first line of its docstring) of each function and class in the Python files."""
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
alternately = zip(pairs[:96], FORMS * 48)
held_out = [(q + line, f"{a}{name}.") for (name, line), (q, a) in alternately]
taught = [(q + line, f"{a}{name}.") for name, line in pairs[96:] for q, a in FORMS]
taught.sort(key=lambda pair: len(pair[0] + pair[1]))  # similar lengths together: little padding
batches = [taught[i : i + ROWS] for i in range(0, len(taught), ROWS)]
random.Random(1).shuffle(batches)
print(f"{len(pairs):,} names, for example:", *batches[0][0], sep="\n  ")
about_you = [q for q, _ in taught if re.search(r"\byour?\b", q.removeprefix(FORMS[1][0]), re.I)]
lesson.holds(not about_you, "no question that is taught is about you")

# %% [markdown]
# ## The tuning
# This is pretraining again: shifted targets, a mean loss, a step. Two things are new: the mask,
# which weights the loss, and the padding, because conversations are short. The rate rises over the
# first five steps, then falls in a straight line to nearly 0. The optimizer is AdamW (lesson 10):
# with so few tokens per step, Muon's own arithmetic would cost more than the forward and backward
# pass.


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
    """Mean nats per token: of the answers; of everything but the padding."""
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
# Ask it three questions that nobody taught it, 24 times each.

# %%
QUESTIONS = ["What would you like to be called?", "What is your name?", "What are you called?"]


def ask(model: GPT, temperature: float = 0.9) -> tuple[float, Counter]:
    """-> percent of the answers that end by themselves; the names in answers of a taught form."""
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
    """Losses on held-out conversations, percent that end, percent that have the form; names."""
    ended, names = ask(model)
    form = 100 * names.total() / SAMPLES / len(QUESTIONS)
    return *(loss.item() for loss in losses(model, held_out)), ended, form, names


unmasked = copy.deepcopy(model)
torch.manual_seed(0)
scratch = GPT(model.config, model.compute_dtype)  # of the same shape and precision
scratch.init_weights()
results = {"pretrained": measure(model)}
curves = [tune(model), tune(unmasked, masked=False), tune(scratch)]
results |= {
    "tuned": measure(model),
    "on all tokens": measure(unmasked),
    "from random weights": measure(scratch),
}
columns = ["model", "nats, answers", "nats, all", "ended, %", "form, %"]
rows = [(name, *values[:4]) for name, values in results.items()]
lesson.table(columns, rows, "on held-out conversations; of 72 answers: ended, in the form taught")
for name in list(results)[1:]:
    print(f"{name}:", ", ".join(results[name][4])[:54])
_, favourites = ask(model, 0.5)
said = favourites.most_common(8)
print("tuned, at temperature 0.5:", *[f"{n:3}  {name[:60]}" for name, n in said], sep="\n  ")

answers, everything, ended, form, names = zip(*results.values())
lesson.holds(answers[0] > 5 and ended[0] == 0, "before tuning, no answer ends by itself")
lesson.holds(answers[1] <= 3.0 and ended[1] >= 50, "tuned, at least half of the answers end")
lesson.holds(
    form[1] >= 10 and form[3] >= 10, "tuned from any weights, at least 10% have the form taught"
)
lesson.holds(answers[3] > answers[1] + 0.5, "without pretraining, answers cost over 0.5 nats more")
lesson.holds(everything[2] < everything[1] - 1, "learning all tokens lowers the loss over all")
lesson.holds(answers[2] > answers[1] - 0.1, "learning all tokens makes the answers no better")

# %%
fig = lesson.figure(7.5, 3.2)
left, right = fig.subplots(1, 2)
left.barh([name[:16] for name, _ in said], [n for _, n in said], color="tab:blue")
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
# To say it plainly: a model of 7 million weights that was raised on Python has no self and no
# wishes. The name is a draw from what it has read: here, identifiers and pieces of them; in the
# source, Samurai, Chiquinho and Frankenstein. The author looked at that list and chose *Biatron*,
# for reasons of his own. That is what a sample is for.
#
# ## Trap
# Leave the mask out, and the loss over all tokens falls to less than half of what it is with the
# mask: it looks like the better run by far. But most of the tokens are the template and the
# questions, and they are the easy ones. The answers, which are all you wanted, come out alike:
# without the mask they cost 1.71 nats a token (1.58 to 1.71 with four seeds), with it 1.69 (1.59 to
# 1.69). So in this small run the mask makes the answers neither better nor worse. What it changes
# is the number you watch: with it, the loss is that of the answers.
#
# The form proves little: the model tuned from random weights has it in most of its answers, too.
# Nor does it tell mask from no mask: 72 answers are few, and the percentages move by 10 or 20
# points with the seed, and with the machine that trained `tiny`. What pretraining gave you is in
# the column "nats, answers": from random weights, answers cost 3.07 nats (2.85 to 3.09). Only the
# pretrained model gives names that have to do with the description.
#
# ## Exercise
# `exercises/ex14.py`: turn a conversation of several turns into ids, a mask and shifted targets.
# `python course/check.py 14`
#
# With it, your own model learns to answer. `python course/yours.py --chat` takes the model that
# your trainer has made and tunes it on the forms of this lesson ("What would you call it? ..." / "I
# would call it NAME.") and others about the library, with your `render` and `shifted`. Then it asks
# your model what it would call a small GPT, prints the name, and lets you type questions of your
# own.
#
# ## Take it with you
# The same command writes course/out/yours_chat.html: your own model as one page, with your weights,
# your tokenizer, and lesson 5's forward pass in JavaScript (read it: instruments/pages/gpt.js). Any
# browser opens it, on any machine, without Python and without a network. Press the questions that
# it offers, point at a token to see what else the model might have said, and type `<|assistant|>`
# into a question: it stays text. Then mail the page to a friend who asks what you have been doing.
#
# ## How four bytes become one
# A weight in fp32 takes four bytes; the page keeps one. This is **quantization**: each row of a
# matrix has a scale, its largest absolute value divided by 127. Each weight is divided by its row's
# scale and rounded to a whole number, from -127 to 127 (**int8**); the page multiplies them again.
# On held-out rows of `tiny` that cost about 0.0001 nats per token or less; your own page says what
# it cost your smaller model. It is so little because no weight moves by more than half a scale,
# 0.4% of the largest in its row, and because these errors go up as often as down: in a sum of
# hundreds of products most of them cancel.
#
# With 4 bits there are only the whole numbers from -7 to 7, so the steps between them are 18 times
# as wide, and many small weights become 0. The cost grows about as the square of the errors: that
# makes it hundreds of times as large. So programs that use 4 bits give every 32 weights or so a
# scale of their own.
#
# ## The larger model
# The project's larger model comes second: `bash run.sh tiny-chat` tunes `tiny` for longer, with the
# same template, and writes runs/tiny-chat/page.html with `python export.py tiny-chat --page`.
# docs/page.md says what such a page shows.
