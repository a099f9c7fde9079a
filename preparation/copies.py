"""Documents that are copies of earlier ones of their source: `prepare_data.py --dedup exact`.

Finding copies takes the whole source, so the pool reads it once before it prepares it; which
documents a unit has to leave out is then part of its task. Lesson 35 finds those that are nearly
equal as well. Next: worker.py leaves them out.
"""

import hashlib
from concurrent.futures import Executor

from config import UsageError
from preparation import chat, sources
from preparation.reading import Notes
from tokenizer import normalize


def hashes_of(source, unit: dict, nfc: bool) -> list[bytes]:
    """16 bytes for each document of a unit: the same for equal texts."""
    return [
        hashlib.blake2b(normalize(chat.as_text(document), nfc).encode(), digest_size=16).digest()
        for document in sources.documents(source, unit, Notes())
    ]


def find(job, pool: Executor) -> dict[tuple[int, int], frozenset[int]]:
    """(source, unit) -> which of its documents, in the order of `sources.documents`, are copies of
    earlier ones of the source. The first stays, so a prefix of the units is free of copies too."""
    if job.config.dedup == "none":
        return {}
    remote = [source.place for source in job.sources if source.remote]
    if remote:
        raise UsageError(
            f"--dedup {job.config.dedup} would download hf:{remote[0]} twice; take data without "
            "copies, and --dedup none"
        )
    tasks = [(job.sources[s], job.units[s][u], job.nfc) for s, u in job.all_units]
    seen = [set() for _ in job.sources]
    copies = {}
    for (s, u), hashes in zip(job.all_units, pool.map(hashes_of, *zip(*tasks))):
        in_unit = set()
        for i, digest in enumerate(hashes):
            if digest in seen[s]:
                in_unit.add(i)
            seen[s].add(digest)
        copies[s, u] = frozenset(in_unit)
    return copies
