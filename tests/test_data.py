"""data.py and machinery/shards.py against slow, obvious oracles; reliability cases 20, 21, 23."""

import doctest
import errno
import itertools
import os
import random
import sys
import threading
import tracemalloc
import weakref
import zlib
from collections import Counter
from concurrent.futures import wait
from contextlib import closing, contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import flip, run_code
from data_helpers import SIZES, make_folder, manifest_of, pieces_of, row_of

import data
from config import UsageError
from data import Order, Permutation, Quota, RowLoader, order_of, pack, val_batches
from machinery import disk, shards
from machinery.errors import DataError
from machinery.shards import Manifest


# ---------------------------------------------------------------------------------- packing
def documents(count: int, seed: int = 0) -> list[np.ndarray]:
    """Documents of log-normal length in which every token occurs once: 1, 2, 3, ..."""
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, rng.lognormal(np.log(40), 1.0, count).astype(int))
    tokens = np.arange(1, lengths.sum() + 1).astype(np.uint32)
    return np.split(tokens, np.cumsum(lengths)[:-1])


@pytest.mark.parametrize("seed", range(6))
def test_best_fit_loses_no_token_and_every_row_is_full(seed):
    rng = random.Random(seed)
    row_len = rng.choice([2, 3, 17, 129, 513])
    buffer = rng.choice([1, 2, 50, 16_384])
    docs = documents(rng.randrange(1, 800), seed)
    packed = pack(docs, row_len, bos_id=0, buffer=buffer)
    rows = list(packed)
    assert all(r.shape == (row_len,) and r.dtype == docs[0].dtype for r in rows)
    found = [list(piece[1:]) for row in rows for piece in pieces_of(row)]
    found = [p for p in [*found, *(rest.tolist() for rest in packed.leftover)] if p]
    everything = sorted(t for p in found for t in p)
    assert everything == sorted(t for d in docs for t in d.tolist())  # each token exactly once
    for piece in found:  # each piece is a run of one document
        assert piece == list(range(piece[0], piece[0] + len(piece)))
    s = packed.stats
    assert s.dropped == 0 and s.documents == len(docs) and s.tokens == sum(map(len, docs))
    assert s.rows == len(rows) and s.rows * row_len == s.tokens + s.bos - s.leftover
    assert sum(len(r) + 1 for r in packed.leftover) < row_len  # fewer than a row of them


def test_best_fit_cuts_only_where_nothing_fits():
    for lengths, row_len, rows, cuts in (
        ([9, 6, 3, 1], 11, 2, 0),  # with BOS 7 + 4 fill the row; 10 leaves room for a bare BOS only
        ([4, 8, 2], 10, 1, 0),  # the 5 is half a row, but no pair with itself
        ([7, 7, 7], 10, 2, 2),  # one is cut, its tail comes back with BOS
    ):
        packed = pack([np.full(n, n) for n in lengths], row_len, 0)
        assert len(list(packed)) == packed.stats.rows == rows and packed.stats.cuts == cuts
    with pytest.raises(UsageError):  # no room for a token besides BOS
        pack([], 1, 0)


def test_shelves_find_what_a_search_finds():
    rng = random.Random(0)
    for _ in range(500):
        row_len = rng.randrange(2, 40)
        lengths = [rng.randrange(2, row_len + 1) for _ in range(rng.randrange(1, 8))]
        shelves = data.Shelves(row_len)
        for n in lengths:
            shelves.put(np.zeros(n - 1))
        for space in range(1, row_len + 1):
            fits = [n for n in lengths if n <= space]
            others = {n: Counter(lengths) - Counter([n]) for n in fits}
            pairs = [n for n in fits if space - n in others[n]]
            exact = [n for n in fits if n == space]
            assert shelves.best(space) == max(exact or pairs or fits or [0])
        for length in sorted(lengths, reverse=True):
            assert len(shelves.take(shelves.has.bit_length() - 1)) + 1 == length
        assert not (shelves.has or shelves.has_complement or shelves.documents or shelves.tokens)


def test_the_example_in_the_text_is_true():
    assert doctest.testmod(data).failed == 0


def test_best_fit_cuts_few_documents_on_web_like_lengths():
    lengths = np.random.default_rng(0).lognormal(np.log(600), 1.0, 25_000).astype(int)
    packed = pack((np.ones(max(1, n), np.uint16) for n in lengths), 2049, 0)
    rows = sum(1 for _ in packed)
    assert packed.stats.cuts / rows < 0.1 and packed.stats.dropped == 0


def test_long_documents_do_not_hold_on_to_memory():
    """The tail of a cut document is a copy: 200 tails must not keep 200 long documents alive."""
    documents = []  # weak references

    def long_ones():
        for _ in range(200):
            ids = np.ones(5_000, np.uint16)
            documents.append(weakref.ref(ids))
            yield ids

    for _ in pack(long_ones(), 1025, 0, buffer=10_000):
        assert sum(document() is not None for document in documents) <= 2


# ------------------------------------------------------------------------------------ order


def test_permutation_is_not_visibly_biased():
    """All 24 orders of 4 items, equally often over 4,800 keys (chi-square, 23 degrees: 99.9%)."""
    counts = Counter(tuple(map(Permutation(4, key), range(4))) for key in range(4800))
    assert len(counts) == 24
    assert sum((c - 200) ** 2 / 200 for c in counts.values()) < 49.7


@pytest.mark.parametrize("weights", [(1,), (0.6, 0.3, 0.05, 0.05), (7, 0, 3), (123_457, 9, 88_001)])
def test_quota_is_exact_within_a_row_and_counts_itself(weights):
    quota = Quota(weights)
    had = [0] * len(weights)
    bound = 1 if len(weights) <= 3 else 1.2
    for p in range(20_000):
        assert quota.counts(p) == had
        source, i = quota(p)
        assert i == had[source]
        had[source] += 1
        for n, w in zip(had, weights):
            assert abs(n * sum(weights) - (p + 1) * w) <= sum(weights) * (bound + 1e-9)
    far = 10**12
    counts = quota.counts(far)
    assert sum(counts) == far
    for n, w in zip(counts, weights):
        assert abs(n - far * w / sum(weights)) <= bound + 0.01
    source, i = quota(far)
    assert i == counts[source] and quota.counts(far + 1)[source] == i + 1


def test_each_epoch_of_each_source_is_a_bijection_and_epochs_differ():
    sizes = [60, 25, 7]
    order = Order(sizes, [0.6, 0.3, 0.1], seed=5)
    drawn = [[], [], []]
    for p in range(900):
        source, row = order(p)
        drawn[source].append(row)
    for rows, size in zip(drawn, sizes):
        epochs = [rows[k : k + size] for k in range(0, len(rows) - size + 1, size)]
        assert len(epochs) >= 8 and all(sorted(e) == list(range(size)) for e in epochs)
        assert len({tuple(e) for e in epochs}) == len(epochs)
    assert order.epochs(900) == [len(r) / s for r, s in zip(drawn, sizes)]


def test_the_decay_mixture_takes_over_and_no_row_is_skipped():
    sizes = [40, 40]
    switch = 31
    order = Order(sizes, [1, 1], 3, decay_weights=[0, 1], decay_from=switch)
    plain = Order(sizes, [1, 1], 3)
    assert [order(p) for p in range(switch)] == [plain(p) for p in range(switch)]
    second = [order(p)[1] for p in range(100) if order(p)[0] == 1]
    assert {order(p)[0] for p in range(switch, 100)} == {1}
    assert sorted(second[:40]) == list(range(40)) and sorted(second[40:80]) == list(range(40))
    assert order.epochs(switch + 10)[0] == plain.epochs(switch)[0]


def test_golden_order():
    """These may never change: a run that is resumed by another version must see the same rows."""
    order = Order([1000, 50, 7], [0.6, 0.3, 0.1], seed=42)
    start = [(0, 599), (1, 6), (0, 972), (1, 48), (0, 930), (0, 846), (2, 1), (0, 709)]
    assert [order(p) for p in range(8)] == start
    assert [order(10**12 + p) for p in range(4)] == [(0, 737), (1, 0), (0, 439), (1, 48)]
    assert [Permutation(10, 1, 2, 3)(i) for i in range(10)] == [7, 8, 1, 4, 3, 9, 2, 0, 5, 6]


def test_order_refuses_what_cannot_be():
    for sizes, weights in (([1], [1, 1]), ([1, 1], [0, 0]), ([1, 1], [1, -1]), ([0, 1], [1, 1])):
        with pytest.raises(ValueError):
            Order(sizes, weights, 0)
    assert Order([0, 1], [0, 1], 0)(5) == (1, 0)


# ----------------------------------------------------------------------------------- loader
def rows_at(order, positions) -> list[list[int]]:
    """The rows that stand there, by the order."""
    places = [order(p) for p in positions]
    return [row_of(row, source).tolist() for source, row in places]


def rows_of(batch) -> list[list[int]]:
    """The rows of which a batch has the inputs and the targets."""
    inputs, targets = batch
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    return [[*x, y[-1]] for x, y in zip(inputs.tolist(), targets.tolist())]


@contextmanager
def loading(manifest, seed=1, micro_batch=2, **how):
    """A RowLoader that is closed, also after a failure."""
    with closing(RowLoader(manifest, order_of(manifest, seed), micro_batch, **how)) as loader:
        yield loader


def test_the_loader_reads_ahead_of_a_slow_disk(manifest, monkeypatch):
    """While a step computes, up to `prefetch` batches are read, and no more; with none ready, the
    time that next_batch waits is counted: here by a clock that each row moves by a second."""
    honest = Manifest.row
    disk_works = threading.Semaphore(6)
    reads = []
    batches = []

    def row(manifest, *place):
        disk_works.acquire(timeout=60)
        reads.append(place)
        return honest(manifest, *place)

    def seconds() -> int:
        now = len(reads)
        disk_works.release(2) if len(batches) == 3 else None  # once somebody waits
        return now

    monkeypatch.setattr(Manifest, "row", row)
    monkeypatch.setattr(data, "time", SimpleNamespace(perf_counter=seconds))
    with loading(manifest, prefetch=3) as loader:
        wait(loader._ahead)
        assert len(reads) == 6
        for _ in range(4):
            batches.append(loader.next_batch())
        wait([loader._ahead[0]])
        batches.append(loader.next_batch())
        assert (loader.pop_wait_s(), loader.pop_wait_s()) == (2, 0)
        found = [row for batch in batches for row in rows_of(batch)]
        assert found == rows_at(order_of(manifest, 1), range(10))
        disk_works.release(100)  # whatever the reader still wants


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_the_global_sequence_is_that_of_the_order_at_every_world_size(dtype, tmp_path):
    manifest = make_folder(tmp_path / "d", SIZES, dtype=dtype)
    manifest.check()
    order = order_of(manifest, 1, {"a": 1, "b": 2})

    def rows(world_size, micro_batch, position=40):
        ranks = range(world_size)
        out = []
        how = dict(position=position, world_size=world_size)
        loaders = [RowLoader(manifest, order, micro_batch, rank=r, **how) for r in ranks]
        for _ in range(48 // (world_size * micro_batch)):
            for loader in loaders:
                out += rows_of(loader.next_batch())
        for r, loader in enumerate(loaders):  # the first row of the last batch
            assert loader.position == position + 48 - (world_size - r) * micro_batch
            loader.close()
        assert len({loader.random_seed() for loader in loaders}) == world_size
        return out

    expected = rows_at(order, range(40, 88))
    for world_size, micro_batch in ((1, 4), (2, 4), (4, 2), (3, 16), (1, 1)):
        assert rows(world_size, micro_batch) == expected
    # stopped after 24 rows, and resumed with nothing but the position
    assert rows(2, 2, position=64)[:24] == expected[24:]


@pytest.mark.parametrize("device, used", [("cuda", []), ("cuda:0", []), ("cuda:1", [1])])
def test_each_batch_for_a_gpu_is_pinned_in_memory_of_its_own(device, used, manifest, monkeypatch):
    """Torch knows when a copy from it is done. And the thread uses the GPU that was named, as torch
    does: set_device takes no device without an index."""
    pinned = []
    set_to = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda batch: pinned.append(batch) or batch)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: set_to.append(device.index))
    with loading(manifest, device=device, prefetch=3) as loader:
        wait(loader._ahead)
    assert len({batch.data_ptr() for batch in pinned}) == 3 and set_to == used


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("max_rows, batch", [(0, 4), (7, 1), (19, 4)])
def test_each_validation_row_once_in_a_fixed_order(manifest, world_size, max_rows, batch):
    ranks = [list(val_batches(manifest, batch, max_rows, r, world_size)) for r in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1  # the same number on each rank
    per_rank = [[row for x, *_ in batches for row in x.tolist()] for batches in ranks]
    assert all(0 < len(x) <= 4 for batches in ranks for x, *_ in batches)
    seen = [row for k in range(30) for row in (rows[k] for rows in per_rank if k < len(rows))]
    places = [(s, i) for i in range(21) for s, size in ((0, 21), (1, 5)) if i < size]
    expected = [row_of(i, s)[:-1].tolist() for s, i in places[: max_rows or None]]
    assert seen == expected
    with pytest.raises(UsageError):  # more ranks than rows
        list(val_batches(manifest, 4, 2, 0, 3))


def test_case_23_far_positions_cost_what_near_ones_do(manifest):
    """The order of a billion rows, and a loader: at 10^12 at most twice of what it is at 0, in
    memory, and in time: in lines of Python that are run, which other work cannot disturb."""

    def order(position):
        order = Order([10**9, 10**8, 1000], [0.6, 0.3, 0.1], 1)
        for p in range(position, position + 1000):
            order(p)

    def first_batch(position):
        with loading(manifest, position=position, micro_batch=16) as loader:
            loader.next_batch()
            wait(loader._ahead)

    def lines(what, position) -> int:
        count = itertools.count()
        trace = lambda *event: next(count) >= 0 and trace
        threading.settrace(trace)
        sys.settrace(trace)
        what(position)
        sys.settrace(None)
        threading.settrace(None)
        return next(count)

    for what in (order, first_batch):
        what(0), what(10**12)  # the files are open
        assert 0 < lines(what, 10**12) < 2 * lines(what, 0), what.__name__
    tracemalloc.start()
    order(10**12)
    assert tracemalloc.get_traced_memory()[1] < 200_000  # bytes: no table of a billion rows
    tracemalloc.stop()


def test_more_shards_than_files_that_may_be_open(tmp_path):
    folder = make_folder(tmp_path / "d", {"train": {"a": 60}, "val": {"a": 1}}, shard_rows=1)
    code = (
        "import resource, sys; from machinery.shards import Manifest\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "for m in (several := [Manifest.load(sys.argv[1]) for _ in range(3)]): m.check()\n"
        "print([m.row('train', 0, i).tolist() for i in range(m.rows('train'))])"
    )
    rows = [folder.row("train", 0, i).tolist() for i in range(60)]
    assert run_code(code, folder.dir) == f"{rows}\n"


# -------------------------------------------------------------------------- damaged data
@pytest.mark.parametrize("split", ["train", "val"])
def test_case_20_a_damaged_row_is_never_trained_on(split, manifest):
    flipped, _ = manifest.locate(split, 0, 17)
    row_bytes = 9 * 2
    flip(manifest.dir / flipped.file, at=128 + 17 * row_bytes + 5)
    manifest.check()  # sizes and headers are right
    for source, name in enumerate(manifest.sources):
        for row in range(manifest.rows(split, source)):
            if (name, row) == ("a", 17):
                with pytest.raises(DataError, match=f"{flipped.file}.* row 17 "):
                    manifest.row(split, source, row)
            else:
                expected = row_of(row, source)
                assert (manifest.row(split, source, row) == expected).all()


def test_case_20_a_damaged_checksum_and_a_row_that_cannot_be_read(manifest, monkeypatch):
    shard = manifest.shards("train", 0)[1]
    flip(manifest.dir / shard.crc32_file, at=-2)
    with pytest.raises(DataError, match="row 99 "):
        manifest.row("train", 0, 199)
    failing = mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(DataError, match=f"{shard.file}.*{os.strerror(errno.EIO)}"):
        manifest.row("train", 0, 117)


def test_shards_are_what_numpy_writes_with_checksums_of_zlib(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_ROWS", 7)
    rows = [row_of(i, 0) for i in range(17)]
    for dtype in ("<u2", "<u4"):
        entries = shards.write_shards(rows, tmp_path, "train/a/unit_00000", dtype)
        assert [e.rows for e in entries] == [7, 7, 3]
        np.save(tmp_path / "theirs.npy", np.stack(rows[7:14]).astype(dtype))
        ours = tmp_path / entries[1].file
        assert ours.read_bytes() == (tmp_path / "theirs.npy").read_bytes()
        crcs = np.concatenate([np.load(tmp_path / e.crc32_file) for e in entries])
        assert crcs.tolist() == [zlib.crc32(row.astype(dtype).tobytes()) for row in rows]
    assert (shards.dtype_for(65_536), shards.dtype_for(65_537)) == ("<u2", "<u4")


def test_case_21_another_tokenizer_or_an_edited_manifest(manifest):
    """An older format: test_formats.py."""
    (manifest.dir / "tokenizer.json").write_text("{ }")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        manifest.check()
    disk.write_json(manifest.dir / "manifest.json", manifest_of(manifest.dir) | {"row_len": 8})
    with pytest.raises(DataError, match=r"manifest\.json"):
        Manifest.load(manifest.dir)


@pytest.mark.parametrize("damage", ["vanishes", "is cut off"])
def test_a_shard_that_changes_during_the_run_is_named(damage, tmp_path):
    manifest = make_folder(tmp_path / "d", {"train": {"a": 200}, "val": {}}, shard_rows=5)
    files = [manifest.dir / entry.file for entry in manifest.shards("train", 0)]
    if damage == "is cut off":
        for entry in manifest.shards("train", 0):
            manifest.open_shard(entry)  # a shard opened later would be refused by its size
    with loading(manifest, micro_batch=1) as loader:
        loader.next_batch()
        for file in files:
            os.truncate(file, 130) if damage == "is cut off" else file.unlink()
        with pytest.raises(DataError) as error:
            for _ in range(300):
                loader.next_batch()
    assert any(file.name in str(error.value) for file in files)
