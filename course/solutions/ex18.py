"""Exercise 18: the reference, and answers that the oracle must refuse."""

from edits import edits


def publish(disk, folder, files):
    parent = folder.rpartition("/")[0]
    tmp = f"{folder}.tmp"
    if not disk.exists(folder):
        write_through(disk, tmp, files)
        disk.rename(tmp, folder)  # the one moment at which it comes into being
    disk.fsync(parent)


def write_through(disk, tmp, files):
    """A new folder, whose files and names are on the disk."""
    if disk.exists(tmp):
        disk.remove(tmp)  # of a publish that has crashed
    disk.mkdir(tmp)
    for name, data in files.items():
        disk.write(f"{tmp}/{name}", data)
        disk.fsync(f"{tmp}/{name}")
    disk.fsync(tmp)


edit = edits(__file__)
SYNC = "    disk.fsync(parent)"
LEFT = "disk.remove(tmp)  # of a publish that has crashed\n    disk.mkdir(tmp)"
KEPT = """in files.items():
        if disk.exists(f"{tmp}/{name}"):
            continue"""
WRONG = {  # name -> what of the reference it replaces
    "does not sync the parent": edit(SYNC, ""),
    "believes a name that nobody synced": edit(SYNC, "    " + SYNC),
    "does not sync the names": edit("disk.fsync(tmp)", ""),
    "moves into what is there": edit("not disk.exists(folder)", "True"),
    "trusts what a crash has left": edit(
        LEFT, "pass\n    else:\n        disk.mkdir(tmp)", "in files.items():", KEPT
    ),
}
