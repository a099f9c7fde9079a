"""Somebody's tokenizer.json -> a Tokenizer of ours, with the same ids.

Reads a tokenizer.json and the tokenizer_config.json beside it, from a folder or from the Hub. Their
byte-level forms say the same thing in several ways; here each becomes the one that tokenizer.py
runs by tiktoken, a Split and a ByteLevel: GPT-2's own split, which ByteLevel has built in, and
SmolLM2's Digits before it. And which token begins a document, which is known by its role and not by
its name, is written down where the file alone says so. A file that needs neither stays as it is, to
the byte, and with it its hash. Next: prepare_data.py --tokenizer, hf/imported.py.
"""

import json
from pathlib import Path

from config import UsageError
from tokenizer import AWKWARD, BOS, Tokenizer, first_token, steps_of

WANTED = ("*.safetensors", "*.json")  # what is fetched from the Hub: no code, and no pickle
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Digits first, and GPT-2's split of what is between them: there, spaces before a digit are at the
# end of a piece, so that none of them goes with what follows.
DIGITS = r"|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"


def local_folder(word: str | Path) -> Path:
    """A folder as it is; `hf:REPO[@REVISION]` -> its copy in the Hub's cache, made if there is
    none. UsageError if it cannot be had."""
    if not str(word).startswith("hf:"):
        return Path(word)
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repo, _, revision = str(word).removeprefix("hf:").partition("@")
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=WANTED))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        said = " ".join(str(error).split())[:200]
        raise UsageError(f"{word} cannot be read from the Hub: {said}") from None


def read(word: str | Path, bos_token: str = "") -> Tokenizer:
    """word: a tokenizer.json, its folder, or hf:REPO. The token that begins a document is
    bos_token, else what the file puts first, else the bos_token or the eos_token of
    tokenizer_config.json; UsageError if none of them says so, or if it is of another kind."""
    folder = local_folder(word)
    path = folder / "tokenizer.json" if folder.is_dir() else folder
    if folder.is_dir() and not path.exists() and (folder / "tokenizer.model").exists():
        raise UsageError(f"{word} has SentencePiece's tokenizer.model and no tokenizer.json")
    found = Tokenizer.load(path, lambda spec: in_our_form(spec, path, bos_token))
    check_ids(path, found)
    return found


def in_our_form(spec: str, path: Path, bos_token: str = "") -> str:
    """The text of the tokenizer.json at `path` as tokenizer.py wants it; `spec` itself if it is
    that already, or if it is of a kind that tokenizer.py refuses."""
    from tokenizers import Tokenizer as HFTokenizer

    try:
        tree = json.loads(HFTokenizer.from_str(spec).to_str())  # it knows the format
    except Exception:
        return spec
    refuse_odd(tree)
    changes, special = {}, {t["content"]: t["id"] for t in tree["added_tokens"] if t["special"]}
    if pattern := one_pattern(steps_of(tree)):
        split = {"type": "Split", "pattern": {"Regex": pattern}}
        split |= {"behavior": "Isolated", "invert": False}
        last = steps_of(tree)[-1] | {"use_regex": False}
        changes["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, last]}
    first = bos_token or first_token(tree)
    if first != first_token(tree) or not first and BOS not in special:
        first = first or named_beside(path)
        if first not in special and tree["model"]["type"] == "BPE":
            why = (
                f"has no special token {first}" if first else "does not say what begins a document"
            )
            names = ", ".join(special) or "none"
            raise UsageError(f"the tokenizer {why}; give one of its own with --bos_token: {names}")
        changes |= begin_with(first, special.get(first, 0))
    return json.dumps(json.loads(spec) | changes, ensure_ascii=False) if changes else spec


def refuse_odd(tree: dict) -> None:
    """UsageError for what a BPE of bytes need not have, and tokenizer.py does not look for."""
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if tree["model"].get(key):
            raise UsageError(f"the tokenizer's BPE has a {key}; it cannot be used here")
    for t in tree["added_tokens"]:
        if not t["special"] and (t["lstrip"] or t["rstrip"]):
            raise UsageError(f"the tokenizer's {t['content']!r} swallows the spaces beside it")


def check_ids(path: Path, found: Tokenizer) -> None:
    """UsageError unless `found` gives the ids of `tokenizers`, reading the file as it is, for a
    line of awkward characters and for words made of its own tokens."""
    from tokenizers import Tokenizer as HFTokenizer

    theirs = HFTokenizer.from_file(str(path))
    theirs.encode_special_tokens = True
    ids = range(0, found.vocab_size, max(1, found.vocab_size // 2000))
    words = [found.decode([i, (i * 7) % found.vocab_size]) for i in ids]
    for text in map(found.normalize, [AWKWARD, *words]):
        if found.encode(text) != theirs.encode(text, add_special_tokens=False).ids:
            raise UsageError(f"{path}: {text!r} gets other ids than from tokenizers")


def one_pattern(steps: list[dict]) -> str:
    """The split of a pre-tokenizer as one regular expression; empty if it is that already, or if it
    is none of these forms."""
    kinds, last = [step["type"] for step in steps], steps[-1] if steps else {}
    built_in = last.get("use_regex") and not last["add_prefix_space"]
    if kinds == ["ByteLevel"] and built_in:
        return GPT2
    if kinds == ["Digits", "ByteLevel"] and built_in:
        return (r"\p{N}" if steps[0]["individual_digits"] else r"\p{N}+") + DIGITS
    if kinds == ["Split", "ByteLevel"] and not last["use_regex"]:
        removed = (steps[0]["behavior"], steps[0]["invert"]) == ("Removed", True)
        return steps[0]["pattern"].get("Regex", "") if removed else ""
    return ""


def named_beside(path: Path) -> str:
    """The bos_token, or else the eos_token, that the tokenizer_config.json beside it names."""
    try:
        beside = json.loads((path.parent / "tokenizer_config.json").read_bytes())
        tokens = [beside.get("bos_token"), beside.get("eos_token")]
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    found = [t.get("content") if isinstance(t, dict) else t for t in tokens]
    return next((t for t in found if isinstance(t, str) and t), "")


def begin_with(token: str, token_id: int) -> dict:
    """A tokenizer.json's entry that puts `token` first, by a post-processor: of the ways to say so,
    the only one that every version of transformers and lm_eval obeys."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text, second = ({"Sequence": {"id": s, "type_id": i}} for i, s in enumerate("AB"))
    entry = {"id": token, "ids": [token_id], "tokens": [token]}
    template = {"type": "TemplateProcessing", "special_tokens": {token: entry}}
    return {"post_processor": template | {"single": [first, text], "pair": [first, text, second]}}
