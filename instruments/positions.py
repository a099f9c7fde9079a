"""Loss by position in the row: what a model makes of a long context, and where it fails.

Reads the newest checkpoint of a run and the first held-out rows of its data; writes
RUN_DIR/positions.json, from which report.py makes a table. `eval.py report` calls `measure`. A
packed row holds several documents: late positions see a long row, not always a long document.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

import data
from config import UsageError
from machinery import checkpoint, disk
from machinery.errors import CheckpointError, DataError
from machinery.trained import EvalConfig, open_data
from model import GPT

TOKENS = 65_536  # to score, in whole rows
FIRST = 32  # positions of the first range; each range ends at twice the end of the one before


@torch.no_grad()
def by_position(model: GPT, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Inputs and targets, (B, T) each -> mean cross-entropy in nats at each position, (T,)."""
    total, n = 0, 0
    for inputs, targets in batches:
        nats = model(inputs, targets, reduction="none")  # (B, T)
        total, n = total + nats.double().sum(0), n + len(nats)
    return total / n


def ranges(T: int) -> list[tuple[int, int]]:
    """Positions from .. up to, not including: 512 -> 0 32, 32 64, 64 128, 128 256, 256 512."""
    ends = [FIRST]
    while ends[-1] < T:
        ends.append(2 * ends[-1])
    return [(begin, min(end, T)) for begin, end in zip([0, *ends], ends)]


def measure(config, load_model: Callable) -> None:
    """Score the newest checkpoint, unless that is done. config: a ReportConfig; load_model:
    EvalConfig -> (model, trainer.json)."""
    run_dir = Path(config.run_dir)
    paths = checkpoint.checkpoints(run_dir / "checkpoints")
    if not paths or read(run_dir).get("step") == checkpoint.step_of(paths[0]):
        return
    where = dict(data_dir=config.data_dir, device=config.device, dtype=config.dtype)
    which = EvalConfig(run_dir=config.run_dir, checkpoint=str(paths[0]), **where)
    try:
        model, trainer = load_model(which)
        manifest = open_data(which, trainer)
    except (UsageError, DataError, CheckpointError) as error:
        print(f"no loss by position: {error}")
        return
    rows = min(max(1, TOKENS // (manifest.row_len - 1)), manifest.rows("val"))
    batches = data.val_batches(manifest, 8, rows, device=model.cos.device)
    nats = by_position(model, batches).cpu()
    found = [[begin, end, float(nats[begin:end].mean())] for begin, end in ranges(len(nats))]
    facts = dict(step=trainer["step"], rows=rows, data=str(manifest.dir), nats=found)
    with disk.writable(run_dir, "copy the run to where you may write"):
        disk.write_json(run_dir / "positions.json", facts)


def read(run_dir: Path) -> dict:
    """positions.json; {} if there is none, or a damaged one, which is then written anew."""
    try:
        found = disk.read_json(run_dir / "positions.json")
        found["rows_of_table"] = [
            (f"{int(begin):,} to {int(end) - 1:,}", f"{float(nats):.4f} nats per token")
            for begin, end, nats in found["nats"]
        ]
        return found if {"step", "rows", "data"} <= found.keys() else {}
    except (OSError, DataError, KeyError, TypeError, ValueError, OverflowError):
        return {}


def rows(run_dir: Path) -> list[tuple[str, str]]:
    """The table, (positions, loss) each; [] if nothing was measured."""
    if not (found := read(run_dir)):
        return []
    scored = f"step {found['step']} on {found['rows']} held-out rows of {found['data']}"
    return [("measured", scored), *found["rows_of_table"]]
