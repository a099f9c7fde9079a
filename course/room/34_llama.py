# %% [markdown]
# # 34. A Llama: is what I wrote the real thing?
#
# **Afterwards** you can write the model that most open weights are made for, prove that yours is
# right, and run those weights in it.
#
# **Question.** Your trainer's GPT has 213,120 weights and writes nonsense. Is it the same thing as
# the models that people download, only smaller?
#
# Source: H. Touvron et al., LLaMA: open and efficient foundation language models (2023); N.
# Shazeer, GLU variants improve transformer (2020); J. Ainslie et al., GQA (2023). Core files:
# `model.py`, `hf/mapping.py`. Before: lesson 16. Next: a lab, or the reading room. Takes 10 seconds
# on two cores, without the download.

# %%
import importlib.util
import json
import random
import urllib.request
from pathlib import Path

import lesson
import judging
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from config import GPTConfig
from hf.mapping import config_json, to_huggingface
from model import GPT

torch.set_num_threads(1)
lesson.begin(34, "a Llama")

# %% [markdown]
# ## Your functions
# A Llama needs attention (exercise 4), rotated positions (8), a way to write (6), and something
# that joins them: this lesson's exercise. The lesson runs those of your functions that `check.py`
# accepts, and the reference in place of the others. Come back when all four are yours.


# %%
def part(number: int, name: str):
    mine = lesson.COURSE / f"exercises/ex{number:02d}.py"
    yours = judging.apart(mine, judging.examine) is None
    print(f"  {name}: {'yours' if yours else 'the reference'}")
    return getattr(judging.load(mine if yours else lesson.COURSE / "solutions" / mine.name), name)


attention = part(4, "scaled_dot_product_attention")
generate = part(6, "generate")
rotate = part(8, "rotate")
llama = part(34, "llama")

# %% [markdown]
# ## What is different
# The block is lesson 5's: attention and an MLP each read a stream through a norm, and add what they
# find to it. A Llama does five things differently:
#
# | | lesson 5 | Llama | why |
# | --- | --- | --- | --- |
# | norm | divides by the size | then multiplies by a learned weight per channel | costs nothing |
# | MLP | `down(relu(up(x))^2)` | SwiGLU: `down(silu(gate(x)) * up(x))` | lower loss per FLOP |
# | keys, values | as many heads as queries | fewer; neighboring queries share one | smaller cache |
# | positions | `rotate`, base 100 | the same, base theta: 10,000 and more | longer texts |
# | head | a matrix | in small models, the embedding itself | saves a large table |
#
# (`silu(y)` is y times sigmoid(y): about 0 for negative numbers, about y for positive ones. A model
# that writes keeps the keys and values of all it has read in a cache, so fewer heads make it
# smaller: lesson 24.) [What has changed since GPT-2](../since_gpt2.md) goes on from this table.
#
# ## Parity
# A model that runs and writes can still be wrong. What counts is **parity**: give it the weights
# and the input of a program that is known to be right, and it gives the same logits. Random weights
# will do, and are even better: none of them is 0 or 1 by accident. Here are two such programs: the
# project's own `model.py`, with the options that make it a Llama, and the library transformers,
# whose LlamaForCausalLM is what everybody means by the word. The project's norms have no weights,
# so yours get random ones only for the second comparison.

# %%
torch.manual_seed(0)
config = GPTConfig(
    vocab_size=256,
    n_layer=3,
    n_head=4,
    n_kv_head=2,
    head_dim=16,
    n_embd=64,
    mlp_hidden=176,
    mlp="swiglu",
    qk_norm=False,
    embed_norm=False,
    logit_softcap=0.0,
    rope_theta=10_000.0,
)
ours = GPT(config).requires_grad_(False)
for weight in ours.parameters():
    weight.normal_(0, weight.size(1) ** -0.5)
weights = to_huggingface(ours)  # the same numbers under the names of a Llama
ids = torch.randint(256, (4, 64))
how = (4, 2, 10_000.0, 1e-6, attention, rotate)
far = float((llama(ids, weights, *how) - ours(ids)).abs().max())
lesson.holds(far < 1e-4, f"parity with model.py: the logits differ by {far:.0e} at most")
for name in weights:
    if "norm" in name:
        weights[name].uniform_(0.5, 2)
logits = llama(ids, weights, *how)
if importlib.util.find_spec("transformers"):
    from transformers import LlamaConfig, LlamaForCausalLM

    stock = LlamaForCausalLM(LlamaConfig(**config_json(config, "Llama"))).requires_grad_(False)
    stock.load_state_dict(weights)
    far = float((logits - stock(ids).logits).abs().max())
    lesson.holds(far < 1e-4, f"parity with transformers: by {far:.0e} at most")
else:
    print("not compared with transformers, which is not installed (requirements-eval.txt)")

# %% [markdown]
# ## What each difference does
# Now leave one out, or do it the way that first comes to mind. Nothing crashes, and all shapes fit.
# The error is the root mean square of how far the logits are off, compared with their own size.

# %%
wrong = judging.load(lesson.COURSE / "solutions/ex34.py").WRONG
changes = {"eps 1e-5, not 1e-6": llama(ids, weights, 4, 2, 10_000.0, 1e-5, attention, rotate)}
for name in (
    "norms without their weights",
    "relu squared, no gate",
    "key heads dealt out in turn",
    "pairs of neighbours",
):
    changes[name] = wrong[name]["llama"](ids, weights, *how)
rows = []
for name, other in changes.items():
    error = float((other - logits).square().mean().sqrt() / logits.std())
    same = float((other.argmax(-1) == logits.argmax(-1)).float().mean())
    rows.append((name, error, 100 * same))
columns = ["changed", "error / size", "same likeliest token, %"]
lesson.table(columns, rows, "a Llama with one thing changed, random weights")
_, errors, _ = zip(*rows)
lesson.holds(
    min(errors[1:]) > 0.1, "each of the four moves the logits by over a tenth of their size"
)
lesson.holds(errors[0] < 0.01, "another eps does not: not every difference matters")

# %% [markdown]
# The last two are the treacherous ones. "Dealt out in turn" gives the query heads 0, 1, 2, 3 the
# key heads 0, 1, 0, 1 instead of 0, 0, 1, 1. "Pairs of neighbours" rotates the channels 2i and
# 2i + 1 together instead of i and i + D/2. Meta's own files and llama.cpp do pair neighbors, so a
# converter has to reorder the rows of q and k.
#
# ## It speaks
# SmolLM2-135M is a Llama: 30 layers of width 576, 9 query heads and 3 key heads, the embedding as
# the head, and two trillion tokens of training behind it. Its three files (270 MB) come from the
# Hugging Face Hub, unless an earlier run has left them here. You need not set up anything. Without
# a network the lesson says so and goes on (HF_HUB_OFFLINE=1 keeps it from asking). Nothing is
# translated: the names in the file go straight into your function.


# %%
def smollm2() -> Path | None:
    """The folder of its files; None if they are not here and cannot be fetched."""
    from huggingface_hub import constants, hf_hub_download

    local = constants.HF_HUB_OFFLINE
    try:
        if not local:
            urllib.request.urlopen(constants.ENDPOINT, timeout=3).close()
    except OSError:
        local = True  # or the Hub's library would keep trying for half a minute
    try:
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            file = hf_hub_download("HuggingFaceTB/SmolLM2-135M", name, local_files_only=local)
    except OSError as error:
        print(f"SmolLM2-135M is not here, and cannot be fetched ({type(error).__name__})")
        return None
    return Path(file).parent


folder = smollm2()
if folder:
    sizes = json.loads((folder / "config.json").read_text())
    its = {name: w.float() for name, w in load_file(folder / "model.safetensors").items()}
    names = ("num_attention_heads", "num_key_value_heads", "rope_theta", "rms_norm_eps")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def scores(tokens: list[int]):
        asked = torch.tensor([tokens])
        return llama(asked, its, *(sizes[n] for n in names), attention, rotate)[0].double().numpy()

    for prompt in ("The capital of France is", "Once upon a time, a robot"):
        new = generate(scores, tokenizer.encode(prompt).ids, 24, 512, 0.0, 1.0, random.Random(0))
        print(" ", (prompt + tokenizer.decode(new)).replace("\n", " ")[:78])

# %%
fig = lesson.figure(7.5, 2.6)
axes = fig.subplots()
axes.barh([row[0] for row in rows], errors, color="crimson")
axes.set(xscale="log", xlabel="one thing changed: error of the logits / their size")
lesson.save(fig, "34_llama")

# %% [markdown]
# ## Trap
# "It writes English, so it is right." With a wrong eps, a wrong base, or a wrong rule for long
# texts it still writes English, for a while. Only parity on many positions finds such a fault. And
# parity on special weights can miss one: with norm weights of 1, nobody sees that you forgot them.
#
# ## Exercise
# `exercises/ex34.py`: the Llama itself. Then run this lesson again, and hear what your own lines
# say. `python course/check.py 34`
