"""What a model tuned on `chats:stdlib` answers: `python benchmarks/answers.py RUN [RUN ...]`.

Each held-out question follows the true turns before it. Counted by kind of question: how many
answers are right word for word if each token is the likeliest one; and, of every N-th question, how
many end by themselves and have the form of an answer to it. Some kinds of answers follow from what
was said (SAID); the others (what it does, where it is) can only be remembered.
"""

import json
import re
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import torch
import tyro

import at_root  # noqa: F401
import data
import eval
from bits_per_byte import score_text
from machinery import trained
from machinery.shards import Manifest
from preparation import stdlib_chats

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


@torch.no_grad()
def exchanges(model, manifest: Manifest) -> list[tuple[list[int], list[int], bool]]:
    """(ids of all before an answer, BOS first; ids of the answer with <|end|>; whether greedy
    decoding gives it) of the held-out conversations. Greedy decoding gives an answer if each of its
    tokens is the likeliest after those before it, so one pass over a row tells."""
    model.config = replace(model.config, doc_mask=True)
    found = []
    source = manifest.sources.index("chats")
    for i in range(manifest.rows("val", source)):
        row = manifest.row("val", source, i).astype(np.int64)
        targets = data.targets_of(row[None], manifest.marks)[0]
        likeliest = model(torch.from_numpy(row[None, :-1])).argmax(-1)[0].numpy()
        counted = targets != data.IGNORED
        edges = np.flatnonzero(np.diff(counted, prepend=False, append=False)).tolist()
        for start, end in zip(edges[::2], edges[1::2]):
            begin = np.flatnonzero(row[: start + 1] == manifest.bos_id)[-1]
            right = bool((likeliest[start:end] == targets[start:end]).all())
            found.append((row[begin : start + 1].tolist(), targets[start:end].tolist(), right))
    return found


def measure(run: str, folder: str, every: int) -> dict:
    which = trained.find_model(run)
    config = trained.EvalConfig(**which, data_dir=folder, device="cpu", dtype="fp32")
    loaded = eval.load_model(config)
    model = loaded.model
    manifest = loaded.data
    tokenizer = loaded.tokenizer
    end = manifest.marks[2]
    token_bytes = torch.from_numpy(tokenizer.token_bytes)
    counts = defaultdict(Counter)
    for k, (before, answer, right) in enumerate(exchanges(model, manifest)):
        kind = kind_of(tokenizer.decode(answer[:-1]))
        counts[kind].update(n=1, right=right)
        if k % every or len(before) + MOST > model.config.seq_len:
            continue
        stream = model.stream(
            torch.tensor([before]), max_new_tokens=MOST, temperature=0, stop_id=end
        )
        drawn = [token.item() for token in stream]
        ends = drawn[-1] == end
        formed = ends and kind_of(tokenizer.decode(drawn[:-1])) == kind
        assert (drawn == answer) == right or MOST < len(answer)
        counts[kind].update(asked=1, ends=ends, form=formed)
    batches = data.val_batches(manifest, 8)
    nats, bpb, _ = score_text(model, batches, token_bytes, names=manifest.sources)
    for kind, c in sorted(counts.items()):
        known = "said" if kind in SAID else "remembered"
        asked = max(1, c["asked"])
        right = f"{c['right'] / c['n']:4.0%} of {c['n']} right; of {c['asked']} asked"
        print(
            f"  {kind:9} ({known:10}) {right}, {c['ends'] / asked:.0%} end, "
            f"{c['form'] / asked:.0%} in form"
        )
    total = sum(counts.values(), Counter())
    said = sum((counts[kind] for kind in SAID), Counter())
    figures = {name: total[name] / total["asked"] for name in ("ends", "form")}
    figures |= dict(right=total["right"] / total["n"], right_of_said=said["right"] / said["n"])
    return dict(run=run, nats=nats, bpb=bpb, n=total["n"], asked=total["asked"]) | figures


def main(
    runs: tyro.conf.Positional[tuple[str, ...]], data_dir: str = "data/tiny-chat", every: int = 1
) -> None:
    """Print the figures of each run, of every N-th question."""
    for run in runs:
        print(json.dumps(measure(run, data_dir, every)), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
