"""The measure of a model: its loss on text, in nats per token and in bits per byte.

Nats per token depend on the tokenizer: with larger tokens there are fewer to predict. Bits per byte
do not, so that models with different tokenizers can be compared. Both are ratios of sums over the
targets, which may be added up over rows, ranks and sources. They mean nothing if the model has read
what it is to predict: `reads_future` tries that. Next: eval.py, its command `loss`.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def sums_of(nats: Tensor, targets: Tensor, token_bytes: Tensor) -> dict[str, Tensor]:
    """The arguments of `loss_and_bpb`, by name, in their order, summed over each row: (B,), fp32.

    nats (B, T): the loss of each target; targets (B, T): below 0, a target counts nowhere;
    token_bytes (V,): a special token has 0 bytes, and is no text."""
    counted = targets >= 0
    size = token_bytes[targets.clamp(min=0)] * counted  # (B, T)
    sums = dict(nats=nats * counted, counted=counted, text_nats=nats * (size > 0), bytes=size)
    return {name: x.sum(1, dtype=torch.float32) for name, x in sums.items()}


def loss_and_bpb(nats, counted, text_nats, bytes) -> tuple[float, float]:
    """Nats per target, and bits per byte of text: the latter do not depend on the tokenizer."""
    return nats / max(counted, 1), text_nats / math.log(2) / max(bytes, 1)


@torch.no_grad()
def score_text(
    model: nn.Module, batches: Iterable, token_bytes: Tensor, rows: int = 0, names=("",)
) -> tuple[float, float, dict[str, float]]:
    """Loss in nats per token and in bits per byte of text, over all ranks' batches; the latter also
    by source: their mean, weighted by bytes of text, is that of all.

    batches: inputs and targets (B, T), and for each row the index of its source in `names`; equally
    many batches on every rank (a sharded model's ranks run in lockstep). rows: in every forward
    pass, since a compiled model is compiled for one shape; a smaller batch is filled up with copies
    of its own rows, which are not scored."""
    parts = []  # read after the loop, so that the host never waits for the device in between
    source_of = []  # each row
    training = model.training
    model.eval()
    for inputs, targets, sources in batches:
        n = len(inputs)
        fill = torch.arange(max(n, rows), device=inputs.device) % n  # 0 .. n - 1, then again
        nats = model(inputs[fill], targets[fill], reduction="none")[:n]  # (n, T)
        parts.append(torch.stack([*sums_of(nats, targets, token_bytes).values()]))
        source_of += sources
    model.train(training)
    by_row = torch.cat(parts, dim=1).cpu().double()  # (4, rows of this rank)
    by_source = torch.zeros(4, len(names), dtype=torch.double)
    by_source.index_add_(1, torch.tensor(source_of), by_row)
    if dist.is_initialized():
        dist.all_reduce(by_source)
    by_name = zip(names, by_source.T.tolist())
    bits = {name: loss_and_bpb(*sums)[1] for name, sums in by_name if sums[3]}  # bytes
    return *loss_and_bpb(*by_source.sum(1).tolist()), bits


@torch.no_grad()
def reads_future(model: nn.Module, say: Callable) -> float | None:
    """By how many nats the loss of a text moves when later tokens are changed; if it does, `say`
    gets a warning. 0.0: it does not, and the loss means something. None: the model, a GPT in eval
    mode, does not run on so small a text. If it is sharded, all ranks call this.

    Copies of one text of up to 64 tokens are changed, each from another position on, and compared
    with what the first pass said of the positions before: so what one pass leaves to the next is
    found as well. The first pass itself must say what the logits say, which are computed without
    the targets. Kernels choose the order of their sums by shapes, and these are equal: the loss of
    an honest model does not move at all."""
    T = min(64, model.config.seq_len)
    V = model.config.vocab_size
    text = (63 - torch.arange(T + 1, device=model.cos.device)) % V
    text[21::21] = model.config.bos_id  # so that there are several documents
    inputs = text[:-1].repeat(8, 1)  # (8, T)
    targets = text[1:].repeat(8, 1)
    try:
        first = model(inputs, targets, reduction="none")  # (8, T)
        by_logits = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")
        off = (by_logits - first).abs().max()
        moved = off * (off > 0.01)  # less is rounding
        for start in range(0, T, 8):
            begins = start + torch.arange(8, device=text.device)[:, None]
            later = torch.arange(T, device=text.device) >= begins  # (8, T)
            changed = model((inputs + later) % V, (targets + later) % V, reduction="none")
            moved = torch.maximum(moved, ((changed - first).abs() * ~later).max())
        moved = moved.item()
    except Exception as error:  # of a model that was edited: no reason to end a run
        say(f"warning: whether the model reads the future is not known: {error!r}")
        return None
    if moved < 1e-5:
        return 0.0
    say(  # also if it is NaN
        f"warning: the model reads the future: its loss moves by {moved:.2g} nats when later "
        "tokens change, so its bits per byte mean nothing; look at attention's mask, at what "
        "shifts keys or values, at norms over time, at what a call leaves to the next one"
    )
    return moved
