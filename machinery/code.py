"""The code of a run, which its readers change: the files that compute, their commit, their edits.

A run's config.json, its checkpoints and each of its starts have a `Code`, so that runs can be told
apart that differ in model.py alone; RUN_DIR/code.diff has the edits that no commit has. Without
git, the hashes of the files still say whether the code was the same. Next: folders.py.
"""

import os
import shlex
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from machinery import disk
from machinery.formats import Code
from machinery.output import public

ROOT = Path(__file__).resolve().parent.parent
# What they do before, beside or after a run changes none of its numbers.
OTHER_ROOMS = {"preparation", "stores", "instruments"}
LARGEST_DIFF = 1 << 20  # characters of code.diff
GIT_S = 10  # seconds; a slow file system must not keep a run from beginning
MOST_NAMES = 4  # of files, in a line
# Whatever the user's settings, so that `git apply` takes it.
DIFF = "diff --no-color --no-ext-diff --no-textconv --src-prefix=a/ --dst-prefix=b/".split()


def loaded_files() -> list[str]:
    """The project's files that this process has loaded, whichever program it runs, but for those of
    OTHER_ROOMS; relative to ROOT, sorted."""
    found = set()
    pythons = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]
    pythons = [python for python in pythons if ROOT in python.parents]  # an environment inside it
    for module in [*sys.modules.values()]:
        path = Path(getattr(module, "__file__", None) or "/")
        if path.suffix == ".py" and "site-packages" not in path.parts and path.is_file():
            path = path.parent.resolve() / path.name  # what was typed may lead through a link
            if path.is_relative_to(ROOT) and not any(map(path.is_relative_to, pythons)):
                found.add(path.relative_to(ROOT))
    return sorted(path.as_posix() for path in found if path.parts[0] not in OTHER_ROOMS)


def git(*words: str) -> str | None:
    """What git prints about ROOT; None if there is no git, it fails, or it takes too long."""
    command = ["git", "-C", str(ROOT), *words]
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}  # as set in a hook
    env["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode < 2 else None  # 1: it differs


def commit() -> str:
    """The commit that is checked out; "" if there is none."""
    said = git("rev-parse", "--quiet", "--verify", "HEAD")
    return said.strip() if said else ""


@cache  # the files may be edited while a run trains with what was loaded
def of_process() -> tuple[Code, str]:
    """The code of this process, when it is first asked for; and its edits that no commit has: a
    diff, without what is secret in its URLs, its lines after LARGEST_DIFF left out."""
    names = loaded_files()
    files = {name: disk.sha256_of((ROOT / name).resolve()) for name in names}
    head = commit()
    tracked = git("ls-files", "-z", "--", *names) if head else None
    if not tracked:  # no commit, or that of a project in whose folder this one lies
        return Code(files=files), ""
    new = [name for name in names if name not in tracked.split("\0")]
    parts = [git(*DIFF, "--relative", "HEAD", "--", *names)]
    parts += [git(*DIFF, "--no-index", "--", os.devnull, name) for name in new]
    if None in parts:
        return Code(files=files), ""
    edits = "".join(parts)
    code = Code(commit=head, changed=edits != "", files=files)
    if len(edits) > LARGEST_DIFF:
        edits = edits[:LARGEST_DIFF].rpartition("\n")[0] + "\n"  # whole lines: none hides a secret
    return code, public(edits)


def keep_edits(run_dir: Path) -> None:
    """Write the edits of this process to RUN_DIR/code.diff, above those of earlier ones."""
    path = run_dir / "code.diff"
    edits = of_process()[1]
    earlier = ""
    with suppress(OSError):  # there is none, or it cannot be read
        earlier = disk.read_text(path)
    if edits not in earlier:
        disk.write_text(path, (edits + earlier)[:LARGEST_DIFF])


def difference(a: Code, b: Code, folders: tuple) -> str:
    """Which files differ, and where to see how: "model.py differs (git diff A B -- model.py)"; ""
    if none does. folders: that of each run."""
    names = sorted(n for n in a.files.keys() | b.files.keys() if a.files.get(n) != b.files.get(n))
    if not names:
        return ""
    places = []
    if a.commit and b.commit and a.commit != b.commit:
        paths = ["--", *names] if len(names) <= MOST_NAMES else []
        places.append(shlex.join(["git", "diff", a.commit[:12], b.commit[:12], *paths]))
    for code, folder in zip((a, b), folders):
        if code.changed:
            places.append(f"{folder}/code.diff")
    where = f" ({', '.join(dict.fromkeys(places))})" if places else ""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more} differ{'s' * (len(names) == 1)}{where}"
