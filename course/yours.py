"""A trainer of your own: it trains a small GPT with every part of the spine that you have solved.

    python course/yours.py                  what you have not solved is the plain thing it replaces
    python course/yours.py --fill ours      ... is the reference: your parts in our trainer
    python course/yours.py --only 1,3       as if you had solved these alone

The number is bits per byte on the exam of lesson 1 (lower is better). A part is yours if its judge
accepts it (check.py), and its trial (trial.py). The page is course/out/yours.html.
Exit codes: 0, or 1 if a part of yours is refused or fails, 2 for a wrong option.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import judging
import lesson
import numpy as np
import torch  # noqa: F401  once, before the children are made
from jinja2 import Environment, FileSystemLoader
from spine import BOARD, PARTS, PLAIN, STEPS, Part, Refused, post, run
from trial import trial

RUN_S = 150  # of processor; a run ends at twice that
RUN_WALL_S = 1800  # in all; likewise
SAME = 0.03  # bits per byte: two right versions of one part may differ so much


def judged(number: int, path: Path) -> str | None:
    """None if judge and trial accept the file, else what they say; remembered by its bytes."""
    exercise = lesson.COURSE / f"exercises/ex{number:02d}.py"
    inputs = [
        path,
        exercise,
        *(lesson.COURSE / f"{name}.py" for name in ("trial", "spine", "check")),
    ]
    key = hashlib.sha256(b"".join(p.read_bytes() for p in inputs)).hexdigest()
    memory = lesson.OUT / "yours.json"
    known = json.loads(memory.read_text()) if memory.exists() else {}
    if key not in known:
        said = judging.apart(path, lambda path: by_judge(exercise, path))
        rest = [f"not begun: write {name} too" for name in PARTS[number].later]
        if said is None or said.startswith(tuple(rest)):  # what the run calls is accepted
            said = judging.apart(path, lambda path: by_trial(number, path))
            said = said and f"accepted by check.py {number}, but {said}"
        elif not said.startswith("not begun"):
            said = f"python course/check.py {number}: {said}"
        known[key] = said
        memory.write_text(json.dumps(known))
    return known[key]


def by_judge(exercise: Path, path: Path) -> str | None:
    try:
        answer = judging.load(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    said = judging.verdict(judging.load(exercise).oracle, answer)
    return said and said.removeprefix("AssertionError: ")


def by_trial(number: int, path: Path) -> str | None:
    return trial(number, judging.load(path), reference(number))


def reference(number: int):
    return judging.load(lesson.COURSE / f"solutions/ex{number:02d}.py")


def collect(folder: Path, only: set[int], fill: str) -> tuple[dict[str, Part], list[dict]]:
    """-> the functions of the run by name; a row for each part."""
    parts = {}
    rows = []
    for number, spec in PARTS.items():
        path = folder / f"ex{number:02d}.py"
        said = judged(number, path) if number in only else "not begun"
        yours = said is None
        plain = said is not None and fill == "plain" and bool(spec.plain)
        owner = judging.load(path) if yours else reference(number)
        for name in spec.functions:
            function = PLAIN.get(name, getattr(owner, name)) if plain else getattr(owner, name)
            parts[name] = Part(number, function, yours)
        refused = None if yours or said.startswith("not begun") else said
        rows.append(dict(number=number, yours=yours, plain=plain, refused=refused))
    return parts, rows


def guarded(parts: dict[str, Part], have: set[int], steps: int, seed: int) -> dict | str:
    """The run, in a child -> its numbers, or in which part it ended and why."""
    result = lesson.OUT / "yours_run.json"
    result.unlink(missing_ok=True)
    BOARD[:] = b" " * 64

    def child(_: Path) -> str | None:
        try:
            with judging.limit(RUN_S, RUN_WALL_S):
                result.write_text(json.dumps(run(parts, have, steps, seed)))
        except Refused as error:
            post(error.args[0], True)
            return f"{error.args[1]}"
        except judging.TooLong as late:
            return f"{late}"
        except Exception as error:  # in what joins the parts, outside of all
            if not Part.last.yours:
                raise
            post(Part.last.number, True)
            return f"what it returned cannot be used: {type(error).__name__}: {error}"
        return None

    said = judging.apart(Path(__file__), child, RUN_S, RUN_WALL_S)
    if result.exists():
        return json.loads(result.read_text())
    if said is None or said.startswith("the program ended") or said.startswith("no end"):
        said = "the process was killed, or ended itself there"
    number, yours = on_board()
    if not number:
        return said
    whose = f"yours; ask python course/check.py {number}" if yours else "not yours"
    return f"the run ended in part {number} ({PARTS[number].name}, {whose}): {said}"


def on_board() -> tuple[int, bool]:
    """The part that ran last in a run, and whether it is the learner's."""
    words = bytes(BOARD).split()
    return (int(words[0]), words[1] == b"1") if words else (0, False)


def whose(row: dict) -> str:
    spec = PARTS[row["number"]]
    return "yours" if row["yours"] else spec.plain if row["plain"] else "ours"


def show(rows: list[dict], out: dict, began: float) -> None:
    seconds = {int(number): s for number, s in out["seconds"].items()}
    cells = [
        (r["number"], PARTS[r["number"]].name, whose(r), seconds.get(r["number"])) for r in rows
    ]
    mine = sum(row["yours"] for row in rows)
    title = f"{mine} of {len(rows)} parts are yours"
    lesson.table(["lesson", "part", "in this run", "CPU s"], cells, title)
    for row in rows:
        if row["refused"]:
            print(f"  {row['number']} is refused: {row['refused'][:400]}")
    print(f"rows of {out['rows']:,}: {out['lost']:,} tokens in none; {out['unseen']:,} passed over")
    print(f"counting, as in part 1: {out['counting']:.3f} bits per byte: the line to get under")
    print(f"your trainer:           {out['bits']:.3f} bits per byte, to about {SAME}")
    written = [line for line in out["sample"].splitlines() if line.strip()][:2] or [""]
    print(f"it writes: {' / '.join(written)[:68]!r}")
    print(f"that took {time.perf_counter() - began:.0f} s")


def remember(rows: list[dict], out: dict, folder: Path) -> list[dict]:
    """Add a run to the history, if other parts are yours than in the one before -> the history."""
    log = lesson.OUT / "yours_history.json"
    past = json.loads(log.read_text()) if log.exists() else []
    numbers = [row["number"] for row in rows if row["yours"]]
    files = b"".join((folder / f"ex{number:02d}.py").read_bytes() for number in numbers)
    entry = {"key": hashlib.sha256(files).hexdigest(), "parts": numbers}
    entry |= {name: out[name] for name in ("bits", "sample", "losses")}
    past = [*past[:-1], entry] if past and past[-1]["key"] == entry["key"] else [*past, entry]
    log.write_text(json.dumps(past))
    return past


def page(rows: list[dict], out: dict, past: list[dict]) -> None:
    """course/out/yours.html: the curve of all runs, two samples, what is left."""
    known = [out["counting"], *(one["bits"] for one in past)]
    low = math.floor(2 * min(known)) / 2
    top = math.ceil(2 * max(known)) / 2
    y = lambda bits: round(20 + 200 * (top - bits) / (top - low), 1)
    x = lambda i: round(60 + 600 * i / max(1, len(past) - 1), 1)
    points = []
    for i, one in enumerate(past):
        added = sorted({*one["parts"]} - {*(past[i - 1]["parts"] if i else [])})
        points.append(
            dict(
                x=x(i),
                y=y(one["bits"]),
                bits=one["bits"],
                n=len(one["parts"]),
                added=", ".join(PARTS[number].name for number in added),
            )
        )
    lines = [(y(bits), f"{bits:.1f}") for bits in np.arange(low, top + 0.1, 0.5)]
    table = [row | dict(name=PARTS[row["number"]].name, whose=whose(row)) for row in rows]
    for row in table:
        row["lesson"] = lesson.pages()[row["number"] - 1].relative_to(lesson.COURSE)
    shown = dict(points=points, lines=lines, count_y=y(out["counting"]))
    env = Environment(loader=FileSystemLoader(lesson.COURSE), autoescape=True)
    html = env.get_template("yours.html").render(rows=table, out=out, past=past, **shown)
    (lesson.OUT / "yours.html").write_text(html, encoding="utf-8")
    print("page: course/out/yours.html")


def numbers_of(text: str) -> set[int]:
    try:
        found = {int(word) for word in text.split(",") if word}
    except ValueError:
        found = {-1}
    if found - {*PARTS}:
        known = ",".join(map(str, PARTS))
        raise argparse.ArgumentTypeError(
            f"{text!r}: the parts are {known}, with commas between them"
        )
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", type=numbers_of, default={*PARTS}, help="as in 1,2,3: these parts"
    )
    parser.add_argument("--fill", default="plain", choices=["plain", "ours"])
    parser.add_argument("--folder", type=Path, default=lesson.COURSE / "exercises")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    began = time.perf_counter()
    lesson.OUT.mkdir(exist_ok=True)
    parts, rows = collect(args.folder, args.only, args.fill)
    print(f"training, {args.steps:,} steps: about a minute", flush=True)
    have = {row["number"] for row in rows if not row["plain"]}
    out = guarded(parts, have, args.steps, args.seed)
    if isinstance(out, str):
        print(out)
        return 1
    show(rows, out, began)
    if args.fill == "plain" and args.steps == STEPS:
        page(rows, out, remember(rows, out, args.folder))
    return int(any(row["refused"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
