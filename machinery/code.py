"""The code of a run, which its readers change: the files that compute, their commit, their edits.

A run's config.json, its checkpoints and each of its starts have a `Code`, so that runs can be told
apart that differ in model.py alone; RUN_DIR/code.diff has the edits that no commit has. Without
git, the hashes of the files still say whether the code was the same. Next: folders.py.
"""

import os
import shlex
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from machinery import disk
from machinery.formats import Code
from machinery.output import public, say

ROOT = Path(__file__).resolve().parent.parent
# What stands beside a run: it changes none of its numbers.
BESIDE = {"preparation", "stores", "instruments", "benchmarks", "course", "tests"}
BESIDE |= {"eval.py", "export.py", "prepare_data.py"}
GIT_S = 10  # seconds; a slow file system must not keep a run from beginning
# Whatever the user's settings, so that `git apply` takes it. Ends of lines, as Windows has them,
# and permissions are no edits.
OPTIONS = "-c core.autocrlf=input -c core.fileMode=false".split()
DIFF = "diff --no-color --no-ext-diff --no-textconv --src-prefix=a/ --dst-prefix=b/".split()
# What a file that computes is called, in git's patterns.
PATTERNS = [":(glob)*.py", ":(glob)*/*.py", *(f":(exclude){name}" for name in sorted(BESIDE))]


def files() -> list[str]:
    """The Python files in ROOT and in its folders that compute; relative to ROOT, sorted."""
    paths = [path for path in (*ROOT.glob("*.py"), *ROOT.glob("*/*.py")) if path.is_file()]
    names = [path.relative_to(ROOT) for path in paths]
    return sorted(name.as_posix() for name in names if name.parts[0] not in BESIDE)


def git(folder: str | Path, *words: str) -> str | None:
    """What git prints about the files in ROOT by the repository in `folder`; None if it fails, or
    takes too long."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}  # as set in a hook
    command = ["git", f"--git-dir={folder}", f"--work-tree={ROOT}", *OPTIONS, *words]
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.decode(errors="replace")


def commit() -> str:
    """The commit that is checked out; "" if there is none, or only one of a folder around ROOT."""
    return (git(ROOT / ".git", "rev-parse", "HEAD") or "").strip()


def edits_since(head: str, names: list[str]) -> str | None:
    """What differs from the commit `head` in the files that compute, as a diff; None if git fails.

    The settings of a stranger's repository may name programs, which git would run on the files. So
    this asks a new repository, without settings, which takes the commit's files from the other."""
    objects = git(ROOT / ".git", "rev-parse", "--git-path", "objects")
    if objects is None:
        return None
    names = [name for name in names if not (ROOT / name).parent.is_symlink()]  # as git demands
    with suppress(OSError), tempfile.TemporaryDirectory() as own:
        git(own, "init", "--quiet")
        if git(own, "--literal-pathspecs", "add", "--force", "--", *names) is None:
            return None
        disk.write_text(Path(own, "objects/info/alternates"), f"{ROOT / objects[:-1]}")
        return git(own, *DIFF, "--cached", head, "--", *PATTERNS)


@cache  # the files may be edited while a run trains with what was loaded
def of_process() -> tuple[Code, str]:
    """The code of this process, when it is first asked for; and its edits that no commit has: a
    diff, without what is secret in its URLs."""
    names = files()
    hashes = {name: disk.sha256_of((ROOT / name).resolve()) for name in names}
    head = commit()
    edits = edits_since(head, names) if head else None
    if edits is None:
        return Code(files=hashes), ""
    shown = public(edits)
    if shown != edits:
        shown = f"Not quite the edits of the run: what was secret in URLs is left out.\n{shown}"
    return Code(commit=head, changed=edits != "", files=hashes), shown


def keep_edits(run_dir: Path) -> None:
    """Write the edits of this process to RUN_DIR/code.diff, above those of earlier ones."""
    path = run_dir / "code.diff"
    found, edits = of_process()
    if not found.commit and (ROOT / ".git").exists():
        say(f"warning: git does not tell the commit and the edits of {ROOT}; hashes are kept")
    earlier = ""
    with suppress(OSError):  # there is none, or it cannot be read
        earlier = disk.read_text(path)
    if edits not in earlier:
        disk.write_text(path, edits + earlier)


def difference(a: Code, b: Code) -> str:
    """Which files differ, and where to see how: "model.py differs (git diff A B -- model.py)"; ""
    if none does."""
    names = sorted(n for n in a.files.keys() | b.files.keys() if a.files.get(n) != b.files.get(n))
    if not names:
        return ""
    where = " (code.diff)" if a.changed or b.changed else ""
    if a.commit and b.commit and a.commit != b.commit:
        command = ["git", "diff", a.commit[:12], b.commit[:12], "--", *names]
        where += f" ({shlex.join(command)})"
    return f"{', '.join(names)} differ{'s' * (len(names) == 1)}{where}"
