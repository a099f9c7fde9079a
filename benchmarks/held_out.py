"""The held-out text, and what a model makes of it, in numbers that the model does not compute.

`divide` takes a data folder apart: training rows, which both versions get, with a few held-out rows
for their own use; held-out rows that judge every try; as many that are sealed. `score` asks a model
what comes next, at random places. It has been told nothing of what follows a place, and its answer
is turned into probabilities here, which therefore add up to 1. For referee.py.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import at_root  # noqa: F401
import data
from bits_per_byte import loss_and_bpb, sums_of
from config import UsageError
from machinery import disk, shards
from machinery.errors import DataError
from machinery.shards import Manifest

ROWS = 256  # that judge, and that are sealed
OWN = 64  # for a version's own validation
PLACES = 64  # in a row, whose next token is asked for
AT_ONCE = 32  # rows
PIECE = 32  # tokens
FILES = ("text/manifest.json", "scored.npy", "sealed.npy")


def divide(whole: Manifest, folder: Path) -> None:
    """Write FOLDER/text, a data folder, and FOLDER/scored.npy and sealed.npy, (ROWS, row_len)."""
    rows = np.array([whole.row("val", *place) for place in data.val_rows(whole)])
    if len(rows) < 2 * ROWS + OWN:
        raise UsageError(
            f"{whole.dir} has {len(rows)} held-out rows, and {2 * ROWS + OWN} are needed: prepare "
            "it with a larger --val_fraction"
        )
    rows = np.random.default_rng(0).permutation(rows)[: 2 * ROWS + OWN]
    scored, sealed, own = np.split(rows, [ROWS, 2 * ROWS])
    for name, part in (("scored", scored), ("sealed", sealed)):
        np.save(folder / f"{name}.npy", part)
    text = folder / "text"
    shutil.rmtree(text, ignore_errors=True)
    shutil.copytree(whole.dir, text, ignore=shutil.ignore_patterns(".units"))
    shutil.rmtree(text / "val")
    (text / "val").mkdir()
    tree = disk.read_json(text / "manifest.json")
    kept = [
        vars(replace(shard, file=f"val/{shard.file}", crc32_file=f"val/{shard.crc32_file}"))
        for shard in shards.write_shards(own, text / "val", "own", whole.dtype)
    ]
    for source in whole.sources:
        tree["splits"]["val"][source]["shards"] = kept
        kept = []
    tree["made"] = {}  # it has the beginnings of held-out documents
    tree["fingerprint"] = shards.fingerprint(tree)
    disk.write_json(text / "manifest.json", tree)


def check(folder: Path, files: dict[str, str]) -> None:
    """DataError unless the texts are those that the ledger began with. files: name -> sha256."""
    for name, sha256 in files.items():
        if not disk.has_sha256(folder / name, sha256):
            raise DataError(f"{folder / name} is not the one that the ledger began with")
    Manifest.load(folder / "text").verify()


def copied(folder: Path, manifest: Manifest) -> float:
    """The share of the held-out text, in pieces of PIECE tokens, that stands in training rows."""
    powers = np.random.default_rng(0).integers(1 << 63, size=PIECE, dtype=np.uint64)

    def hashes(rows: np.ndarray) -> np.ndarray:  # (n, T + 1) -> (n, T + 2 - PIECE), mod 2**64
        return np.lib.stride_tricks.sliding_window_view(rows.astype(np.uint64), PIECE, 1) @ powers

    texts = np.concatenate([np.load(folder / name) for name in FILES[1:]])
    pieces = hashes(texts)[:, ::PIECE].ravel()
    found = np.zeros(len(pieces), bool)
    for source in range(len(manifest.sources)):
        for row in range(manifest.rows("train", source)):
            found |= np.isin(pieces, hashes(manifest.row("train", source, row)[None]))
    return float(found.mean())


def log_probabilities(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Of ids (B, P) by logits (B, P, V), in fp64: those of all ids add up to 1."""
    logits = torch.from_numpy(logits).double().log_softmax(-1)
    return logits.gather(-1, torch.from_numpy(ids)[..., None])[..., 0].numpy()


def score(
    rows: np.ndarray, token_bytes: np.ndarray, ask: Callable, secret: int
) -> tuple[float, float]:
    """Bits per byte of PLACES tokens of each row; and by how many nats, in the mean, the model says
    something else of them when it has the whole row: 0 but for rounding, unless it reads the
    future. ask(shape of the answer, **question) -> logits (answers.py). secret: decides the places,
    which nobody may know beforehand: a model could be trained for these alone."""
    draw = np.random.default_rng(secret)
    T = rows.shape[1] - 1
    V = len(token_bytes)
    parts = []
    moved = []
    for batch in np.split(rows.astype(np.int64), range(AT_ONCE, len(rows), AT_ONCE)):  # (B, T + 1)
        B = len(batch)
        at = np.sort(draw.permutation(T)[:PLACES])
        ends = at + 1
        answers = [
            ask((B, V), ids=batch[:, start:end], start=start)
            for start, end in zip([0, *ends], ends)
        ]
        targets = batch[:, ends]  # (B, P)
        log_p = log_probabilities(np.stack(answers, axis=1), targets)
        parts.append((-log_p, targets))
        whole = ask((B, len(at), V), ids=batch[:, :-1], at=at)
        moved.append(np.abs(log_probabilities(whole, targets) - log_p).mean())
    nats, targets = (torch.from_numpy(np.concatenate(part)) for part in zip(*parts))
    sums = sums_of(nats, targets, torch.from_numpy(token_bytes)).values()
    return loss_and_bpb(*(x.double().sum().item() for x in sums))[1], float(np.mean(moved))
