"""How soon and how fast rows come from a data folder of 100 GB: `python benchmarks/loader.py`.

The shards are sparse files, which read as zeros. Prints the seconds from `Manifest.load` to the
first batch, and the loader's rows/s at position 0 and 10^12, against the 250 that an H100 consumes
at preset d12 (about 512K tokens/s); then rows/s of data/tiny, if it is there.
"""

import argparse
import os
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np

from at_root import ROOT
from data import RowLoader, order_of
from machinery import disk, formats, shards
from machinery.shards import Manifest

H100_ROWS_PER_S = 250
NEVER_READ = 64 * "0"  # a sha256


def sparse_folder(folder: Path, gigabytes: float, row_len: int = 2049) -> None:
    """Write a data folder of that size whose shards are sparse files."""
    entries = []
    rows = shards.SHARD_ROWS
    total = 0
    crcs = np.full(rows, zlib.crc32(bytes(2 * row_len)), "<u4")
    facts = dict(descr="<u2", fortran_order=False, shape=(rows, row_len))
    folder.joinpath("train", "web").mkdir(parents=True)
    while total < gigabytes * 1e9:
        name = f"train/web/unit_{len(entries):05d}_00"
        size = 128 + rows * row_len * 2
        with open(folder / f"{name}.npy", "wb") as f:
            np.lib.format.write_array_header_1_0(f, facts)
            f.truncate(size)
        np.save(folder / f"{name}.crc32.npy", crcs)
        entry = dict(file=f"{name}.npy", rows=rows, bytes=size, sha256=NEVER_READ, min=0, max=0)
        entry |= dict(crc32_file=f"{name}.crc32.npy", crc32_bytes=128 + crcs.nbytes)
        entries.append(entry | dict(crc32_sha256=NEVER_READ))
        total += size
    (folder / "tokenizer.json").write_text("{}")
    sha256 = disk.sha256_of(folder / "tokenizer.json")
    tree = dict(format=formats.DATA_FORMAT, row_len=row_len, dtype="<u2", sources=[{"name": "web"}])
    tree["tokenizer"] = dict(vocab_size=50_000, bos_id=0, sha256=sha256)
    train = dict(rows=rows * len(entries), shards=entries)
    val = dict(rows=0, shards=[])
    tree["splits"] = dict(train={"web": train}, val={"web": val})
    tree["fingerprint"] = shards.fingerprint(tree)
    disk.write_json(folder / "manifest.json", tree)


def loader_rate(manifest: Manifest, position: int, micro_batch: int = 16, batches: int = 400):
    """Rows/s of a consumer that does nothing else."""
    loader = RowLoader(manifest, order_of(manifest), micro_batch, position=position)
    loader.next_batch()
    t0 = time.perf_counter()
    for _ in range(batches):
        loader.next_batch()
    rate = micro_batch * batches / (time.perf_counter() - t0)
    loader.close()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=100.0)
    args = parser.parse_args()
    import torch  # noqa: F401 (its import is not part of the first batch)

    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as scratch:
        folder = Path(scratch) / "big"
        sparse_folder(folder, args.gigabytes)
        t0 = time.perf_counter()
        manifest = Manifest.load(folder)
        manifest.check()
        loader = RowLoader(manifest, order_of(manifest), 32)
        loader.next_batch()
        print(f"{args.gigabytes:.0f} GB: first batch after {time.perf_counter() - t0:.3f} s")
        loader.close()
        for position in (0, 10**12):
            rate = loader_rate(manifest, position)
            print(
                f"  from position {position:,}: {rate:,.0f} rows/s, {rate / H100_ROWS_PER_S:.0f} "
                "times what an H100 takes at d12"
            )
    if (ROOT / "data/tiny/manifest.json").exists():
        print(f"data/tiny: {loader_rate(Manifest.load(ROOT / 'data/tiny'), 0):,.0f} rows/s")


if __name__ == "__main__":
    main()
