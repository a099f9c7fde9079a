"""Three packing policies compared: tokens thrown away, documents cut, time.

    python benchmarks/packing.py [--documents 100000] [--row_len 2049]
    python benchmarks/packing.py --write data/contiguous --like data/tiny

Packs documents of lengths like the web's (log-normal, median 600 tokens, sigma 1.0) and the Python
standard library, tokenized (by data/tiny's tokenizer if there is one). `split` counts rows made of
one document that is longer than a row, which no policy can avoid; `cuts` counts the avoidable ones.
data.py trains with best fit; the other two policies are here.

--write prepares the text of tiny once more, with the tokenizer of --like, as contiguous rows. Train
on either, and score both models on the validation rows of both (`eval.py loss --data_dir`).
"""

import argparse
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import data
import prepare_data
from data import Packing, pack
from machinery import shards
from preparation import sources, worker
from tokenizer import Tokenizer


class BestFitDiscard(Packing):
    """nanochat's method: of 1,000 documents take the longest that fits; when none does, crop the
    shortest to the remaining space and throw its tail away."""

    def _rows(self, docs: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        R, held, more = self.row_len, [], True
        while True:
            row, at = None, 0
            while at < R:
                while more and len(held) < min(self.buffer, 1000):
                    more = (ids := next(docs, None)) is not None
                    if more:
                        held.append(ids)
                if not held:  # the text is at its end, and this row is not full
                    if row is not None:
                        bos = int((row[:at] == self.bos_id).sum())
                        self.stats.dropped += at - bos
                        self.stats.bos -= bos
                    return
                row = np.empty(R, held[0].dtype) if row is None else row
                lengths = [len(ids) + 1 for ids in held]
                fitting = [n for n in lengths if n <= R - at]
                ids = held.pop(lengths.index(max(fitting) if fitting else min(lengths)))
                if not fitting:
                    self.stats.cuts += 1
                    self.stats.dropped += len(ids) - (R - at - 1)
                at = self._write(row, at, ids[: R - at - 1])
            yield row


class Concat(Packing):
    """All documents end to end, cut every row_len tokens: rows start anywhere in a document."""

    def _rows(self, docs: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        row, at = None, 0
        for ids in docs:
            piece = np.concatenate((np.array([self.bos_id], ids.dtype), ids))
            self.stats.bos += 1
            while len(piece):
                row = np.empty(self.row_len, ids.dtype) if row is None else row
                n = min(len(piece), self.row_len - at)
                row[at : at + n] = piece[:n]
                piece, at = piece[n:], at + n
                if at == self.row_len:
                    yield row
                    row, at = None, 0
                    self.stats.cuts += len(piece) > 0
        if at:
            left = row[:at]
            self.leftover = [left[left != self.bos_id]]
            self.stats.leftover = len(self.leftover[0])
            self.stats.bos -= at - self.stats.leftover


def best_fit_discard(docs, row_len: int, bos_id: int, buffer: int = 16_384) -> Packing:
    return BestFitDiscard(docs, row_len, bos_id, buffer)


def concat(docs, row_len: int, bos_id: int, buffer: int = 16_384) -> Packing:
    return Concat(docs, row_len, bos_id, buffer)


POLICIES = {"best_fit": pack, "best_fit_discard": best_fit_discard, "concat": concat}


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
    packed = POLICIES[policy](docs, row_len, bos_id=0)
    rows = sum(1 for row in packed if len(row) == row_len)
    seconds = time.process_time() - t0
    s = packed.stats
    assert rows == s.rows and rows * row_len == s.tokens + s.bos - s.dropped - s.leftover
    return (
        f"{policy:17} {100 * s.dropped / s.tokens:9.4f} {s.leftover:8,} {s.cuts / rows:9.4f} "
        f"{s.splits / rows:10.4f} {s.tokens / seconds / 1e6:9.1f}"
    )


@contextlib.contextmanager
def one_thread(workers: int):
    """In place of worker.open_pool: other processes would not have the policy set here."""
    with ThreadPoolExecutor(1) as pool:
        yield pool, 1


def write_contiguous(folder: str, like: Path) -> None:
    data.pack, worker.open_pool = concat, one_thread
    options = ["--tokenizer", str(like / "tokenizer.json"), "--data_dir", folder]
    row_len = shards.Manifest.load(like).row_len
    prepare_data.main(["tiny", *options, "--row_len", str(row_len)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--row_len", type=int, default=2049)
    parser.add_argument("--write", help="folder for contiguous rows")
    parser.add_argument("--like", type=Path, default=ROOT / "data" / "tiny")
    args = parser.parse_args()
    if args.write:
        return write_contiguous(args.write, args.like)
    for name, docs in (("web-like", web_like(args.documents)), ("stdlib", stdlib())):
        total = sum(map(len, docs))
        print(f"\n{name}: {len(docs):,} documents, {total:,} tokens, rows of {args.row_len}")
        print("policy            dropped % leftover  cuts/row  split/row    Mtok/s")
        for policy in POLICIES:
            print(measure(docs, args.row_len, policy), flush=True)


if __name__ == "__main__":
    main()
