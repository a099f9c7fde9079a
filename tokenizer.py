"""Text <-> token ids: a byte-level BPE, trained by `tokenizers`, run by `tiktoken`.

Reads `tokenizer.json` (the Hugging Face format), or makes its text (`spec`). Guarantees:
- any text encodes, and decodes to the same text, as every byte has a token (after NFC, if asked;
  a lone surrogate becomes U+FFFD);
- `tokenizers` and `tiktoken` give the same ids from one merge table; `tiktoken` is 4x faster, and
  runs what this file has trained; `tokenizers` runs everybody else's;
- a special token written in the text is encoded as ordinary characters, never as its id.

Ids, if trained here: the special tokens (`<|bos|>` is 0), then the 256 bytes, then one per merge,
in the order learned. Next: prepare_data.py trains and runs it; hf/tokenizer_json.py imports others.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import tiktoken

from config import UsageError

BOS = "<|bos|>"
SPECIAL_TOKENS = (BOS, "<|user|>", "<|assistant|>", "<|end|>")  # the last three: for chat, later


def split_of(digits: int, combining: bool) -> str:
    """GPT-4's pattern for cutting text into pieces: words, punctuation, spaces, and numbers in
    groups of up to `digits` digits. A token never crosses a cut. combining: combining marks, such
    as Hindi's vowels, belong to words, as in Qwen3.5's pattern, and not to punctuation."""
    word = r"[^\r\n\p{L}\p{N}]?+\p{L}+"  # with the space or sign before it
    punctuation = r" ?[^\s\p{L}\p{N}]++[\r\n]*"  # with the line end after it
    if combining:
        word = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
        punctuation = r" ?[^\s\p{L}\p{M}\p{N}]++[\r\n]*"
    return (
        r"'(?:[sdmtSDMT]|[lL][lL]|[vV][eE]|[rR][eE])"  # 's 'll 've ...
        rf"|{word}"
        rf"|\p{{N}}{{1,{digits}}}"
        rf"|{punctuation}"
        r"|\s*[\r\n]"
        r"|\s+(?!\S)"  # spaces except the last one, which belongs to the next word
        r"|\s+"
    )


SPLIT = split_of(digits=2, combining=True)
SPLITS = {split_of(digits, combining) for digits in (1, 2, 3) for combining in (False, True)}


def has_marks(texts: Iterable[str]) -> bool:
    """Whether these texts combine characters: one in a thousand, or more, is a vowel sign, as in
    Hindi, an accent of its own, or another combining mark. Reads the beginning of each."""
    beginnings = "".join(text[:1000] for text in texts)
    marks = sum(unicodedata.category(c)[0] == "M" for c in beginnings)
    return 1000 * marks > len(beginnings)


# A tokenizer that gives this line back, when its ids are decoded, loses no class of characters.
AWKWARD = "Aé汉 \u0623\u0e01 42½\u0660 🎉\u200d ...?! _-'s\t\r\n\n  \x00\x7f\xa0\u2028\ufffd "

# The split is a backtracking regex and overflows its stack on a million spaces, so a long text is
# encoded in blocks. A block ends after a word. The split always ends there too, so the ids are
# those of the uncut text. Only a stretch of 32K characters without the end of a word is cut at an
# arbitrary place: a token may then become two, but no byte is lost.
BLOCK = 65_536
AFTER_A_WORD = re.compile(r"[^\W_](?=[ \t\n.,;:!?()\[\]{}<>=+*/\"-])")


def blocks(text: str, size: int = BLOCK) -> Iterator[str]:
    """Cut a long text into blocks of at most `size` characters: `"".join(blocks(t)) == t`."""
    start = 0
    while len(text) - start > size:
        word_end = AFTER_A_WORD.search(text, start + size // 2, start + size)
        end = word_end.end() if word_end else start + size
        yield text[start:end]
        start = end
    yield text[start:]


class Tokenizer:
    """A byte-level BPE: text is split into pieces, each piece begins as bytes, and then the pair of
    neighbours that was learned first is merged into one token, again and again. Build one with
    `Tokenizer.train` or `Tokenizer.load`. A tokenizer.json, as far as it is read here:

        added_tokens    [{"content": "<|bos|>", "id": 0, "special": true}, ...]
        normalizer      nothing, or NFC
        pre_tokenizer   the split
        model           "vocab": {"Ġthe": 300, ...}, "merges": [["Ġ", "t"], ...] as learned
        post_processor  "single": [{"SpecialToken": {"id": "<|bos|>"}}, ...]: a text begins with it
    """

    def __init__(self, spec: str):
        """`spec` is the text of a tokenizer.json; UsageError if it is not a byte-level BPE."""
        self.spec = spec
        tree, self._library = read_spec(spec)
        self.bytes_of = vocabulary_of(tree)  # id -> bytes of UTF-8, often a part of a character
        self.vocab_size = len(self.bytes_of)
        self.special = {t["content"]: t["id"] for t in tree["added_tokens"] if t["special"]}
        self.bos = begins_with(tree)
        if self.bos not in self.special:
            raise UsageError(f"the tokenizer has no {self.bos} token, which starts every row")
        self.bos_id = self.special[self.bos]
        self.nfc = bool(_steps(tree["normalizer"]))  # any other step was refused
        sizes = [len(self.bytes_of[i]) for i in range(self.vocab_size)]
        self.token_bytes = np.array(sizes, np.int32)  # (vocab_size,)
        self.token_bytes[list(self.special.values())] = 0  # no part of the text
        self.split = split_trained_with(tree, self.vocab_size)  # "": it was not trained here
        if self.split:
            ranks = {self.bytes_of[i]: i for i in range(len(SPECIAL_TOKENS), self.vocab_size)}
            self._tiktoken = tiktoken.Encoding(
                "nano2049", pat_str=self.split, mergeable_ranks=ranks, special_tokens={}
            )
        if self.decode(self.encode(AWKWARD)) != self.normalize(AWKWARD):
            raise _other_kind("it leaves out, adds or changes some of the text")

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        split: str = SPLIT,
        nfc: bool = False,
        progress: bool = False,
    ) -> "Tokenizer":
        """Learn `vocab_size` tokens, or fewer once no pair occurs twice. split: one of SPLITS."""
        from tokenizers import pre_tokenizers, trainers

        smallest = 256 + len(SPECIAL_TOKENS)  # every byte
        if vocab_size < smallest:
            raise UsageError(f"vocab_size {vocab_size} is below {smallest}; try --vocab_size 4096")
        bpe = untrained(split, nfc)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,  # with 5, 170 KB of text give only 2,600 of 4,096 tokens
            show_progress=progress,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        # Read in this thread: in that of `train_from_iterator`, streaming from the Hub has crashed.
        pieces = [
            piece for text in texts for part in blocks(normalize(text)) for piece in _cut(part)
        ]
        bpe.train_from_iterator(pieces, trainer)
        return cls(bpe.to_str(pretty=True))

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer.json; UsageError, which names the file, if it is no byte-level BPE."""
        try:  # a byte that is not UTF-8 becomes a surrogate, which no tokenizer.json has
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                return cls(file.read(1 << 26))  # the rest is left out: then it is no JSON
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({error.strerror})") from None
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.spec.encode("utf-8")).hexdigest()

    def normalize(self, text: str) -> str:
        """The text that the ids stand for: what `decode` gives back."""
        return normalize(text, self.nfc)

    def encode_array(self, text: str) -> np.ndarray:
        """text -> uint32 ids without BOS; makes no Python object per token."""
        text = self.normalize(text)
        if not self.split:
            encoded = of_library(self._library.encode, text, add_special_tokens=False)
            return np.array(encoded.ids, np.uint32)
        parts = [  # with special tokens as plain text
            self._tiktoken.encode_to_numpy(block, allowed_special=set(), disallowed_special=())
            for block in blocks(text)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def encode(self, text: str) -> list[int]:
        """text -> ids, without BOS."""
        return self.encode_array(text).tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """ids -> text; an incomplete character becomes U+FFFD."""
        return b"".join(self.bytes_of[int(i)] for i in ids).decode(errors="replace")


def normalize(text: str, nfc: bool = False) -> str:
    """Replace each lone UTF-16 surrogate, which UTF-8 cannot encode, by U+FFFD; then NFC if asked:
    "e" + U+0301 -> "é", one spelling for each text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if nfc and not text.isascii():  # Python's own NFC is of another version of Unicode
        from tokenizers.normalizers import NFC

        text = NFC().normalize_str(text)
    return text


def byte_symbols() -> dict[str, int]:
    """The 256 printable characters that stand for bytes in tokenizer.json (GPT-2's table):
    'A' -> 65, 'Ġ' -> 32 (space), 'Ċ' -> 10 (line feed)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def vocabulary_of(tree: dict) -> dict[int, bytes]:
    """The tokens of a tokenizer.json, id -> bytes; UsageError unless each of the 256 bytes is an
    ordinary one, and the ids are 0, 1, 2, ..."""
    symbols = byte_symbols()
    added = {token["content"]: token["id"] for token in tree["added_tokens"]}
    ordinary = {text: i for text, i in tree["model"]["vocab"].items() if text not in added}
    odd = set("".join(ordinary)) - symbols.keys()
    if odd:
        raise _other_kind(f"{min(odd)!r} in a token stands for no byte")
    bytes_of = {i: bytes(symbols[c] for c in text) for text, i in ordinary.items()}
    missing = {bytes([b]) for b in range(256)}.difference(bytes_of.values())
    if missing:
        raise _other_kind(f"{len(missing)} of the 256 bytes have no token")
    bytes_of |= {i: text.encode() for text, i in added.items()}
    if sorted(bytes_of) != list(range(len(ordinary) + len(added))):
        raise UsageError("the tokenizer's ids have gaps or duplicates; train a new one")
    return bytes_of


def begins_with(tree: dict) -> str:
    """The token that a tokenizer.json puts before each text: the first thing in the template of its
    post-processor. BOS if it has none."""
    template = (tree["post_processor"] or {}).get("single") or [{}]
    return template[0].get("SpecialToken", {}).get("id", BOS)


def split_trained_with(tree: dict, vocab_size: int) -> str:
    """The split, one of SPLITS, of a tokenizer.json that `Tokenizer.train` made; "" for any other.
    tiktoken gives the same ids for the former: it has no options, and merges in order of ids."""
    added = [(token["id"], token["content"]) for token in tree["added_tokens"]]
    model = tree["model"]
    merged = [model["vocab"].get("".join(pair)) for pair in model["merges"]]
    expected = list(range(len(SPECIAL_TOKENS) + 256, vocab_size))
    if added == list(enumerate(SPECIAL_TOKENS)) and merged == expected:
        bare = dict(pre_tokenizer=tree["pre_tokenizer"], model=model | {"vocab": {}, "merges": []})
        for split in SPLITS:
            ours = json.loads(untrained(split, nfc=False).to_str())
            if ours == ours | bare:
                return split
    return ""


def untrained(split: str, nfc: bool):
    """A tokenizer of the library, as `Tokenizer.train` begins: without vocabulary and merges."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as HFTokenizer

    bpe = HFTokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC() if nfc else None
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    return bpe


LONG_RUN = re.compile(r"\S{4096}|\s{4096}")


def _cut(text: str) -> Iterator[str]:
    """Cut text for the trainer, whose time grows with the square of a word's length: a gene is one
    word, and so is Chinese without punctuation."""
    start = 0
    for run in LONG_RUN.finditer(text):
        yield text[start : run.end()]
        start = run.end()
    yield text[start:]


# The kinds of steps that the parts of a tokenizer.json may have.
STEPS = {
    "normalizer": {"NFC"},
    "pre_tokenizer": {"ByteLevel", "Digits", "Punctuation", "Split"},
    "decoder": {"ByteLevel"},
}
# Options of a BPE that it may not have: ids would not be those of plain merges.
OPTIONS = ("byte_fallback", "continuing_subword_prefix", "dropout", "end_of_word_suffix")


def _steps(part: dict | None) -> list[str]:
    """The kinds of the steps of a part, in order: [] if it does nothing."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        lists = [value for value in part.values() if type(value) is list]
        return [step for one in sum(lists, []) for step in _steps(one)]
    return [part["type"]]


def read_spec(spec: str):
    """A tokenizer.json's text -> (its tree, the library's tokenizer); UsageError if it is damaged,
    or of another kind.

    The library sees only what was checked: in a file of a few KB, an id, or steps that each double
    the text, would have it take all memory. Its time is not limited. It gives up a pattern like
    `(a+)+$` after ten million steps at one place, which is an error here; but a pattern that takes
    a little less at every place of a long text takes days.
    """
    from tokenizers import Tokenizer as HFTokenizer

    try:
        checked = json.dumps(_check(json.loads(spec)))  # a key that was there twice is there once
    except UsageError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _other_kind(f"{type(error).__name__}: {error}") from None
    bpe = of_library(HFTokenizer.from_str, checked)
    bpe.encode_special_tokens = True  # in text they are plain text
    return json.loads(bpe.to_str()), bpe


def _check(tree: dict) -> dict:
    """A tokenizer.json as the library may read it; UsageError, or what Python raises for a value of
    another type, if it may not."""
    model = tree["model"]
    added = tree["added_tokens"]
    if model.get("type", "BPE") != "BPE":
        raise _other_kind("the model is Unigram or WordPiece")
    if any(map(model.get, OPTIONS)):
        raise _other_kind(f"its BPE has one of {', '.join(OPTIONS)}")
    for part, known in STEPS.items():
        steps = _steps(tree.get(part))
        if set(steps) - known or steps.count("ByteLevel") > 1:
            raise _other_kind(
                f"its {part} changes the text, or is unknown here: {', '.join(steps):.80}"
            )
    # Of each character, the library makes up to 6 KB of a pattern, and 75 bytes of an added token.
    if len(json.dumps(tree.get("pre_tokenizer"))) > 1 << 14 or len(json.dumps(added)) > 1 << 22:
        raise _other_kind("its patterns or its added tokens are too long")
    ids = [*model["vocab"].values(), *(token["id"] for token in added)]
    for i in ids:
        if type(i) is not int or not 0 <= i < len(ids):
            raise UsageError(
                f"the tokenizer has {len(ids):,} ids, and one of them is {i!r:.40}; train a new one"
            )
    # Texts are encoded whole, whatever length a model takes.
    return tree | dict(model=model | {"type": "BPE"}, truncation=None, padding=None)


def of_library(function: Callable, *args, **options):
    """The result of a function of `tokenizers`; UsageError for whatever it raises: the library has
    no exception class of its own, and a panic in its Rust code is not even an Exception."""
    try:
        return function(*args, **options)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise _other_kind(str(error)) from None


def _other_kind(reason: str) -> UsageError:
    return UsageError(
        f"not a tokenizer.json of a byte-level BPE that this project can run: {reason}; leave "
        "--tokenizer empty to train one"
    )
