"""`--stage DIR`: the data on a local disk, copied once per node and verified.

Reads DATA_DIR, writes DIR/FINGERPRINT. A file that is already there and intact is not copied again,
and the manifest comes last. For a slow shared file system. Next: machinery/shards.py.
"""

import shutil
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from machinery import disk, ranks
from machinery.shards import Manifest, damaged, files_of, reading


def once_per_node(manifest: Manifest, folder: str | Path, world: ranks.World) -> Manifest:
    """The first rank of each node copies the data while the others wait, for a day if need be;
    returns the copy's manifest. An error on one rank is raised on all."""
    error = patient = None
    if world.world_size > 1:
        patient = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    try:
        if world.local_rank == 0:
            copy(manifest, folder)
    except Exception as e:
        error = e
    if error := ranks.any_rank(error, patient):
        raise error
    return Manifest.load(target_of(manifest, folder))


def target_of(manifest: Manifest, folder: str | Path) -> Path:
    return Path(folder) / manifest.fingerprint[:16]


def copy(manifest: Manifest, folder: str | Path) -> Manifest:
    """Copy a data folder into `folder` and verify it; returns the copy's manifest."""
    target = target_of(manifest, folder)
    files = [file for shard in manifest.all_shards() for file in files_of(shard)]
    missing = sum(size for name, size, _ in files if not (target / name).exists())
    remedy = "choose another disk or leave --stage out"
    disk.check_room(target, missing, remedy)
    with disk.writable(target, remedy):
        target.mkdir(parents=True, exist_ok=True)
    for name, _, sha256 in files:
        path = target / name
        if path.exists() and disk.sha256_of(path) == sha256:
            continue
        original = manifest.dir / name
        with disk.replacing(path) as file:
            with reading(original):
                shutil.copyfile(original, file.name)
            if disk.sha256_of(Path(file.name)) != sha256:
                raise damaged(original, "is damaged: its copy has another sha256 than it should")
    for name in ("tokenizer.json", "manifest.json"):
        with disk.replacing(target / name) as file:
            file.write((manifest.dir / name).read_bytes())
    return Manifest.load(target)
