"""Documents -> rows -> order -> batches: how text reaches the model.

1. prepare_data.py tokenizes documents and packs them (`pack`) into rows of row_len tokens:

       row 17  | BOS the cat sat . BOS there was once a king | exactly row_len tokens
       row 18  | BOS who had a horse . BOS yes . BOS no       | no padding, no token lost

   The story of the king is longer than what was left of row 17: it is cut, and what remains is
   packed like a document of its own.

2. `Order` maps position p = 0, 1, 2, ... to (source, row): shuffled, and in the mixture's shares.
3. `batch_of` makes a batch of rows: inputs = row[:-1], targets = row[1:]. `RowLoader` does it ahead
   of time for training, `val_batches` does it for validation.

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

# torch is imported where a batch is made: prepare_data.py's workers, which only pack, start faster.

# ------------------------------------------------------------------------------------ packing


@dataclass
class PackStats:
    """Where the tokens went. What went into rows, tokens + bos - leftover, is rows * row_len."""

    documents: int = 0
    tokens: int = 0  # of the documents, without BOS
    bos: int = 0  # BOS tokens in rows: before each piece of a document, and as filler
    rows: int = 0
    splits: int = 0  # full rows made of one document that is longer than a row
    cuts: int = 0  # documents cut because none fitted in the space left in a row
    dropped: int = 0  # 0; prepare_data.py counts here what is left over in the end
    leftover: int = 0  # tokens in `pack.leftover`, less than a row


class Shelves:
    """Documents by length: one shelf per length (BOS included). Two integers, with a bit for each
    shelf that is not empty, find the document to take in a few operations, however many there are.

    With rows of 7 tokens, and documents of 3, 4 and 6:

        has             1011000    bits 3, 4, 6
        has_complement  0011010    bits 4, 3, 1: of each, what it leaves of a row
    """

    def __init__(self, row_len: int):
        self.row_len = row_len
        self.shelves: list[list[np.ndarray]] = [[] for _ in range(row_len + 1)]
        self.has = 0  # bit n: shelves[n] is not empty
        self.has_complement = 0  # bit row_len - n: shelves[n] is not empty
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

        First choice: one that fills the space exactly. Second: the longest that leaves a space
        which another document fills; looking one step ahead makes 5 times fewer cuts. Third: the
        longest. In the example, for a space of 7: the longest, 6, would leave 1, which no document
        fills. 3 and 4 fill it together; the longer, 4, is taken now.
        """
        fits = self.has & ((2 << space) - 1)  # bits 0 .. space
        if not fits:
            return 0
        longest = fits.bit_length() - 1
        complements = self.has_complement >> (self.row_len - space)  # bit space - n: n is there
        pairs = fits & complements  # lengths of which the complement in `space` is there too
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
    the caller may pack again. whole, for conversations, none of which is longer than a row: cut no
    document, fill rows with BOS, leave nothing over.
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
        """Best fit: keep `buffer` documents on shelves, so that most spaces find one that fits."""
        R = self.row_len
        shelves = Shelves(R)
        for doc in self.docs:
            ids = np.asarray(doc)
            if not len(ids):
                continue
            self.stats.documents += 1
            self.stats.tokens += len(ids)
            while len(ids) >= R:  # it fills rows by itself
                self.stats.splits += 1
                yield self._row([ids[: R - 1]])
                ids = ids[R - 1 :]
            shelves.put(ids.copy())  # a view would keep the whole of a long document alive
            while shelves.documents >= self.buffer and shelves.tokens >= R:
                yield self._row(self._take(shelves))
        while shelves.tokens >= (1 if self.whole else R):
            yield self._row(self._take(shelves))
        self.leftover = [ids for shelf in reversed(shelves.shelves) for ids in shelf]
        self.stats.leftover = sum(len(ids) for ids in self.leftover)

    def _take(self, shelves: Shelves) -> list[np.ndarray]:
        """The documents of the next row; one of them may have to be cut."""
        taken = []
        space = self.row_len
        while space:
            n = shelves.best(space)
            if n:
                ids = shelves.take(n)
            elif space == 1 or self.whole:
                break
            else:  # cut the longest, as what remains of it is long too: short ones can fill gaps
                longest = shelves.take(shelves.has.bit_length() - 1)
                ids = longest[: space - 1]
                shelves.put(longest[space - 1 :])
                self.stats.cuts += 1
            taken.append(ids)
            space -= 1 + len(ids)
        return taken

    def _row(self, docs: list[np.ndarray]) -> np.ndarray:
        """BOS + ids of each document, and BOS in the places that remain."""
        row = np.full(self.row_len, self.bos_id, docs[0].dtype)
        start = 0
        for ids in docs:
            end = start + 1 + len(ids)
            row[start + 1 : end] = ids
            start = end
        self.stats.rows += 1
        self.stats.bos += len(docs) + self.row_len - start
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

    A number x < a * b is a pair (left, right) = divmod(x, b). Each round adds to one half a hash of
    the other half and the key, which can be undone: so different pairs stay different (a Feistel
    network; Black and Rogaway 2002). a * b is n or just above it; a result that is not below n goes
    through again, until it is. 12 rounds; 4 are visibly biased on small sets.
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


permutation = lru_cache(maxsize=64)(Permutation)  # keeps those that were asked for last


class Quota:
    """Deals positions 0, 1, 2, ... to sources in proportion to their weights. With weights 5, 3, 2
    for the sources A, B, C:

        position                    0 1 2 3 4 5 6 7 8 9
        A takes 5 of them           A   A   A   A   A
        B takes 3 of the other 5      B       B   B
        C takes what is left              C           C

    A chain, heaviest source first: of the first n positions that reach a source, it takes n * its
    weight / the weight of all sources that are left, rounded, and passes on the others. A count is
    within 1 of its share for up to 3 sources, within 1.7 for up to 16 (counted in
    tests/test_data.py).
    """

    def __init__(self, weights: Sequence[float]):
        exact = [Fraction(str(w)) for w in weights]  # 0.05 means 1/20
        if not exact or min(exact) < 0 or sum(exact) == 0:
            raise UsageError(f"mixture weights {list(weights)} must be >= 0, and not all 0")
        unit = math.lcm(*(w.denominator for w in exact))
        whole = [int(w * unit) for w in exact]  # the same proportions, in integers
        heaviest_first = sorted((i for i, w in enumerate(whole) if w), key=lambda i: -whole[i])
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
            p -= had  # among the positions that reach the next source
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

    A Quota says which source has position p, and how many it had before, i. With n rows in the
    source, its epoch i // n is a Permutation of them, of which the row is element i % n.

    weights: the mixture. From position `decay_from` on, where the learning rate begins to decay, it
    is `decay_weights`; each source continues where it was, so that no row comes twice before all
    have come once.
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
            for i, (n, weight) in enumerate(zip(sizes, mixture, strict=True)):
                if weight and not n:
                    raise UsageError(f"source {i} has no rows; give it more text or weight 0")
        self.quota = Quota(weights)
        self.late_quota = Quota(decay_weights or weights)
        self.late_from = decay_from if decay_weights else math.inf

    def __call__(self, p: int) -> tuple[int, int]:
        if p >= self.late_from:
            source, i = self.late_quota(p - self.late_from)
            i += self.quota.counts(self.late_from)[source]  # that it had before
        else:
            source, i = self.quota(p)
        n = self.sizes[source]
        epoch, i = divmod(i, n)
        return source, permutation(n, self.seed, source, epoch)(i)

    def epochs(self, p: int) -> list[float]:
        """How many times the first p positions went through each source."""
        late = max(0, p - self.late_from)
        counts = zip(self.quota.counts(p - late), self.late_quota.counts(late), self.sizes)
        return [(before + after) / size if size else 0.0 for before, after, size in counts]


def mixture_weights(manifest, weights: dict[str, float]) -> list[float]:
    """Weights by name -> in the order of manifest.sources."""
    names = manifest.sources
    for name in weights:
        if name not in names:
            raise UsageError(f"the mixture names {name!r}, the data has {', '.join(names)}")
    return [weights.get(name, 0) for name in names]


def order_of(manifest, seed=0, weights=None, decay_weights=None, decay_from=0) -> Order:
    """The order of the training rows; weights by name, None: in proportion to the sources' rows."""
    sizes = [manifest.rows("train", i) for i in range(len(manifest.sources))]
    mixture = sizes if weights is None else mixture_weights(manifest, weights)
    in_decay = decay_weights and mixture_weights(manifest, decay_weights)
    return Order(sizes, mixture, seed, in_decay, decay_from)


# ---------------------------------------------------------------------------------- the batches

IGNORED = -100  # a target that does not count: torch's default ignore_index


def targets_of(rows: np.ndarray, marks: Sequence[int] = ()) -> np.ndarray:
    """rows (n, T + 1) -> targets (n, T) int64: the next ids. All count in a row of text. In a row
    of conversations only answers do: what follows <|assistant|>, through the <|end|> of the answer.

        inputs     BOS  <|user|>  Hi  <|assistant|>  Hello  you      <|end|>
        last mark       <|user|> ...  <|assistant|> ...    ...       <|end|>
        targets    -    -         -   Hello          you    <|end|>  -        (-: IGNORED)

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


def batch_of(manifest, rows: list[np.ndarray], size: int, device):
    """Rows of T + 1 ids -> inputs and targets: int64 (2, size, T), in the CPU's memory. What is
    missing of `size` rows has targets that are IGNORED. For a GPU as the device it is memory from
    which that copies by itself, while the program goes on; torch keeps it until the copy is done.
    """
    import torch

    n = len(rows)
    array = np.array(rows, manifest.dtype).reshape(n, manifest.row_len)
    batch = np.zeros((2, size, manifest.row_len - 1), np.int64)
    batch[0, :n] = array[:, :-1]
    batch[1, :n] = targets_of(array, manifest.marks)
    batch[1, n:] = IGNORED
    tensor = torch.from_numpy(batch)
    return tensor.pin_memory() if torch.device(device).type == "cuda" else tensor


class RowLoader:
    """Batches of training rows by position, read ahead by a thread.

    The ranks' micro-batches follow each other. With 2 ranks, micro-batches of 4 rows and 10 rows
    per step, the positions are

                   rank 0                    rank 1
        step 0     0 1 2 3, then 8 9 - -     4 5 6 7, then - - - -
        step 1     10 11 12 13, 18 19 - -    14 15 16 17, - - - -

    where - is a row whose targets are IGNORED. So the rows of a step, taken together, are the same
    for any number of ranks and any split into micro-batches. With rows_per_step 0, a step is one
    micro-batch of each rank.
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
        self.micro_batch = micro_batch
        self.device = torch.device(device)
        self._spans = self._spans_from(position, rank, world_size, rows_per_step)
        # A new thread uses GPU 0, unless it is told otherwise.
        use_device = partial(torch.cuda.set_device, self.device) if self.device.index else None
        self._thread = ThreadPoolExecutor(1, initializer=use_device)
        self._ahead: deque[Future] = deque()  # batches that are read already, or queued
        self._waited_s = 0.0
        for _ in range(prefetch):
            self._read_ahead()

    def next_batch(self):
        """-> inputs, targets: int64 (micro_batch, row_len - 1) each, on the device. `position` is
        then that of its first row. An error in the reading thread is raised here."""
        t0 = time.perf_counter()
        batch, self.position = self._ahead[0].result()
        self._waited_s += time.perf_counter() - t0
        self._ahead.popleft()  # after an error it stays: the next call raises it again
        self._read_ahead()
        inputs, targets = batch.to(self.device, non_blocking=True)
        return inputs, targets

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
        """For each of this rank's micro-batches: the position of its first row, and that of the
        first row of the next step."""
        at_once = world_size * self.micro_batch  # rows of all ranks
        rows = rows or at_once  # of a step
        for begin in count(position, rows):  # of each step, without end
            for first in range(begin, begin + rows, at_once):
                yield first + rank * self.micro_batch, begin + rows

    def _read_ahead(self) -> None:
        """Have the thread read one more batch."""
        self._ahead.append(self._thread.submit(self._read, *next(self._spans)))

    def _read(self, position: int, end: int) -> tuple:
        """The micro-batch of the rows from `position` on, but none from `end` on."""
        places = map(self.order, range(position, min(position + self.micro_batch, end)))
        rows = [self.manifest.row("train", *place) for place in places]
        return batch_of(self.manifest, rows, self.micro_batch, self.device), position


def val_rows(manifest, max_rows: int = 0) -> list[tuple[int, int]]:
    """(source, row) of the first `max_rows` validation rows (0: all), in an order that never
    changes: sources take turns, each with its rows in the order in which they were prepared."""
    turns = sorted(
        (row, i) for i in range(len(manifest.sources)) for row in range(manifest.rows("val", i))
    )
    return [(i, row) for row, i in turns[: max_rows or None]]


def val_batches(
    manifest, batch: int, max_rows: int = 0, rank: int = 0, world_size: int = 1, device="cpu"
) -> Iterator[tuple]:
    """The rows of `val_rows`, each once, in batches of about `batch` rows: inputs and targets like
    RowLoader's, and a list with the source of each row.

    Rank r reads rows r, r + world_size, ... Each rank has the same number of batches, since a
    sharded model needs all ranks, so batch sizes may differ by one.
    """
    places = val_rows(manifest, max_rows)
    total = len(places)
    if total < world_size:
        raise UsageError(
            f"{total} validation rows are too few for {world_size} ranks; prepare more: "
            "--val_fraction"
        )
    own = places[rank::world_size]
    # At least a row in each: no more batches than the rank with fewest rows has rows.
    batches = min(math.ceil(total / (batch * world_size)), total // world_size)
    for k in range(batches):
        part = own[len(own) * k // batches : len(own) * (k + 1) // batches]
        rows = [manifest.row("val", source, row) for source, row in part]
        tensor = batch_of(manifest, rows, len(rows), device)
        inputs, targets = tensor.to(device, non_blocking=True)
        yield inputs, targets, [source for source, _ in part]
