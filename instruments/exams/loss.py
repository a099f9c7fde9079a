"""The loss on held-out text, and which targets it comes from: `python eval.py loss RUN`.

A target continues a copy if the same two tokens stood earlier in its row and were followed by it.
A change that helps to copy should be judged by the other targets, too (`--by copy`). Next:
pages/multiplier.py, what a smaller loss is worth.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import data
from bits_per_byte import loss_and_bpb, reads_future, sums_of
from config import Count, UsageError
from instruments.pages.multiplier import aligned
from machinery.errors import NonFiniteError
from machinery.output import say
from machinery.screen import sources_line
from machinery.trained import EvalConfig
from model import GPT

PARTS = 16  # of a row, for the loss by position
CLASSES = (  # of targets
    "two tokens seen before, followed by the same",
    "two tokens seen before, followed by another",
    "one token seen before, followed by the same",
    "one token seen before, followed by another",
    "after a token that is new in its row",
)


@dataclass(frozen=True)
class LossConfig(EvalConfig):
    """Bits per byte on the validation split."""

    rows: int = 0
    """Validation rows to score; 0: all."""
    batch: Count = 8
    """Rows per forward pass."""
    by: Literal["", "copy", "position"] = ""
    """copy: also the loss of targets that continue a copy, and of the others; position: by how
    much of the row stands before the target."""


def last_equal(keys: Tensor) -> Tensor:
    """keys (B, T) -> the place in its row of the last equal key before each, (B, T) int64; -1 if
    there is none. A stable sort puts equal keys side by side, in the order in which they stood."""
    found, order = keys.sort(stable=True)  # (B, T) each: sorted keys, and where they stood
    before = order[:, :-1].where(found.diff() == 0, -1)
    return torch.full_like(order, -1).scatter(1, order[:, 1:], before)


def copy_classes(ids: Tensor) -> Tensor:
    """ids (B, T + 1) int64 -> the class of each target, (B, T) int64: an index into CLASSES.

    By what followed the last time that the two tokens before the target stood in the row; if they
    never did, by what followed the last time that the one before it did; 4 if that one is there
    for the first time."""
    inputs = ids[:, :-1]
    targets = ids[:, 1:]
    # Two ids in one number of 64 bits. 0 is none, too: no token is before the first.
    pair_at = last_equal(inputs.roll(1, dims=1) << 32 | inputs)  # (B, T)
    index = pair_at.where(pair_at > 0, last_equal(inputs))
    differs = targets.gather(1, index.clamp(min=0)) != targets
    return (2 * (pair_at < 1) + differs).masked_fill(index < 0, 4)


@torch.no_grad()
def score(
    model: GPT, batches: Iterable, token_bytes: Tensor, n_sources: int
) -> tuple[Tensor, Tensor]:
    """Batches of inputs and targets (B, T), and for each row the index of its source -> sums by
    source and class of targets, (sources, classes, 4), as bits_per_byte.sums_of has them: nats,
    targets, nats and bytes of text; and sums by position, (2, T): nats and targets. Both fp64, on
    the host.

    Of the targets that count: in a conversation, only answers do. Nothing else is kept of a batch,
    so that a long held-out text fits into memory."""
    by_class = torch.zeros(n_sources, len(CLASSES), 4, dtype=torch.double)
    by_position = torch.zeros(2, 1, dtype=torch.double)  # (2, T) from the first batch on
    for inputs, targets, sources in batches:
        nats = model(inputs, targets, reduction="none").cpu()  # (B, T)
        targets = targets.cpu()
        counted = targets != data.IGNORED
        nats = nats.where(counted, 0)
        if not nats.isfinite().all():
            raise NonFiniteError("the loss of held-out text is NaN or infinite")
        by_position = by_position + torch.stack([nats, counted]).sum(1, dtype=torch.double)
        classes = copy_classes(torch.cat([inputs.cpu(), targets[:, -1:]], dim=1))
        for k in range(len(CLASSES)):
            of_class = targets.where(classes == k, data.IGNORED)
            by_row = torch.stack([*sums_of(nats, of_class, token_bytes).values()], dim=1)  # (B, 4)
            by_class[:, k].index_add_(0, torch.tensor(sources), by_row.double())
    return by_class, by_position


def score_held_out(config: LossConfig, load_model) -> None:
    """Print the loss, and append it to eval.jsonl."""
    loaded = load_model(config)
    model = loaded.model
    manifest = loaded.data
    if manifest.row_len - 1 > model.config.seq_len:
        raise UsageError(
            f"the rows of {manifest.dir} have {manifest.row_len - 1} inputs, but {loaded.path} "
            f"reads {model.config.seq_len}; docs/context.md tells how a model learns to read more"
        )
    batches = data.val_batches(manifest, config.batch, config.rows, device=model.cos.device)
    by_class, by_position = score(
        model, batches, torch.from_numpy(manifest.token_bytes()), len(manifest.sources)
    )
    nats, bpb = loss_and_bpb(*by_class.sum((0, 1)).tolist())
    sums = zip(manifest.sources, by_class.sum(1).tolist())
    by_source = {name: loss_and_bpb(*of)[1] for name, of in sums if of[3]}  # bytes
    rows = len(data.val_rows(manifest, config.rows))
    say(
        f"validation: {nats:.4f} nats per token, {bpb:.4f} bits per byte{sources_line(by_source)}, "
        f"on {rows:,} of {manifest.rows('val'):,} rows of {manifest.dir}"
    )
    if config.by == "copy":
        say("\n".join(table(by_class.sum(0))))
    if config.by == "position":
        T = by_position.size(1)
        for part in torch.arange(T).tensor_split(min(PARTS, T)):
            total, n = by_position[:, part].sum(1)
            say(f"{part[0]:,} to {part[-1]:,}: {total / n:.4f} nats per token")
    loaded.append_result(
        val_loss=nats,
        val_bpb=bpb,
        val_bpb_by_source=by_source,
        rows=rows,
        reads_future=reads_future(model, say),
        data_fingerprint=manifest.fingerprint,
    )


def table(sums: Tensor) -> list[str]:
    """sums (classes, 4) -> a line for each class."""
    shares = sums / sums.sum(0).clamp(min=1)
    rows = [("targets", "share", "nats each", "bits per byte", "share of the bits")]
    for name, of, share in zip(CLASSES, sums, shares):
        nats, bpb = loss_and_bpb(*of.tolist())
        rows.append((name, f"{share[1]:.1%}", f"{nats:.4f}", f"{bpb:.4f}", f"{share[2]:.1%}"))
    return aligned(rows)
