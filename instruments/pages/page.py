"""A model as one HTML file, which any browser opens: `python export.py [MODEL] --page`.

The file holds the weights, the tokenizer and what computes with them, gpt.js, bpe.js and worker.js,
in page.html. It needs no other file and no network; its policy allows neither, nor another script.
Weights are int8 with a scale for each row, or fp16; what that costs on held-out rows is said. Each
time that it is opened, the page compares ids and numbers with those that are computed here.
Next: gpt.js, the forward pass of model.py.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict

import torch

import data
from bits_per_byte import score_text
from config import UsageError
from instruments.pages.template import filled, page_file
from instruments.talk.sample import prompts_of
from machinery import disk
from machinery.errors import DataError
from machinery.output import say
from machinery.trained import Trained
from model import GPT, KINDS, kind_of
from preparation.chat import prompt_ids
from tokenizer import AWKWARD, Tokenizer, read_spec

MOST = 60_000_000  # bytes of weights in a page; more go into a file beside it
SCORED = 8192  # tokens of held-out rows, about, on which the cost of rounding is measured
TEXTS = (AWKWARD, "it's 12345 I'LL \u0915\u094d\u0937\u093f x\u0301 \ufeff\x85\x1c a\u3000\u2003b")
# How the pre_tokenizer ByteLevel cuts text by itself: as GPT-2.
BYTE_LEVEL = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def held_out_loss(loaded: Trained) -> float:
    """Nats per token on the first held-out rows; NaN if they cannot be read."""
    with suppress(UsageError, DataError):
        manifest = loaded.data
        batches = data.val_batches(manifest, 4, max(1, SCORED // manifest.row_len))
        return score_text(loaded.model, batches, torch.from_numpy(manifest.token_bytes()))[0]
    return math.nan


def write(loaded: Trained, out: str, half: bool, loss=held_out_loss, **shown) -> None:
    """Write the page, and if its weights are many a file with them beside it. out: the file, or a
    folder for page.html; empty: that of the run. half: weights in fp16. loss: a model's, in nats
    per token of held-out text. shown: `name` or `prompts`, in place of the model's own. Afterwards
    the model has the weights of the page."""
    file = page_file(out, loaded.run_dir, "page.html")
    facts = facts_of(loaded)
    form = "fp16" if half else "int8"
    before = loss(loaded)
    tensors = [*rounded(loaded.model, half)]
    cost = loss(loaded) - before
    paid = "what it costs is not known, as the held-out text cannot be read"
    if not math.isnan(cost):
        paid = f"{cost:+.5f} nats per token of held-out text"
    facts.append(f"{form} instead of fp32: {paid}")
    content = b"".join(content for *_, content in tensors)
    mark = hashlib.sha256(content).hexdigest()[:16]
    content = mark.encode() + content
    beside = ""
    if len(content) > MOST:
        beside = file.with_suffix(".weights").name
        disk.write_bytes(file.with_name(beside), content)
    tree = describe(loaded) | dict(
        facts=facts,
        form=form,
        tensors=[shape for *shape, _ in tensors],
        weights=dict(bytes=len(content), mark=mark, file=beside),
        **shown,
    )
    weights = base64.b64encode(b"" if beside else content).decode()
    disk.write_text(file, filled("page.html", tree=tree, weights=weights))
    say("; ".join(facts))
    where = f"{file}, and beside it {beside}" if beside else file
    say(f"wrote {where} ({len(content) / 1e6:.1f} MB of weights): open it in a browser")


@torch.no_grad()
def rounded(model: GPT, half: bool) -> Iterator[tuple[str, int, int, bytes]]:
    """Each weight's name, R rows, C columns (1 of a vector) and bytes: R scales in fp32 and R x C
    int8, or R x C fp16; each array ends at a multiple of 4 bytes. The model gets the weights that
    these say."""
    for name, p in model.named_parameters():
        rows = p.view(len(p), -1)
        if KINDS[kind_of(name)][0] in ("embedding", "head"):
            rows = rows[: model.config.vocab_size]  # without a table's padding
        arrays = [rows.half()]
        scale = 1
        if not half:
            scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127  # (R, 1)
            arrays = [scale, (rows / scale).round().to(torch.int8)]
        rows.copy_(arrays[-1] * scale)
        yield (
            name,
            *rows.shape,
            b"".join(array.numpy().tobytes() + bytes(-array.nbytes % 4) for array in arrays),
        )


def facts_of(loaded: Trained) -> list[str]:
    """What the page says of the model: parameters, steps, text."""
    facts = [
        f"{sum(p.numel() for p in loaded.model.parameters()):,} parameters",
        loaded.about or f"{loaded.provenance.step:,} steps, {loaded.provenance.tokens:,} tokens",
    ]
    with suppress(UsageError, DataError):
        facts.append("text: " + ", ".join(loaded.data.sources))  # names: no folder of the writer's
    return facts


@torch.no_grad()
def describe(loaded: Trained) -> dict:
    """What the page must know to compute, and what it is to compute: ids of awkward texts, and
    log p of the likeliest tokens after a prompt."""
    tokenizer = loaded.tokenizer
    tuned = loaded.provenance.tuned
    prompts = prompts_of(loaded)
    ids = prompt_ids(prompts[0], tokenizer, tuned)[0][: min(8, loaded.model.config.seq_len)]
    log_p, top = loaded.model(torch.tensor([ids]))[0, -1].log_softmax(-1).topk(5)
    return dict(
        name=loaded.run_dir.name,
        tuned=tuned,
        prompts=prompts,
        config=asdict(loaded.model.config),
        special=tokenizer.special,
        tokenizer=tokenizer_of(tokenizer),
        check=dict(
            texts=[[text, tokenizer.encode(text)] for text in TEXTS],
            ids=ids,
            top=[*zip(top.tolist(), log_p.tolist())],
        ),
    )


def tokenizer_of(tokenizer: Tokenizer) -> dict:
    """What bpe.js needs of a tokenizer.json; UsageError if it cuts text in a way that bpe.js does
    not know."""
    tree, _ = read_spec(tokenizer.spec)
    steps = tree["pre_tokenizer"] or {}
    splits = []
    for step in steps.get("pretokenizers", [steps]):
        if step.get("use_regex"):
            splits.append(BYTE_LEVEL)
        elif step.get("type") == "Digits":
            splits.append(r"\p{N}" if step["individual_digits"] else r"\p{N}+")
        elif step.get("behavior") == "Isolated" and "Regex" in step.get("pattern", ()):
            splits.append(step["pattern"]["Regex"])
        elif step.get("type", "ByteLevel") != "ByteLevel":
            raise UsageError(f"bpe.js, in the page, cannot cut text by {json.dumps(step):.200}")
    return dict(
        model=tree["model"],
        added=tree["added_tokens"],
        nfc=tokenizer.nfc,
        splits=[*map(for_javascript, splits)],
    )


def for_javascript(pattern: str) -> str:
    """A pattern of tokenizer.json as JavaScript has it, with the flag u: white space is Unicode's;
    a group with (?i: names both cases; possessive repetition becomes ordinary, since in these
    patterns nothing that follows could match what it has taken."""
    both = lambda c: f"[{c}{c.swapcase()}]" if c.isalpha() else c
    pattern = re.sub(r"\(\?i:(.*?)\)", lambda found: f"(?:{''.join(map(both, found[1]))})", pattern)
    pattern = pattern.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}")
    return re.sub(r"(\[(?:\\.|[^\]\\])*\])|([?+*])\+", r"\1\2", pattern)
