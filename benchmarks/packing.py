"""What each packing policy costs: tokens thrown away, documents cut, time.

    python benchmarks/packing.py [--documents 100000] [--row_len 2049]

On document lengths like the web's (log-normal, median 600 tokens, sigma 1.0) and on the Python
standard library, tokenized (data/tiny's tokenizer if there is one). `split` counts the rows made of
one document that is longer than a row, which no policy can avoid; `cuts` those that one could.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data import pack
from machinery import sources
from tokenizer import Tokenizer


def web_like(count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, rng.lognormal(np.log(600), 1.0, count).astype(int))
    tokens = rng.integers(1, 32_768, lengths.sum(), dtype=np.uint16)
    return np.split(tokens, np.cumsum(lengths)[:-1])


def stdlib() -> list[np.ndarray]:
    source = sources.parse("stdlib")
    texts = [
        text
        for unit in sources.list_units(source)[0]
        for text in sources.documents(source, unit, Counter())
    ]
    path = ROOT / "data" / "tiny" / "tokenizer.json"
    tokenizer = Tokenizer.load(path) if path.exists() else Tokenizer.train(texts, 4096)
    return [tokenizer.encode_array(text).astype(np.uint16) for text in texts]


def measure(docs: list[np.ndarray], row_len: int, policy: str) -> str:
    t0 = time.process_time()
    packed = pack(docs, row_len, bos_id=0, policy=policy)
    rows = sum(1 for row in packed if len(row) == row_len)
    seconds = time.process_time() - t0
    s = packed.stats
    assert rows == s.rows and rows * row_len == s.tokens + s.bos - s.dropped - s.rest
    return (
        f"{policy:17} {100 * s.dropped / s.tokens:9.4f} {s.rest:7,} {s.cuts / rows:9.4f} "
        f"{s.splits / rows:10.4f} {s.tokens / seconds / 1e6:9.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--row_len", type=int, default=2049)
    args = parser.parse_args()
    for name, docs in (("web-like", web_like(args.documents)), ("stdlib", stdlib())):
        total = sum(map(len, docs))
        print(f"\n{name}: {len(docs):,} documents, {total:,} tokens, rows of {args.row_len}")
        print("policy            dropped %    rest  cuts/row  split/row    Mtok/s")
        for policy in ("best_fit", "best_fit_discard", "concat"):
            print(measure(docs, args.row_len, policy), flush=True)


if __name__ == "__main__":
    main()
