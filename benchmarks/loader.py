"""What a batch costs: near and far, with few rows and with a billion.

    python benchmarks/loader.py

1. `Order` alone: microseconds per row and memory, at position 0 and 10^12, with 10^4 and 10^9 rows.
2. The real loader on data/tiny (or a made-up folder): rows/s, against the 250 rows/s that an H100
   eats at preset d12 (about 512K tokens/s in rows of 2,048).
3. A 100 GB manifest of sparse files: seconds from `Manifest.load` to the first batch.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import data
from data import Manifest, Order, RowLoader

H100_ROWS_PER_S = 250


def order_cost(sizes: list[int], position: int, rows: int = 20_000) -> tuple[float, int]:
    """(microseconds per row, bytes of memory at the peak)."""
    weights = [0.6, 0.3, 0.05, 0.05]
    tracemalloc.start()
    order = Order(sizes, weights, 0)
    for p in range(position, position + 200):
        order(p)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    order = Order(sizes, weights, 0)
    t0 = time.perf_counter()
    for p in range(position, position + rows):
        order(p)
    return (time.perf_counter() - t0) / rows * 1e6, peak


def sparse_folder(folder: Path, gigabytes: float, row_len: int = 2049) -> None:
    """A manifest of that size whose shards are holes on the disk (all zeros when read)."""
    shards, rows, total = [], 65_536, 0
    folder.joinpath("train", "web").mkdir(parents=True)
    while total < gigabytes * 1e9:
        name = f"train/web/unit_{len(shards):05d}_00.npy"
        with open(folder / name, "wb") as f:
            np.lib.format.write_array_header_1_0(
                f, {"descr": "<u2", "fortran_order": False, "shape": (rows, row_len)}
            )
            f.truncate(f.tell() + rows * row_len * 2)
        size = (folder / name).stat().st_size
        shards.append({"file": name, "rows": rows, "bytes": size, "sha256": "", "min": 0, "max": 0})
        total += size
    (folder / "tokenizer.json").write_text("{}")
    np.save(folder / "token_bytes.npy", np.ones(50_000, np.int32))
    tree = {
        "format": shards.FORMAT,
        "row_len": row_len,
        "dtype": "<u2",
        "sources": [{"name": "web"}],
        "tokenizer": {
            "vocab_size": 50_000,
            "bos_id": 0,
            "sha256": data.sha256_of(folder / "tokenizer.json"),
        },
        "splits": {
            "train": {"web": {"rows": rows * len(shards), "shards": shards}},
            "val": {"web": {"rows": 0, "shards": []}},
        },
    }
    tree["fingerprint"] = shards.fingerprint(tree)
    shards.write_json(folder / "manifest.json", tree)


def loader_rate(manifest: Manifest, position: int, micro_batch: int = 16, batches: int = 400):
    """Rows/s of a consumer that does nothing else; and the seconds it waited."""
    loader = RowLoader(manifest, seed=0, micro_batch=micro_batch, position=position)
    loader.next_batch()
    t0 = time.perf_counter()
    for _ in range(batches):
        loader.next_batch()
    rate = micro_batch * batches / (time.perf_counter() - t0)
    loader.close()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=100.0)
    args = parser.parse_args()
    import torch  # noqa: F401 (its import is no part of the first batch)

    print("order                     position 0          position 10^12")
    for name, sizes in (
        ("10^4 rows", [6000, 3000, 500, 500]),
        ("10^9 rows", [600_000_000, 300_000_000, 50_000_000, 50_000_000]),
    ):
        near, far = order_cost(sizes, 0), order_cost(sizes, 10**12)
        print(f"  {name:16} {near[0]:8.2f} us {near[1]:7,} B {far[0]:8.2f} us {far[1]:7,} B")
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as scratch:
        folder = Path(scratch) / "big"
        sparse_folder(folder, args.gigabytes)
        t0 = time.perf_counter()
        manifest = Manifest.load(folder)
        manifest.check()
        t1 = time.perf_counter()
        loader = RowLoader(manifest, seed=0, micro_batch=32)
        loader.next_batch()
        t2 = time.perf_counter()
        loader.close()
        print(
            f"{args.gigabytes:.0f} GB in {len(manifest.shards('train'))} shards: load and check "
            f"{t1 - t0:.3f} s, first batch {t2 - t1:.3f} s, together {t2 - t0:.3f} s"
        )
        for position in (0, 10**12):
            rate = loader_rate(manifest, position)
            print(
                f"  rows of {manifest.row_len} at position {position:.0e}: {rate:,.0f} rows/s, "
                f"{rate / H100_ROWS_PER_S:.0f}x an H100 at d12"
            )
    if (ROOT / "data/tiny/manifest.json").exists():
        manifest = Manifest.load(ROOT / "data/tiny")
        for position in (0, 10**12):
            print(
                f"data/tiny, rows of {manifest.row_len} at position {position:.0e}: "
                f"{loader_rate(manifest, position):,.0f} rows/s"
            )


if __name__ == "__main__":
    main()
