# %% [markdown]
# # 13. Bits per byte: comparing models that read different tokens
#
# **Afterwards** you can turn any loss into bits per byte or a perplexity, and say why you must not
# compare losses per token when the tokens differ.
#
# **Question.** One model reads bytes and has a loss of 2.5; another reads tokens and has 4.9. Which
# one predicts the text better?
#
# Source: Gao et al., The Pile (2020), section 3.1. Core file: `bits_per_byte.py`.
# Before: lesson 12. Next: lesson 14. Takes 10 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import math
from collections import Counter

import numpy as np
import torch

from bits_per_byte import loss_and_bpb, sums_of
from tokenizer import Tokenizer

lesson.begin(13, "bits per byte")

# %% [markdown]
# ## One text, four tokenizers, one kind of model
# Lesson 1 measured bytes: -log2 p for each byte, and the mean over all of them. PyTorch's
# `cross_entropy` takes the natural logarithm instead, so its unit is the nat (lesson 3): 1 nat is
# 1 / ln 2 = 1.44 bits. And a model that reads tokens (lesson 9) predicts tokens, so it reports
# **nats per token**.
#
# Here are four tokenizers for the same text. The first has no merges, so each of its tokens is one
# byte (like the others, it also has 4 special tokens); the last has 8,192 tokens. For each of them
# we build lesson 1's simple model: count in the training text which token follows which. (With one
# refinement, because many pairs are rare: to the counts after a token we add 100, shared out among
# all tokens as they are in the whole text.) Then all four models take the same exam, 64 held-out
# pieces of 1,024 bytes. Each piece begins with BOS, the token that begins a document (lesson 11).

# %%
BOS = 0
training, held = lesson.exam()
training = bytes(training.tolist()).decode(errors="ignore")
held = bytes(held[1:].tolist())
documents = [training[i : i + 1024] for i in range(0, len(training), 1024)]
pieces = [held[i : i + 1024].decode(errors="ignore") for i in range(0, len(held), 1024)]


def losses(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """-> of each target of the held-out text: its loss in nats, its token."""
    learned, asked = (
        [token for text in texts for token in (BOS, *tokenizer.encode(text))]
        for texts in (documents, pieces)
    )
    single = Counter(learned)
    first = Counter(learned[:-1])  # of a pair
    pairs = Counter(zip(learned, learned[1:]))
    nats = []
    for a, b in zip(asked, asked[1:]):
        alone = (single[b] + 0.1) / (len(learned) + 0.1 * tokenizer.vocab_size)
        p = (pairs[a, b] + 100 * alone) / (first[a] + 100)
        nats.append(-math.log(p))
    return np.array(nats), np.array(asked[1:])


VOCABULARIES = (260, 512, 2048, 8192)
exams = {}
rows = []
for V in VOCABULARIES:
    tokenizer = Tokenizer.train(documents, V)
    nats, targets = losses(tokenizer)
    sizes = tokenizer.token_bytes[targets]  # the bytes that each target stands for; BOS: 0
    bits = nats[sizes > 0].sum() / math.log(2)  # of the whole text
    exams[V] = nats, targets, sizes
    rows.append((V, len(nats), sizes.sum(), nats.mean(), bits / 8, bits / sizes.sum()))
columns = "vocabulary|targets|bytes|nats per token|whole text, bytes|bits per byte".split("|")
lesson.table(columns, rows, "the same text, guessed token by token")
_, _, asked, per_token, _, per_byte = map(np.array, zip(*rows))
lesson.holds(len({*asked}) == 1, "whatever the tokens, they stand for the same number of bytes")
lesson.holds(all(np.diff(per_token) > 0.5), "with more tokens, the loss per token always rises")
lesson.holds(
    per_byte[0] > per_byte[1] + 0.5 and per_byte[1] > per_byte[2] + 0.1,
    "yet up to 2,048 tokens, bits per byte fall: the model predicts better",
)
lesson.holds(per_byte[3] > per_byte[2], "with 8,192 tokens they rise: pairs become too rare")

# %% [markdown]
# By nats per token, the byte model seems to be the best. But it answers three times as many
# questions as the model of 2,048 tokens, and easier ones: it guesses one byte at a time, where the
# other must guess several at once. What you can compare is the **whole text**. Its probability is
# the product of the probabilities of its tokens, so its loss is the *sum* of their losses. (In
# bits, divided by 8, that is the size in bytes to which the model could compress the text: the
# fifth column.) All four models are asked about the same text, so divide each sum by the same
# number, the bytes of that text:
#
#     bits per byte = sum of nats / ln 2 / sum of bytes
#                   = nats per token / ln 2 * tokens / bytes
#
# Now the question at the top: 2.5 nats per byte are 2.5 / ln 2 = 3.6 bits per byte. And 4.9 nats
# per token are 7.1 bits per token; if its tokens have 2.9 bytes on average, as those of the third
# model have, that is 7.1 / 2.9 = 2.4 bits per byte. The model of tokens predicts the text better.
#
# Use bytes, not characters: "é" is one character and two bytes, and a tokenizer may cut between
# them. And keep to one text: bits per byte on Python and on novels do not compare.
#
# ## Perplexity
# Papers often report **perplexity**: e^(nats per token), which is the same as 2^(bits per token).
# Read it as a number of choices: a model that finds k tokens equally likely gives each of them 1/k,
# so its loss is ln k and its perplexity is k. Of our two models, one is as unsure as if it had to
# choose among e^2.5 = 12 bytes, the other as if among e^4.9 = 134 tokens. But for three bytes,
# about one token, the first must choose three times, among 12 x 12 x 12 = 1,728 strings. The model
# with the larger perplexity is the better one here. **Two perplexities compare only if the
# tokenizer is the same, and the text too.**
#
# ## Targets that are not text
# After the last token of a piece, the model is asked for BOS: "does the text end here?" That is a
# question about how we cut the text, not about the text. So in `bits_per_byte.py`, `token_bytes`
# has 0 bytes for each special token, `sums_of` leaves the loss of such a target out of its
# `text_nats`, and `loss_and_bpb` divides those by the bytes:

# %%
rows = []
for V, (nats, targets, sizes) in exams.items():
    of_vocabulary = torch.zeros(V, dtype=torch.long)
    of_vocabulary[targets] = torch.from_numpy(sizes).long()
    sums = sums_of(torch.from_numpy(nats)[None], torch.from_numpy(targets)[None], of_vocabulary)
    _, project = loss_and_bpb(**{name: x.item() for name, x in sums.items()})
    with_bos = nats.sum() / math.log(2) / sizes.sum()
    text = sizes > 0
    ratios = nats[text] / math.log(2) / sizes[text]
    rows.append((V, project, with_bos, ratios.mean()))
columns = ["vocabulary", "bits_per_byte.py", "loss of BOS counts too", "mean of ratios"]
lesson.table(columns, rows, "bits per byte, right and wrong")
_, project, with_bos, ratios = map(np.array, zip(*rows))
lesson.holds(abs(project - per_byte).max() < 1e-4, "bits_per_byte.py measures the same")
lesson.holds(all(with_bos > project + 0.005), "the loss of 63 BOS alone adds over 0.005 bits")
lesson.holds(min(ratios[1:]) > ratios[0], "the mean of the ratios puts the byte model first")

# %%
fig = lesson.figure(8, 3)
left, right = fig.subplots(1, 2)
left.plot(VOCABULARIES, per_token, "o-", color="silver")
left.set(ylabel="nats per token", title="misleads")
right.plot(VOCABULARIES, per_byte, "o-", color="crimson")
right.set(ylabel="bits per byte", title="compares")
for ax in (left, right):
    ax.set(xlabel="tokens in the vocabulary", xscale="log", ymargin=0.2, ylim=(0, None))
    ax.set_xticks(VOCABULARIES, VOCABULARIES)
    ax.minorticks_off()
lesson.save(fig, "13_bits")

# %% [markdown]
# ## Trap
# The last column takes the bits of each token, divides them by that token's bytes, and takes the
# mean. It sounds like the same thing, yet it ranks the models the other way round: a hard token of
# one byte weighs as much as an easy one of ten. Add up first, divide last. The same goes for
# batches and for files: keep both sums, not their ratio.
#
# ## Exercise
# `exercises/ex13.py`: the bits per byte of a text, whatever its tokens. Your trainer uses it for
# its exam. `python course/check.py 13`
