# %% [markdown]
# # 9. The tokenizer: merges by hand, equal to the library's
#
# **Afterwards** you can train a tokenizer by hand, predict each of its merges, and say why two
# correct trainers give different ids for one text.
#
# **Question.** What exactly does a BPE trainer do, and how small a detail makes two of them differ?
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "Tokenizador". Core file: `tokenizer.py`.
# Before: lesson 8. Next: lesson 10. Takes 6 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import json
import sysconfig
import unicodedata
from collections import Counter
from pathlib import Path

import regex  # like `re`, with the classes of Unicode; tiktoken brings it
import tokenizers as lib

from tokenizer import SPECIAL_TOKENS, SPLIT, Tokenizer, byte_symbols

lesson.begin(9, "the tokenizer")

# %% [markdown]
# ## The whole algorithm
# A model reads numbers. So far these were bytes: the 64 positions of your GPT hold two lines of
# code, and it spends a step on each letter of `return`. Byte-pair encoding (BPE) gives frequent
# strings of bytes an **id** of their own, so that fewer numbers say the same. Such a string is a
# **token**; all of them are the **vocabulary**. A tokenizer is trained, before the model is:
#
# 1. Cut the text into words, each with the space before it. Write each word as bytes, whose ids are
#    0 to 255.
# 2. Count each pair of neighbours, within words only.
# 3. Give the most frequent pair the next free id, and replace it in every word: a **merge**. Repeat
#    from 2 until the vocabulary is as large as you want.
#
# To **encode** another text, do the same merges in the same order. To **decode** ids, join their
# bytes.
#
# In the code below, `merge` and `train` are the algorithm. Each distinct word is kept once, with
# its count. `choose` picks the most frequent pair, and decides between pairs that are equally
# frequent; remember it for later. A pattern (a regular expression) says what a word is. Special
# tokens, such as one for the end of a document, stand for no bytes.


# %%
def merge(ids: list[int], pair: tuple[int, int], new: int) -> list[int]:
    """[7, 7, 7], (7, 7), 9 -> [9, 7]: from the left, without overlap."""
    out = []
    for i in ids:
        if out and (out[-1], i) == pair:
            out[-1] = new
        else:
            out.append(i)
    return out


def smallest(counts: Counter) -> tuple[int, int]:
    return min(counts, key=lambda pair: (-counts[pair], pair))


class BPE:
    """Ids: the bytes in the order of `alphabet`, then one per merge. Methods as in minbpe, a small
    BPE by A. Karpathy."""

    def __init__(self, pattern: str | None = None, alphabet=range(256)):
        self.pattern = pattern
        self.alphabet = list(alphabet)
        self.merges = {}  # pair -> id
        self.special_tokens = {}  # token -> id
        self.vocab = {i: bytes([b]) for i, b in enumerate(self.alphabet)}

    def words(self, text: str) -> list[list[int]]:
        """Each word as the ids of its bytes; without a pattern the text is one long word."""
        words = regex.findall(self.pattern, text) if self.pattern else [text]
        return [[self.alphabet.index(byte) for byte in word.encode()] for word in words]

    def train(self, text: str, vocab_size: int, choose=smallest):
        words = Counter(map(tuple, self.words(text)))
        while len(self.vocab) < vocab_size:
            counts = Counter()
            for word, n in words.items():
                for pair in zip(word, word[1:]):
                    counts[pair] += n
            pair = choose(counts) if counts else None
            if counts[pair] < 2:
                break
            new = self.add(pair)
            words = {tuple(merge(w, pair, new)): n for w, n in words.items()}
        return self

    def add(self, pair: tuple[int, int]) -> int:
        self.merges[pair] = new = len(self.vocab)
        self.vocab[new] = self.vocab[pair[0]] + self.vocab[pair[1]]
        return new

    def encode_ordinary(self, text: str) -> list[int]:
        """In each word, the earliest merge that applies, until none does."""
        out = []
        for word in self.words(text):
            while pairs := [pair for pair in zip(word, word[1:]) if pair in self.merges]:
                pair = min(pairs, key=self.merges.get)
                word = merge(word, pair, self.merges[pair])
            out += word
        return out

    def register_special_tokens(self, special_tokens: dict[str, int]) -> None:
        self.special_tokens = special_tokens

    def encode(self, text: str, allowed_special: str = "none_raise") -> list[int]:
        """Special tokens in the text: "all" their ids, "none" plain text, else an error."""
        special = self.special_tokens if allowed_special != "none" else {}
        found = sorted((token for token in special if token in text), key=len, reverse=True)
        if found and allowed_special != "all":
            raise ValueError(f"the text has special tokens: {found}")
        parts = regex.split(f"({'|'.join(map(regex.escape, found))})", text) if found else [text]
        coded = ([special[p]] if p in special else self.encode_ordinary(p) for p in parts)
        return [i for part in coded for i in part]

    def decode(self, ids: list[int]) -> str:
        known = self.vocab | {i: token.encode() for token, i in self.special_tokens.items()}
        return b"".join(known[i] for i in ids).decode(errors="replace")

    def save(self, prefix: str) -> None:
        state = (self.pattern, self.alphabet, self.special_tokens, list(self.merges))
        Path(f"{prefix}.model").write_text(json.dumps(state))
        Path(f"{prefix}.vocab").write_text("\n".join(f"{i} {t}" for i, t in self.vocab.items()))

    def load(self, path: str) -> None:
        pattern, alphabet, special_tokens, pairs = json.loads(Path(path).read_text())
        self.__init__(pattern, alphabet)
        self.register_special_tokens(special_tokens)
        for pair in pairs:
            self.add(tuple(pair))


# %% [markdown]
# ## Five merges of one sentence
# Brackets show the tokens that are longer than a byte. A space counts as a byte like any other.

# %%
sentence = "other mothers bother their brothers"
rows = []
for n in range(5):
    bpe = BPE(SPLIT).train(sentence, 257 + n)
    pair = list(bpe.merges)[-1]
    ids = bpe.encode(sentence)
    tokens = (bpe.vocab[i].decode() for i in ids)
    shown = "".join(f"[{token}]" if len(token) > 1 else token for token in tokens)
    rows.append((256 + n, " + ".join(repr(bpe.vocab[i].decode()) for i in pair), len(ids), shown))
lesson.table(["id", "pair", "tokens", "the sentence now"], rows, f"{sentence!r}, five merges")
lesson.holds((len(sentence), len(ids)) == (35, 15), "five merges turn 35 bytes into 15 tokens")
lesson.holds(bpe.decode(ids) == sentence, "the tokens' bytes, joined, are the sentence")
bpe.register_special_tokens({"<|end|>": 300})
bpe.save(str(lesson.OUT / "09_bpe"))
loaded = BPE()
loaded.load(str(lesson.OUT / "09_bpe.model"))
same = loaded.merges == bpe.merges and loaded.encode(f"{sentence}<|end|>", "all") == [*ids, 300]
lesson.holds(same, "saved and loaded, the tokenizer has its merges and its special token")

# %% [markdown]
# ## 300 merges, and the library's
# Of pairs that are equally frequent, which one comes first? Papers on byte-pair encoding often do
# not say, and such ties are common: after the first merges many pairs occur equally often. Each of
# these rules gives a valid BPE; one is that of the library that trains the project's tokenizer. The
# library numbers the bytes in another order, which `alphabet` repeats, and its ids begin with the
# special tokens, which we leave out.

# %%
rules = {
    "smallest pair of ids": smallest,
    "first one met": lambda counts: max(counts, key=counts.get),
    "largest pair of ids": lambda counts: max(counts, key=lambda pair: (counts[pair], pair)),
}
stdlib = Path(sysconfig.get_paths()["stdlib"])
special = len(SPECIAL_TOKENS)
text = "".join((stdlib / name).read_text() for name in ("argparse.py", "json/decoder.py"))
library = Tokenizer.train([text], special + 556)
model = json.loads(library.spec)["model"]
theirs = [tuple(model["vocab"][x] - special for x in pair) for pair in model["merges"]]
rows = []
encoded = []
for name, choose in rules.items():
    bpe = BPE(SPLIT, byte_symbols().values()).train(text, 556, choose=choose)
    encoded.append(bpe.encode(text))
    differ = [i for i, (a, b) in enumerate(zip(bpe.merges, theirs)) if a != b]
    first = differ[0] + 1 if differ else None
    rows.append((name, 300 - len(differ), first, len(text.encode()) / len(encoded[-1])))
    lesson.holds(bpe.decode(encoded[-1]) == text, f"ties to the {name}: decodes to the text")
columns = ["ties go to the", "merges as the library", "first other merge", "bytes/token"]
lesson.table(columns, rows, "300 merges on two files of the standard library")
same = [row[1] for row in rows]  # how many depends on the Python whose library is the text
lesson.holds(same[0] == 300 > max(same[1:]), "only the smallest pair of ids gives 300 of 300")
ids = [i + special for i in encoded[0]]
lesson.holds(ids == library.encode(text), "with that rule, the whole text has the library's ids")
best, *_, worst = sorted(row[3] for row in rows)
lesson.holds(worst < 1.01 * best, "the bytes per token of the three rules agree within 1%")

# %% [markdown]
# So the rule decides which ids a text has, and hardly how many. But a model that was trained with
# one tokenizer cannot read the ids of the other.
#
# (In a hurry? What follows, up to the trap, is not needed for the exercise.)
#
# ## Two ways to write ã
# Unicode writes "coração" with 7 characters (form NFC) or with 9 (NFD: letter, then accent), which
# look the same but are different bytes. `nfc` turns both into NFC before encoding. The tokenizers
# of this table are trained on this course's README in Portuguese.

# %%
pages = {"English": "README.md", "Portuguese": "README.pt.md"}
texts = {name: (lesson.COURSE / page).read_text("utf-8") for name, page in pages.items()}
without, with_nfc = (Tokenizer.train([texts["Portuguese"]], 660, nfc=nfc) for nfc in (False, True))
word = {form: unicodedata.normalize(form, "coração") for form in ("NFC", "NFD")}
rows = [(f, len(w), len(without.encode(w)), len(with_nfc.encode(w))) for f, w in word.items()]
lesson.table(["form", "characters", "tokens", "with nfc"], rows, "'coração', Portuguese tokens")
lesson.holds(rows[1][2] > rows[0][2], "without nfc, the form with separate accents costs more")
lesson.holds(rows[1][3] == rows[0][3], "with nfc, both forms cost the same")

# %% [markdown]
# ## There and back
# A text, encoded and decoded, should come back. The source trains with the same library, and with
# the library's defaults it does not: `ByteLevel` puts a space before each text, and a byte that the
# training text lacks is not in the vocabulary. It becomes `<unk>` (unknown), or nothing, though
# "byte-level" sounds as if any text had tokens. The project sets two options against it:
# `add_prefix_space=False`, and an `initial_alphabet` of all 256 bytes.

# %%
plain = lib.Tokenizer(lib.models.BPE(unk_token="<unk>"))
plain.pre_tokenizer = lib.pre_tokenizers.ByteLevel()
plain.decoder = lib.decoders.ByteLevel()
known = dict(special_tokens=["<eos>", "<unk>"], vocab_size=660, show_progress=False)
plain.train_from_iterator([texts["Portuguese"]], lib.trainers.BpeTrainer(**known))
rows = []
for word in ("coração", "5 €"):
    back = plain.decode(plain.encode(word).ids, skip_special_tokens=False)
    rows.append((repr(word), repr(back), repr(with_nfc.decode(with_nfc.encode(word)))))
lesson.table(["text", "by default", "the project's"], rows, "encoded and decoded")
lesson.holds(all(a != b for a, b, _ in rows), "by default, neither text comes back")
lesson.holds(all(a == c for a, _, c in rows), "from the project's tokenizer, both do")

# %% [markdown]
# ## What a larger vocabulary buys
# Train tokenizers of six sizes on three files of the standard library, and encode four texts: those
# files, another file, and this course's README in two languages. More bytes per token mean fewer
# steps for the model.

# %%
sizes = [300, 400, 600, 1000, 1800, 3400]
seen = "".join((stdlib / f"{name}.py").read_text() for name in ("argparse", "ast", "inspect"))
texts |= {"the text it was trained on": seen, "other Python": (stdlib / "typing.py").read_text()}
tokenizers = [Tokenizer.train([seen], size) for size in sizes]
curves = {n: [len(x.encode()) / len(t.encode(x)) for t in tokenizers] for n, x in texts.items()}
fig = lesson.figure()
ax = fig.subplots()
for name, curve in curves.items():
    ax.plot(sizes, curve, "o-")
    ax.text(sizes[-1] * 1.05, curve[-1], name, va="center")
ax.set(xscale="log", xlabel="vocabulary", ylabel="bytes per token", xlim=(280, 11_000))
ax.set(title="learned from Python: worth most on the same text, least on another language")
ax.set_xticks(sizes, sizes), ax.minorticks_off()
lesson.save(fig, "09_bpe")
more = curves["other Python"][-1] / curves["English"][-1]
lesson.holds(more > 1.3, "a token covers 1.3 times as much of unseen Python as of English")

# %% [markdown]
# ## Trap
# "The smallest pair of ids" is not "the smallest pair of bytes": the library numbers the bytes in
# the order of the characters that stand for them, so "!" is 4 and the space is near the end. And a
# special token that a user typed must not get its special id, or a user can end a document. With
# the library's defaults it does. minbpe's `encode` (and `encode` above) refuses such a text unless
# told otherwise, and the project's takes it as plain characters.

# %%
lesson.holds(library.encode("! ") == [4, 224], "'!' is 4, ' ' is 224: not 4 + the byte")
lesson.holds(library.bos_id not in library.encode("<|bos|>"), "a typed <|bos|> gets no special id")
lesson.holds("<eos>" in plain.encode("olá<eos>").tokens, "by default, a typed <eos> does")

# %% [markdown]
# ## Exercise
# `exercises/ex09.py`: learn merges from bytes, and encode words with them: the tokenizer of your
# trainer. Mind its ties: the *largest* pair of *bytes* goes first there, so ids play no part.
# `python course/check.py 9`
