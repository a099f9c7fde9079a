"""Exercise 36: a shuffle buffer that goes on after a stop as if there had been none.

    buffer = Shuffler(read, n, size, seed)       a stream of n rows: read(0), read(1), ...
    buffer.next()                                the next row, shuffled; None after the last
    saved = buffer.state()                       and later, perhaps in another process:
    buffer = Shuffler(read, n, size, seed, saved)

It holds up to `size` rows. Before each draw it reads on until it holds that many, or the stream is
at its end; next() gives out one of them, drawn at random (each as likely as any other). Rules:
1. each of the n rows comes once, then None, also if size is larger than n, or n is 0;
2. before draw k (the first is 0) the first k + size rows have been read, and at most one row more:
   you may read on before next() returns, or at the next call;
3. another seed gives another order, the same seed the same, whoever else draws random numbers;
   and nobody else's are touched (several buffers may be at work, and Python's generator in use);
4. state() is what json can write, without any row: numbers say which rows are held. It is of its
   moment: what comes later does not change it. It may be taken at any time;
5. after a resume the rows come as they would have come without a stop, and no row is read more than
   once, so you can not begin from the start.
"""

from collections.abc import Callable


class Shuffler:
    def __init__(self, read: Callable, n: int, size: int, seed: int, state=None) -> None:
        raise NotImplementedError("write Shuffler, then: python course/check.py 36")

    def next(self):
        raise NotImplementedError

    def state(self):
        raise NotImplementedError


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import random

    rng = random.Random(9)
    for n, size in ((10, 3), (7, 1), (5, 9), (1, 1), (0, 4), (60, 16), (4, 4), (150, 99)):
        case = f"{n} rows, a buffer of {size}"
        whole, *_ = _go_on(answer, n, size, 5, n + 2)
        assert sorted(whole) == [*range(n)], f"{case}: the rows come as {whole}"
        assert _go_on(answer, n, size, 5, n + 2)[0] == whole, f"{case}: a seed has two orders"
        for _ in range(12):
            stops = sorted(rng.choices(range(n + 2), k=rng.choice((1, 1, 2, 3))))
            _stop_and_go_on(answer, n, size, whole, stops)
    _alone(answer)
    _looks_random(answer)


def _alone(answer) -> None:
    """Two buffers in turns, beside somebody who draws and seeds."""
    import random

    import numpy as np

    seeds = (5, 6)
    n = 40
    orders = [_go_on(answer, n, 7, seed, n)[0] for seed in seeds]
    random.random(), np.random.random()
    before = random.getstate(), np.random.get_state()[1].tolist()
    buffers = [answer.Shuffler(Stream(n, "two buffers").read, n, 7, seed) for seed in seeds]
    found = [[buffer.next().number for buffer in buffers] for _ in range(n)]
    touched = (random.getstate(), np.random.get_state()[1].tolist()) != before
    assert not touched, "rule 3: the global generator of Python or numpy is used"
    for order, alone in zip(zip(*found), orders):
        assert [*order] == alone, f"two buffers in turns: {[*order]}, one alone: {alone}"


class Stream:
    """Rows that json cannot write; it notes which were read."""

    class Row:
        def __init__(self, number: int) -> None:
            self.number = number

        def __repr__(self) -> str:
            return f"row {self.number}"

    def __init__(self, n: int, case: str) -> None:
        self.rows = [self.Row(i) for i in range(n)]
        self.reads = []
        self.case = case

    def read(self, i: int) -> "Stream.Row":
        assert i in range(len(self.rows)), f"{self.case}: read({i}), of {len(self.rows)} rows"
        assert i not in self.reads, f"{self.case}: row {i} is read twice"
        self.reads.append(i)
        return self.rows[i]


def _go_on(answer, n: int, size: int, seed: int, count: int, case: str = "", resume=(0, None, 0)):
    """Take `count` rows -> their numbers, the buffer, how far the stream was read.

    resume: rows that came before, the state after them, how far the stream was read then."""
    case = case or f"{n} rows, a buffer of {size}"
    at, state, far = resume
    stream = Stream(n, case)
    out = []
    buffer = answer.Shuffler(stream.read, n, size, seed, state)
    for k in range(at, at + count):
        row = buffer.next()
        if k >= n:
            assert row is None, f"{case}: after the last row next() returns {row!r}, not None"
            continue
        assert any(row is other for other in stream.rows), f"{case}: next() returns {row!r}, no row"
        out.append(row.number)
        far = max(far, *[i + 1 for i in stream.reads], 0)
        assert 0 <= far - min(n, k + size) <= 1, (
            f"{case}: after draw {k}, {far} rows of the stream have been read; "
            f"{min(n, k + size)} before it, and one more at most"
        )
    most = size + count
    assert len(stream.reads) <= most, f"{case}: {len(stream.reads)} reads for {count} rows"
    return out, buffer, far


def _stop_and_go_on(answer, n: int, size: int, whole: list[int], stops: list[int]) -> None:
    import json

    case = f"{n} rows, a buffer of {size}, stopped after {stops}"
    at = 0
    resume = (0, None, 0)
    for stop in [*stops, n + 2]:
        out, buffer, far = _go_on(answer, n, size, 5, stop - at, case, resume)
        expected = whole[at:stop]
        assert out == expected, f"{case}: from row {at} on {out}, without a stop {expected}"
        kept = buffer.state()
        try:
            text = json.dumps(kept)
        except (TypeError, ValueError) as error:
            raise AssertionError(f"{case}: json cannot write the state {kept!r}: {error}") from None
        assert len(text) < 8000 + 30 * size, f"{case}: a state of {len(text):,} characters"
        for _ in range(3):
            buffer.next()
        late = json.dumps(kept)
        assert late == text, f"{case}: a state changes when rows come later, {text} to {late}"
        at = stop
        resume = (stop, json.loads(text), far)


def _looks_random(answer) -> None:
    from collections import Counter

    size = 4
    seeds = 1200
    orders = [_go_on(answer, 6, size, seed, 6)[0] for seed in range(seeds)]
    assert len({tuple(order) for order in orders}) > 200, (
        f"{seeds} seeds give {len({*map(tuple, orders)})} orders of 6 rows, such as {orders[:2]}"
    )
    # a row that is held when 4 rows are comes with 1/4, in each of the first three draws
    chance = [[0.25] * 4 + [0, 0], [3 / 16] * 4 + [0.25, 0], [9 / 64] * 4 + [3 / 16, 0.25]]
    for draw in range(3):
        counts = Counter(order[draw] for order in orders)
        for row in range(6):
            expected = seeds * chance[draw][row]
            assert abs(counts[row] - expected) <= 0.3 * expected, (
                f"6 rows, a buffer of 4, {seeds} seeds: draw {draw} gives row {row} {counts[row]} "
                f"times, about {expected:.0f} are expected"
            )
    last = Counter(order[5] for order in orders)  # the last three are held, and drawn as well
    expected = seeds / 3 * (1 - sum(c[5] for c in chance))
    assert abs(last[5] - expected) <= 0.3 * expected, (
        f"6 rows, a buffer of 4, {seeds} seeds: row 5 is the last {last[5]} times, about "
        f"{expected:.0f} are expected; the last rows are drawn too"
    )
    firsts = {_go_on(answer, 20, 20, seed, 1)[0][0] for seed in range(400)}
    assert len(firsts) == 20, f"20 rows, a buffer of 20, 400 seeds: the first is one of {firsts}"
    rows, *_ = _go_on(answer, 300, 20, 1, 300)
    follow = sum(b == a + 1 for a, b in zip(rows, rows[1:]))
    assert follow < 60, f"300 rows, a buffer of 20: {follow} times a row is followed by the next"
