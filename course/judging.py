"""How an answer to an exercise is judged: in a process of its own, by the exercise's oracle.

`load` runs a file, `verdict` asks an oracle, `examine` says what is wrong in the learner's words,
`apart` does so in a process of its own, with limits. The answer and its judge are in one process,
so an answer can cheat (check.py says how). Next: check.py, the command.
"""

import ast
import builtins
import faulthandler
import math
import os
import re
import reprlib
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import FrameType, ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch: its limit counts all threads' seconds
import lesson  # puts the project on the path

EXERCISES = sorted(int(path.stem[2:]) for path in (lesson.COURSE / "exercises").glob("ex*.py"))
CPU_S = 20  # what one answer may take: computing
WALL_S = 120  # and waiting
BYTES = 12 << 30  # of addresses, of which torch takes some


def load(path: Path) -> ModuleType:
    """Run a file. What stands from `oracle` on is the judge's, and has a namespace of its own: a
    `sum` or a `_hash` of the learner's cannot take the place of the judge's, nor the reverse."""
    tree = ast.parse(path.read_text(), str(path))
    lines: dict[str, list[int]] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            lines.setdefault(node.name, []).append(node.lineno)
    for name, at in lines.items():
        if len(at) > 1:
            where = " and ".join(map(str, at))
            raise SyntaxError(f"{name} is defined in the lines {where}: keep one, or rename yours")
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    end = lines.get("oracle", [math.inf])[0]
    own = []
    judge = []
    for node in tree.body:
        (own if node.lineno < end else judge).append(node)
    exec(compile(ast.Module(own, []), str(path), "exec"), vars(module))
    if judge:
        names = {k: v for k, v in vars(module).items() if not hasattr(builtins, k)}
        names |= {"__name__": module.__name__}
        exec(compile(ast.Module(judge, []), str(path), "exec"), names)
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


def verdict(oracle, answer, cpu_s: float = 0) -> str | None:
    """None if the oracle accepts the answer, else what it says; any error is a refusal."""
    try:
        with limit(cpu_s or CPU_S, WALL_S):
            oracle(answer)
    except NotImplementedError as error:
        return f"not begun: {error}"
    except AssertionError as error:
        return f"AssertionError: {error}"
    except TooLong as error:
        return f"TooLong: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# ------------------------------------------------------------------ what is said to the learner
class Short(reprlib.Repr):
    """Values in a few words: arrays and tensors of more than eight numbers by their shapes."""

    def __init__(self):
        super().__init__()
        self.maxlevel = 4
        self.maxlist = 12
        self.maxtuple = 12
        self.maxdict = 8
        self.maxstring = self.maxother = 60

    def repr_ndarray(self, x, level) -> str:
        values = x.tolist() if x.size <= 8 else f"of shape {tuple(x.shape)}"
        return f"array {values}, {x.dtype}"

    def repr_Tensor(self, x, level) -> str:
        values = x.tolist() if x.numel() <= 8 else f"of shape {tuple(x.shape)}"
        return f"tensor {values}, {str(x.dtype).removeprefix('torch.')}"


SHORT = Short().repr


class Learner:
    """What of an exercise file is the learner's: the lines above `oracle`."""

    def __init__(self, path: Path):
        self.path = path
        self.lines = path.read_text().splitlines()
        judge = [i for i, line in enumerate(self.lines, 1) if line.startswith("def oracle(")]
        self.end = judge[0] if judge else math.inf

    def owns(self, file: str, line: int) -> bool:
        return Path(file) == self.path and line < self.end

    def has(self, frame: FrameType | None) -> bool:
        return bool(frame) and self.owns(frame.f_code.co_filename, line_of(frame))

    def line(self, number: int) -> str:
        return f"line {number}: {self.lines[number - 1].strip()}"

    def entered(self, frames: list[FrameType]) -> tuple[str, int] | None:
        """Of a stack, outermost first: the call of the learner's code and its line by now."""
        own = [frame for frame in frames if self.has(frame)]
        return (call(own[0]), line_of(own[-1])) if own else None

    def trace(self, oracle, answer) -> tuple[str, str] | None:
        """Judge once more, watched -> the last call from outside, what it returned."""
        calls: dict[int, tuple[str, str]] = {}  # by thread, the last one last

        def watch(frame: FrameType, event: str, value) -> None:
            if event in ("call", "return") and self.has(frame) and not self.has(frame.f_back):
                thread = threading.get_ident()
                made = call(frame) if event == "call" else calls.pop(thread, ("", ""))[0]
                calls[thread] = made, SHORT(value)

        try:
            threading.setprofile(watch), sys.setprofile(watch)
            with limit(CPU_S, WALL_S), redirect_stdout(open(os.devnull, "w")):
                oracle(answer)
        except BaseException:
            pass
        finally:
            threading.setprofile(None), sys.setprofile(None)
        return list(calls.values())[-1] if calls else None


def line_of(frame: FrameType) -> int:
    """The jump back of a loop that ends with an `if` has no line: then the one before it."""
    lines = [line for at, _, line in frame.f_code.co_lines() if line and at <= frame.f_lasti]
    return frame.f_lineno or lines[-1]


def call(frame: FrameType) -> str:
    """A frame as it was called: f([3, 9], 5)."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    values = {name: frame.f_locals[name] for name in names if name in frame.f_locals}
    owner = values.pop("self", None)
    name = code.co_name if owner is None else f"{type(owner).__name__}.{code.co_name}"
    if name == "<module>":
        return "the file itself"
    shown = ", ".join(map(SHORT, values.values()))
    return f"{name}({shown if len(shown) < 400 else shown[:400] + '...'})"


def examine(path: Path) -> str | None:
    """Judge an exercise file -> None, or what its writer should know. Changes this process."""
    learner = Learner(path)
    try:
        with limit(CPU_S, WALL_S):
            exercise = load(path)
            exercise.oracle(exercise)
        return None
    except NotImplementedError as error:
        return f"not begun: {error}"
    except TooLong as late:
        stacks = [[f for f, _ in traceback.walk_stack(frame)][::-1] for frame in late.frames]
        found = next(filter(None, map(learner.entered, stacks)), None)
        said = f"{late} (it never ends, or is too slow)"
        return said + (f" in {found[0]} ({learner.line(found[1])})" if found else "")
    except BaseException as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        lines = [line for _, line in traceback.walk_tb(error.__traceback__)]
        own = [i for i, frame in enumerate(frames) if learner.owns(*place(frame, lines[i]))]
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        judges = Path(frames[-1].f_code.co_filename) == path and len(frames) - 1 not in own
        if isinstance(error, AssertionError) and judges:  # also from what the judge handed over
            return said
        if own and frames[own[-1]].f_code.co_name == "<module>":
            return f"{said} ({learner.line(lines[own[-1]])})"
        with suppress(BaseException):  # the same once more, for the input as it was
            exercise = load(path)
            last = learner.trace(exercise.oracle, exercise)
            if last:
                if not own:
                    made, returned = last
                    return f"{made} returned {returned}, and the judge cannot use it: {said}"
                return f"{last[0]} ended with {said} ({learner.line(lines[own[-1]])})"
        return f"{said} ({learner.line(lines[own[-1]])})" if own else said


def place(frame: FrameType, line: int) -> tuple[str, int]:
    return frame.f_code.co_filename, line


def apart(
    path: Path, judge: Callable[[Path], str | None], cpu_s: float = 0, wall_s: float = 0
) -> str | None:
    """Judge in a child that ends by itself, whatever the answer does -> what was said.

    Its limits are twice those of one judgement: it may judge twice."""
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
        learner = Learner(path)
        dumped = stuck.read_text() if stuck.exists() else ""
        places = re.findall(r'File "(.*)", line (\d+)', dumped)
        own = [int(line) for file, line in places if learner.owns(file, int(line))]
        where = f" ({learner.line(own[0])})" if own else ""
        return f"no end{where}" if dumped else "the program ended before the judge had decided"
