"""The loss on held-out text, and which targets it comes from: `python eval.py loss RUN`.

A target continues a copy if the same two tokens stood earlier in its row and were followed by it.
A change that helps to copy should be judged by the other targets, too (`--by copy`). The figures of
each row are kept in RUN_DIR/val_rows_STEP.npy: `eval.py compare` needs them to tell a difference
from chance. Next: pages/multiplier.py, which reads them.
"""

import io
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

import data
from config import Count, UsageError
from flops import loss_and_bpb, sums_of
from instruments.pages.multiplier import CLASSES, rows_file
from machinery import disk, trained
from machinery.errors import NonFiniteError
from machinery.log import sources_line
from machinery.trained import EvalConfig
from model import GPT

PARTS = 16  # of a row, for the loss by position


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


def copy_classes(ids: Tensor) -> Tensor:
    """ids (B, T + 1) -> the class of each target, (B, T): an index into CLASSES.

    By what followed the last time that the two tokens before the target stood in the row; if they
    never did, by what followed the last time that the one before it did; 4 if that one is there
    for the first time."""
    classes = torch.full((len(ids), ids.size(1) - 1), 4)
    for b, row in enumerate(ids.tolist()):
        after_pair, after_token = {}, {}
        for t, (token, target) in enumerate(zip(row, row[1:])):
            pair = (row[t - 1], token) if t else None
            if pair in after_pair:
                classes[b, t] = 0 if after_pair[pair] == target else 1
            elif token in after_token:
                classes[b, t] = 2 if after_token[token] == target else 3
            after_pair[pair] = after_token[token] = target
    return classes


@torch.no_grad()
def score(model: GPT, batches: Iterable) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and targets (B, T) -> nats, targets and classes (N, T) of all of them, on the host.
    Nats are NaN where a target does not count: only the answers of a conversation do."""
    found = []
    for inputs, targets in batches:
        nats = model(inputs, targets, reduction="none").cpu()  # (B, T)
        inputs, targets = inputs.cpu(), targets.cpu()
        if not nats[targets != data.IGNORED].isfinite().all():
            raise NonFiniteError("the loss of held-out text is NaN or infinite")
        classes = copy_classes(torch.cat([inputs, targets[:, -1:]], dim=1))
        found.append((nats.masked_fill(targets == data.IGNORED, torch.nan), targets, classes))
    return tuple(torch.cat(parts) for parts in zip(*found))


def sums_by_class(nats: Tensor, targets: Tensor, classes: Tensor, token_bytes: Tensor) -> Tensor:
    """(N, T) each -> (N, classes, 4): nats, targets, nats of text and bytes of text, as
    flops.sums_of has them."""
    nats = nats.nan_to_num()
    parts = [targets.where(classes == k, data.IGNORED) for k in range(len(CLASSES))]
    sums = [torch.stack([*sums_of(nats, y, token_bytes).values()], dim=1) for y in parts]
    return torch.stack(sums, dim=1)


def measure(config: LossConfig, load_model) -> None:
    """Print the loss, append it to eval.jsonl, and keep the figures of each row."""
    model, trainer = load_model(config)
    manifest, device = trained.open_data(config, trainer), model.cos.device
    if (long := manifest.row_len - 1) > (most := model.config.seq_len):
        why = f"the rows of {manifest.dir} have {long} inputs, but {trainer['path']} reads {most}"
        raise UsageError(f"{why}; docs/context.md tells how a model learns to read more")
    batches = data.val_batches(manifest, config.batch, config.rows, device=device)
    nats_of_targets, targets, classes = score(model, batches)  # (N, T) each
    token_bytes = torch.from_numpy(manifest.token_bytes())
    rows = sums_by_class(nats_of_targets, targets, classes, token_bytes)
    each = rows.double().sum(1)  # (N, 4)
    nats, bpb = loss_and_bpb(*each.sum(0).tolist())
    source_of = torch.tensor([source for source, _ in data.val_places(manifest, config.rows)])
    sums = {name: each[source_of == i].sum(0) for i, name in enumerate(manifest.sources)}
    by_source = {name: loss_and_bpb(*x.tolist())[1] for name, x in sums.items() if x[3]}
    print(
        f"validation: {nats:.4f} nats per token, {bpb:.4f} bits per byte{sources_line(by_source)}, "
        f"on {len(rows):,} of {manifest.rows('val'):,} rows of {manifest.dir}"
    )
    if config.by == "copy":
        print("\n".join(table(rows.double().sum(0))))
    places = torch.arange(targets.size(1)).tensor_split(PARTS)
    for part in places if config.by == "position" else ():
        mean = nats_of_targets[:, part].nanmean()
        print(f"{part[0]:,} to {part[-1]:,}: {mean:.4f} nats per token")
    figures = dict(val_loss=nats, val_bpb=bpb, val_bpb_by_source=by_source, rows=len(rows))
    trained.keep_record(config, trainer, **figures, data_fingerprint=manifest.fingerprint)
    if not config.rows and not config.data_dir:
        keep_rows(rows_file(trained.run_of(trainer["path"]), trainer["step"]), rows)


def keep_rows(path: Path, rows: Tensor) -> None:
    """Write them as a .npy; if that fails, say so and go on."""
    content = io.BytesIO()
    np.lib.format.write_array(content, rows.numpy())
    try:
        disk.write_bytes(path, content.getvalue())
    except OSError as error:
        print(f"not written to {path}: {error.strerror}", file=sys.stderr)


def table(sums: Tensor) -> list[str]:
    """sums (classes, 4) -> a line for each class."""
    whole = sums.sum(0)
    lines = [f"{'targets':44}  share  nats each  bits per byte  share of the bits"]
    for name, of in zip(CLASSES, sums):
        nats, bpb = loss_and_bpb(*of.tolist())
        share, bits = of[1] / whole[1].clamp(min=1), of[2] / whole[2].clamp(min=1)
        lines.append(f"{name:44} {share:6.1%} {nats:10.4f} {bpb:14.4f} {bits:18.1%}")
    return lines
