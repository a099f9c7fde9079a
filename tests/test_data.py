"""data.py and machinery/shards.py against slow, obvious oracles; reliability cases 20, 21, 23."""

import doctest
import errno
import os
import random
import threading
import tracemalloc
import weakref
from concurrent.futures import wait
from contextlib import closing
from itertools import permutations
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
@pytest.mark.parametrize("seed", range(6))
def test_best_fit_loses_no_token_and_every_row_is_full(seed):
    """In documents of log-normal length each token occurs once: 1, 2, 3, ..."""
    rng = np.random.default_rng(seed)
    row_len = int(rng.choice([2, 3, 17, 129, 513]))
    lengths = 1 + rng.lognormal(np.log(40), 1.0, rng.integers(1, 800)).astype(int)
    tokens = np.arange(1, lengths.sum() + 1, dtype=np.uint32)
    docs = np.split(tokens, np.cumsum(lengths)[:-1])
    packed = pack(docs, row_len, bos_id=0, buffer=rng.choice([1, 2, 50, 16_384]))
    rows = list(packed)
    assert all(row.shape == (row_len,) and row.dtype == tokens.dtype for row in rows)
    pieces = [list(piece[1:]) for row in rows for piece in pieces_of(row)]
    pieces = [piece for piece in [*pieces, *map(list, packed.leftover)] if piece]
    assert sorted(t for piece in pieces for t in piece) == list(tokens)
    for piece in pieces:  # a run of one document
        assert piece == list(range(piece[0], piece[0] + len(piece)))
    s = packed.stats
    assert (s.dropped, s.documents, s.tokens) == (0, len(docs), len(tokens))
    assert s.rows == len(rows) and s.rows * row_len == s.tokens + s.bos - s.leftover
    assert sum(len(rest) + 1 for rest in packed.leftover) < row_len


def test_best_fit_cuts_only_where_nothing_fits():
    """How a row is filled: the next test."""
    for lengths, row_len, rows, cuts in (
        ([5, 5, 3, 3], 10, 2, 0),  # each 5 waits for the 3 that fills its row
        ([7, 7, 7], 10, 2, 2),  # one is cut, its tail comes back with BOS
    ):
        packed = pack([np.full(n, n) for n in lengths], row_len, 0)
        assert len(list(packed)) == rows and packed.stats.cuts == cuts
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
            pairs = [a for a, b in permutations(fits, 2) if a + b == space]
            exact = [n for n in fits if n == space]
            assert shelves.best(space) == max(exact or pairs or fits or [0])
        for n in lengths:
            shelves.take(n)
        assert not (shelves.has or shelves.has_complement or shelves.documents or shelves.tokens)


def test_the_example_in_the_text_is_true():
    assert doctest.testmod(data).failed == 0


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
@pytest.mark.parametrize("weights", [(1,), (0.6, 0.3, 0.05, 0.05), (7, 0, 3), (123_457, 9, 88_001)])
def test_quota_is_exact_within_a_row_and_counts_itself(weights):
    quota = Quota(weights)
    bound = 1 if len(weights) <= 3 else 1.2
    for p in (*range(20_000), 10**12):
        had = quota.counts(p)
        assert sum(had) == p
        for n, w in zip(had, weights):
            assert abs(n - p * w / sum(weights)) <= bound + 1e-3
        source, i = quota(p)
        assert i == had[source]
        had[source] += 1
        assert quota.counts(p + 1) == had


def test_each_epoch_of_each_source_is_a_bijection_and_epochs_differ():
    """Also where the decay mixture takes over: no row is skipped."""
    sizes = [60, 25, 7]
    weights = [0.6, 0.3, 0.1]
    switch = 431
    order = Order(sizes, weights, 5, decay_weights=[0, 0.7, 0.3], decay_from=switch)
    drawn = [[], [], []]
    for p in range(900):
        source, row = order(p)
        drawn[source].append(row)
    for rows, size in zip(drawn, sizes):
        epochs = [rows[k : k + size] for k in range(0, len(rows) - size + 1, size)]
        assert len(epochs) >= 4 and all(sorted(e) == list(range(size)) for e in epochs)
        assert len({tuple(e) for e in epochs}) == len(epochs)
    assert order.epochs(900) == [len(r) / s for r, s in zip(drawn, sizes)]
    plain = Order(sizes, weights, 5)
    assert [*map(order, range(switch))] == [*map(plain, range(switch))]
    assert {order(p)[0] for p in range(switch, 900)} == {1, 2}


def test_golden_order():
    """These may never change: a run that is resumed by another version must see the same rows."""
    order = Order([1000, 50, 7], [0.6, 0.3, 0.1], seed=42)
    start = [(0, 599), (1, 6), (0, 972), (1, 48), (0, 930), (0, 846), (2, 1)]
    assert [order(p) for p in range(7)] == start
    assert [order(10**12 + p) for p in range(3)] == [(0, 737), (1, 0), (0, 439)]
    assert [Permutation(10, 1, 2, 3)(i) for i in range(10)] == [7, 8, 1, 4, 3, 9, 2, 0, 5, 6]


@pytest.mark.parametrize("sizes, weights", [([1, 1], [0, 0]), ([1, 1], [1, -1]), ([0, 1], [1, 1])])
def test_order_refuses_what_cannot_be(sizes, weights):
    with pytest.raises(UsageError):
        Order(sizes, weights, 0)
    assert Order([0, 1], [0, 1], 0)(5) == (1, 0)


# ----------------------------------------------------------------------------------- loader
def rows_at(order, positions):
    """The rows that stand there, by the order."""
    return [row_of(row, source).tolist() for source, row in map(order, positions)]


def rows_of(batch):
    """The rows of which a batch has the inputs and the targets."""
    inputs, targets = batch
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    return [[*x, y[-1]] for x, y in zip(inputs.tolist(), targets.tolist())]


def loading(manifest, micro_batch=2, **how):
    """A RowLoader that is closed, also after a failure."""
    return closing(RowLoader(manifest, order_of(manifest, 1), micro_batch, **how))


def test_the_loader_reads_ahead_of_a_slow_disk(manifest, monkeypatch):
    """While a step computes, up to `prefetch` batches are read, and no more; with none ready, the
    time that next_batch waits is counted: here by a clock that each row moves by a second."""
    honest = Manifest.row
    somebody_waits = threading.Event()
    reads = []

    def row(manifest, *place):
        somebody_waits.wait(timeout=60)
        reads.append(place)
        return honest(manifest, *place)

    def seconds():
        now = len(reads)
        somebody_waits.set()
        return now

    monkeypatch.setattr(Manifest, "row", row)
    monkeypatch.setattr(data, "time", SimpleNamespace(perf_counter=seconds))
    with loading(manifest, prefetch=3) as loader:
        loader.next_batch()
        assert 2 <= loader.pop_wait_s() <= 6
        wait(loader._ahead)
        assert len(reads) == 2 + 6
        loader.next_batch()
        assert loader.pop_wait_s() == 0


def test_the_global_sequence_is_that_of_the_order_at_every_world_size(tmp_path):
    """From any position on; and no two ranks draw the same numbers."""
    manifest = make_folder(tmp_path / "d", SIZES, dtype="<u4")
    order = order_of(manifest, 1, {"a": 1, "b": 2})
    for world_size, micro_batch in ((1, 4), (2, 4), (4, 2), (3, 16), (1, 1)):
        how = dict(position=40, world_size=world_size)
        loaders = [
            RowLoader(manifest, order, micro_batch, rank=r, **how) for r in range(world_size)
        ]
        rows = []
        for _ in range(48 // (world_size * micro_batch)):
            for loader in loaders:
                rows += rows_of(loader.next_batch())
        assert rows == rows_at(order, range(40, 88))
        assert len({loader.random_seed() for loader in loaders}) == world_size
        for loader in loaders:
            loader.close()


@pytest.mark.parametrize("device, used", [("cuda", []), ("cuda:1", [1])])
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
    places = [(s, i) for i in range(21) for s in ((0, 1) if i < 5 else (0,))]
    expected = [(s, row_of(i, s)[:-1].tolist()) for s, i in places[: max_rows or None]]
    for rank, batches in enumerate(ranks):
        assert all(0 < len(x) <= batch + 1 for x, *_ in batches)
        seen = [pair for x, _, sources in batches for pair in zip(sources, x.tolist())]
        assert seen == expected[rank::world_size]
    with pytest.raises(UsageError):  # more ranks than rows
        list(val_batches(manifest, 4, 2, 0, 3))


def test_case_23_far_positions_cost_what_near_ones_do(manifest):
    """After billions of epochs: what went through them would not end. Nor has the order of a
    billion rows a table."""
    far = range(10**12, 10**12 + 16)
    with loading(manifest, position=far.start, micro_batch=16) as loader:
        assert rows_of(loader.next_batch()) == rows_at(order_of(manifest, 1), far)
    tracemalloc.start()
    order = Order([10**9, 10**8, 1000], [0.6, 0.3, 0.1], 1)
    assert {order(p)[0] for p in far} == {0, 1, 2}
    assert tracemalloc.get_traced_memory()[1] < 200_000  # bytes
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
def test_case_20_a_damaged_row_is_never_trained_on(manifest):
    """Nor one whose checksum is damaged. All others are read."""
    first, second, _ = manifest.shards("train", 0)
    row_bytes = 9 * 2
    flip(manifest.dir / first.file, at=128 + 17 * row_bytes + 5)
    flip(manifest.dir / second.crc32_file, at=-2)
    manifest.check()  # sizes and headers are right
    damaged = {17: f"{first.file}.* row 17 ", 199: f"{second.file}.* row 99 "}
    for row in range(manifest.rows("train", 0)):
        if row in damaged:
            with pytest.raises(DataError, match=damaged[row]):
                manifest.row("train", 0, row)
        else:
            assert (manifest.row("train", 0, row) == row_of(row, 0)).all()


def test_case_20_a_row_that_cannot_be_read(manifest, monkeypatch):
    failing = mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(DataError, match=f"unit_0000.*{os.strerror(errno.EIO)}"):
        manifest.row("train", 0, 117)


def test_shards_are_what_numpy_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_ROWS", 7)
    rows = [row_of(i, 0) for i in range(17)]
    entries = shards.write_shards(rows, tmp_path, "train/a/unit_00000", "<u4")
    assert [e.rows for e in entries] == [7, 7, 3]
    np.save(tmp_path / "theirs.npy", np.stack(rows[7:14]).astype("<u4"))
    theirs = (tmp_path / "theirs.npy").read_bytes()
    assert (tmp_path / entries[1].file).read_bytes() == theirs
    assert (shards.dtype_for(65_536), shards.dtype_for(65_537)) == ("<u2", "<u4")


def test_case_21_another_tokenizer_or_an_edited_manifest(manifest):
    """An older format: test_formats.py."""
    (manifest.dir / "tokenizer.json").write_text("{ }")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        manifest.check()
    disk.write_json(manifest.dir / "manifest.json", manifest_of(manifest.dir) | {"row_len": 8})
    with pytest.raises(DataError, match=r"manifest\.json"):
        Manifest.load(manifest.dir)


def test_a_shard_that_changes_during_the_run_is_named(manifest):
    """One is cut off after it was opened, and one is gone before."""
    manifest.row("train", 0, 0)
    cut, gone, _ = (manifest.dir / shard.file for shard in manifest.shards("train", 0))
    os.truncate(cut, 130)
    gone.unlink()
    for row, file in ((0, cut), (100, gone)):
        with pytest.raises(DataError, match=file.name):
            manifest.row("train", 0, row)
    with loading(manifest, micro_batch=1) as loader, pytest.raises(DataError):
        for _ in range(300):
            loader.next_batch()
