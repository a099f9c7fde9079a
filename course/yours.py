"""A trainer of your own: it trains a small GPT with every part of the spine that you have solved.

    python course/yours.py                  what you have not solved is the plain thing it replaces
    python course/yours.py --fill ours      ... is the reference: your parts in our trainer
    python course/yours.py --only 1,4       as if you had solved these alone
    python course/yours.py --steps 6000     a longer run, of five minutes, on more text
    python course/yours.py --prompt "def "  the last model writes on
    python course/yours.py --chat           it learns to answer, gets a name, and becomes a page

The number is bits per byte on the exam of lesson 1 (lower is better). A part is yours if its judge
accepts it (check.py), and its trial (trial.py). The page is course/out/yours.html; the last model
is kept in course/out/yours.pt. --chat writes course/out/yours_chat.html, which is that model: any
browser opens it, on any machine.
Exit codes: 0, or 1 if a part of yours is refused or fails, 2 for a wrong option.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import judging
import lesson
import numpy as np
import own_page  # brings torch: once, before the children are made
import spine
from jinja2 import Environment, FileSystemLoader, Template
from markupsafe import Markup
from spine import BOARD, PARTS, PLAIN, STEPS, Part, Refused, post
from trial import trial

RUN_S = 150  # of processor, for STEPS; a run ends at twice that
RUN_WALL_S = 1800  # in all; likewise
SAME = 0.03  # bits per byte: two right versions of one part may differ so much


def noted(name: str, otherwise: dict | list):
    """What was noted in course/out under this name."""
    path = lesson.OUT / name
    return json.loads(path.read_text()) if path.exists() else otherwise


def note(name: str, what: dict | list) -> None:
    (lesson.OUT / name).write_text(json.dumps(what))


def remembered(name: str, files: list[Path], find: Callable):
    """What find() gave, in this Python, when the files had these bytes."""
    contents = [name, sys.version, *(file.read_text(encoding="utf-8") for file in files)]
    key = hashlib.sha256("\0".join(contents).encode()).hexdigest()
    known = noted("yours.json", {})
    if key not in known:
        known[key] = find()
        note("yours.json", known)
    return known[key]


def judged(number: int, path: Path) -> str | None:
    """None if judge and trial accept the file, else what they say."""
    exercise = lesson.COURSE / f"exercises/ex{number:02d}.py"

    def find() -> str | None:
        said = judging.apart(path, lambda path: judging.examine(path, exercise))
        words = ("write {} too", "there is no {} ")
        rest = ["not begun: " + one.format(name) for name in PARTS[number].later for one in words]
        if said is None or said.startswith(tuple(rest)):  # what the run calls is accepted
            by_trial = lambda path: trial(number, judging.load(path), reference(number))
            said = judging.apart(path, by_trial)
            return said and f"accepted by check.py {number}, but {said}"
        if said.startswith("not begun"):
            return said
        return f"python course/check.py {number}: {said}"

    programs = [lesson.COURSE / f"{name}.py" for name in ("trial", "spine", "judging", "subject")]
    return remembered("judged", [path, exercise, *programs], find)


def reference(number: int):
    return judging.load(lesson.COURSE / f"solutions/ex{number:02d}.py")


def collect(
    folder: Path, only: set[int], fill: str, have: set[str] | None = None
) -> tuple[dict[str, Part], list[dict]]:
    """-> the functions of the run by name; a row for each part. have: what a kept model has."""
    parts = {}
    rows = []
    for number, spec in PARTS.items():
        path = folder / f"ex{number:02d}.py"
        said = judged(number, path) if number in only else "not begun"
        yours = said is None
        plain = not yours and fill == "plain"
        if have:
            plain = spec.name not in have
        plain = plain and bool(spec.plain)
        owner = judging.load(path) if yours else reference(number)
        for name in spec.functions:
            written = getattr(owner, name)
            parts[name] = Part(number, PLAIN.get(name, written) if plain else written, yours)
        refused = None if yours or said.startswith("not begun") else said
        rows.append(dict(number=number, yours=yours, plain=plain, refused=refused))
    return parts, rows


def counting(parts: dict[str, Part], folder: Path, steps: int) -> float:
    """Bits per byte of part 1 on the exam, from the text of such a run: the line to get under."""
    part = parts["bits_per_byte"]
    source = (folder if part.yours else lesson.COURSE / "solutions") / "ex01.py"
    training, held = spine.exam()
    text = b"".join(spine.training_files(training, steps))
    return remembered(
        f"counting in {len(text):,} bytes",
        [source],
        lambda: part(text, held[1:], spine.ORDER, spine.ALPHA),
    )


def guarded(
    parts: dict[str, Part], have: set[str], steps: int, seed: int, folder: Path
) -> dict | str:
    """The run, in a child -> its numbers, or in which part it ended and why."""
    (lesson.OUT / "yours_run.json").unlink(missing_ok=True)
    BOARD[:] = b" " * 64
    times = max(1, steps / STEPS)
    limits = (times * RUN_S, times * RUN_WALL_S)

    def child(_: Path) -> str | None:
        Part.most_s = times * spine.PART_S
        try:
            with judging.limit(*limits):
                line = counting(parts, folder, steps)
                out = spine.run(parts, have, steps, seed) | {"counting": line}
                note("yours_run.json", out)
        except Refused as error:
            post(error.args[0], True)
            return f"{error.args[1]}"
        except judging.TooLong as late:
            slow = max(parts.values(), key=lambda part: part.seconds)
            if slow.seconds > Part.most_s:
                post(slow.number, slow.yours)
                return f"a timeout, {late}, of which this part took {slow.seconds:.0f}"
            BOARD[:] = b" " * 64  # nobody's fault
            return f"a timeout: {late}, the limit for {steps:,} steps; is the machine busy?"
        except Exception as error:  # in what joins the parts, outside of all
            if not Part.last.yours:
                raise
            post(Part.last.number, True)
            return f"what it returned cannot be used: {type(error).__name__}: {error}"
        return None

    said = judging.apart(Path(__file__), child, *limits)
    out = noted("yours_run.json", {})
    if out:
        return out
    if said is None or said.startswith("the program ended"):
        said = "the process was killed, or ended itself there"
    words = bytes(BOARD).split()
    if not words:
        return said
    number = int(words[0])
    whose = f"yours; ask python course/check.py {number}" if words[1] == b"1" else "not yours"
    return f"the run ended in part {number} ({PARTS[number].name}, {whose}): {said}"


def whose(row: dict) -> str:
    spec = PARTS[row["number"]]
    return "yours" if row["yours"] else spec.plain if row["plain"] else "ours"


def wrapped(text: str) -> str:
    return textwrap.fill(text, lesson.WIDTH, initial_indent="  ", subsequent_indent="    ")


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
            print(wrapped(f"{row['number']} is refused: {row['refused'][:400]}"))
    print(f"{out['rows']:,} rows, {out['unseen']:,} never drawn; {out['lost']:,} tokens in no row")
    print(f"counting, as in lesson 1: {out['counting']:.3f} bits per byte: the line to get under")
    print(f"your trainer:             {out['bits']:.3f} bits per byte, to about {SAME}")
    if "failed" in out:
        number, said = out["failed"]
        print(wrapped(f"it did not write, as part {number} failed: {said}"))
    written = [line for line in out["sample"].splitlines() if line.strip()][:2] or [""]
    print(f"it writes: {' / '.join(written)[:68]!r}")
    print(f"that took {time.perf_counter() - began:.0f} s; the model is kept: --prompt, --chat")


def remember(rows: list[dict], out: dict, folder: Path) -> list[dict]:
    """Add a run to the history, if other parts are yours than in the one before and it is as long
    as all -> the history."""
    past = noted("yours_runs.json", [])
    if past and out["steps"] != STEPS:
        return past
    numbers = [row["number"] for row in rows if row["yours"]]
    files = b"".join((folder / f"ex{number:02d}.py").read_bytes() for number in numbers)
    entry = {"key": hashlib.sha256(files).hexdigest(), "parts": numbers}
    entry |= {name: out[name] for name in ("bits", "sample", "counting")}
    past = [*past[:-1], entry] if past and past[-1]["key"] == entry["key"] else [*past, entry]
    note("yours_runs.json", past)
    return past


def page(rows: list[dict], out: dict, past: list[dict]) -> None:
    """course/out/yours.html: the model, the curve of all runs, two samples, what is left."""
    line = past[-1]["counting"]
    known = [line, out["bits"], out["counting"], *(one["bits"] for one in past)]
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
    table = []
    for row in rows:
        link = lesson.page(row["number"]).relative_to(lesson.COURSE)
        table.append(row | dict(name=PARTS[row["number"]].name, whose=whose(row), lesson=link))
    html = template("yours.html").render(
        rows=table,
        out=out,
        past=past,
        steps=STEPS,
        points=points,
        lines=[(y(bits), f"{bits:.1f}") for bits in np.arange(low, top + 0.1, 0.5)],
        count_y=y(line),
        own_y=y(out["counting"]),
        last_y=y(out["bits"]),
        gpt=drawing({row["name"] for row in table if row["yours"]}, out["kinds"]),
    )
    (lesson.OUT / "yours.html").write_text(html, encoding="utf-8")
    print("page: course/out/yours.html")


def template(name: str) -> Template:
    loader = FileSystemLoader(lesson.COURSE)
    return Environment(loader=loader, autoescape=True).get_template(name)


def drawing(lit: set[str], kinds: int) -> Markup:
    """The GPT, which reads so many kinds of ids, and what is around it, in boxes with their shapes;
    lit are the parts that are yours."""
    return Markup(
        template("gpt.svg").render(
            lit=lit,
            V=kinds,
            D=spine.WIDTH,
            T=spine.T,
            blocks=spine.BLOCKS,
            heads=spine.HEADS,
            rows=spine.ROWS,
        )
    )


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


def speak(args: argparse.Namespace) -> int:
    """--prompt and --chat: the last model, with the parts that it was trained with."""
    kept = spine.last()
    if kept is None:
        print("there is no model yet: train one first, python course/yours.py", file=sys.stderr)
        return 2
    have = kept["have"] | {"chat", "writing"}
    if 6 not in args.only or judged(6, args.folder / "ex06.py"):  # it is no part of the training
        have.remove("writing")
    parts, rows = collect(args.folder, args.only, args.fill, have)
    print(f"a model of {kept['steps']:,} steps, {kept['bits']:.3f} bits per byte", flush=True)
    if args.prompt is not None:
        print(spine.written(*spine.loaded(parts, have, kept), args.prompt, args.seed))
        return 0
    print("it learns to answer: about a minute", flush=True)
    model = spine.chat(parts, have, kept, args.seed)
    name = model.name(args.seed)
    print(f"{spine.NAME_IT}\n  {f'I would call it {name}.' if name else '(it gave no name)'}")
    mine = f"{sum(row['yours'] for row in rows)} of {len(rows)} parts"
    trained = f"{mine} mine, {kept['steps']:,} steps, {kept['bits']:.3f} bits per byte"
    about = f"{trained}; it answers questions about Python's library like those above, no others"
    failed = own_page.write(model, name or "Nameless", about)
    if failed:
        print(wrapped(failed))
    run = noted("yours_run.json", {})
    if "parts" in run:  # the last run is on the page
        page(run["parts"], run | dict(name=name, chat=not failed), noted("yours_runs.json", []))
    print("Ask as it was taught (Ctrl-D ends): Hello; Who are you?; What does open do?;")
    print("Which arguments does open(file, mode) take?; What would you call it? Open a file.")
    for line in sys.stdin:
        if line.strip():
            print(f"  {model.answer(line.strip(), args.seed)}", flush=True)
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", type=numbers_of, default={*PARTS}, help="as in 1,2,4: these parts"
    )
    parser.add_argument("--fill", default="plain", choices=["plain", "ours"])
    parser.add_argument("--folder", type=Path, default=lesson.COURSE / "exercises")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", help="the last model writes on after this text")
    parser.add_argument("--chat", action="store_true", help="the last model learns to answer")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: at least 1")
    began = time.perf_counter()
    lesson.OUT.mkdir(exist_ok=True)
    if args.chat or args.prompt is not None:
        return speak(args)
    parts, rows = collect(args.folder, args.only, args.fill)
    print(f"training, {args.steps:,} steps: about {-(-args.steps // STEPS)} min", flush=True)
    have = {PARTS[row["number"]].name for row in rows if not row["plain"]}
    out = guarded(parts, have, args.steps, args.seed, args.folder)
    if isinstance(out, str):
        print(wrapped(out))
        return 1
    show(rows, out, began)
    if args.fill == "plain" and args.steps >= STEPS:
        note("yours_run.json", out | dict(parts=rows))
        page(rows, out, remember(rows, out, args.folder))
    return int("failed" in out or any(row["refused"] for row in rows))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except Refused as error:  # in --prompt or --chat
        sys.exit(f"part {error.args[0]} failed: {error.args[1]}")
