"""Documents -> full rows of tokens: which document goes where.

  a row (row_len = 8, B = BOS):  | B the cat sat B once upon a |

Best fit wastes nothing: every row is full and starts with BOS, no token is padding, none is lost,
and hardly a document is cut that a row could have held. Two other policies are here to compare
with. Next: data.py (rows on disk), prepare_data.py (who calls `pack`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np


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
        policies = {"best_fit": self._best_fit, "best_fit_discard": self._best_fit_discard,
                    "concat": self._concat}
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


def pack(docs: Iterable, row_len: int, bos_id: int, policy: str = "best_fit",
         buffer: int = 16_384) -> Packing:
    """Documents (sequences of ids, without BOS) -> rows, arrays of exactly `row_len` ids.

    >>> packed = pack([[5, 6], [7, 8, 9, 4]], row_len=4, bos_id=0)
    >>> [row.tolist() for row in packed], [ids.tolist() for ids in packed.rest]
    ([[0, 7, 8, 9], [0, 5, 6, 0]], [[4]])

    Iterate over the result, then read its `.stats`. What is left at the end, less than a row, is
    in `.rest`: dropped by nobody but the caller.
    """
    return Packing(docs, row_len, bos_id, policy, buffer)
