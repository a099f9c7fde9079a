"""Data brought to a local disk, once per node and verified, before a run begins: out of a store
(`--data_dir s3://...`) or a slow folder (`--stage DIR`).

Reads DATA, writes DIR/FINGERPRINT. A file that is there and whole is not copied again, and
manifest.json comes last. `publish` sends prepared data to a store: URL/objects/SHA256, one object
for each file, never changed, and URL/manifest.json, last. Next: shards.py.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from config import UsageError
from machinery import disk
from machinery.errors import DataError
from machinery.shards import Manifest, files_of
from machinery.store import Store

CACHE = "data/cache"
THREADS = 16


def once_per_node(data_dir: str, folder: str, world) -> Manifest:
    """The first rank of each node copies the data into `folder` (empty: CACHE) while the others
    wait; returns the copy's manifest. An error is raised on all ranks. world: ranks.World."""
    import torch.distributed as dist  # prepare_data.py does not wait for it

    from machinery import ranks

    copied = error = patient = None
    if world.world_size > 1:
        patient = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    try:
        if world.local_rank == 0:
            copied = copy(data_dir, folder)
    except Exception as e:
        error = e
    if error := ranks.any_rank(error, patient):
        raise error
    return Manifest.load(ranks.any_rank(copied, patient))


def copy(data_dir: str, folder: str | Path) -> str:
    """Copy data into `folder` (empty: CACHE) and verify it; returns the folder of the copy."""
    store, is_published = Store(data_dir), "://" in data_dir
    folder, text = Path(folder or CACHE), store.read("manifest.json")
    if text is None:
        how = f"--publish {store.url}" if is_published else f"--data_dir {store.url}"
        raise UsageError(f"{store.url} has no manifest.json; run: python prepare_data.py ... {how}")
    manifest = Manifest.of(store.url, disk.parse_json(text, f"{store.url}/manifest.json"))
    target = folder / manifest.fingerprint[:16]

    def is_missing(file: tuple[str, int, str]) -> bool:
        name, _, sha256 = file
        return not disk.has_sha256(disk.inside(target, name), sha256)

    def bring(file: tuple[str, int, str]) -> None:
        name, size, sha256 = file
        there = f"objects/{sha256}" if is_published else name
        store.fetch(there, disk.inside(target, name), sha256, size)

    with ThreadPoolExecutor(THREADS) as pool:
        files = everything(manifest)
        missing = [f for f, lacks in zip(files, pool.map(is_missing, files)) if lacks]
        need = sum(size for name, size, _ in missing if name != "tokenizer.json")
        disk.check_room(target, need, "choose another --stage")
        list(pool.map(bring, missing))
    disk.write_bytes(target / "manifest.json", text)
    return str(target)


def publish(manifest: Manifest, url: str) -> None:
    """Send the data to a store. Objects that are there are not sent again."""
    store = Store(url)
    there = store.names("objects")

    def send(file: tuple[str, int, str]) -> None:
        path = disk.inside(manifest.dir, file[0])
        if not disk.has_sha256(path, file[2]):
            raise DataError(f"{path} is not what manifest.json says; it was not published")
        store.send(path, f"objects/{file[2]}")

    files = {sha256: (name, size, sha256) for name, size, sha256 in everything(manifest)}
    size = lambda name: disk.inside(manifest.dir, name).stat().st_size
    new = [file for sha256, file in files.items() if there.get(sha256) != size(file[0])]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(send, new))
    store.write("manifest.json", disk.read_bytes(manifest.dir / "manifest.json"))
    print(f"{store.url}: {len(files):,} objects, {len(new):,} of them new")


def everything(manifest: Manifest) -> list[tuple[str, int, str]]:
    """(name, bytes, sha256) of every file but the manifest; of the tokenizer, the most bytes."""
    files = [file for shard in manifest.all_shards() for file in files_of(shard)]
    return [*files, ("tokenizer.json", disk.LARGEST_SMALL, manifest.tokenizer_sha256)]
