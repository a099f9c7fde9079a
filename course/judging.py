"""How an answer to an exercise is judged: in a process of its own, by the exercise's oracle.

`load` runs a file, `verdict` asks an oracle about an answer (subject.py), `apart` does so in a
process of its own, with limits. The answer and its judge are in one process, so an answer can cheat
(check.py says how). Next: check.py, the command.
"""

import ast
import faulthandler
import linecache
import math
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch: its limit counts all threads' seconds
import lesson  # puts the project on the path
from subject import Subject

EXERCISES = sorted(int(path.stem[2:]) for path in (lesson.COURSE / "exercises").glob("ex*.py"))
CPU_S = 20  # what one answer may take: computing
WALL_S = 120  # and waiting
BYTES = 12 << 30  # of addresses, of which torch takes some


def load(path: Path) -> ModuleType:
    """Run a file. Its judge is the function `oracle`, which has names of its own: a `sum` or a
    missing import of the learner's does not reach it. All else, above and below, is the learner's.
    """
    source = path.read_text("utf-8-sig")
    tree = ast.parse(source, str(path))
    lines: dict[str, list[int]] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            lines.setdefault(node.name, []).append(node.lineno)
    for name, at in lines.items():
        if len(at) > 1:
            where = " and ".join(map(str, at))
            raise SyntaxError(f"{name} is defined in the lines {where}: keep one, or rename yours")
    module = sys.modules[path.stem] = ModuleType(path.stem)  # a dataclass looks its module up
    module.__file__ = str(path)
    judge = [node for node in tree.body if getattr(node, "name", "") == "oracle"]
    own = [node for node in tree.body if node not in judge]
    exec(compile(ast.Module(own, []), str(path), "exec"), vars(module))
    if judge:
        name = f"{path} (the judge)"  # so that a stack tells whose a line is
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        names = {"__name__": f"judge_of_{path.stem}"}
        exec(compile(ast.Module(judge, []), name, "exec"), names)
        module.oracle = names["oracle"]
    return module


def files(number: int) -> tuple[ModuleType, ModuleType]:
    """-> the exercise, its solution."""
    name = f"ex{number:02d}.py"
    return tuple(load(lesson.COURSE / folder / name) for folder in ("exercises", "solutions"))


# ------------------------------------------------------------------------------- a limit of time
class TooLong(BaseException):
    """The time is up. No `except Exception` in an answer or an oracle catches it."""

    def __init__(self, seconds: float, frames: list[FrameType]):
        super().__init__(f"no end within {seconds} seconds")
        self.seconds = seconds
        self.frames = frames  # where all threads are, the main one last


@contextmanager
def limit(cpu_s: float, wall_s: float) -> Iterator[None]:
    """Raise TooLong in the main thread when either time is up."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread has signals
        return

    def stop(number: int, frame: FrameType) -> None:
        others = [f for i, f in sys._current_frames().items() if i != threading.get_ident()]
        raise TooLong(cpu_s if number == signal.SIGPROF else wall_s, [*others, frame])

    timers = {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}
    before = {number: signal.signal(number, stop) for number in timers}
    for timer, seconds in zip(timers.values(), (cpu_s, wall_s)):
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, timer in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def said_of(subject: Subject, judge: Callable) -> str | None:
    """None if judge() ends well, else what is wrong; any error is a refusal."""
    try:
        with limit(CPU_S, WALL_S):
            judge()
    except NotImplementedError as error:
        return f"not begun: {error}"
    except TooLong as error:
        return subject.late(error.seconds, error.frames)
    except (Exception, SystemExit) as error:
        return subject.told(error)
    return None


def verdict(oracle, answer) -> str | None:
    """None if the oracle accepts the answer, else what it says."""
    subject = Subject(answer)
    return said_of(subject, lambda: (oracle(subject), subject.again()))


def examine(path: Path, exercise: Path | None = None) -> str | None:
    """Judge a file by its oracle, or that of `exercise` -> None, or what its writer should know."""
    answers: list[ModuleType] = []
    file = Subject(SimpleNamespace(__file__=str(path)))
    said = said_of(file, lambda: answers.append(load(path)))
    if said is None:
        judge = load(exercise) if exercise else answers[0]
        said = verdict(judge.oracle, answers[0])
    return said and said.removeprefix("AssertionError: ")


def apart(
    path: Path, judge: Callable[[Path], str | None], cpu_s: float = 0, wall_s: float = 0
) -> str | None:
    """Judge in a child that ends by itself, whatever the answer does -> what was said.

    Its limits are twice those of `said_of`: it loads the file, then judges."""
    cpu_s = cpu_s or CPU_S
    wall_s = wall_s or WALL_S
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        stuck = Path(folder, "stuck")
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                with suppress(ValueError, OSError):  # macOS has no such limit
                    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
                # in C code no Python signal handler runs: then the kernel says when to stop
                faulthandler.register(signal.SIGXCPU, file=stuck.open("w"))
                most = math.ceil(2 * cpu_s)
                resource.setrlimit(resource.RLIMIT_CPU, (most + 2, most + 4))
                said.write_text(judge(path) or "")
                sys.stdout.flush()
            except Exception:
                said.write_text(f"the judge itself failed:\n{traceback.format_exc()}")
            finally:
                os._exit(0)
        began = time.monotonic()
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.01)
            if time.monotonic() > began + 2 * wall_s + 4:
                os.kill(child, signal.SIGXCPU if not stuck.stat().st_size else signal.SIGKILL)
        if said.exists():
            return said.read_text() or None
        dumped = stuck.read_text() if stuck.exists() else ""
        own = re.findall(rf'File "{re.escape(str(path))}", line (\d+)', dumped)
        if not dumped:
            return "the program ended before the judge had decided"
        lines = [f" (line {n}: {linecache.getline(str(path), int(n)).strip()})" for n in own]
        return "no end" + "".join(lines[:1])
