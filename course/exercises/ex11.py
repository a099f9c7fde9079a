"""Exercise 11: publish a folder on a disk that forgets.

    publish(disk, "run/step_5", {"weights": b"...", "config": b"..."})

Readers consider "run/step_5" complete as soon as it exists. The disk may crash after any operation,
and then it forgets what was not synced; "run" is there from the start. Rules:
1. after a crash the folder either does not exist, or holds exactly these files with these bytes;
2. once `publish` has returned, the folder is there after any crash;
3. after a crash `publish` is called again with the same arguments, and must succeed.

The operations of the disk:
    disk.mkdir(path), disk.write(path, data)   a new folder, a new file (or a file's new content)
    disk.rename(old, new)   as `mv`: if `new` is a folder, `old` is moved into it
    disk.remove(path)       a file, or a folder with all that is in it
    disk.exists(path)
    disk.fsync(path)        of a file: its content lasts; of a folder: its list of names lasts (the
                            files in it are another matter); the disk's root is ""
A crash loses content that was not synced, and names that were not: a file may be empty, a folder
may lack its latest files, a rename may never have happened.
"""


def publish(disk, folder: str, files: dict[str, bytes]) -> None:
    raise NotImplementedError("write publish, then: python course/check.py 11")


class Crash(Exception):
    pass


class Disk:
    """A node is [content that lasts, content now]: bytes of a file, {name: node} of a folder."""

    def __init__(self, root: list, operations: int):
        self.root, self.left, self.log = root, operations, []

    def _node(self, path: str) -> list:
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
        names.setdefault(name, [b"", b""])[1] = bytes(data)
        self._did("write", path)

    def rename(self, old: str, new: str) -> None:
        (source, name), (target, as_name) = self._names(old), self._names(new)
        node = self._node(old)
        if as_name in target and isinstance(target[as_name][1], dict):
            target, as_name = target[as_name][1], name  # into it
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


def oracle(answer) -> None:
    """The judge. You may read it: it tests the result and gives no solution away."""
    import random

    rng = random.Random(16)
    luck = {
        "all that was not synced is lost": lambda folder: False,
        "contents that were not synced are lost": lambda folder: folder,
        "names that were not synced are lost": lambda folder: not folder,
        "nothing is lost": lambda folder: True,
        "some of what was not synced is lost": lambda folder: rng.random() < 0.5,
    }
    files = {"weights": b"w" * 50, "config": b"c" * 5, "MANIFEST": b"m"}
    for folder in ("run/step_5", "step_5"):
        operations, done = 0, False
        while not done:
            operations += 1
            assert operations < 200, "publish did not finish within 200 operations"
            for what, keeps in luck.items():
                run = [{}, {}]
                disk = Disk([{"run": run}, {"run": run}], operations)
                try:
                    answer.publish(disk, folder, dict(files))
                    done = True
                except Crash:
                    pass
                after = disk.after_crash(keeps)
                found, story = after.found(folder), f"{disk}; crash, {what}"
                assert not done or found is not None, f"published, but not there: {story}"
                assert found in (None, files), f"{folder} holds {found}: {story}"
                answer.publish(after, folder, dict(files))
                for last in (after, after.after_crash(lambda folder: False)):
                    found = last.found(folder)
                    assert found == files, f"{folder} holds {found}: {story}; again: {after}"
