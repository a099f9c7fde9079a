"""Exercise 18: publish a folder on a disk that forgets.

    publish(disk, "run/step_5", {"weights": b"...", "config": b"..."})

Readers take "run/step_5" to be complete as soon as it exists. The disk may crash after any
operation, and then it forgets what was not synced; "run" is there from the start. Rules:
1. after a crash, the folder either does not exist, or holds exactly these files with these bytes;
2. once `publish` has returned, the folder is there after any crash;
3. after a crash `publish` is called again with the same arguments. That call may crash too, any
   number of times; if it does not, it must succeed;
4. what a reader has found stays: if the folder is there after one crash, it is there, and whole,
   after the next one;
5. when `publish` has returned, the folder is the only new name on the disk; all else is as it was.

The operations of the disk:
    disk.mkdir(path)        a new folder
    disk.write(path, data)  a new file, or new content for a file: the old content is gone at once
    disk.rename(old, new)   like `mv`: if `new` is a folder, `old` is moved into it
    disk.remove(path)       a file, or a folder with everything in it
    disk.exists(path)
    disk.fsync(path)        of a file: its content lasts; of a folder: its list of names lasts (the
                            files in it are another matter); the disk's root is ""
A crash loses content that was not synced, and names that were not: a file may be empty, a folder
may lack its latest files, a rename may never have happened. Or only the process is killed: then
everything is there when `publish` is called again, but what was not synced is lost in the next
crash.
"""


def publish(disk, folder: str, files: dict[str, bytes]) -> None:
    raise NotImplementedError("write publish, then: python course/check.py 18")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import copy
    from itertools import count
    from types import SimpleNamespace

    class Crash(BaseException):
        """Comes out of every operation from then on."""

    def nodes(content):
        """Bytes of a file, or {name: content} of a folder -> a node, all of which is synced."""
        if isinstance(content, dict):
            content = {name: nodes(child) for name, child in content.items()}
        return SimpleNamespace(now=content, synced=copy.copy(content))

    def left(node, lost):
        """The reverse, after a crash. lost: what of all that was not synced."""
        if not isinstance(node.now, dict):
            return node.synced if "contents" in lost else node.now
        names = node.synced if "names" in lost else node.now
        return {name: left(child, lost) for name, child in names.items()}

    class Disk:
        def __init__(self, root, story, operations):
            self.top = {"": copy.deepcopy(root)}
            self.story = story  # all that has happened
            self.operations = operations  # until the crash

        def find(self, what, path, there=None):
            """-> the names in its folder, its own name. there: whether it should be there."""
            if self.operations == 0:
                raise Crash
            self.operations -= 1
            self.story += f"{what} {path or '/'}; "
            names = self.top
            *folders, name = f"/{path}".rstrip("/").split("/")
            for folder in folders:
                assert folder in names, f"rule 3: there is no folder for {path}: {self.story}"
                names = names[folder].now
            right = there in (None, name in names)
            assert right, f"rule 3: {path} is {'not' if there else 'already'} there: {self.story}"
            return names, name

        def exists(self, path):
            names, name = self.find("exists", path)
            return name in names

        def mkdir(self, path):
            names, name = self.find("mkdir", path, False)
            names[name] = nodes({})

        def write(self, path, data):
            names, name = self.find("write", path)
            file = names.setdefault(name, nodes(b""))
            file.now = data
            file.synced = b""

        def rename(self, old, new):
            names, name = self.find("rename", old, True)
            new_names, new_name = self.find("to", new)
            if new_name in new_names and isinstance(new_names[new_name].now, dict):
                new_names = new_names[new_name].now  # into it
                new_name = name
            new_names[new_name] = names.pop(name)

        def remove(self, path):
            names, name = self.find("remove", path, True)
            del names[name]

        def fsync(self, path):
            names, name = self.find("fsync", path, True)
            names[name].synced = copy.copy(names[name].now)

    def judge(folder, start, wanted):
        def explore(root, crashes, story="", was_there=None):
            """Publish with a crash after each operation; then again, with one crash less."""
            for operations in count() if crashes else [-1]:
                disk = Disk(root, story, operations)
                returned = True
                publish = answer.own["publish"] if story else answer.publish  # unwatched is faster
                try:
                    publish(disk, folder, files)
                except Crash:
                    returned = False
                for lost in ("nothing", "contents", "names", "contents and names"):
                    here = f"{disk.story}a crash loses {lost}"
                    found = tree = left(disk.top[""], lost)
                    for name in folder.split("/"):
                        found = (found or {}).get(name)
                    assert found in (None, files), f"rule 1: {folder} has {found}: {here}"
                    assert found or not returned, f"rule 2: {folder} is not there: {here}"
                    assert found or not was_there, f"rule 4: {folder} is no longer there: {here}"
                    assert tree == wanted or not returned, f"rule 5: the disk has {tree}: {here}"
                    if crashes:
                        explore(nodes(tree), crashes - 1, f"{here}; again: ", found)
                if crashes:
                    explore(disk.top[""], crashes - 1, f"{disk.story}it is killed; again: ")
                if returned:
                    return

        for crashes in range(3):
            explore(nodes(start), crashes)

    files = {"weights": b"www", "config": b"c"}
    start = {"step_4": {"weights": b"older"}}
    end = start | {"step_5": files}
    judge("step_5", start, end)
    judge("a/b/step_5", {"a": {"b": start}}, {"a": {"b": end}})
