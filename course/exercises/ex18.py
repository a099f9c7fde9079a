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
    import copy
    import random
    from contextlib import suppress
    from itertools import count

    from subject import SHORT

    rng = random.Random(16)
    run = {"step_4": {"weights": b"older"}, "a": {}, "notes": b"n"}
    start = {"run": run, "step_4": {"config": b"o"}}  # all of it lasts
    luck = {  # of a file or a folder: did what was not synced survive?
        "all that was not synced is lost": lambda folder: False,
        "contents that were not synced are lost": lambda folder: folder,
        "names that were not synced are lost": lambda folder: not folder,
        "nothing is lost": lambda folder: True,
        "some of what was not synced is lost": lambda folder: rng.random() < 0.5,
    }

    def attempt(root, operations):
        """publish, with a crash after so many operations."""
        disk = Disk(copy.deepcopy(root), operations)
        with suppress(Crash):
            publish(disk, folder, files)
        return disk

    def explore(root, crashes, story, was_there=False):
        """publish, with a crash after each operation; then again, and so on."""
        for operations in count(1) if crashes else [0]:
            disk = attempt(root, operations)
            told = f"{story}{disk}"
            now = content(disk.root, lambda folder: True)
            assert disk.dead or now == wanted, (
                f"the disk holds {SHORT(now)}, not {SHORT(wanted)}: {told}"
            )
            for what, keeps in luck.items():
                after = content(disk.root, keeps)
                found = after
                for name in folder.split("/"):
                    found = (found or {}).get(name)
                here = f"{told}; then a crash, {what}"
                assert disk.dead or after == wanted, f"the disk holds {SHORT(after)}: {here}"
                assert found == files or found is None and disk.dead and not was_there, (
                    f"{folder} is {SHORT(found)}: {here}"
                )
                if crashes:
                    explore(node(after), crashes - 1, f"{here}; again: ", found is not None)
            if crashes:
                explore(disk.root, crashes - 1, f"{told}; then the process is killed; again: ")
            if not disk.dead:
                return

    letters = "abcdefgh._-"
    for folder, amount in (
        ("run/step_5", 3),
        ("step_5", 2),
        ("run/a/step_7", 0),
        ("run/b", 1),
        ("run/many", 1500),
    ):
        files = {"".join(rng.choices(letters, k=6)): i * b"x" for i in range(amount)}
        wanted = copy.deepcopy(start)
        place = wanted
        *parents, name = folder.split("/")
        for parent in parents:
            place = place[parent]
        place[name] = files
        answer.publish(Disk(node(start), 0), folder, files)
        publish = answer.own["publish"]  # for thousands of calls
        explore(node(start), 2 if amount < 9 else 0, "")
        for operations in range(1, 12, 4):
            root = node(start)
            for _ in range(300):
                root = attempt(root, operations).root
            explore(root, 0, f"killed 300 times after {operations} operations; again: ")


class Crash(Exception):
    pass


class Disk:
    """A node is [content that lasts, content now]: bytes of a file, {name: node} of a folder."""

    def __init__(self, root, operations):
        self.root = root
        self.left = operations
        self.log = []
        self.dead = False

    def _node(self, path):
        if self.dead:
            raise Crash
        node = self.root
        for name in path.split("/") if path else ():
            assert isinstance(node[1], dict) and name in node[1], f"{path} does not exist: {self}"
            node = node[1][name]
        return node

    def _names(self, path):
        folder, _, name = path.rpartition("/")
        return self._node(folder)[1], name

    def _did(self, *operation):
        self.log.append(" ".join(operation))
        self.left -= 1
        if self.left == 0:
            self.dead = True
            raise Crash

    def __repr__(self):
        return "; ".join(self.log[-30:]) or "nothing was done"

    def exists(self, path):
        names, name = self._names(path)
        return name in names

    def mkdir(self, path):
        names, name = self._names(path)
        assert name not in names, f"mkdir {path}, which exists: {self}"
        names[name] = node({})
        self._did("mkdir", path)

    def write(self, path, data):
        names, name = self._names(path)
        names.setdefault(name, node(b""))[:] = [b"", bytes(data)]  # empty until it is synced
        self._did("write", path)

    def rename(self, old, new):
        source, name = self._names(old)
        target, as_name = self._names(new)
        moved = self._node(old)
        if as_name in target and isinstance(target[as_name][1], dict):
            target = target[as_name][1]  # into it
            as_name = name
        del source[name]
        target[as_name] = moved
        self._did("rename", old, new)

    def remove(self, path):
        self._node(path)
        names, name = self._names(path)
        del names[name]
        self._did("remove", path)

    def fsync(self, path):
        import copy

        found = self._node(path)
        found[0] = copy.copy(found[1])
        self._did("fsync", path or "/")


def node(content):
    """Of bytes, or {name: the same again}: a node of which all lasts."""
    if isinstance(content, dict):
        content = {name: node(child) for name, child in content.items()}
        return [content, content.copy()]
    return [content, content]


def content(node, keeps):
    """The reverse, after a crash."""
    kept = node[keeps(isinstance(node[1], dict))]
    if isinstance(kept, dict):
        return {name: content(child, keeps) for name, child in kept.items()}
    return kept
