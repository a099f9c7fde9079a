"""Did it help? A change of the code goes in, a verdict comes out that the change cannot touch.

    python benchmarks/referee.py                        your files against the last commit
    python benchmarks/referee.py -- --lr_scale 0.5      an idea that is an option of train.py
    python benchmarks/referee.py --final                on the sealed text, with new seeds

Both versions train at several sizes (dN: N layers, 64 N wide) with pairs of seeds, on the same rows
in the same order, on as many tokens. Then each model is asked what comes next in held-out text, and
its answers are judged by the code of the commit with which the ledger began, not by yours
(held_out.py). The rule is instruments/pages/rule.py's. Neither version can read or write more than
what is its own (confined.py).

In --folder: tries.jsonl, the ledger; page.html, all tries, and what luck alone would have found in
so many; rows.jsonl, a line for each run. A run that has its line is not made again: after a kill,
or for the next idea, the same command makes what is missing. Your files are copied first, so what
you edit meanwhile is another try. program.md is for those who make many.

On a GPU the presets themselves are run: `--depths 8 12 --tokens_per_weight 10.5 --data data/d12
--at_once 1`. Exit codes: 0 it helps, 1 it does not, 2 there is nothing to judge.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# No file of the project is imported here: it might be the change's. judge.py does the work.
ROOT = Path(__file__).resolve().parent.parent


class GitError(Exception):
    """git cannot say what is asked."""

    exit_code = 2  # for machinery/cli.py


def git(project: str | Path, *words: str) -> str:
    command = ["git", "-C", str(project), *words]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode:
        raise GitError(
            f"{shlex.join(command)}: {done.stderr.strip()}; a try is a commit (git add, git commit)"
        )
    return done.stdout.strip()


def copy_of(project: str | Path, commit: str, folder: Path) -> Path:
    """The files of a commit, in FOLDER/tree_HASH, without the repository."""
    name = git(project, "rev-parse", f"{commit}^{{tree}}")
    tree = folder / f"tree_{name}"
    if not tree.exists():
        prefix = git(project, "rev-parse", "--show-prefix")
        with tempfile.TemporaryDirectory(dir=folder) as new:
            git(project, "archive", f"--output={new}/tree.tar", f"{name}:{prefix}")
            shutil.unpack_archive(f"{new}/tree.tar", f"{new}/tree")
            os.rename(f"{new}/tree", tree)
    return tree


def main(argv: list[str]) -> None:
    """Go on with the files of the commit that judges."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--folder", default="runs/referee")
    folder = Path(parser.parse_known_args(argv)[0].folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    ledger = folder / "tries.jsonl"
    try:
        commit = git(ROOT, "rev-parse", "HEAD")
        if ledger.exists():
            commit = json.loads(ledger.read_text().splitlines()[0])["judge"]
        program = copy_of(ROOT, commit, folder) / "benchmarks" / "judge.py"
    except GitError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    command = [sys.executable, str(program), "--project", str(ROOT), *argv]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main(sys.argv[1:])
