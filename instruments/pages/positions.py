"""Loss by position in the row: what a model makes of a long context, and where it fails.

Reads the newest checkpoint of a run and the first held-out rows of its data; writes
RUN_DIR/positions.json, from which report.py makes a table. Only targets that count are scored: of
conversations, the answers. A packed row holds several documents: late positions see a long row,
not always a long document.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

import data
from config import UsageError
from instruments.pages.records import number
from machinery import checkpoint, disk
from machinery.errors import CheckpointError, DataError, NonFiniteError
from machinery.trained import EvalConfig, open_data
from model import GPT

TOKENS = 65_536  # to score, in whole rows
FIRST = 32  # positions of the first range; each range ends at twice the end of the one before
NO_MODEL = (UsageError, DataError, CheckpointError, NonFiniteError)  # one that cannot be measured


def nats_of(model: GPT, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Batches of inputs and targets, (B, T) each -> nats of every target, (N, T), on the host. NaN:
    a target that does not count; any other that is not finite is a NonFiniteError."""
    found = []
    for inputs, targets in batches:
        with torch.no_grad():
            nats = model(inputs, targets, reduction="none").cpu().double()  # (B, T)
        counts = targets.cpu() != data.IGNORED
        if not nats[counts].isfinite().all():
            raise NonFiniteError("the loss of held-out text is NaN or infinite")
        found.append(nats.masked_fill(~counts, torch.nan))
    return torch.cat(found)


def by_position(model: GPT, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """-> mean cross-entropy in nats at each position, (T,); NaN where no target counts."""
    return nats_of(model, batches).nanmean(0)


def by_range(nats: Tensor) -> list[tuple[int, int, float]]:
    """nats (N, T), NaN where a target does not count -> (begin, end, mean) of the ranges; those
    without a target that counts are left out."""
    means = [(begin, end, nats[:, begin:end].nanmean()) for begin, end in ranges(nats.size(1))]
    return [(begin, end, mean.item()) for begin, end, mean in means if not mean.isnan()]


def ranges(T: int) -> list[tuple[int, int]]:
    """Positions from .. up to, not including: 512 -> 0 32, 32 64, 64 128, 128 256, 256 512."""
    ends = [FIRST]
    while ends[-1] < T:
        ends.append(2 * ends[-1])
    return [(begin, min(end, T)) for begin, end in zip([0, *ends], ends)]


def measure(config: EvalConfig, load_model: Callable) -> None:
    """Score config.checkpoint of the run, unless that is done. load_model: EvalConfig -> (model,
    trainer.json)."""
    run_dir = Path(config.run_dir)
    step = checkpoint.step_of(Path(config.checkpoint))
    asked = {"step": step, "data_dir": config.data_dir}
    if asked.items() <= read(run_dir).items():
        return
    try:
        model, trainer = load_model(config)
        manifest = open_data(config, trainer)
        rows = min(max(1, TOKENS // (manifest.row_len - 1)), manifest.rows("val"))
        nats = nats_of(model, data.val_batches(manifest, 8, rows, device=model.cos.device))
    except NO_MODEL as error:
        print(f"no loss by position: {error}")
        return
    facts = asked | {"rows": rows, "data": str(manifest.dir), "nats": by_range(nats)}
    disk.write_json(run_dir / "positions.json", facts)


def read(run_dir: Path) -> dict:
    """positions.json; {} if there is none, or a damaged one, which is then written anew."""
    try:
        facts = disk.read_json(run_dir / "positions.json")
        numbers = [x for begin, end, nats in facts["nats"] for x in (begin, end, nats)]
        numbers += [facts["step"], facts["rows"]]
        return facts if isinstance(facts["data"], str) and all(map(number, numbers)) else {}
    except (DataError, KeyError, TypeError, ValueError):
        return {}
