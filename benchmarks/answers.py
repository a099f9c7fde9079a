"""What comes next? Asked by trials.py, answered by a model that a version of the code has trained.

    cd VERSION; python REFEREE/benchmarks/answers.py RUN_DIR DEVICE

A question, on standard input, is an .npz; an answer, on standard output, the bytes of an array in
fp32: logits after the last token that was given, (B, V). The text of rows comes piece by piece, so
that no answer can depend on what follows. This file is the referee's; what it imports, the
version's.
"""

import io
import os
import sys
from multiprocessing.connection import Connection

sys.path[0] = os.getcwd()
ANSWERS = Connection(os.dup(1), readable=False)
os.dup2(2, 1)  # what the version prints is no answer
import numpy as np
import torch

from machinery.trained import EvalConfig, load_model
from model import GPT, KVCache


def cache_for(model: GPT, rows: int) -> KVCache:
    c = model.config
    return KVCache(c, rows, c.seq_len, model.compute_dtype, model.cos.device)


def has_cache(model: GPT) -> bool:
    """Whether the model says with its cache what it says without. An idea that has not been taught
    to use it is asked without, which takes longer."""
    T = model.config.seq_len
    ids = torch.arange(T, device=model.cos.device)[None] * 7919 % model.config.vocab_size  # (1, T)
    try:
        cache = cache_for(model, 1)
        pieces = [model(piece, cache=cache) for piece in ids.split(5, dim=1)]
        return (torch.cat(pieces, dim=1) - model(ids)).abs().max().item() < 1e-3
    except Exception:  # of code that is tried out
        return False


@torch.no_grad()
def answer(model: GPT, questions: Connection) -> None:
    """ids (B, n): the next tokens of B rows; with `start` 0, their first. Or, with `at` (P,): whole
    rows, and the answer is wanted after each of these positions, (B, P, V)."""
    cached = has_cache(model)
    cache = given = None
    while True:
        try:
            question = np.load(io.BytesIO(questions.recv_bytes()))
        except EOFError:
            return
        ids = torch.from_numpy(question["ids"]).to(model.cos.device)
        if "at" in question:
            logits = torch.cat([model(row[None])[:, question["at"]] for row in ids])
        elif cached:
            cache = cache if question["start"] else cache_for(model, len(ids))
            logits = model(ids, cache=cache)[:, -1]
        else:
            given = torch.cat([given, ids], dim=1) if question["start"] else ids
            logits = torch.cat([model(row[None])[:, -1] for row in given])
        ANSWERS.send_bytes(logits.float().cpu().numpy().tobytes())


if __name__ == "__main__":
    run_dir, device = sys.argv[1:]
    model = load_model(EvalConfig(run_dir=run_dir, device=device, dtype="fp32")).model
    answer(model, Connection(0))
