"""What the lessons share: tables, figures, claims, ranks, and two small data sets.

It puts the project on the path, so a lesson imports it before the project's modules."""

import ast
import atexit
import inspect
import os
import pickle
import queue
import re
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import numpy as np

if not __debug__:  # python -O, PYTHONOPTIMIZE
    sys.exit("without assertions nothing is judged or claimed: run without -O or PYTHONOPTIMIZE")
COURSE = Path(__file__).resolve().parent
OUT = COURSE / "out"
START = time.perf_counter()
sys.path.insert(0, str(COURSE.parent))
from instruments.pages import picture  # noqa: E402


def pages() -> list[Path]:
    """The lessons, by number: those of the path, then those of the room."""
    return sorted(COURSE.glob("[0-9]*.py")) + sorted(COURSE.glob("room/[0-9]*.py"))


def page(number: int) -> Path:
    return next(path for path in pages() if path.name.startswith(f"{number:02d}_"))


def begin(number: int, name: str) -> None:
    """Print the lesson's title now, and its time at the end of the program, beside the one that its
    first page promises for a machine with nothing else to do."""
    OUT.mkdir(exist_ok=True)
    print(f"lesson {number}: {name}")
    said = " ".join(re.findall(r"Takes (\d+ seconds)", page(number).read_text()))

    def end() -> None:
        print(f"{time.perf_counter() - START:.0f} s (on two quiet cores: {said or 'not measured'})")

    atexit.register(end)


WIDTH = 80  # of a terminal: what a lesson prints fits in one


def table(columns: list[str], rows: list[tuple], title: str) -> None:
    """Print rows under columns: words to the left, numbers to the right, None as a dash."""

    def cell(x) -> str:
        if isinstance(x, (float, np.floating)):
            return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"
        return "-" if x is None else f"{x:,}" if isinstance(x, (int, np.integer)) else str(x)

    words = [all(isinstance(row[i], str) for row in rows) for i in range(len(columns))]
    lines = [columns, *([cell(x) for x in row] for row in rows)]
    width = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    wide = max(len(title), 2 * len(width) + sum(width))
    assert wide <= WIDTH and len({*columns}) == len(columns), f"{title!r}: {wide} wide, {columns}"
    print(title)
    for line in lines:
        cells = [c.ljust(w) if word else c.rjust(w) for c, w, word in zip(line, width, words)]
        print("  " + "  ".join(cells).rstrip())


def holds(claim: bool, text: str) -> None:
    """A claim about what was measured: printed if it holds, an AssertionError if not."""
    assert claim, f"does not hold: {text}"
    print(f"holds: {text}")


def timed(claim: bool, text: str) -> None:
    """A claim about the clock: it stops nothing, as a busy machine or another CPU may refute it."""
    print(f"holds: {text}" if claim else f"not here, or not now: {text}")


def arithmetic(claim: bool, text: str) -> None:
    """A sum done on given numbers, checked like a claim: it cannot come out otherwise."""
    assert claim, f"does not add up: {text}"
    print(f"arithmetic: {text}")


def figure(width: float = 7, height: float = 3.5):
    """A matplotlib figure; needs no display."""
    return picture.figure(width, height)


def save(fig, name: str) -> None:
    """Write the figure to course/out/NAME.svg; a notebook shows it."""
    title = f"the figure of lesson {name}"
    text = picture.svg(fig, title)
    (OUT / f"{name}.svg").write_text(text, encoding="utf-8")
    if "ipykernel" in sys.modules:
        from IPython.display import SVG, display

        display(SVG(text), metadata={"image/svg+xml": {"alt": title}})
    print(f"figure: course/out/{name}.svg")


def tiny_run() -> Path:
    """The folder of the run that `bash run.sh` makes; without it the lesson ends with code 2."""
    if (COURSE.parent / "runs/tiny/checkpoints").is_dir():
        return COURSE.parent / "runs/tiny"
    print("run bash run.sh first (5 to 15 minutes)", file=sys.stderr)
    sys.exit(2)


# the pictures of 0 to 9: 7 rows of 5 dots, one bit each
GLYPHS = "3a33ae62e 11842108e 3a211111f 7c441062e 08ca97c42 "
GLYPHS += "7e1e0862e 1910f462e 7c2222108 3a317462e 3a317844c"


def digits(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """n pictures -> float32 (n, 784) from 0 to 1, labels int64 (n,): MNIST without a download.

    Glyphs enlarged three times, moved by up to two pixels, with normal noise of 0.5."""
    dots = [[int(dot) for dot in f"{int(glyph, 16):035b}"] for glyph in GLYPHS.split()]
    big = np.kron(np.array(dots).reshape(10, 7, 5), np.ones((1, 3, 3)))  # (10, 21, 15)
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, n)
    moved = rng.integers(0, 3, (n, 2))
    images = rng.normal(0, 0.5, (n, 28, 28)).astype(np.float32)
    for image, label, (down, right) in zip(images, labels, moved):
        image[3 + down : 24 + down, 6 + right : 21 + right] += big[label]
    return np.clip(images, 0, 1).reshape(n, 784), labels


def _stdlib() -> list[Path]:
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def bytes_of_stdlib(n: int) -> np.ndarray:
    """The first n bytes of the standard library's sources, int64: a vocabulary of 256."""
    text = b"".join(path.read_bytes() for path in _stdlib())
    assert len(text) >= n, f"the standard library has {len(text):,} bytes, fewer than {n:,}"
    return np.frombuffer(text[:n], np.uint8).astype(np.int64)


def draw(source, length: int, n: int, gen):
    """n pieces of a tensor of ids, from places that gen draws: (n, length + 1)."""
    import torch

    at = torch.randint(0, len(source) - length, (n, 1), generator=gen)
    return source[at + torch.arange(length + 1)]


def exam() -> tuple[np.ndarray, np.ndarray]:
    """-> the training text of lessons 1 to 5 and of yours.py, and what they are examined on: int64.

    The first 1,000,000 bytes of the library, and 64 pieces of 1,024 bytes from all over the rest of
    it, end to end, with one byte before them: so the number is not that of one lucky place. (The
    first byte of a piece comes after the last one of another: 63 of 65,536.)"""
    text = b"".join(p.read_bytes() for p in _stdlib())
    step = (len(text) - 1_000_001) // 64
    pieces = [text[1_000_001 + i * step :][:1024] for i in range(64)]
    held = text[1_000_000:1_000_001] + b"".join(pieces)
    return tuple(np.frombuffer(x, np.uint8).astype(np.int64) for x in (text[:1_000_000], held))


def ranks(world: int, fn, *args, timeout_s: float = 120.0) -> list:
    """Run fn(rank, world, *args) in `world` processes joined by gloo -> results by rank.

    The children get the caller's definitions (imports, functions, classes, CONSTANTS), not its
    cells, so this works from a notebook too. One launch takes about 4 s: put all that a lesson
    compares into one. A RuntimeError names a rank that fails or hangs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        (folder / "job").write_bytes(pickle.dumps((world, fn.__name__, args)))
        (folder / "definitions.py").write_text(_definitions(fn))
        children = []
        for r in range(world):
            command = [sys.executable, __file__, name, str(r)]
            said = folder / f"{r}.stderr"
            children.append(subprocess.Popen(command, env=env, stderr=said.open("w")))
        deadline = time.monotonic() + timeout_s
        try:
            while None in (codes := [c.poll() for c in children]) and not any(codes):
                time.sleep(0.02)
                late = [r for r, code in enumerate(codes) if code is None]
                if time.monotonic() > deadline:
                    raise RuntimeError(f"ranks {late} did not end within {timeout_s:.0f} s")
        finally:
            for c in children:
                c.kill()
                c.wait()
        first = folder / "failed"
        if first.exists():
            raise RuntimeError(first.read_text())
        for r in [r for r, code in enumerate(codes) if code]:  # killed, say
            raise RuntimeError(f"rank {r} failed:\n{(folder / f'{r}.stderr').read_text()[-2000:]}")
        return [pickle.loads((folder / str(r)).read_bytes()) for r in range(world)]


def threads(world: int, fn, *args) -> tuple[list, list[int]]:
    """Run fn(rank, world, send, recv, *args) in threads -> results and bytes sent, by rank.

    send(to, x) sends a copy of an array or CPU tensor; recv(source) waits for one. For exercises:
    the first error of a rank is raised here. When each rank that has not ended waits for another
    one, that is a deadlock, and an error of them all."""
    boxes = {(a, b): queue.Queue() for a in range(world) for b in range(world)}
    waits: dict[int, int] = {}  # a rank whose box is empty -> from whom it waits
    running = {*range(world)}
    lock = threading.Lock()
    results = [None] * world
    sent = [0] * world
    errors = []

    def end_a_deadlock() -> None:
        if waits.keys() == running:
            for rank, source in waits.items():
                boxes[source, rank].put(None)

    def work(rank: int) -> None:
        def send(to: int, x) -> None:
            sent[rank] += x.nbytes
            with lock:
                boxes[rank, to].put(x.copy() if hasattr(x, "copy") else x.clone())
                if waits.get(to) == rank:
                    del waits[to]

        def recv(source: int):
            with lock:
                if boxes[source, rank].empty():
                    waits[rank] = source
                    end_a_deadlock()
            x = boxes[source, rank].get()
            assert x is not None, f"rank {rank} waits for rank {source} forever"
            return x

        try:
            results[rank] = fn(rank, world, send, recv, *args)
        except BaseException as error:
            errors.append(error)
        with lock:
            running.remove(rank)
            waits.pop(rank, None)
            end_a_deadlock()

    team = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(world)]
    for t in team:
        t.start()
    for t in team:
        t.join()
    if errors:
        raise errors[0]
    return results, sent


def names_of(number: int) -> ModuleType:
    """A lesson as a module: its definitions are there, and none of its cells has run."""
    module = ModuleType(f"lesson_{number}")
    exec(_without_cells([page(number).read_text()]), vars(module))
    return module


def _definitions(fn) -> str:
    """The definitions of the caller's file (in a notebook: of its cells so far)."""
    path = Path(inspect.getsourcefile(fn) or "")
    if path.is_file() and "ipykernel" not in str(path):
        return _without_cells([path.read_text()])
    from IPython import get_ipython

    cells = get_ipython().user_ns["In"]
    return _without_cells([c for c in cells if not c.lstrip().startswith(("%", "!"))])


def _without_cells(cells: list[str]) -> str:
    """Their imports, functions, classes and CONSTANTS, without what they merely execute."""
    keep = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    out = []
    for node in (node for cell in cells for node in ast.parse(cell).body):
        targets = node.targets if isinstance(node, ast.Assign) else [None]
        constant = all(isinstance(x, ast.Name) and x.id.isupper() for x in targets)
        out += [ast.unparse(node)] if isinstance(node, keep) or constant else []
    return "\n".join(out)


if __name__ == "__main__":  # a rank: python lesson.py FOLDER RANK
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    rank = int(sys.argv[2])
    names = {"__name__": "definitions"}
    world, name, args = pickle.loads((folder / "job").read_bytes())
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    try:
        exec(compile((folder / "definitions.py").read_text(), "definitions.py", "exec"), names)
        (folder / str(rank)).write_bytes(pickle.dumps(names[name](rank, world, *args)))
        dist.barrier()
        status = 0
    except Exception:
        status = 1
        with suppress(FileExistsError), open(folder / "failed", "x") as file:  # by the first
            file.write(f"rank {rank} failed:\n{traceback.format_exc()[-2000:]}")
    sys.stdout.flush()
    os._exit(status)  # Python's end and gloo's threads do not get along
