"""What a model tuned on `chats:stdlib` answers: `python benchmarks/answers.py RUN [RUN ...]`.

Each held-out question is asked once, after the true turns before it, and answered greedily. Counted
by kind of question: answers that end by themselves, that have the form of an answer to this
question, and that are right word for word. Those of the first kinds follow from what was said; the
others (what it does, where it is) can only be remembered. Prints a table, and the loss of answers.
"""

import json
import re
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import data
import eval
from flops import bits_per_byte
from machinery import trained
from machinery.shards import Manifest
from preparation import chat, stdlib_chats
from tokenizer import Tokenizer

MOST = 48  # tokens of an answer
SAID = ("arguments", "count", "again", "greeting")  # the others must be remembered
COUNTS = "|".join(stdlib_chats.COUNTS)
NAME = r"[\w*]+"
FORMS = {  # what the right answer looks like tells what was asked
    "arguments": rf"(It takes|You pass) {NAME}(, {NAME})*( and {NAME})?\.",
    "count": rf"({COUNTS})\.",
    "again": rf"Its name is {NAME}\.",
    "kind": rf"{NAME} is a (class|function)\.",
    "where": r"(It is in|In) [\w.]+\.",
    "name": rf"(It is called|That is) {NAME}\.",
}


def kind_of(answer: str) -> str:
    """The kind of question that an answer of the data answers."""
    fixed = [a for _, a in stdlib_chats.GREETINGS + stdlib_chats.THANKS]
    if answer in fixed:
        return "greeting"
    return next((kind for kind, form in FORMS.items() if re.fullmatch(form, answer)), "what")


def exchanges(manifest: Manifest, tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """(ids of all before an answer, BOS first; ids of the answer) of the held-out conversations."""
    _, assistant, end = chat.marks(tokenizer)
    found = []
    source = manifest.sources.index("chats")
    for i in range(manifest.rows("val", source)):
        row = manifest.row("val", source, i).astype(np.int64)
        for piece in np.split(row, np.flatnonzero(row == manifest.bos_id)):
            ids = piece.tolist()
            for at in np.flatnonzero(piece == assistant).tolist():
                found.append((ids[: at + 1], ids[at + 1 : ids.index(end, at)]))
    return found


def measure(run: str, folder: str) -> dict:
    config = replace(trained.EvalConfig(**trained.find_model(run)), data_dir=folder, device="cpu")
    model, trainer = eval.load_model(config)
    manifest = trained.open_data(config, trainer)
    tokenizer = Tokenizer.load(manifest.tokenizer_file())
    end, token_bytes = chat.marks(tokenizer)[2], torch.from_numpy(tokenizer.token_bytes)
    nats, bpb = bits_per_byte(model, data.val_batches(manifest, 8), token_bytes)
    counts = defaultdict(Counter)
    for before, answer in exchanges(manifest, tokenizer):
        if len(before) + MOST > model.config.seq_len:
            continue
        stream = model.stream(torch.tensor([before]), MOST, 0.0, 0, None, end)
        drawn = [token.item() for token in stream]
        right, ends = tokenizer.decode(answer), drawn[-1] == end
        said = tokenizer.decode(drawn[:-1] if ends else drawn)
        kind = kind_of(right)
        formed = kind_of(said) == kind if kind != "what" else kind_of(said) == "what" and ends
        counts[kind].update(n=1, ends=ends, form=ends and formed, right=ends and said == right)
    for kind, c in sorted(counts.items()):
        known = "said" if kind in SAID else "remembered"
        shares = ", ".join(f"{name} {c[name] / c['n']:.0%}" for name in ("ends", "form", "right"))
        print(f"  {kind:9} ({known:10}) {c['n']:4} questions: {shares}")
    total = sum(counts.values(), Counter())
    said = sum((counts[kind] for kind in SAID), Counter())
    figures = {name: total[name] / total["n"] for name in ("ends", "form", "right")}
    figures |= dict(right_of_said=said["right"] / max(1, said["n"]), n=total["n"])
    return dict(run=run, nats=nats, bpb=bpb) | figures


if __name__ == "__main__":
    folder = "data/tiny-chat"
    runs = [word for word in sys.argv[1:] if not word.startswith("--data_dir=")]
    for word in set(sys.argv[1:]) - set(runs):
        folder = word.removeprefix("--data_dir=")
    for run in runs:
        print(
            json.dumps(
                {
                    k: round(v, 4) if isinstance(v, float) else v
                    for k, v in measure(run, folder).items()
                }
            ),
            flush=True,
        )
