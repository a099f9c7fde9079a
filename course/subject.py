"""An answer as its judge calls it: every call is watched, and some are made once more.

An oracle is given a `Subject` in place of the answer. What is wrong in any task is looked for here,
once for all: an argument that is changed, a result that is an argument, or that a later call
changes, or that is not computed yet (a Python generator); a random generator or a setting of the
whole process that is left in another state. When the oracle is content, its calls are made again in
reverse order, with copies of the arguments, in another layout of memory, and with few frames of the
stack: a right answer says the same. A task that allows some of it says so: answer.may("muon",
change="W average"). What an oracle's own functions hand over is looked at if they are `lent`.

`same` compares numbers with what they should be, and tells the largest difference; `equal` compares
anything else. What an oracle asserts need not name the call: `told` adds the last one. Next:
judging.py, which asks an oracle.
"""

import copy
import functools
import inspect
import linecache
import random
import reprlib
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from numbers import Integral
from types import FrameType

import numpy as np

KEPT = 40  # calls of a function that are made again
NUMBERS = 20_000  # and letters: no more in the arguments of such a call
HELD = 4  # results that are looked at after each later call
FRAMES = 200  # of the stack, for a call that is made again


def is_tensor(x) -> bool:
    """Without an import of torch, which takes a second."""
    torch = sys.modules.get("torch")
    return bool(torch) and isinstance(x, torch.Tensor)


class Short(reprlib.Repr):
    """Values in a few words: arrays and tensors of more than 16 numbers by their shapes."""

    def __init__(self):
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = 12
        self.maxdict = 4
        self.maxstring = self.maxother = 60

    def repr1(self, x, level) -> str:
        if callable(x) and hasattr(x, "__name__"):
            return x.__name__
        numbers = array(x)
        if type(x).__repr__ is object.__repr__:
            return f"a {type(x).__name__}"
        if numbers is None:
            return " ".join(super().repr1(x, level).split())
        values = f"of shape {tuple(x.shape)}"
        if 0 < numbers.size <= 16:
            if numbers.dtype.kind == "f":
                numbers = np.vectorize(lambda number: float(f"{number:.4g}"))(numbers)
            values = numbers.tolist()
        kind = "tensor" if is_tensor(x) else "array"
        return f"{kind} {values}, {str(x.dtype).removeprefix('torch.')}"


SHORT = Short().repr


def said_call(name: str, values: dict) -> str:
    text = ", ".join(f"{label}={SHORT(value)}" for label, value in values.items())
    return f"{name}({text})" if len(text) < 500 else f"{name}({text[:500]}...)"


# -------------------------------------------------------------------------------------- values
def array(x) -> np.ndarray | None:
    """An array, or a tensor's numbers as one, in the same memory if it can be; None of others."""
    if not is_tensor(x):
        return x if isinstance(x, np.ndarray) else None
    if x.is_meta:
        return np.empty(0)
    x = x.detach()
    return (x.float() if x.is_floating_point() and x.itemsize < 4 else x).numpy()


def parts(x) -> Iterator:
    """A value, and all values in it."""
    yield x
    if isinstance(x, (list, tuple, dict)):
        for part in x.values() if isinstance(x, dict) else x:
            yield from parts(part)


def mapped(x, leaf: Callable, back: bool = False):
    """A value with leaf(part) for each part that is no list, tuple or dict. back: dicts in reverse
    order."""
    if isinstance(x, dict):
        items = [*x.items()][:: -1 if back else 1]
        return {key: mapped(part, leaf, back) for key, part in items}
    if isinstance(x, (list, tuple)):
        make = getattr(x, "_make", type(x))  # of a NamedTuple
        return make([mapped(part, leaf, back) for part in x])
    return leaf(x)


def frozen(x):
    """What can be compared later, to see whether a value has changed."""

    def leaf(part):
        numbers = array(part)
        if numbers is not None:
            wants = getattr(part, "requires_grad", False)
            return numbers.shape, str(part.dtype), wants, hash(numbers.tobytes())
        return repr(part) if isinstance(part, (float, set, bytearray, np.generic)) else part

    return mapped(x, leaf)


def places(x) -> list[tuple[int, int]]:
    """The addresses of what can be changed: an array's numbers, or a container itself."""
    found = []
    for part in parts(x):
        if is_tensor(part) and part.itemsize == 2:  # numpy has no bfloat16, but its bits
            part = part.detach().view(sys.modules["torch"].int16)
        numbers = array(part)
        if numbers is not None and numbers.size:
            found.append(np.lib.array_utils.byte_bounds(numbers))
        elif isinstance(part, (list, dict, set)):
            found.append((id(part), id(part) + 1))
    return found


def shared(x, y) -> bool:
    """Is a change of the one a change of the other?"""
    ends = [0, 0]  # of what begins before, in x and in y
    sides = [
        (start, end, side) for side, value in enumerate((x, y)) for start, end in places(value)
    ]
    for start, end, side in sorted(sides):
        if start < ends[1 - side]:
            return True
        ends[side] = max(ends[side], end)
    return False


def copyable(x) -> bool:
    """Is a copy of it as good, and small?"""
    known = (int, float, str, bytes, type(None), np.generic, np.ndarray, random.Random)
    size = 0
    for part in parts(x):
        if not isinstance(part, (*known, list, tuple, dict)) and not is_tensor(part):
            return False
        size += len(part) if isinstance(part, (str, bytes)) else np.size(array(part))
    return size < NUMBERS


def copied(x, spread: bool = False):
    """A copy; `spread`: with its numbers in another layout, and dicts in another order."""

    def leaf(part):
        if isinstance(part, bytes):
            return bytes(bytearray(part))  # at an address of its own
        if array(part) is None:
            return copy.deepcopy(part)
        back = [*range(part.ndim)][:: -1 if spread else 1]
        if is_tensor(part):
            new = part.detach().clone().permute(back).contiguous().permute(back)
            return new.requires_grad_(part.requires_grad)
        new = part.transpose(back).copy().transpose(back)
        return np.repeat(new, 2)[::2] if spread and new.ndim == 1 else new

    return mapped(x, leaf, spread)


def narrow(x):
    """Whole numbers in the smallest type that has them; torch indexes with int32 and int64 only."""
    if is_tensor(x):
        return x.int()
    ends = [np.min_scalar_type(end) for end in (x.min(initial=0), x.max(initial=0))]
    return x.astype(np.result_type(*ends))


def equal(found, right, what: str = "the result") -> None:
    assert found == right, f"{what} is {SHORT(found)}, and should be {SHORT(right)}"


def same(found, right, what: str = "the result", rtol=1e-9, atol=1e-12, dtype=None) -> None:
    """Assert that `found` is an array, tensor or number such as `right`: of its shape and dtype (or
    `dtype`), and within rtol * |right| + atol of it; or a list of numbers such as `right`, whole
    where those are whole. NaN is only equal to NaN."""
    if isinstance(right, list):
        assert isinstance(found, list), f"{what} is {SHORT(found)}, and should be a list"
        for i, (a, b) in enumerate(zip(found, right)):
            assert isinstance(a, Integral) or not isinstance(b, Integral), (
                f"{what}[{i}] is {SHORT(a)}, and should be a whole number"
            )
    b = array(right)
    if b is None:
        a = np.asarray(found)
        b = np.asarray(right)
        assert a.dtype.kind in "biuf", f"{what} is {SHORT(found)}, and should be {SHORT(right)}"
    else:
        assert is_tensor(found) if is_tensor(right) else isinstance(found, np.ndarray), (
            f"{what} is {SHORT(found)}, and should be of type {type(right).__name__}"
        )
        wanted = right.dtype if dtype is None else dtype
        wanted = wanted if is_tensor(right) else np.dtype(wanted)
        kinds = [str(kind).removeprefix("torch.") for kind in (found.dtype, wanted)]
        assert kinds[0] == kinds[1], f"{what} is of {kinds[0]}, and should be of {kinds[1]}"
        a = array(found)
    assert a.shape == b.shape, f"{what} is of shape {a.shape}, and should be of {b.shape}"
    with np.errstate(all="ignore"):
        exact = a.dtype.kind in "biu" and b.dtype.kind in "biu"
        bad = a != b if exact else ~np.isclose(a, b, rtol, atol, equal_nan=True)
        off = np.abs(np.subtract(a, b, dtype=float))
    if bad.any():
        far = np.where(bad, np.where(np.isnan(off), np.inf, off), -1.0)
        at = np.unravel_index(far.argmax(), far.shape)
        place = f"{what}{[int(i) for i in at]}" if at else what
        more = f"; {bad.sum():,} of {bad.size:,} wrong, this one the most" if bad.size > 1 else ""
        yours, ours = (f"{x[at]}" if exact else f"{float(x[at]):.10g}" for x in (a, b))
        if yours == ours:
            yours, ours = (float(x[at]) for x in (a, b))
        raise AssertionError(f"{place} is {yours}, and should be {ours}{more}")


def alike(found, right) -> None:
    """Assert that a call has the same result once more, but for rounding."""
    theirs, ours = ([*parts(x)] for x in (found, right))
    assert len(theirs) == len(ours), f"the result is {SHORT(found)}; before it was {SHORT(right)}"
    for a, b in zip(theirs, ours):
        if isinstance(b, float) or array(b) is not None:
            values = np.abs(array(b) if array(b) is not None else b, dtype=float)
            near = 1e-3 if getattr(b, "itemsize", 8) > 2 else 0.03
            near = near * values[np.isfinite(values)].max(initial=0)
            same(a, b, "the result, this time,", 0, near)
        elif not isinstance(b, (list, tuple, dict)):
            assert a == b, f"the result has {SHORT(a)}; before it was {SHORT(b)}"


def unchanged(before: dict, now: dict, free: list[str], said: str) -> None:
    for name, value in before.items():
        assert name in free or now[name] == value, said.format(name)


def settings() -> dict:
    """What belongs to the whole process, and no answer changes."""
    _, keys, at, *_ = np.random.get_state()
    found = {
        "Python's global generator": hash(random.getstate()),
        "numpy's global generator": hash((keys.tobytes(), at)),
        "numpy.geterr()": np.geterr(),
        "the limit of calls within calls": sys.getrecursionlimit(),
    }
    torch = sys.modules.get("torch")
    if torch:
        found["torch's global generator"] = hash(torch.get_rng_state().numpy().tobytes())
        found["whether torch records gradients"] = torch.is_grad_enabled()
        found["torch's default dtype"] = torch.get_default_dtype()
    return found


# ------------------------------------------------------------------------------------- the calls
class Names(dict):
    def __missing__(self, name: str):
        raise NotImplementedError(f"there is no {name} in the file")


class Subject:
    """The answer's functions, watched; the methods of its classes, too."""

    def __init__(self, answer):
        self.own = Names(vars(answer))  # the answer's, unwatched
        self._may: dict[str, dict] = {}
        self._last = ("the file itself", time.monotonic())  # the last call, when it began
        self._count = 0
        self._returned = None
        self._held: deque = deque(maxlen=HELD)  # (call, result, frozen)
        self._kept: dict[str, list] = {}  # by function: (arguments, result)
        self._lent: list = []  # in this call: (what it is, value, frozen)

    def has(self, name: str) -> bool:
        return name in self.own

    def may(self, name: str, change="", draw=False, whole="", once=False) -> None:
        """What a function may do: change the arguments that are named, draw from torch's global
        generator. The arguments in `whole` may come as whole numbers of any type. `once`: its calls
        are not made again."""
        self._may[name] = dict(change=change.split(), draw=draw, whole=whole.split(), once=once)

    def __getattr__(self, name: str):
        value = self.own[name]
        if inspect.isclass(value):
            methods = {n: f for n, f in vars(value).items() if inspect.isfunction(f)}
            public = {n: f for n, f in methods.items() if n == "__init__" or n[0] != "_"}
            watched = {n: self._watched(f"{name}.{n}", f, 1) for n, f in public.items()}
            value = type(name, (value,), watched)
        elif callable(value):
            value = self._watched(name, value)
        setattr(self, name, value)
        return value

    def lent(self, function: Callable) -> Callable:
        """A function of the oracle's, to be called by the answer. What it returns, and what it
        gives to a function of the answer's, still belongs to the oracle."""
        name = function.__name__

        def keep(what: str, value):
            self._lent.append((what, value, frozen(value)))
            return value

        def theirs(x):
            if not callable(x):
                return x
            return lambda *args: x(*keep(f"what {name} gave to {SHORT(x)}", args))

        @functools.wraps(function)
        def call(*args, **named):
            named = {key: theirs(x) for key, x in named.items()}
            return keep(f"what {name} returned", function(*map(theirs, args), **named))

        return call

    def unmeasured(self, function: Callable, *args):
        """Work of the oracle's own, which takes nothing of the answer's time."""
        timers = (signal.ITIMER_PROF, signal.ITIMER_REAL)
        left = [signal.setitimer(timer, 0)[0] for timer in timers]
        try:
            return function(*args)
        finally:
            for timer, seconds in zip(timers, left):
                signal.setitimer(timer, seconds)

    def _watched(self, name: str, function: Callable, skip: int = 0) -> Callable:
        """skip: how many arguments at the front, a method's self, are not looked at."""
        if name not in self._may:
            self.may(name)
        may = self._may[name]
        once = may["once"] or skip
        kept = [] if once else self._kept.setdefault(name, [])
        names = [*inspect.signature(function).parameters][skip:]

        def call(*args, **named):
            if skip and sys._getframe(1).f_code.co_filename == self.own.get("__file__"):
                return function(*args, **named)  # a method that the answer calls for itself
            labels = [*names, *map(str, range(len(names), len(args)))]
            given = dict(zip(labels, args[skip:])) | named
            told = said_call(name, given)
            this = self._last = (told, time.monotonic())
            self._count += 1
            again = None
            if not once and len(kept) < KEPT and copyable(given):
                again = copied(args), copied(named)
            held = list(self._held)
            self._lent.clear()
            before = frozen(given)
            state = settings()
            try:
                found = self._returned = function(*args, **named)
            finally:
                self._last = this  # of several threads, the one that ends, or fails
            free = ["torch's global generator"] if may["draw"] else []
            unchanged(state, settings(), free, "{} is not as it was before the call")
            unchanged(before, frozen(given), may["change"], "the argument {} was changed")
            for what, value, was in self._lent:
                assert frozen(value) == was, f"{what} was changed"
            assert not isinstance(found, Iterator), (
                f"the result is a {type(found).__name__}, which has computed nothing yet"
            )
            for earlier, result, was in held:
                assert frozen(result) == was, (
                    f"it changed what an earlier call had returned, {earlier}"
                )
            others = [(f"the argument {label}", value) for label, value in given.items()]
            others += [(f"that of {earlier}", result) for earlier, result, _ in held]
            for whose, value in others:
                assert not shared(found, value), f"the result shares memory with {whose}"
            self._held.append((told, found, frozen(found)))
            if again and copyable(found):
                kept.append((again, copied(found)))
            return found

        return call

    def again(self) -> None:
        """Make the calls that were kept once more, the last one first."""
        for name, kept in self._kept.items():
            whole = self._may[name]["whole"]
            names = inspect.signature(self.own[name]).parameters
            for (args, named), right in kept[::-1]:
                narrowed = [narrow(x) if n in whole else x for n, x in zip(names, args)]
                ways = {
                    f"made again, where calls may be {FRAMES} deep": copied(args),
                    "made again, another layout of memory, dicts in reverse": copied(args, True),
                }
                if whole:
                    ways["made again with whole numbers of a small type"] = narrowed
                for how, values in ways.items():
                    told = said_call(name, dict(zip(names, values)) | named)
                    self._last = (f"{how}: {told}", time.monotonic())
                    alike(shallow(self.own[name], values, copied(named)), right)

    # ------------------------------------------------------------------------- what is told
    def _line(self, frames: list[tuple[FrameType, int]]) -> str:
        """The line of the answer where a stack, outermost first, has come to; or nothing."""
        path = self.own.get("__file__")
        own = [line for frame, line in frames if frame.f_code.co_filename == path]
        return f" (line {own[-1]}: {linecache.getline(path, own[-1]).strip()})" if own else ""

    def told(self, error: BaseException) -> str:
        """What is wrong, and in which call."""
        frames = [*traceback.walk_tb(error.__traceback__)]
        line = self._line(frames)
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        call, _ = self._last
        if isinstance(error, AssertionError) and not self._line(frames[-1:]):  # the judge's
            return f"{said}: {call}" if self._count else said
        if line or isinstance(error, SyntaxError):
            return f"{said}{line}: {call}"
        if "NoneType" in str(error) and self._returned is None:
            return f"the result is None: is a `return` missing? {call}"
        if not self._count:
            return said
        return f"the judge can do nothing with {SHORT(self._returned)} ({said}), returned by {call}"

    def late(self, seconds: float, frames: list[FrameType]) -> str:
        """The time was over; `frames` are where all threads were, the main one last."""
        call, began = self._last
        stacks = [[(f, line_of(f)) for f, _ in traceback.walk_stack(top)][::-1] for top in frames]
        line = next(filter(None, map(self._line, stacks)), "")
        ran = time.monotonic() - began
        if line and ran > seconds / 2:
            return f"not done after {ran:.0f} seconds{line}: {call}"
        return f"too slow: {seconds} seconds for {self._count:,} calls, the last one {call}{line}"


def line_of(frame: FrameType) -> int:
    """The jump back of a loop that ends with an `if` has no line: then the one before it."""
    lines = [line for at, _, line in frame.f_code.co_lines() if line and at <= frame.f_lasti]
    return frame.f_lineno or lines[-1]


def shallow(function: Callable, values, named: dict):
    """Call a function where it can call others FRAMES deep, and numpy does not warn."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len([*traceback.walk_stack(None)]) + FRAMES)
    try:
        with np.errstate(all="ignore"):
            return function(*values, **named)
    finally:
        sys.setrecursionlimit(limit)
