"""log p(continuation | context): the measurement behind multiple choice and CORE.

A pair of texts becomes a pair of ids (`encode_pair`), and `log_likelihoods` gives a number in nats
for each pair. Next: choice.py and core.py.
"""

import math

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from config import UsageError
from machinery.errors import NonFiniteError
from machinery.output import say
from model import GPT
from preparation.chat import prompt_ids
from tokenizer import Tokenizer

Pair = tuple[list[int], list[int]]  # ids of the context, BOS in front, and of its continuation
LOGITS = 1 << 27  # in a forward pass: 0.5 GB in fp32


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str, tuned: bool = False) -> Pair:
    """A continuation begins with the space that stands before it. White space at the end of the
    context counts as the continuation's, and both are encoded as one text, since a token may span
    the boundary. For a tuned model, the context is what a user asks, and the continuation, without
    its space, follows <|assistant|>."""
    if tuned and context:
        question, _ = prompt_ids(context.rstrip(), tokenizer, tuned)
        return question, tokenizer.encode(continuation.removeprefix(" "))
    prefix = tokenizer.encode(context.rstrip())
    answer = tokenizer.encode(context + continuation)[len(prefix) :]
    # A merge across the boundary may leave no token for the answer, which would then cost 0 nats.
    return [tokenizer.bos_id, *prefix], answer or tokenizer.encode(continuation)


@torch.no_grad()
def log_likelihoods(model: GPT, pairs: list[Pair], batch: int) -> list[tuple[float, bool]]:
    """For each pair, log p(continuation | context) in nats, and whether each token of the
    continuation is the likeliest one. batch: rows of a forward pass, at most.

    A pair longer than seq_len + 1 tokens loses the beginning of its context; UsageError for a
    continuation that does not fit alone."""
    seq_len = model.config.seq_len
    lengths = [len(context) + len(answer) for context, answer in pairs]
    most = max(len(answer) for _, answer in pairs)
    if most > seq_len:
        raise UsageError(f"an answer has {most} tokens; the model sees {seq_len}")
    cropped = sum(length > seq_len + 1 for length in lengths)
    if cropped:
        say(
            f"{cropped:,} of {len(pairs):,} answers lost the beginning of their context: seq_len "
            f"is {seq_len}"
        )
    row = min(max(lengths), seq_len) * model.config.vocab_size  # logits of the longest
    batch = max(1, min(batch, LOGITS // row))
    # The longest first, so that the rows of a batch are about as long.
    order = sorted(range(len(pairs)), key=lambda i: -lengths[i])
    found = [()] * len(pairs)
    for start in tqdm(range(0, len(pairs), batch), unit="batch", disable=None, leave=False):
        part = order[start : start + batch]
        rows = [torch.tensor((pairs[i][0] + pairs[i][1])[-seq_len - 1 :]) for i in part]
        # Padded on the right: attention is causal, so what follows a row is not seen.
        ids = pad_sequence(rows, batch_first=True).to(model.cos.device)  # (B, T + 1)
        y = ids[:, 1:]
        logits = model(ids[:, :-1])  # (B, T, V)
        loss = F.cross_entropy(logits.float().mT, y, reduction="none").cpu()
        likeliest = (logits.argmax(-1) == y).cpu()
        for r, i in enumerate(part):
            end = len(rows[r]) - 1
            span = slice(end - len(pairs[i][1]), end)
            found[i] = -loss[r, span].double().sum().item(), likeliest[r, span].all().item()
    if not all(math.isfinite(nats) for nats, _ in found):
        raise NonFiniteError("the model gives log-likelihoods that are NaN or infinite")
    return found
