"""What packing does to a text: tokens thrown away, documents cut, time.

    python benchmarks/packing.py [--documents 100000] [--row_len 2049]

Packs documents of lengths like the web's (log-normal, median 600 tokens, sigma 1.0), and the Python
standard library, tokenized (by data/tiny's tokenizer if there is one). `split` counts rows made of
one document that is longer than a row, which cannot be avoided; `cuts` counts the avoidable ones.
Lesson 11 of the course compares best fit with the policies of others.
"""

import argparse
import time

import numpy as np

from at_root import ROOT
from data import pack
from preparation import sources
from preparation.reading import Notes
from tokenizer import Tokenizer


def web_like(count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, rng.lognormal(np.log(600), 1.0, count).astype(int))
    tokens = rng.integers(1, 32_768, lengths.sum(), dtype=np.uint16)
    return np.split(tokens, np.cumsum(lengths)[:-1])


def stdlib_texts() -> list[str]:
    source = sources.parse("stdlib")
    units, _ = sources.list_units(source)
    return [text for unit in units for text in sources.documents(source, unit, Notes())]


def stdlib() -> list[np.ndarray]:
    texts = stdlib_texts()
    path = ROOT / "data" / "tiny" / "tokenizer.json"
    tokenizer = Tokenizer.load(path) if path.exists() else Tokenizer.train(texts, 4096)
    return [tokenizer.encode_array(text).astype(np.uint16) for text in texts]


def measure(docs: list[np.ndarray], row_len: int) -> str:
    t0 = time.process_time()
    packed = pack(docs, row_len, bos_id=0)
    rows = sum(1 for row in packed if len(row) == row_len)
    seconds = time.process_time() - t0
    s = packed.stats
    assert rows == s.rows and rows * row_len == s.tokens + s.bos - s.dropped - s.leftover
    return (
        f"dropped {s.dropped / s.tokens:.4%}, {s.leftover:,} tokens left over, {s.cuts / rows:.4f} "
        f"cuts and {s.splits / rows:.4f} splits per row, {s.tokens / seconds / 1e6:.1f} Mtok/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--row_len", type=int, default=2049)
    args = parser.parse_args()
    for name, docs in (("web-like", web_like(args.documents)), ("stdlib", stdlib())):
        tokens = sum(map(len, docs))
        print(f"{name}: {len(docs):,} documents, {tokens:,} tokens, rows of {args.row_len}")
        print(f"    {measure(docs, args.row_len)}", flush=True)


if __name__ == "__main__":
    main()
