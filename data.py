"""Documents -> rows -> order -> batches: what the model is fed.

  documents --pack--> rows of row_len tokens, written as shards           prepare_data.py
  position p --Order--> (source, row) --manifest--> tokens --RowLoader--> (inputs, targets)

Guarantees: no token is lost and none is padding; a batch depends on (data, seed, position) and
nothing else, so the loader's whole state is one integer. Next: train.py.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from machinery.errors import DataError

# torch is imported where a batch is made: each process of prepare_data.py does without it.

# ------------------------------------------------------------------------------------ packing


@dataclass
class PackStats:
    """What became of the documents. Always: rows * row_len == tokens + bos - dropped - rest."""

    documents: int = 0
    tokens: int = 0  # of the documents, without BOS
    bos: int = 0  # BOS tokens written, one at the start of each piece of a document
    rows: int = 0
    splits: int = 0  # full rows made of one document that is longer than a row
    cuts: int = 0  # documents cut because none fitted in what was left of a row
    dropped: int = 0  # tokens thrown away
    rest: int = 0  # tokens left over: fewer than a row of them (see `Packing.rest`)


class Shelves:
    """Documents by length: one shelf per length (BOS included), and a bit per shelf that has any.

    The longest document that fits is found with two operations on the bits, whatever the number
    of documents.
    """

    def __init__(self, row_len: int) -> None:
        self.row_len = row_len
        self.shelves: list[list[np.ndarray]] = [[] for _ in range(row_len + 1)]
        self.full = self.mirror = 0  # bit n, and bit row_len - n: shelves[n] is not empty
        self.documents = self.tokens = 0  # on all shelves; tokens with a BOS per document

    def put(self, ids: np.ndarray) -> None:
        n = len(ids) + 1
        self.shelves[n].append(ids)
        self.full |= 1 << n
        self.mirror |= 1 << (self.row_len - n)
        self.documents += 1
        self.tokens += n

    def take(self, n: int) -> np.ndarray:
        shelf = self.shelves[n]
        ids = shelf.pop()
        if not shelf:
            self.full ^= 1 << n
            self.mirror ^= 1 << (self.row_len - n)
        self.documents -= 1
        self.tokens -= n
        return ids

    def longest(self) -> int:
        return self.full.bit_length() - 1

    def best(self, space: int) -> int:
        """The length of the document to put into `space` tokens; 0 if none fits.

        One that fills it exactly; else the longest of which the *complement* (the length that then
        fills what is left) is there too: this look one step ahead makes 5 times fewer cuts; else
        the longest.
        """
        fits = self.full & ((2 << space) - 1)  # shelves 0 .. space
        if not fits:
            return 0
        longest = fits.bit_length() - 1
        # bit n: shelves n and space - n are not empty; so the highest bit is space / 2 or more
        pairs = fits & (self.mirror >> (self.row_len - space))
        if longest == space or not pairs:
            return longest
        n = pairs.bit_length() - 1
        lone = 2 * n == space and len(self.shelves[n]) == 1  # no complement but itself
        return longest if lone else n


class Packing:
    """An iterator over rows; `.stats` and `.rest` (a list of documents) are final at its end."""

    def __init__(self, docs: Iterable, row_len: int, bos_id: int, policy: str, buffer: int) -> None:
        policies = {
            "best_fit": self._best_fit,
            "best_fit_discard": self._best_fit_discard,
            "concat": self._concat,
        }
        if policy not in policies:
            raise ValueError(f"packing {policy!r} is unknown; choose one of {', '.join(policies)}")
        if row_len < 2 or buffer < 1:
            raise ValueError(f"row_len {row_len} must be at least 2 and buffer {buffer} at least 1")
        self.row_len, self.bos_id, self.buffer = row_len, bos_id, buffer
        self.stats, self.rest = PackStats(), []
        self._rows = policies[policy](self._count(docs))

    def __iter__(self) -> Iterator[np.ndarray]:
        for row in self._rows:
            self.stats.rows += 1
            yield row

    def _count(self, docs: Iterable) -> Iterator[np.ndarray]:
        for doc in docs:
            ids = np.asarray(doc)
            if len(ids):
                self.stats.documents += 1
                self.stats.tokens += len(ids)
                yield ids

    def _write(self, row: np.ndarray, at: int, ids: np.ndarray) -> int:
        """Write BOS + ids at `at`; returns where the next document starts."""
        self.stats.bos += 1
        row[at] = self.bos_id
        row[at + 1 : at + 1 + len(ids)] = ids
        return at + 1 + len(ids)

    def _best_fit(self, docs: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Keep `buffer` documents on shelves, so that there is one for most spaces left in a row;
        cut one only when none fits."""
        R, shelves, dtype = self.row_len, Shelves(self.row_len), np.dtype(np.int64)
        for ids in docs:
            dtype = ids.dtype
            if len(ids) >= R:  # longer than a row: cut into rows first
                ids = ids.copy()  # the last piece is kept: don't let it hold on to a big batch
                while len(ids) >= R:
                    row = np.empty(R, dtype)
                    self._write(row, 0, ids[: R - 1])
                    self.stats.splits += 1
                    yield row
                    ids = ids[R - 1 :].copy() if len(ids) < 2 * R else ids[R - 1 :]
            if len(ids):
                shelves.put(ids)
            while shelves.documents >= self.buffer and shelves.tokens >= R:
                yield self._fill_row(shelves, dtype)
        while shelves.tokens >= R:
            yield self._fill_row(shelves, dtype)
        self.rest = [ids for shelf in reversed(shelves.shelves) for ids in shelf]
        self.stats.rest = sum(len(ids) for ids in self.rest)

    def _fill_row(self, shelves: Shelves, dtype: np.dtype) -> np.ndarray:
        row, at = np.empty(self.row_len, dtype), 0
        while space := self.row_len - at:
            if n := shelves.best(space):
                at = self._write(row, at, shelves.take(n))
            elif space == 1:  # a bare BOS, which says that the document before it is complete
                at = self._write(row, at, row[:0])
            else:  # cut the longest: its tail is still long, so it spoils no short filler
                ids = shelves.take(shelves.longest())
                at = self._write(row, at, ids[: space - 1])
                shelves.put(ids[space - 1 :])
                self.stats.cuts += 1
        return row

    def _best_fit_discard(self, docs: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """nanochat's method, to compare with: of 1,000 documents take the longest that fits; when
        none does, crop the shortest one to what is left, and throw its tail away."""
        R, held, more = self.row_len, [], True
        while True:
            row, at = None, 0
            while at < R:
                while more and len(held) < min(self.buffer, 1000):
                    more = (ids := next(docs, None)) is not None
                    if more:
                        held.append(ids)
                if not held:  # the text is at its end, and this row is not full
                    self.stats.dropped += at - self._bos_in(row, at)
                    self.stats.bos -= self._bos_in(row, at)
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

    def _bos_in(self, row: np.ndarray | None, end: int) -> int:
        return 0 if row is None else int((row[:end] == self.bos_id).sum())

    def _concat(self, docs: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """All documents end to end, cut every row_len tokens: rows start anywhere in a document."""
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
            self.rest = [left[left != self.bos_id]]
            self.stats.rest = len(self.rest[0])
            self.stats.bos -= at - self.stats.rest


def pack(
    docs: Iterable, row_len: int, bos_id: int, policy: str = "best_fit", buffer: int = 16_384
) -> Packing:
    """Documents (sequences of ids, without BOS) -> rows, arrays of exactly `row_len` ids.

    >>> packed = pack([[5, 6], [7, 8, 9, 4]], row_len=4, bos_id=0)
    >>> [row.tolist() for row in packed], [ids.tolist() for ids in packed.rest]
    ([[0, 7, 8, 9], [0, 5, 6, 0]], [[4]])

    Iterate over the result, then read its `.stats`. What is left at the end, less than a row, is
    in `.rest`: dropped by nobody but the caller.
    """
    return Packing(docs, row_len, bos_id, policy, buffer)


# -------------------------------------------------------------------------------------- order

MASK = 2**64 - 1


def mix(x: int) -> int:
    """64 bits -> 64 well-mixed bits (the finalizer of SplitMix64, Steele et al. 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class Permutation:
    """A keyed bijection of 0..n-1, computed one element at a time: no table, whatever n.

    A Feistel network on pairs (l, r) with l < a, r < b, a * b just above n (Black and Rogaway
    2002): each round adds to one half a keyed hash of the other half, which can be undone, so the
    whole can. A result outside 0..n-1 goes through again (cycle walking; rare, as a * b is hardly
    above n). 12 rounds; 4 are visibly biased on small sets.
    """

    ROUNDS = 12

    def __init__(self, n: int, *key: int) -> None:
        self.n = n
        self.b = max(1, math.isqrt(n))
        self.a = -(-n // self.b)
        name = "/".join(map(str, key))
        self.keys = [
            int.from_bytes(hashlib.blake2b(f"{name}/{i}".encode(), digest_size=8).digest(), "big")
            for i in range(self.ROUNDS)
        ]

    def __call__(self, x: int) -> int:
        a, b, keys = self.a, self.b, self.keys
        while True:
            left, right = divmod(x, b)
            for i in range(0, self.ROUNDS, 2):
                left = (left + mix((right + keys[i]) & MASK)) % a
                right = (right + mix((left + keys[i + 1]) & MASK)) % b
            x = left * b + right
            if x < self.n:
                return x


class Quota:
    """Deals positions 0, 1, 2, ... to sources in exact proportion to their weights, in O(1).

    The sources are the leaves of a binary tree. Of the n positions that reach a node, the left
    branch has had round(n * its share): whole numbers, exact at any n. So the i-th source has had
    p * w_i of the first p positions, within 1 for up to 4 sources and within 1.5 for up to 16.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(w)) for w in weights]  # 0.05 means 1/20
        if not exact or min(exact) < 0 or sum(exact) == 0:
            raise ValueError(f"mixture weights {list(weights)} must be >= 0, and not all 0")
        unit = math.lcm(*(w.denominator for w in exact))
        leaves = [(int(w * unit), i) for i, w in enumerate(exact) if w]
        leaves.sort(key=lambda leaf: (-leaf[0], leaf[1]))
        self.count = len(weights)
        self.tree = self._build(leaves, Fraction(0), root=True)[1]

    def _build(self, leaves: list, above: Fraction, root: bool = False) -> tuple:
        """(error bound, tree). A rounding error made at a node of weight W reaches a leaf of
        weight w scaled by w / W: of the possible trees, take that with the smallest sum."""
        if len(leaves) == 1:
            return leaves[0][0] * above, leaves[0][1]
        total = sum(w for w, _ in leaves)
        above = above if root else above + Fraction(1, total)
        if len(leaves) <= 6:
            cuts = range(1, len(leaves))
        else:  # too many trees to try: split where the halves are the most equal
            cuts = [
                min(
                    range(1, len(leaves)),
                    key=lambda k: abs(total - 2 * sum(w for w, _ in leaves[:k])),
                )
            ]
        best = None
        for k in cuts:
            left, right = self._build(leaves[:k], above), self._build(leaves[k:], above)
            bound = max(left[0], right[0])
            if best is None or bound < best[0]:
                best = bound, (left[1], right[1], sum(w for w, _ in leaves[:k]), total)
        return best

    def __call__(self, p: int) -> tuple[int, int]:
        """Position p -> (source, how many earlier positions that source had)."""
        node = self.tree
        while isinstance(node, tuple):
            left, right, w, total = node
            had = (2 * p * w + total) // (2 * total)  # round(p * w / total)
            if (2 * (p + 1) * w + total) // (2 * total) > had:
                node, p = left, had
            else:
                node, p = right, p - had
        return node, p

    def counts(self, p: int) -> list[int]:
        """How many of the first p positions each source has had."""
        counts = [0] * self.count
        todo = [(self.tree, p)]
        while todo:
            node, n = todo.pop()
            if isinstance(node, tuple):
                left, right, w, total = node
                had = (2 * n * w + total) // (2 * total)
                todo += [(left, had), (right, n - had)]
            else:
                counts[node] = n
        return counts


class Order:
    """Position p, any p >= 0 -> (source, row). A pure function: nothing to save, nothing to replay.

    p -> (source, i-th row drawn from it) by quota -> epoch, index = divmod(i, size) -> that epoch's
    permutation of the source's rows. From position `decay_from` on, `decay_weights` hold; each
    source goes on where it was, so that no row comes twice before all have come once.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        seed: int,
        *,
        decay_weights: Sequence[float] | None = None,
        decay_from: int = 0,
    ) -> None:
        if len(sizes) != len(weights):
            raise ValueError(f"{len(sizes)} sources but {len(weights)} mixture weights")
        self.sizes, self.seed = list(sizes), seed
        self.stages = [(0, [0] * len(sizes), Quota(weights))]  # (from, counts there, quota)
        if decay_weights is not None:
            if len(sizes) != len(decay_weights):
                raise ValueError(f"{len(sizes)} sources but {len(decay_weights)} decay weights")
            before = self.stages[0][2].counts(decay_from)
            self.stages.append((decay_from, before, Quota(decay_weights)))
        for i, size in enumerate(sizes):
            if size < 1 and any(w[i] for w in (weights, decay_weights) if w is not None):
                raise ValueError(
                    f"source {i} has no rows to draw from; give it more text or weight 0"
                )
        self._permutation = lru_cache(maxsize=64)(
            lambda source, epoch: Permutation(self.sizes[source], seed, source, epoch)
        )

    def __call__(self, p: int) -> tuple[int, int]:
        start, before, quota = self.stages[-1 if p >= self.stages[-1][0] else 0]
        source, i = quota(p - start)
        epoch, i = divmod(i + before[source], self.sizes[source])
        return source, self._permutation(source, epoch)(i)

    def epochs(self, p: int) -> list[float]:
        """How many times the first p positions went through each source."""
        start, before, quota = self.stages[-1 if p >= self.stages[-1][0] else 0]
        counts = [a + b for a, b in zip(before, quota.counts(p - start))]
        return [n / size if size else 0.0 for n, size in zip(counts, self.sizes)]


# ----------------------------------------------------------------------------------- the loader


def mixture_weights(manifest, weights: dict | Sequence[float] | None) -> list[float]:
    """Weights in the manifest's order of sources; None: in proportion to their rows."""
    names = manifest.sources
    if weights is None:
        return [manifest.rows("train", i) for i in range(len(names))]
    if isinstance(weights, dict):
        if unknown := [name for name in weights if name not in names]:
            raise ValueError(
                f"the mixture names source {unknown[0]!r}, the data has {', '.join(names)}"
            )
        return [weights.get(name, 0) for name in names]
    if len(weights) != len(names):
        raise ValueError(
            f"{len(weights)} mixture weights for {len(names)} sources: {', '.join(names)}"
        )
    return list(weights)


class RowLoader:
    """Batches by position. A thread reads ahead into a small ring of (pinned) buffers.

    Item j of the batch that rank r reads at `position` is the row at position + r * micro_batch
    + j; then `position` grows by world_size * micro_batch. So the rows of a step, taken together,
    are the same for any number of ranks and any split into micro-batches.
    """

    def __init__(
        self,
        manifest,
        *,
        seed: int,
        micro_batch: int,
        split: str = "train",
        rank: int = 0,
        world_size: int = 1,
        position: int = 0,
        weights: dict | Sequence[float] | None = None,
        decay_weights: dict | Sequence[float] | None = None,
        decay_from: int = 0,
        device: object = "cpu",
        prefetch: int = 4,
        verify: bool = False,
    ) -> None:
        import torch

        self.manifest, self.split, self.position = manifest, split, position
        self.rank, self.world_size, self.micro_batch = rank, world_size, micro_batch
        self.device = torch.device(device)
        sizes = [manifest.rows(split, i) for i in range(len(manifest.sources))]
        self.order = Order(
            sizes,
            mixture_weights(manifest, weights),
            seed,
            decay_from=decay_from,
            decay_weights=None
            if decay_weights is None
            else mixture_weights(manifest, decay_weights),
        )
        self._wait_s, self._stop = 0.0, threading.Event()
        self._free, self._ready, self._failure = queue.Queue(), queue.Queue(), None
        pin, T = self.device.type == "cuda", manifest.row_len - 1
        for _ in range(max(2, prefetch)):
            buffer = torch.empty((2, micro_batch, T), dtype=torch.int64, pin_memory=pin)
            self._free.put((buffer, torch.cuda.Event() if pin else None))
        self._threads = [threading.Thread(target=self._read_ahead, args=(position,), daemon=True)]
        if verify:
            self._threads.append(threading.Thread(target=self._verify, daemon=True))
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # a thread that is in torch when Python ends aborts the process

    def row_ids(self, position: int, count: int) -> list[str]:
        """The names of `count` rows from `position` on: 'train/stdlib/unit_00003_00.npy row 17'."""
        names = []
        for p in range(position, position + count):
            shard, row = self.manifest.locate(self.split, *self.order(p))
            names.append(f"{shard['file']} row {row}")
        return names

    def next_batch(self):
        """-> inputs, targets: int64 (micro_batch, row_len - 1) each, on the device."""
        import torch

        t0 = time.perf_counter()
        item = self._ready.get()
        self._wait_s += time.perf_counter() - t0
        if self._failure is not None:
            raise self._failure
        buffer, copied = item
        if copied is None:
            batch = buffer.to(self.device, copy=True)
        else:
            batch = buffer.to(self.device, non_blocking=True)
            copied.record(torch.cuda.current_stream(self.device))  # till then, leave the buffer
        self._free.put((buffer, copied))
        self.position += self.world_size * self.micro_batch
        return batch[0], batch[1]

    def pop_wait_s(self) -> float:
        """Seconds that next_batch has waited for data since this was last asked."""
        waited, self._wait_s = self._wait_s, 0.0
        return waited

    def close(self) -> None:
        """Stop the threads; also done when the program ends. Once closed, it stays so."""
        self._stop.set()
        self._free.put(None)  # wakes the reader
        for thread in self._threads:
            thread.join(timeout=10)
        atexit.unregister(self.close)

    def _read_ahead(self, position: int) -> None:
        import torch

        rows = np.empty((self.micro_batch, self.manifest.row_len), dtype=self.manifest.dtype)
        try:
            if self.device.type == "cuda":  # a new thread would begin with the first GPU
                torch.cuda.set_device(self.device)
            while (slot := self._free.get()) is not None and not self._stop.is_set():
                buffer, copied = slot
                if copied is not None:
                    copied.synchronize()  # its last copy to the GPU may still be in flight
                first = position + self.rank * self.micro_batch
                for j in range(self.micro_batch):
                    rows[j] = self.manifest.row(self.split, *self.order(first + j))
                if rows.max() >= self.manifest.vocab_size:
                    j = int(rows.max(axis=1).argmax())
                    raise DataError(
                        f"{self.row_ids(first + j, 1)[0]} has token {rows[j].max()}, "
                        f"the vocabulary ends at {self.manifest.vocab_size - 1}; "
                        "run: python prepare_data.py verify --data_dir "
                        f"{self.manifest.dir}"
                    )
                array = buffer.numpy()
                array[0], array[1] = rows[:, :-1], rows[:, 1:]
                self._ready.put(slot)
                position += self.world_size * self.micro_batch
        except Exception as error:
            self._fail(error)

    def _verify(self) -> None:
        """sha256 of this rank's share of the shards, on at most a fifth of one core."""
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # on Linux: this thread
        except (AttributeError, OSError):
            pass
        try:
            shards = self.manifest.shards("train") + self.manifest.shards("val")
            self.manifest.verify(shards[self.rank :: self.world_size], pause=4.0, stop=self._stop)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._ready.put(None)  # wakes next_batch, which raises it


def val_batches(
    manifest,
    batch: int,
    max_rows: int = 0,
    rank: int = 0,
    world_size: int = 1,
    device: object = "cpu",
) -> Iterator[tuple]:
    """The first `max_rows` validation rows (0: all), each once, in an order that never changes.

    Yields (inputs, targets) as RowLoader does, of about `batch` rows. Sources take turns; within
    one, rows come in unit order. Rank r has rows r, r + world_size, ...; each rank has the same
    number of batches (a sharded model's ranks must all take part), hence their uneven sizes.
    """
    import torch

    sizes = [manifest.rows("val", i) for i in range(len(manifest.sources))]
    turns = (
        (i, row)
        for row in range(max(sizes, default=0))
        for i, size in enumerate(sizes)
        if row < size
    )
    total = min(max_rows or sum(sizes), sum(sizes))
    if total < world_size:
        raise ValueError(
            f"{total} validation rows cannot be shared by {world_size} ranks; prepare "
            "more: --val_fraction"
        )
    mine = [place for k, place in zip(range(total), turns) if k % world_size == rank]
    # the same on each rank, and no rank's is ever empty
    batches = min(-(-total // (batch * world_size)), total // world_size)
    for k in range(batches):
        part = mine[len(mine) * k // batches : len(mine) * (k + 1) // batches]
        rows = np.stack([manifest.row("val", i, row) for i, row in part])
        tensor = torch.from_numpy(rows.astype(np.int64)).to(device)
        yield tensor[:, :-1].contiguous(), tensor[:, 1:].contiguous()
