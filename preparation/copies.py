"""Documents that are copies of earlier ones of their source: `prepare_data.py --dedup exact`.

Finding copies takes the whole source, so the pool reads it once before it prepares it; which
documents a unit has to leave out is then part of its task. `near`: texts whose runs of five
words, as sets, have a Jaccard similarity of about 0.8 or more, by MinHash (Broder 1997; lesson 35
explains it, datasketch implements it). Next: worker.py leaves them out.
"""

import hashlib
import re
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np

from config import UsageError, install
from preparation import chat, sources
from preparation.reading import Notes
from tokenizer import normalize

SHINGLE, SIMILAR, HASHES = 5, 0.8, 128  # words, Jaccard similarity, numbers in a signature
SCHEME = "affine32"  # of datasketch's hash functions: named, so that they stay the same


class Marks(NamedTuple):
    """What is kept of a document, to compare it."""

    whole: bytes  # equal for equal texts
    signature: np.ndarray | None  # (HASHES,): alike for like texts; None if only equal ones count


def marks_of(source, unit: dict, nfc: bool, near: bool) -> list[Marks]:
    """The marks of a unit's documents."""
    found = []
    for document in sources.documents(source, unit, Notes()):
        text = normalize(chat.as_text(document), nfc)
        whole = hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()
        found.append(Marks(whole, signature_of(text) if near else None))
    return found


def signature_of(text: str) -> np.ndarray:
    """The MinHash of a text's shingles; a text of fewer words is one shingle."""
    words = re.findall(r"\w+|[^\w\s]", text)
    last = max(1, len(words) - SHINGLE + 1)
    shingles = {" ".join(words[i : i + SHINGLE]).encode("utf-8") for i in range(last)}
    minhash = library().MinHash(HASHES, scheme=SCHEME)
    minhash.update_batch(list(shingles))
    return minhash.digest()


def library():
    try:
        import datasketch
    except ImportError:
        how = install("requirements-scaling.txt")
        raise UsageError(f"--dedup near needs datasketch: {how}") from None
    return datasketch


def find(job, pool: Executor) -> dict[tuple[int, int], frozenset[int]]:
    """(source, unit) -> which of its documents, in the order of `sources.documents`, are copies of
    earlier ones of the source. The first stays, so a prefix of the units is free of copies too."""
    if job.config.dedup == "none":
        return {}
    if remote := [source.place for source in job.sources if source.remote]:
        twice = f"--dedup {job.config.dedup} would download hf:{remote[0]} twice"
        raise UsageError(f"{twice}; take data without copies, and --dedup none")
    near = job.config.dedup == "near"
    tasks = [(job.sources[s], job.units[s][u], job.nfc, near) for s, u in job.all_units]
    seen = [Seen(near) for _ in job.sources]
    marks = zip(job.all_units, pool.map(marks_of, *zip(*tasks)))
    return {
        (s, u): frozenset(i for i, mark in enumerate(of_unit) if seen[s].copy_of(mark) is not None)
        for (s, u), of_unit in marks
    }


class Seen:
    """The documents so far that are not copies, numbered."""

    def __init__(self, near: bool) -> None:
        self.by_text: dict[bytes, int] = {}
        self.signatures: list[np.ndarray | None] = []
        self.alike = library().MinHashLSH(SIMILAR, HASHES) if near else None

    def copy_of(self, mark: Marks) -> int | None:
        """The number of the one that it copies; None if it is new, and then it is added."""
        if mark.whole in self.by_text:
            return self.by_text[mark.whole]
        number = len(self.signatures)
        if mark.signature is not None:
            minhash = library().MinHash(HASHES, hashvalues=mark.signature, scheme=SCHEME)
            for i in sorted(self.alike.query(minhash)):  # candidates: some hashes are equal
                if np.mean(self.signatures[i] == mark.signature) >= SIMILAR:
                    self.by_text[mark.whole] = i
                    return i
            self.alike.insert(number, minhash)
        self.by_text[mark.whole] = number
        self.signatures.append(mark.signature)
        return None
