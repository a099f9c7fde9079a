"""Exercise 18: publish a folder on a disk that forgets.

    publish(disk, "run/step_5", {"weights": b"...", "config": b"..."})

Readers consider "run/step_5" complete as soon as it exists. The disk may crash after any operation,
and then it forgets what was not synced; "run" is there from the start. Rules:
1. after a crash the folder either does not exist, or holds exactly these files with these bytes;
2. once `publish` has returned, the folder is there after any crash;
3. after a crash `publish` is called again with the same arguments. That may crash too, any number
   of times; if it does not, it must succeed;
4. what a reader has found stays: a folder that is there after one crash is there, and whole, after
   the next one;
5. when `publish` has returned, the folder is the only new name on the disk; all else is as it was.

The operations of the disk:
    disk.mkdir(path)        a new folder
    disk.write(path, data)  a new file, or a file's new content: the old one is gone at once
    disk.rename(old, new)   as `mv`: if `new` is a folder, `old` is moved into it
    disk.remove(path)       a file, or a folder with all that is in it
    disk.exists(path)
    disk.fsync(path)        of a file: its content lasts; of a folder: its list of names lasts (the
                            files in it are another matter); the disk's root is ""
A crash loses content that was not synced, and names that were not: a file may be empty, a folder
may lack its latest files, a rename may never have happened. Or only the process is killed: then all
is there when `publish` is called again, and what was not synced is lost in the next crash.
"""


def publish(disk, folder: str, files: dict[str, bytes]) -> None:
    raise NotImplementedError("write publish, then: python course/check.py 18")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import random

    rng = random.Random(16)
    named = {"weights": b"w" * 50, "config": b"c" * 5, "MANIFEST": b"m"}
    letters = "abcdefgh._-"
    for folder, count in (("run/step_5", -1), ("step_5", 2), ("run/a/step_7", 0), ("run/b", 4)):
        names = ["".join(rng.choices(letters, k=6)) for _ in range(max(count, 0))]
        files = {name: rng.randbytes(rng.choice((0, 1, 30))) for name in names}
        _judge(answer, folder, named if count < 0 else files, rng)


class Crash(Exception):
    pass


class Disk:
    """A node is [content that lasts, content now]: bytes of a file, {name: node} of a folder."""

    def __init__(self, root: list, operations: int):
        self.root = root
        self.left = operations
        self.log = []
        self.dead = False

    def _node(self, path: str) -> list:
        if self.dead:
            raise Crash
        node = self.root
        for name in path.split("/") if path else ():
            assert isinstance(node[1], dict) and name in node[1], f"{path} does not exist: {self}"
            node = node[1][name]
        return node

    def _names(self, path: str) -> tuple[dict, str]:
        folder, _, name = path.rpartition("/")
        return self._node(folder)[1], name

    def _did(self, *operation) -> None:
        self.log.append(" ".join(map(str, operation)))
        self.left -= 1
        if self.left == 0:
            self.dead = True
            raise Crash

    def __str__(self) -> str:
        return "; ".join(self.log) or "nothing was done"

    def exists(self, path: str) -> bool:
        names, name = self._names(path)
        return name in names

    def mkdir(self, path: str) -> None:
        names, name = self._names(path)
        assert name not in names, f"mkdir {path}, which exists: {self}"
        names[name] = [{}, {}]
        self._did("mkdir", path)

    def write(self, path: str, data: bytes) -> None:
        names, name = self._names(path)
        names.setdefault(name, [b"", b""])[:] = [b"", bytes(data)]  # empty until it is synced
        self._did("write", path)

    def rename(self, old: str, new: str) -> None:
        source, name = self._names(old)
        target, as_name = self._names(new)
        node = self._node(old)
        if as_name in target and isinstance(target[as_name][1], dict):
            target = target[as_name][1]  # into it
            as_name = name
        del source[name]
        target[as_name] = node
        self._did("rename", old, new)

    def remove(self, path: str) -> None:
        self._node(path)
        names, name = self._names(path)
        del names[name]
        self._did("remove", path)

    def fsync(self, path: str) -> None:
        node = self._node(path)
        node[0] = dict(node[1]) if isinstance(node[1], dict) else node[1]
        self._did("fsync", path or "/")

    def after_crash(self, keeps, operations: int = 0) -> "Disk":
        """keeps(is a folder) -> bool: did what was not synced of this node survive?"""

        def survivor(node: list) -> list:
            content = node[1] if keeps(isinstance(node[1], dict)) else node[0]
            if isinstance(content, dict):
                content = {name: survivor(child) for name, child in content.items()}
                return [content, dict(content)]
            return [content, content]

        return Disk(survivor(self.root), operations)

    def found(self, path: str) -> dict | None:
        """A folder -> its files, None if it does not exist."""
        if not self.exists(path):
            return None
        return {name: node[1] for name, node in self._node(path)[1].items()}


def _start() -> Disk:
    """A disk with other files on it, all of which last."""

    def node(content) -> list:
        if isinstance(content, dict):
            content = {name: node(child) for name, child in content.items()}
            return [content, dict(content)]
        return [content, content]

    run = {"step_4": {"weights": b"older"}, "a": {}, "notes": b"n"}
    return Disk(node({"run": run, "step_4": {"config": b"o"}}), 0)


def _all_of(node: list):
    """Everything in a folder: names -> bytes or the same again."""
    if isinstance(node[1], bytes):
        return node[1]
    return {name: _all_of(child) for name, child in node[1].items()}


def _judge(answer, folder: str, files: dict[str, bytes], rng) -> None:
    import copy
    from contextlib import suppress

    luck = {
        "all that was not synced is lost": lambda folder: False,
        "contents that were not synced are lost": lambda folder: folder,
        "names that were not synced are lost": lambda folder: not folder,
        "nothing is lost": lambda folder: True,
        "some of what was not synced is lost": lambda folder: rng.random() < 0.5,
    }
    wanted = _start()
    parent, _, name = folder.rpartition("/")
    wanted._node(parent)[1][name] = [{}, {file: [data, data] for file, data in files.items()}]
    wanted = _all_of(wanted.root)

    def publish(disk: Disk, operations: int, before: str, was_there: bool):
        """With a crash after so many operations -> returned, the disks that are found after it."""
        disk.left = operations
        stories = []
        with suppress(Crash):
            answer.publish(disk, folder, dict(files))
        returned = not disk.dead  # an answer may catch a crash, and still the disk has stopped
        for what, keeps in luck.items():
            after = disk.after_crash(keeps)
            found = after.found(folder)
            story = f"{before}{disk}; then a crash, {what}"
            assert found is not None or not returned, f"published, but not there: {story}"
            assert found is not None or not was_there, (
                f"{folder} was there, and is gone when publish is called again: {story}"
            )
            assert found in (None, files), f"{folder} holds {found}: {story}"
            stories.append((after, story, found is not None))
        killed = Disk(copy.deepcopy(disk.root), 0)  # what was found there may still be lost
        stories.append((killed, f"{before}{disk}; then the process is killed", False))
        if returned:
            there = _all_of(disk.root)
            assert there == wanted, f"the disk holds {there}, wanted is {wanted}: {before}{disk}"
        return returned, stories

    for first in range(1, 200):
        returned, stories = publish(_start(), first, "", False)
        for after, story, there in stories:
            for second in range(1, 200):
                again = Disk(copy.deepcopy(after.root), 0)
                twice, last = publish(again, second, f"{story}; again: ", there)
                for disk, told, found in last if second % 3 == first % 3 else last[-1:]:
                    publish(disk, 0, f"{told}; again: ", found)
                if twice:
                    break
            assert twice, f"publish did not return within 200 operations: {story}"
        if returned:
            return
    raise AssertionError("publish did not return within 200 operations")
