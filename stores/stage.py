"""Copies the data to a local disk, once per node, and verifies it before a run begins: from a store
(`--data_dir s3://...`) or a slow folder (`--stage DIR`).

Reads DATA, writes DIR/FINGERPRINT. A file that is there and complete is not copied again;
manifest.json comes last. `publish` sends prepared data to a store or a folder: URL/objects/SHA256,
one object for each file, never changed, and URL/manifest.json, last. Next: shards.py.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from config import UsageError
from machinery import disk
from machinery.errors import DataError
from machinery.output import say
from machinery.shards import CACHE, Manifest, is_published
from stores.store import LARGEST, Store

THREADS = 8


def once_per_node(data_dir: str, folder: str, world) -> str:
    """The first rank of each node copies the data into `folder` (empty: CACHE) while the others
    wait; returns the folder of the copy. An error is raised on all ranks. world: ranks.World."""
    from machinery.ranks import DAY_S, Team  # imports torch, which prepare_data.py must not

    team = Team(first_s=DAY_S, others_s=DAY_S)
    copies = team.on_all(lambda: copy(data_dir, folder) if world.local_rank == 0 else None)
    return next(filter(None, copies))


def copy(data_dir: str, folder: str | Path = "") -> str:
    """Copy data into `folder` (empty: CACHE) and verify it; returns the folder of the copy."""
    store = Store(data_dir)
    folder = Path(folder or CACHE)
    text = store.read("manifest.json", disk.LARGEST_SMALL)
    if text is None:
        raise UsageError(
            f"{store.url} has no manifest.json; run: python prepare_data.py ... --publish "
            f"{store.url}"
        )
    manifest = Manifest(store.url, disk.parse_json(text, f"{store.url}/manifest.json"))
    target = folder / manifest.fingerprint[:16]

    def bring(file: tuple[str, int, str]) -> None:
        name, size, sha256 = file
        path = disk.inside(target, name)
        if not disk.has_sha256(path, sha256):
            there = f"objects/{sha256}" if is_published(data_dir) else name
            store.fetch(there, path, sha256, size or disk.LARGEST_SMALL)

    disk.sweep(target.rglob(disk.TEMPORARY))
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(bring, manifest.files()))
    disk.write_bytes(target / "manifest.json", text)
    return str(target)


def publish(manifest: Manifest, url: str) -> None:
    """Send the data to a store. Objects that it has already are not sent again."""
    store = Store(url)
    store.sweep()
    files = {sha256: disk.inside(manifest.dir, name) for name, _, sha256 in manifest.files()}
    new = files.keys() - Store(f"{url.rstrip('/')}/objects").names()
    for sha256 in new:
        if not disk.has_sha256(files[sha256], sha256):
            raise DataError(f"{files[sha256]} does not match manifest.json; it was not published")
        store.write(f"objects/{sha256}", disk.read_bytes(files[sha256], LARGEST))
    store.write("manifest.json", disk.read_bytes(manifest.dir / "manifest.json"))
    say(f"{store.url}: {len(files):,} objects, {len(new):,} of them new")
