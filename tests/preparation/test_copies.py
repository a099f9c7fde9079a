"""`prepare_data.py --dedup`: what counts as a copy, by comparing all pairs; which one stays."""

import hashlib
import json
import random
import re

import pytest
from data_helpers import in_process

from config import DataConfig, UsageError
from machinery.shards import Manifest
from preparation import copies, worker

WORDS = [f"w{i}" for i in range(400)]


def texts_with_copies(seed: int) -> list[str]:
    """Originals, equal copies, copies with a few words changed, and some with many."""
    draw = random.Random(seed)
    originals = [" ".join(draw.choices(WORDS, k=draw.randint(30, 200))) for _ in range(40)]
    texts = list(originals)
    for original in originals[:25]:
        words = original.split()
        for share in draw.choices((0.0, 0.0, 0.01, 0.02, 0.3), k=2):
            texts.append(
                " ".join(draw.choice(WORDS) if draw.random() < share else w for w in words)
            )
    draw.shuffle(texts)
    return texts


def shingles(text: str) -> set:
    words = re.findall(r"\w+|[^\w\s]", text)
    return {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}


def most_alike(text: str, others: list[str]) -> float:
    """The largest Jaccard similarity, every pair compared."""
    mine, sets = shingles(text), map(shingles, others)
    return max((len(mine & other) / len(mine | other) for other in sets), default=0.0)


def marks(text: str, near: bool) -> copies.Marks:
    whole = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return copies.Marks(whole, copies.signature_of(text) if near else None)


def test_equal_texts_are_copies_of_the_first():
    texts, seen = texts_with_copies(0), copies.Seen(near=False)
    found = {i for i, text in enumerate(texts) if seen.copy_of(marks(text, False)) is not None}
    assert found == {i for i, text in enumerate(texts) if text in texts[:i]} and found


@pytest.mark.parametrize("seed", range(3))
def test_near_copies_are_those_of_the_slow_way(seed):
    """But for pairs near the border, which 128 hashes cannot tell."""
    pytest.importorskip("datasketch")
    texts, seen, kept = texts_with_copies(seed), copies.Seen(near=True), []
    changed = 0
    for text in texts:
        alike = most_alike(text, kept)
        if seen.copy_of(marks(text, True)) is None:
            assert alike < 0.92
            kept.append(text)
        else:
            assert alike > 0.68
            changed += alike < 1
    assert changed > 5 and len(kept) < len(texts) - 15


def write(path, texts) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return f"files:{path}"


TINY = "tiny --vocab_size 300 --row_len 33 --val_fraction 0.1".split()


def prepare(folder, *options):
    return in_process(*TINY, "--data_dir", folder, *options)


def test_a_preparation_leaves_them_out(tmp_path):
    pytest.importorskip("datasketch")
    texts = texts_with_copies(0)
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(6):  # several units
        write(folder / f"{i}.jsonl", texts[i::6])
    bytes_of, left_out = {}, {}
    for way in ("none", "exact", "near"):
        done = prepare(tmp_path / way, "--source", f"files:{folder}", "--dedup", way)
        assert done.returncode == 0, done.stderr
        tree = Manifest.load(tmp_path / way).tree
        left_out[way] = sum(tree["notes"].values())
        bytes_of[way] = sum(tree["splits"][s]["texts"]["bytes"] for s in ("train", "val"))
    assert left_out["none"] == 0 and left_out["exact"] == len(texts) - len(set(texts))
    assert left_out["near"] > left_out["exact"]
    assert bytes_of["exact"] == sum(len(text.encode()) for text in set(texts))
    assert bytes_of["near"] < bytes_of["exact"] < bytes_of["none"]
    near = ("--source", f"files:{folder}", "--dedup", "near")
    assert in_process(*TINY, "--data_dir", tmp_path / "two", *near, processes=True).returncode == 0
    fingerprints = {Manifest.load(tmp_path / name).fingerprint for name in ("near", "two")}
    assert len(fingerprints) == 1
    other = prepare(tmp_path / "near", "--source", f"files:{folder}")
    assert other.returncode == 2


def test_the_sample_for_the_tokenizer_has_no_copies(tmp_path):
    source = write(tmp_path / "a.jsonl", ["one text", "one text", "another"])
    config = DataConfig((source,), data_dir=str(tmp_path / "d"), dedup="exact", row_len=9)
    job = worker.Job(config)
    assert list(job.texts(0, 0)) == ["one text", "one text", "another"]
    with worker.open_pool(1) as (pool, _):
        job.copies = copies.find(job, pool)
    assert job.copies == {(0, 0): {1}}
    assert list(job.texts(0, 0)) == ["one text", "another"]


def test_a_source_that_must_be_downloaded_is_refused():
    class Job:
        config = DataConfig(("hf:some/data",), tokens="1M", dedup="exact")
        sources = [worker.sources.parse("hf:some/data")]

    with pytest.raises(UsageError, match="hf:some/data"):
        copies.find(Job, None)
