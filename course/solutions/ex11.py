"""Exercise 11: the reference, and answers that the oracle must refuse."""

from functools import partial


def publish(disk, folder, files):
    publish_by(write_through, disk, folder, files)


def publish_by(write, disk, folder, files):
    parent, tmp = folder.rpartition("/")[0], f"{folder}.tmp"
    if not disk.exists(folder):
        write(disk, tmp, files)
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


def no_sync_of_the_parent(disk, folder, files):
    if not disk.exists(folder):
        write_through(disk, f"{folder}.tmp", files)
        disk.rename(f"{folder}.tmp", folder)


def returns_if_there(disk, folder, files):
    """A publish that was killed after its rename has left a name that is not on the disk yet."""
    if not disk.exists(folder):
        publish(disk, folder, files)


def no_sync_of_the_names(disk, tmp, files):
    """The contents are safe, and the folder that should name them is empty."""
    if disk.exists(tmp):
        disk.remove(tmp)
    disk.mkdir(tmp)
    for name, data in files.items():
        disk.write(f"{tmp}/{name}", data)
        disk.fsync(f"{tmp}/{name}")


def moves_into_it(disk, folder, files):
    write_through(disk, f"{folder}.tmp", files)
    disk.rename(f"{folder}.tmp", folder)
    disk.fsync(folder.rpartition("/")[0])


def trusts_what_is_left(disk, tmp, files):
    """Files of a publish that crashed are taken for whole."""
    if not disk.exists(tmp):
        disk.mkdir(tmp)
    for name, data in files.items():
        if not disk.exists(f"{tmp}/{name}"):
            disk.write(f"{tmp}/{name}", data)
            disk.fsync(f"{tmp}/{name}")
    disk.fsync(tmp)


WRONG = {  # name -> what of the reference it replaces
    "does not sync the parent": dict(publish=no_sync_of_the_parent),
    "believes a name that nobody synced": dict(publish=returns_if_there),
    "does not sync the names": dict(publish=partial(publish_by, no_sync_of_the_names)),
    "moves into what is there": dict(publish=moves_into_it),
    "trusts what a crash has left": dict(publish=partial(publish_by, trusts_what_is_left)),
}
