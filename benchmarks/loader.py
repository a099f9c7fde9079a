"""The cost of a batch: near and far, with few rows and with a billion.

    python benchmarks/loader.py

1. `Order` alone: microseconds per row and memory, at position 0 and 10^12, with 10^4 and 10^9 rows.
2. A 100 GB data folder of sparse files: seconds from `Manifest.load` to the first batch, and the
   real loader's rows/s, against the 250 that an H100 consumes at preset d12 (about 512K tokens/s).
3. One row of 2,049 tokens: microseconds to read it, with and without the check of its crc32.
4. The real loader on data/tiny, if it is there: rows/s.
"""

import argparse
import os
import sys
import tempfile
import time
import tracemalloc
import zlib
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data import Order, RowLoader
from machinery import disk, shards
from machinery.shards import Manifest

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
    """Write a data folder of that size whose shards are sparse files (they read as zeros)."""
    entries, rows, total = [], shards.SHARD_ROWS, 0
    crcs = np.full(rows, zlib.crc32(bytes(2 * row_len)), "<u4").tobytes()
    folder.joinpath("train", "web").mkdir(parents=True)
    while total < gigabytes * 1e9:
        name = f"train/web/unit_{len(entries):05d}_00"
        size = 128 + rows * row_len * 2
        with open(folder / f"{name}.npy", "wb") as f:
            f.write(shards.header("<u2", (rows, row_len)))
            f.truncate(size)
        (folder / f"{name}.crc32.npy").write_bytes(shards.header("<u4", (rows,)) + crcs)
        entries.append(
            {
                "file": f"{name}.npy",
                "rows": rows,
                "bytes": size,
                "sha256": "",
                "min": 0,
                "max": 0,
                "crc32_file": f"{name}.crc32.npy",
                "crc32_bytes": 128 + len(crcs),
                "crc32_sha256": "",
            }
        )
        total += size
    (folder / "tokenizer.json").write_text("{}")
    tree = {
        "format": shards.FORMAT,
        "row_len": row_len,
        "dtype": "<u2",
        "sources": [{"name": "web"}],
        "tokenizer": {
            "vocab_size": 50_000,
            "bos_id": 0,
            "sha256": disk.sha256_of(folder / "tokenizer.json"),
        },
        "splits": {
            "train": {"web": {"rows": rows * len(entries), "shards": entries}},
            "val": {"web": {"rows": 0, "shards": []}},
        },
    }
    tree["fingerprint"] = shards.fingerprint(tree)
    disk.write_json(folder / "manifest.json", tree)


def row_cost(manifest: Manifest, rows: int = 5000) -> tuple[float, float]:
    """Microseconds to read a random row: (with the check of its crc32, the bytes alone)."""
    order, checked, bare = Order([manifest.rows("train")], [1], 0), 1e9, 1e9
    places = [order(p)[1] for p in range(rows)]
    for row in places:  # fill the page cache
        manifest.row("train", 0, row)
    size = manifest.row_len * np.dtype(manifest.dtype).itemsize
    for _ in range(5):
        t0 = time.perf_counter()
        for row in places:
            manifest.row("train", 0, row)
        t1 = time.perf_counter()
        for row in places:
            shard, i = manifest.locate("train", 0, row)
            file, _ = manifest.open_shard(shard)
            np.frombuffer(os.pread(file.fileno(), size, 128 + i * size), manifest.dtype)
        t2 = time.perf_counter()
        checked, bare = min(checked, t1 - t0), min(bare, t2 - t1)
    return checked / rows * 1e6, bare / rows * 1e6


def loader_rate(manifest: Manifest, position: int, micro_batch: int = 16, batches: int = 400):
    """Rows/s of a consumer that does nothing else."""
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
            f"{args.gigabytes:.0f} GB in {len(manifest.all_shards())} shards: load and check "
            f"{t1 - t0:.3f} s, first batch {t2 - t1:.3f} s, together {t2 - t0:.3f} s"
        )
        for position in (0, 10**12):
            rate = loader_rate(manifest, position)
            print(
                f"  rows of {manifest.row_len} at position {position:.0e}: {rate:,.0f} rows/s, "
                f"{rate / H100_ROWS_PER_S:.0f}x an H100 at d12"
            )
        small = Path(scratch) / "small"
        sparse_folder(small, 3.0)
        checked, bare = row_cost(Manifest.load(small))
        print(f"a row of 2,049 tokens: {checked:.1f} us with its crc32, {bare:.1f} us without")
    if (ROOT / "data/tiny/manifest.json").exists():
        manifest = Manifest.load(ROOT / "data/tiny")
        for position in (0, 10**12):
            print(
                f"data/tiny, rows of {manifest.row_len} at position {position:.0e}: "
                f"{loader_rate(manifest, position):,.0f} rows/s"
            )


if __name__ == "__main__":
    main()
