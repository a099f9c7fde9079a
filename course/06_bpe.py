# %% [markdown]
# # 6. BPE: merges by hand, equal to the library's
#
# **Question.** What exactly does a BPE trainer do, and how small a detail makes two of them differ?
#
# Source: *Pré-Treino Eficiente de Modelos de Linguagem*, "Tokenizador" (32,000 tokens, byte-level,
# NFC, min_frequency 5). Core file: `tokenizer.py`. Before: lesson 5. Next: lesson 7 (what becomes
# of the tokens). Takes 8 seconds on two cores.

# %%
import lesson  # first: it puts the project on the path
import json
import sysconfig
import unicodedata
from collections import Counter
from pathlib import Path

import regex  # like `re`, with the classes of Unicode; tiktoken brings it

from tokenizer import SPECIAL_TOKENS, SPLIT, Tokenizer, byte_symbols

lesson.begin(6, "BPE")

# %% [markdown]
# ## The whole algorithm
# Begin with bytes. Count the pairs of neighbours, give the most frequent pair an id of its own,
# replace it everywhere, and repeat. Each distinct word is kept once, with its count: a pair never
# crosses the end of a word.


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


def first_met(counts: Counter) -> tuple[int, int]:
    return max(counts, key=counts.get)  # the first of several


def largest(counts: Counter) -> tuple[int, int]:
    return max(counts, key=lambda pair: (counts[pair], pair))


class BPE:
    """Byte-level. Ids: first `reserved` special ones, then the bytes of `alphabet`, then merges."""

    def __init__(self, split: str | None = None, alphabet=range(256), reserved: int = 0):
        self.split, self.alphabet, self.reserved = split, list(alphabet), reserved
        self.merges: dict[tuple[int, int], int] = {}
        self.tokens = {reserved + i: bytes([b]) for i, b in enumerate(self.alphabet)}

    def words(self, text: str) -> list[list[int]]:
        ids = {token[0]: i for i, token in self.tokens.items() if len(token) == 1}
        words = regex.findall(self.split, text) if self.split else [text]
        return [[ids[byte] for byte in word.encode()] for word in words]

    def train(self, text: str, vocab_size: int, min_frequency: int = 2, choose=smallest):
        words = Counter(map(tuple, self.words(text)))
        while self.reserved + len(self.tokens) < vocab_size:
            counts = Counter()
            for word, n in words.items():
                for pair in zip(word, word[1:]):
                    counts[pair] += n
            pair = choose(counts) if counts else None
            if counts[pair] < min_frequency:
                break
            self.add(pair)
            words = {tuple(merge(w, pair, self.merges[pair])): n for w, n in words.items()}
        return self

    def add(self, pair: tuple[int, int]) -> None:
        self.merges[pair] = new = self.reserved + len(self.tokens)
        self.tokens[new] = self.tokens[pair[0]] + self.tokens[pair[1]]

    def encode(self, text: str) -> list[int]:
        """In each word, the earliest merge that applies, until none does."""
        out = []
        for word in self.words(text):
            while pairs := [pair for pair in zip(word, word[1:]) if pair in self.merges]:
                pair = min(pairs, key=self.merges.get)
                word = merge(word, pair, self.merges[pair])
            out += word
        return out

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.tokens[i] for i in ids).decode(errors="replace")

    def save(self, path: Path) -> None:
        state = (self.split, self.alphabet, self.reserved, list(self.merges))
        path.write_text(json.dumps(state))

    @classmethod
    def load(cls, path: Path):
        *options, pairs = json.loads(path.read_text())
        bpe = cls(*options)
        for pair in pairs:
            bpe.add(tuple(pair))
        return bpe


example = BPE().train("aaabdaaabac", 256 + 3)
lesson.holds(example.encode("aaabdaaabac") == [258, 100, 258, 97, 99], "aaabdaaabac in five ids")
example.save(lesson.OUT / "06_bpe.json")
loaded = BPE.load(lesson.OUT / "06_bpe.json")
lesson.holds(loaded.merges == example.merges, "saved and loaded, the same merges")

# %% [markdown]
# ## 300 merges, and the library's
# Of pairs that are equally frequent, which one comes first? The paper does not say. Each answer is
# a valid BPE; one of them is the library's, to the last merge.

# %%
stdlib = Path(sysconfig.get_paths()["stdlib"])
text = "".join((stdlib / name).read_text() for name in ("argparse.py", "json/decoder.py"))
library = Tokenizer.train([text], 260 + 300)
vocab = json.loads(library.spec)["model"]["vocab"]
theirs = [tuple(vocab[x] for x in m) for m in json.loads(library.spec)["model"]["merges"]]
rows = []
for choose in (smallest, first_met, largest):
    bpe = BPE(SPLIT, byte_symbols().values(), len(SPECIAL_TOKENS)).train(text, 560, choose=choose)
    ours, ids = list(bpe.merges), bpe.encode(text)
    differ = [i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b]
    rows.append((choose.__name__, 300 - len(differ), differ[0] if differ else None))
    rows[-1] += (len(text.encode()) / len(ids),)
    assert bpe.decode(ids) == text and (differ or ids == library.encode(text))
columns = ["ties go to the", "merges equal to the library's", "first difference", "bytes/token"]
lesson.table(columns, rows)
same = [row[1] for row in rows]  # how many depends on the Python whose library is the text
lesson.holds(same[0] == 300 > max(same[1:]), "only the smallest pair of ids gives 300")
lesson.holds(max(r[3] for r in rows) < 1.01 * min(r[3] for r in rows), "all compress alike")

# %% [markdown]
# ## Two ways to write é, and two languages
# Unicode writes "coração" with 7 characters (NFC) or with 9 (NFD: letter, then accent), which look
# the same but are different bytes. `nfc` turns both into NFC before encoding. The text to train on
# is this course's README, in English and in Portuguese; 20 lines of each are held out.

# %%
pages = {"English": "README.md", "Portuguese": "README.pt.md"}
held_out, trained, tokenizers = {}, {}, {}
for language, name in pages.items():
    lines = (lesson.COURSE / name).read_text(encoding="utf-8").splitlines()
    out = [line for line in lines if len(line) > 50 and line[0] not in "|`"][::2][:20]
    held_out[language], lines = "\n".join(out), [line for line in lines if line not in out]
    trained[language] = "\n".join(lines).encode()[:5000].decode(errors="ignore")
    tokenizers[language] = Tokenizer.train([trained[language]], 260 + 400)
with_nfc = Tokenizer.train([trained["Portuguese"]], 260 + 400, nfc=True)
rows = []
for form in ("NFC", "NFD"):
    word = unicodedata.normalize(form, "coração")
    plain, nfc = len(tokenizers["Portuguese"].encode(word)), len(with_nfc.encode(word))
    rows.append((form, len(word), len(word.encode()), plain, nfc))
lesson.table(["coração in", "characters", "bytes", "tokens", "tokens with nfc"], rows, "nfc")
lesson.holds(rows[1][3] > rows[0][3] == rows[0][4] == rows[1][4], "with nfc, both cost the same")
fertility = {  # tokens per word
    (home, text): len(tokenizers[home].encode(held_out[text])) / len(held_out[text].split())
    for home in pages
    for text in pages
}
rows = [(home, *(fertility[home, text] for text in pages)) for home in pages]
lesson.table(["trained on", *(f"tokens/word of {text}" for text in pages)], rows, "fertility")
best = [min(pages, key=lambda home: fertility[home, text]) for text in pages]
lesson.holds(best == list(pages), "each tokenizer is better at home")

# %%
sizes = [300, 400, 600, 1000, 1800, 3400]
seen = "".join((stdlib / f"{name}.py").read_text() for name in ("argparse", "ast", "inspect", "os"))
texts = {"the text it was trained on": seen, "other Python": (stdlib / "typing.py").read_text()}
texts |= {"English": held_out["English"], "Portuguese": held_out["Portuguese"]}
curves = {name: [] for name in texts}
for size in sizes:
    tokenizer = Tokenizer.train([seen], size)
    for name, sample in texts.items():
        curves[name].append(len(sample.encode()) / len(tokenizer.encode(sample)))
fig = lesson.figure()
ax = fig.subplots()
for name, curve in curves.items():
    ax.plot(sizes, curve, "o-")
    ax.text(sizes[-1] * 1.05, curve[-1], name, va="center")
ax.set(xscale="log", xlabel="vocabulary", ylabel="bytes per token", xlim=(280, 11_000))
ax.set_xticks(sizes, sizes), ax.minorticks_off()
ax.set_title("trained on Python: a larger vocabulary buys most at home")
lesson.save(fig, "06_bpe")
lesson.holds(curves["other Python"][-1] > 1.5 * curves["Portuguese"][-1], "abroad, 1.5 times worse")

# %% [markdown]
# ## Trap
# "The smallest pair of ids" is not "the smallest pair of bytes": the library numbers the bytes in
# the order of the characters that stand for them, so "!" is 4 and the space is near the end. And a
# special token typed by a user must not become its id, or a user can end a document.

# %%
ids = {library.decode([i]): i for i in range(260)}
lesson.holds(ids["!"] == 4 and ids[" "] == 224, "'!' is 4, ' ' is 224: not 4 + the byte")
typed = library.encode("<|bos|>")
lesson.holds(library.bos_id not in typed and library.decode(typed) == "<|bos|>", "just characters")

# %% [markdown]
# ## Exercise
# `exercises/ex06.py`: the order of merges for given words. `python course/check.py 6`
