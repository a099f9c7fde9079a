"""What the benchmarks say about a run: which code and which machine made it; tables."""

import argparse
import datetime
import hashlib
import subprocess
from pathlib import Path

import torch

from at_root import ROOT
from machinery.ranks import cpu_name

# ---------------------------------------------------------------- what made a row


def made() -> dict[str, str]:
    """Code, machine and date, for a row."""
    today = datetime.date.today().isoformat()
    return dict(commit=COMMIT, torch=torch.__version__, machine=device_name(), date=today)


def code_version() -> str:
    """The commit; if the code has been edited since, followed by + and a hash of the edits."""

    def git(*words: str) -> bytes:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, check=False).stdout

    try:
        commit = git("rev-parse", "HEAD").decode()[:7]
        edits = git("diff", "HEAD", "--", "*.py")
    except OSError:  # there is no git
        return "unknown"
    return (commit or "unknown") + (f"+{hashlib.sha256(edits).hexdigest()[:7]}" if edits else "")


def device_name() -> str:
    """The GPU; or the processor, with the threads that torch takes."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


COMMIT = code_version()  # at the start of the program


# ---------------------------------------------------------------- how it is shown


def last_line(log: Path) -> str:
    """Of a log, which may have gigabytes."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 4000))
        text = file.read(4000).decode(errors="replace")
    return (text.strip().splitlines() or ["no message"])[-1][:300]


def parser_of(about: str) -> argparse.ArgumentParser:
    """Of a program whose docstring this is, and whose tables go to a file. The option that names
    it is there already."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--results", default=str(ROOT / "benchmarks" / "RESULTS.md"))
    return parser


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table that also reads well on a screen."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * w for w in widths], *rows]
    padded = [map(str.ljust, line, widths) for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)
