"""Documents -> rows -> order -> batches: how text reaches the model.

1. prepare_data.py tokenizes documents and packs them (`pack`) into rows of row_len tokens:

       row 17  | BOS the cat sat . BOS there was once a king | exactly row_len tokens
       row 18  | BOS who had a horse . BOS yes . BOS no       | no padding, no token lost

   The story of the king is longer than what was left of row 17: it is cut, and what remains is
   packed like a document of its own.

2. `Order` maps position p = 0, 1, 2, ... to (source, row): shuffled, and in the mixture's shares.
3. `RowLoader` reads the rows of a batch ahead of time; inputs = row[:-1], targets = row[1:].

Guarantees, for text: no token is lost except in the last, partial row of a source; the only filler
is one BOS where a single place is left. The row at a position depends only on data, mixtures and
seed, so the loader's whole state is one integer. `manifest` is a machinery.shards.Manifest: it
knows the sources of a data folder and reads their rows. Next: train.py, the loop.
"""

import hashlib
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from itertools import count

import numpy as np

from config import UsageError

# torch is imported where a batch is made: the workers of prepare_data.py do not need it.

# ------------------------------------------------------------------------------------ packing


@dataclass
class PackStats:
    """Where the documents went. Always: rows * row_len == tokens + bos - dropped - leftover."""

    documents: int = 0
    tokens: int = 0  # of the documents, without BOS
    bos: int = 0  # BOS tokens written: before each piece of a document, and as filler
    rows: int = 0
    splits: int = 0  # full rows made of one document that is longer than a row
    cuts: int = 0  # documents cut because none fitted in the space left in a row
    dropped: int = 0  # tokens thrown away: none by `pack`
    leftover: int = 0  # tokens in `pack.leftover`, less than a row, which its caller may drop


class Shelves:
    """Documents by length: one shelf per length (BOS included), and a bit per non-empty shelf, so
    that a few operations on integers find the document to take, however many there are."""

    def __init__(self, row_len: int):
        self.row_len = row_len
        self.shelves: list[list[np.ndarray]] = [[] for _ in range(row_len + 1)]
        self.has = 0  # bit n: shelves[n] is not empty
        self.has_complement = 0  # bit row_len - n: the same; `best` looks up complements in it
        self.documents = 0  # on all shelves
        self.tokens = 0  # theirs, with a BOS per document

    def put(self, ids: np.ndarray) -> None:
        n = len(ids) + 1
        self.shelves[n].append(ids)
        self.has |= 1 << n
        self.has_complement |= 1 << (self.row_len - n)
        self.documents += 1
        self.tokens += n

    def take(self, n: int) -> np.ndarray:
        shelf = self.shelves[n]
        ids = shelf.pop()
        if not shelf:
            self.has ^= 1 << n
            self.has_complement ^= 1 << (self.row_len - n)
        self.documents -= 1
        self.tokens -= n
        return ids

    def best(self, space: int) -> int:
        """The length of the document to put into `space` tokens; 0 if none fits.

        First choice: one that fills the space exactly. Second: the longest whose *complement* (the
        length that fills the remaining space) is there too; looking one step ahead makes 5 times
        fewer cuts. Third: the longest. For a space of 7, and documents of 3, 4 and 6 tokens:

            fits          bits 3, 4, 6    the longest, 6, would leave 1, which no document fills
            complements   bits 4, 3, 1    of each: 7 - 3, 7 - 4, 7 - 6
            pairs         bits 3, 4       lengths in both; the longer is taken: 4, and then 3
        """
        fits = self.has & ((2 << space) - 1)  # bits 0 .. space
        if not fits:
            return 0
        longest = fits.bit_length() - 1
        complements = self.has_complement >> (self.row_len - space)  # bit space - n: n is there
        pairs = fits & complements
        if longest == space or not pairs:
            return longest
        n = pairs.bit_length() - 1
        lone = 2 * n == space and len(self.shelves[n]) == 1  # a single document is no pair
        return longest if lone else n


@dataclass
class pack:  # in lower case, as `map` and `zip` are: it reads as a verb
    """Documents (sequences of ids, without BOS) -> rows, arrays of exactly `row_len` ids.

    >>> packed = pack([[5, 6], [7, 8, 9, 4]], row_len=4, bos_id=0)
    >>> [row.tolist() for row in packed], [ids.tolist() for ids in packed.leftover]
    ([[0, 7, 8, 9], [0, 5, 6, 0]], [[4]])

    Iterate over it, then read `.stats` and `.leftover`: documents, together less than a row, which
    the caller may pack again. whole, for conversations: cut no document, fill rows with BOS, leave
    nothing over.
    """

    docs: Iterable
    row_len: int
    bos_id: int
    buffer: int = 16_384
    whole: bool = False

    def __post_init__(self):
        if self.row_len < 2 or self.buffer < 1:
            raise UsageError(
                f"row_len {self.row_len} must be at least 2 and buffer {self.buffer} at least 1"
            )
        self.stats = PackStats()
        self.leftover = []

    def __iter__(self) -> Iterator[np.ndarray]:
        for row in self._rows(self._count(self.docs)):
            self.stats.rows += 1
            yield row

    def _count(self, docs: Iterable) -> Iterator[np.ndarray]:
        for doc in docs:
            ids = np.asarray(doc)
            if len(ids):
                self.stats.documents += 1
                self.stats.tokens += len(ids)
                yield ids

    def _write(self, row: np.ndarray, start: int, ids: Sequence[int]) -> int:
        """Write BOS + ids from `start` on; returns where the next document starts."""
        self.stats.bos += 1
        end = start + 1 + len(ids)
        row[start] = self.bos_id
        row[start + 1 : end] = ids
        return end

    def _rows(self, docs: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Best fit: keep `buffer` documents on shelves, so that most spaces find one that fits."""
        R = self.row_len
        shelves = Shelves(self.row_len)
        dtype = np.dtype(np.int64)
        for ids in docs:
            dtype = ids.dtype
            if len(ids) >= R:  # longer than a row: cut into rows first
                while len(ids) >= R:
                    row = np.empty(R, dtype)
                    self._write(row, 0, ids[: R - 1])
                    self.stats.splits += 1
                    yield row
                    ids = ids[R - 1 :]
                ids = ids.copy()  # a view would keep the whole document alive
            if len(ids):
                shelves.put(ids)
            while shelves.documents >= self.buffer and shelves.tokens >= R:
                yield self._fill_row(shelves, dtype)
        while shelves.tokens >= (1 if self.whole else R):
            yield self._fill_row(shelves, dtype)
        self.leftover = [ids for shelf in reversed(shelves.shelves) for ids in shelf]
        self.stats.leftover = sum(len(ids) for ids in self.leftover)

    def _fill_row(self, shelves: Shelves, dtype: np.dtype) -> np.ndarray:
        row = np.empty(self.row_len, dtype)
        start = 0
        while start < self.row_len:
            space = self.row_len - start
            n = shelves.best(space)
            if n:
                start = self._write(row, start, shelves.take(n))
            elif space == 1 or self.whole:  # fill it with a BOS: no document is cut
                start = self._write(row, start, [])
            else:  # cut the longest: its tail stays long, and short documents are kept to fill gaps
                ids = shelves.take(shelves.has.bit_length() - 1)
                start = self._write(row, start, ids[: space - 1])
                shelves.put(ids[space - 1 :])
                self.stats.cuts += 1
        return row


# -------------------------------------------------------------------------------------- order

MASK64 = 2**64 - 1


def mix64(x: int) -> int:
    """64 bits -> 64 well-mixed bits (the finalizer of SplitMix64, Steele et al. 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def hash64(text: str) -> int:
    """64 bits that depend on the text alone: the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Permutation:
    """A shuffle of 0..n-1, different for each key, computed one element at a time: no table,
    whatever n, and a resumed run asks for any element at once.

    A Feistel network on pairs (l, r) with l < a, r < b, a * b just above n (Black and Rogaway
    2002): each round adds to one half a keyed hash of the other half, which can be undone, so the
    whole is a bijection. A result outside 0..n-1 goes through again (cycle walking; rare, because
    a * b is barely above n). 12 rounds; 4 are visibly biased on small sets.
    """

    ROUNDS = 12

    def __init__(self, n: int, *key: int):
        self.n = n
        self.b = max(1, math.isqrt(n))
        self.a = -(-n // self.b)  # n / b, rounded up
        name = "/".join(map(str, key))
        self.keys = [hash64(f"{name}/{i}") for i in range(self.ROUNDS)]

    def __call__(self, x: int) -> int:
        a, b, keys = self.a, self.b, self.keys
        while True:
            left, right = divmod(x, b)
            for i in range(0, self.ROUNDS, 2):
                left = (left + mix64((right + keys[i]) & MASK64)) % a
                right = (right + mix64((left + keys[i + 1]) & MASK64)) % b
            x = left * b + right
            if x < self.n:
                return x


class Quota:
    """Deals positions 0, 1, 2, ... to sources in proportion to their weights.

    A chain, heaviest source first: of the n positions that reach a source, it takes
    round(n * its share of the weight from here on), in integers, and passes on the others. With
    weights 5, 3 and 2: of the first 10 positions the first source takes 5 (5 of 10), of the other 5
    the second takes 3 (3 of 5), and the third the 2 that are left. A count is within 1 of its share
    for up to 3 sources, within 1.7 for up to 16 (counted in tests/test_data.py).
    """

    def __init__(self, weights: Sequence[float]):
        exact = [Fraction(str(w)) for w in weights]  # 0.05 means 1/20
        if not exact or min(exact) < 0 or sum(exact) == 0:
            raise UsageError(f"mixture weights {list(weights)} must be >= 0, and not all 0")
        unit = math.lcm(*(w.denominator for w in exact))
        whole = [int(w * unit) for w in exact]
        heaviest_first = sorted((i for i, w in enumerate(whole) if w), key=lambda i: (-whole[i], i))
        self.count = len(weights)
        self.chain = []
        left = sum(whole)
        for i in heaviest_first:
            self.chain.append((i, whole[i], left))  # (source, weight, weight from here on)
            left -= whole[i]

    def __call__(self, p: int) -> tuple[int, int]:
        """Position p -> (source, how many earlier positions that source had)."""
        for source, weight, total in self.chain:
            had = rounded(p * weight, total)
            if rounded((p + 1) * weight, total) > had:  # with p it takes one more
                return source, had
            p -= had  # the position among those that the next source gets to see
        raise AssertionError("the last source takes every position that reaches it")

    def counts(self, p: int) -> list[int]:
        """How many of the first p positions each source has had."""
        counts = [0] * self.count
        for source, weight, total in self.chain:
            counts[source] = rounded(p * weight, total)
            p -= counts[source]
        return counts


def rounded(a: int, b: int) -> int:
    """a / b to the nearest integer, in integers alone."""
    return (2 * a + b) // (2 * b)


class Order:
    """Position p >= 0 -> (source, row). A pure function: nothing to save, nothing to replay.

    p -> (source, i-th row drawn from it) by quota -> epoch, index = divmod(i, size) -> that epoch's
    permutation of the source's rows. weights: the mixture, of sources. From position `decay_from`
    on, where the learning rate begins to decay, it is `decay_weights`; each source continues where
    it was, so that no row comes twice before all have come once.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        seed: int,
        decay_weights: Sequence[float] | None = None,
        decay_from: int = 0,
    ):
        self.sizes = list(sizes)
        self.seed = seed
        for mixture in (weights, decay_weights or weights):
            empty = [i for i, (n, w) in enumerate(zip(sizes, mixture, strict=True)) if w and not n]
            if empty:
                raise UsageError(f"source {empty[0]} has no rows; give it more text or weight 0")
        self.quota = Quota(weights)
        self.late_quota = Quota(decay_weights) if decay_weights else None
        self.late_from = decay_from
        self._permutation = lru_cache(maxsize=64)(
            lambda source, epoch: Permutation(self.sizes[source], seed, source, epoch)
        )

    def __call__(self, p: int) -> tuple[int, int]:
        if self.late_quota and p >= self.late_from:
            source, i = self.late_quota(p - self.late_from)
            i += self.quota.counts(self.late_from)[source]
        else:
            source, i = self.quota(p)
        epoch, i = divmod(i, self.sizes[source])
        return source, self._permutation(source, epoch)(i)

    def epochs(self, p: int) -> list[float]:
        """How many times the first p positions went through each source."""
        late = max(0, p - self.late_from) if self.late_quota else 0
        counts = self.quota.counts(p - late)
        if late:
            counts = [a + b for a, b in zip(counts, self.late_quota.counts(late))]
        return [n / size if size else 0.0 for n, size in zip(counts, self.sizes)]


# ----------------------------------------------------------------------------------- the loader


def mixture_weights(manifest, weights: dict[str, float]) -> list[float]:
    """Weights by name -> in the order of manifest.sources."""
    names = manifest.sources
    unknown = [name for name in weights if name not in names]
    if unknown:
        raise UsageError(f"the mixture names {unknown[0]!r}, the data has {', '.join(names)}")
    return [weights.get(name, 0) for name in names]


def order_of(manifest, seed=0, weights=None, decay_weights=None, decay_from=0) -> Order:
    """The order of the training rows; weights by name, None: in proportion to the sources' rows."""
    sizes = [manifest.rows("train", i) for i in range(len(manifest.sources))]
    mixture = sizes if weights is None else mixture_weights(manifest, weights)
    decay = None if decay_weights is None else mixture_weights(manifest, decay_weights)
    return Order(sizes, mixture, seed, decay, decay_from)


IGNORED = -100  # a target that does not count: torch's default ignore_index


def targets_of(rows: np.ndarray, marks: Sequence[int] = ()) -> np.ndarray:
    """rows (n, T + 1) -> targets (n, T) int64: the next ids. All count in a row of text. In a row
    of conversations only answers do: what follows <|assistant|>, through the <|end|> of the answer.

    marks: the ids of <|user|>, <|assistant|> and <|end|>; none: all rows are text."""
    inputs = rows[:, :-1]
    targets = rows[:, 1:].astype(np.int64)
    if marks:
        column = np.where(np.isin(inputs, marks), np.arange(inputs.shape[1]), 0)
        last = np.maximum.accumulate(column, axis=1)  # (n, T): where the last mark stands
        is_answer = np.take_along_axis(inputs, last, axis=1) == marks[1]
        has_answer = is_answer.any(axis=1, keepdims=True)  # (n, 1): rows without one are text
        targets[has_answer & ~is_answer] = IGNORED
    return targets


class RowLoader:
    """Batches by position. A thread reads ahead into a small ring of buffers; for a GPU they are
    pinned, that is, memory that the GPU copies from by itself while the program goes on.

    The ranks' micro-batches follow each other: with 2 ranks and micro-batches of 4 rows, rank 0
    takes positions 0 to 3, rank 1 those from 4 to 7, then rank 0 from 8 on. With 10 rows per step,
    positions 10 to 15 belong to the next step: rank 0's second micro-batch is filled up with 2 rows
    whose targets are IGNORED, rank 1's with 4. So the rows of a step, taken together, are the same
    for any number of ranks and any split into micro-batches.

    With rows_per_step 0, a step has one micro-batch of each rank.
    """

    def __init__(
        self,
        manifest,
        order: Order,
        micro_batch: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        position: int = 0,
        rows_per_step: int = 0,
        device: object = "cpu",
        prefetch: int = 4,
    ):
        import torch

        self.manifest = manifest
        self.order = order
        self.position = position  # of the first row of the latest batch
        self.marks = manifest.marks
        self.micro_batch = micro_batch
        self.device = torch.device(device)
        self._spans = self._spans_from(position, rank, world_size, rows_per_step)
        pin = self.device.type == "cuda"
        shape = (2, micro_batch, manifest.row_len - 1)
        # a new thread uses GPU 0, so it is told which one; set_device does not take "cuda" alone
        use_device = partial(torch.cuda.set_device, self.device) if self.device.index else None
        self._thread = ThreadPoolExecutor(1, initializer=use_device)
        self._ahead: deque[Future] = deque()  # batches that are read already, or queued
        self._waited_s = 0.0
        for _ in range(max(2, prefetch)):
            buffer = torch.empty(shape, dtype=torch.int64, pin_memory=pin)
            # blocking: the reader sleeps until a copy is done, instead of occupying a core
            self._read_into(buffer, torch.cuda.Event(blocking=True) if pin else None)

    def next_batch(self):
        """-> inputs, targets: int64 (micro_batch, row_len - 1) each, on the device. `position` is
        then that of its first row. An error in the reading thread is raised here."""
        t0 = time.perf_counter()
        buffer, copy_done, self.position = self._ahead[0].result()
        self._waited_s += time.perf_counter() - t0
        self._ahead.popleft()  # after an error it stays: the next call raises it again
        # copy: on a CPU too, where `to` alone would return the buffer itself
        batch = buffer.to(self.device, non_blocking=copy_done is not None, copy=True)
        if copy_done is not None:
            copy_done.record()  # until the copy has passed this point, the buffer is in use
        self._read_into(buffer, copy_done)
        return batch[0], batch[1]

    def random_seed(self) -> int:
        """A seed for whatever draws random numbers in this micro-batch, such as dropout: it depends
        on the position, so that a resumed run draws the same."""
        return mix64(mix64(self.order.seed) ^ self.position)

    def pop_wait_s(self) -> float:
        """Seconds that next_batch has waited for data since the last call."""
        waited_s = self._waited_s
        self._waited_s = 0.0
        return waited_s

    def close(self) -> None:
        """Stop reading, for good."""
        self._thread.shutdown(cancel_futures=True)

    def _spans_from(
        self, position: int, rank: int, world_size: int, rows: int
    ) -> Iterator[tuple[int, int]]:
        """For each of this rank's micro-batches: the position of its first row, and of the first
        that belongs to the next step."""
        at_once = world_size * self.micro_batch
        rows = rows or at_once
        for begin in count(position, rows):  # of each step, without end
            for first in range(begin, begin + rows, at_once):
                yield first + rank * self.micro_batch, begin + rows

    def _read_into(self, buffer, copy_done) -> None:
        """Have the thread read the next batch into `buffer`."""
        task = self._thread.submit(self._read, buffer, copy_done, *next(self._spans))
        self._ahead.append(task)

    def _read(self, buffer, copy_done, position: int, end: int) -> tuple:
        if copy_done is not None:
            copy_done.synchronize()  # the buffer's last copy, if there was one, may be in flight
        n = min(max(0, end - position), self.micro_batch)  # rows left in this step
        rows = np.empty((n, self.manifest.row_len), dtype=self.manifest.dtype)
        for j in range(n):
            rows[j] = self.manifest.row("train", *self.order(position + j))
        array = buffer.numpy()
        array[0, :n] = rows[:, :-1]
        array[1, :n] = targets_of(rows, self.marks)
        array[0, n:] = 0
        array[1, n:] = IGNORED
        return buffer, copy_done, position


def val_rows(manifest, max_rows: int = 0) -> list[tuple[int, int]]:
    """(source, row) of the first `max_rows` validation rows (0: all), in an order that never
    changes: sources take turns, each with its rows in the order in which they were prepared."""
    sources = range(len(manifest.sources))
    turns = sorted((row, i) for i in sources for row in range(manifest.rows("val", i)))
    return [(i, row) for row, i in turns[: max_rows or None]]


def val_batches(
    manifest, batch: int, max_rows: int = 0, rank: int = 0, world_size: int = 1, device="cpu"
) -> Iterator[tuple]:
    """The rows of `val_rows`, each once, in batches of about `batch` rows: inputs and targets like
    RowLoader's, and a list with the source of each row.

    Rank r reads rows r, r + world_size, ... Each rank has the same number of batches, since a
    sharded model needs all ranks, so batch sizes may differ by one.
    """
    import torch

    all_rows = val_rows(manifest, max_rows)
    total = len(all_rows)
    if total < world_size:
        raise UsageError(
            f"{total} validation rows are too few for {world_size} ranks; prepare more: "
            "--val_fraction"
        )
    own_rows = all_rows[rank::world_size]
    # The same number on each rank; not more than the rank with fewest rows has, so none is empty.
    batches = min(math.ceil(total / (batch * world_size)), total // world_size)
    for k in range(batches):
        part = own_rows[len(own_rows) * k // batches : len(own_rows) * (k + 1) // batches]
        rows = np.stack([manifest.row("val", source, row) for source, row in part])
        pair = np.stack([rows[:, :-1], targets_of(rows, manifest.marks)])
        tensor = torch.from_numpy(pair)  # (2, b, T)
        pin = torch.device(device).type == "cuda"
        if pin:  # unpinned, the copy would block the host
            tensor = tensor.pin_memory()
        tensor = tensor.to(device, non_blocking=pin)
        yield tensor[0], tensor[1], [source for source, _ in part]
