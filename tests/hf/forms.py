"""Tokenizers in the forms of others, trained here on a little text: what one finds on the Hub."""

import json
from pathlib import Path

from conftest import ROOT

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
END = "<|endoftext|>"


def steps(*names) -> list:
    """("digits", "bytes") -> pre-tokenizers; a tuple holds the pattern of a split."""
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as P

    known = {
        "bytes": lambda: P.ByteLevel(add_prefix_space=False, use_regex=False),
        "words": lambda: P.ByteLevel(add_prefix_space=False),
        "digits": lambda: P.Digits(True),
    }
    split = lambda pattern: P.Split(Regex(pattern), "isolated")
    return [known[name]() if isinstance(name, str) else split(*name) for name in names]


# name -> (pre-tokenizers, special tokens, options of `make`)
FORMS = {
    "gpt2": (("words",), (END,), dict(late=True, config=dict(bos_token=END))),
    "smollm2": (("digits", "words"), (END, "<|im_start|>"), dict(config=dict(bos_token=END))),
    "llama3": (
        ((LLAMA3,), "bytes"), ("<|begin_of_text|>", "<|end_of_text|>"),
        dict(late=True, first="<|begin_of_text|>", bpe=dict(ignore_merges=True)),
    ),
    "qwen": (
        ((QWEN,), "bytes"), (END, "<|im_end|>"),
        dict(late=True, nfc=True, config=dict(bos_token=None, eos_token=END)),
    ),
    "plain <bos>": (("words",), ("<bos>",), dict(first="<bos>")),
    "runs of spaces": (
        ("words",), (END,), dict(plain=("  ", "    "), config=dict(bos_token=END)),
    ),
}  # fmt: skip


def corpus() -> list[str]:
    texts = [p.read_text() for p in sorted(ROOT.glob("machinery/*.py"))[:6]]
    return [*texts, "Olá, açúcar! " * 20, "汉字 кириллица " * 50, "1234 567 3.14 a fish " * 80]


def make(folder: Path, pre, special, options: dict, vocab_size: int = 800) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from tokenizers import pre_tokenizers as P
    from tokenizers.trainers import BpeTrainer

    late, plain = options.get("late", False), options.get("plain", ())
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC() if options.get("nfc") else None
    found = steps(*pre)
    bpe.pre_tokenizer = found[0] if len(found) == 1 else P.Sequence(found)
    bpe.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(plain) - late * len(special),
        special_tokens=[] if late else list(special),
        initial_alphabet=P.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus(), trainer)
    bpe.add_special_tokens(list(special))
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    if first := options.get("first"):
        pair = dict(single=f"{first} $A", pair=f"{first} $A {first} $B")
        names = [(first, bpe.token_to_id(first))]
        bpe.post_processor = processors.TemplateProcessing(special_tokens=names, **pair)
    tree = json.loads(bpe.to_str())
    tree["model"] |= options.get("bpe", {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    (folder / "tokenizer_config.json").write_text(json.dumps(options.get("config", {})))
