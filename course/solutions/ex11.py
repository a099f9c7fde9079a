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


def renames_before_the_sync(disk, folder, files):
    parent, tmp = folder.rpartition("/")[0], f"{folder}.tmp"
    if disk.exists(tmp):
        disk.remove(tmp)
    disk.mkdir(tmp)
    for name, data in files.items():
        disk.write(f"{tmp}/{name}", data)
    disk.rename(tmp, folder)
    for name in files:
        disk.fsync(f"{folder}/{name}")
    disk.fsync(folder)
    disk.fsync(parent)


def marker_first(disk, folder, files):
    """The name says that all is there, and comes before it is."""
    if not disk.exists(folder):
        disk.mkdir(folder)
    for name, data in files.items():
        disk.write(f"{folder}/{name}", data)
        disk.fsync(f"{folder}/{name}")
    disk.fsync(folder)
    disk.fsync(folder.rpartition("/")[0])


def no_sync_of_the_parent(disk, folder, files):
    if not disk.exists(folder):
        write_through(disk, f"{folder}.tmp", files)
        disk.rename(f"{folder}.tmp", folder)


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


def removes_the_published_one(disk, folder, files):
    """Begins anew, whatever is there."""
    if disk.exists(folder):
        disk.remove(folder)
        disk.fsync(folder.rpartition("/")[0])
    publish(disk, folder, files)


def again_in_place(disk, folder, files):
    """If the folder is there, its files are written once more, where they are."""
    if not disk.exists(folder):
        return publish(disk, folder, files)
    for name, data in files.items():
        disk.write(f"{folder}/{name}", data)
        disk.fsync(f"{folder}/{name}")
    disk.fsync(folder)
    disk.fsync(folder.rpartition("/")[0])


def knows_some_names(disk, folder, files):
    known = ("weights", "config", "MANIFEST")
    publish(disk, folder, {name: data for name, data in files.items() if name in known})


def catches_the_crash(disk, folder, files):
    """Tries again, as if a disk that has crashed could go on."""
    for _ in range(3):
        try:
            return renames_before_the_sync(disk, folder, files)
        except Exception:
            continue


def another_name_each_time(disk, folder, files):
    """What a crash has left is not in the way, and stays forever."""
    parent, i = folder.rpartition("/")[0], 0
    while disk.exists(f"{folder}.tmp{i}"):
        i += 1
    if not disk.exists(folder):
        write_through(disk, f"{folder}.tmp{i}", files)
        disk.rename(f"{folder}.tmp{i}", folder)
    disk.fsync(parent)


def two_names(disk, folder, files):
    """The old one is moved aside, then the new one takes its name: in between there is none."""
    write_through(disk, f"{folder}.tmp", files)
    if disk.exists(folder):
        disk.rename(folder, f"{folder}.old")
    disk.rename(f"{folder}.tmp", folder)
    if disk.exists(f"{folder}.old"):
        disk.remove(f"{folder}.old")
    disk.fsync(folder.rpartition("/")[0])


def tidies_up(disk, folder, files):
    """Removes what else is in the parent: it might be a leftover."""
    publish(disk, folder, files)
    parent, _, name = folder.rpartition("/")
    for other in ("step_4", "notes"):
        path = f"{parent}/{other}".lstrip("/")
        if disk.exists(path):
            disk.remove(path)


WRONG = {  # name -> what of the reference it replaces
    "renames before the sync": dict(publish=renames_before_the_sync),
    "the name first, the content then": dict(publish=marker_first),
    "does not sync the parent": dict(publish=no_sync_of_the_parent),
    "does not sync the names": dict(publish=partial(publish_by, no_sync_of_the_names)),
    "moves into what is there": dict(publish=moves_into_it),
    "removes the published folder first": dict(publish=removes_the_published_one),
    "writes a published folder again, in place": dict(publish=again_in_place),
    "catches the crash": dict(publish=catches_the_crash),
    "knows the three names": dict(publish=knows_some_names),
    "a new temporary name each time": dict(publish=another_name_each_time),
    "moves the old one aside": dict(publish=two_names),
    "tidies up what is not its own": dict(publish=tidies_up),
    "trusts what a crash has left": dict(publish=partial(publish_by, trusts_what_is_left)),
}
