"""Command line -> preset, and how a program ends.

`parse(program, part, argv)`: the first word names the preset (none: tiny), every field of the
program's dataclasses is an option. `run(main)`: a user's mistake is one sentence and an exit code,
a bug a traceback. Next: config.py, the options; errors.py, the exit codes.
"""

import difflib
import errno
import io
import json
import os
import re
import select
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import config as cfg
from config import UsageError
from machinery.errors import DISK_FAILS, RankError, StorageError

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class TrainArgs:
    """Train a GPT. The first word is the preset (none: tiny); each option overrides one of its
    values."""

    model: cfg.GPTConfig
    train: cfg.TrainConfig
    run: cfg.RunConfig


def parse(program: str, part: Literal["data", "train"], argv: list[str]) -> cfg.Preset:
    """Command line -> preset with its folders and the options of argv:
    `parse("train.py", "train", ["d12", "--steps", "200"])`."""
    name, options = first_word(argv)
    others = f"There are {', '.join(cfg.PRESETS)}, and all other depths up to d99"
    preset = replace(cfg.find_preset(name) or find("preset", name, cfg.PRESETS, others), name=name)
    data = replace(preset.data, data_dir=f"data/{preset.name}")
    run = replace(preset.run, data_dir=data.data_dir, run_dir=f"runs/{preset.name}")
    default = data if part == "data" else TrainArgs(preset.model, preset.train, run)
    args = read_options(default, options, f"{program} {preset.name}")
    if part == "data":
        return replace(preset, data=args)
    return replace(preset, model=args.model, train=args.train, run=with_folders(args.run, run))


def first_word(argv: list[str]) -> tuple[str, list[str]]:
    """The word before the options, tiny if there is none; and the options."""
    return (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("tiny", argv)


def read_options(default: Any, argv: list[str], program: str) -> Any:
    """The dataclass `default` with the options of argv."""
    import tyro

    try:
        from tyro._errors import on_parse_error
    except ImportError:  # it is not public: a version other than ours then prints its boxes
        on_parse_error = nullcontext
    style = dict(config=(tyro.conf.OmitArgPrefixes,), use_underscores=True)
    with on_parse_error(lambda event: refuse(event, default)):
        options = tyro.cli(type(default), default=default, args=argv, prog=program, **style)
    cfg.check_numbers(options)
    return with_folders(options, default)


def with_folders(options: Any, default: Any) -> Any:
    """An empty folder, such as a variable of the shell that is not set, means the default's."""
    empty = [name for name, text in vars(options).items() if name.endswith("_dir") and not text]
    return replace(options, **{name: getattr(default, name) for name in empty})


def refuse(event: Any, default: Any) -> None:
    """UsageError for what tyro found, which it would print in a box."""
    help = f"python {event.prog} --help lists all"
    if words := getattr(event, "tokens", None):
        parts = [part for part in vars(default).values() if is_dataclass(part)] or [default]
        names = {f"--{name}": name for part in parts for name in vars(part)}
        find("option", words[0].partition("=")[0], names, help)
    message, argument = getattr(event, "message", ""), getattr(event, "argument", None)
    if argument is None:  # a dataclass of ours refused its values
        raise UsageError(message or help)
    option, kind = argument.lowered.name_or_flags[0], argument.lowered.metavar
    kind = {"INT": "a whole number", "FLOAT": "a number", "STR": "a value"}.get(kind, kind)
    given = repr(event.value) if hasattr(event, "value") else message.partition(": ")[2]
    raise UsageError(f"{option} takes {kind}; given: {given or 'nothing'}")


def find(kind: str, name: str, table: dict, where: str = "") -> Any:
    """table[name]; UsageError with the nearest name, if one is near, if there is no such entry."""
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
    near = f"did you mean {near[0]}? " if near else ""
    where = where or f"There are {', '.join(table)}"
    raise UsageError(f"there is no {kind} {name!r}; {near}{where}")


def count(text: str) -> int:
    """A number of tokens: "2B" -> 2_000_000_000, "10k" -> 10_000, "4096" -> 4096, "" -> 0."""
    unit = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(text[-1:].upper(), 1)
    try:
        tokens = round(float(text if unit == 1 else text[:-1]) * unit) if text else 0
    except (ValueError, OverflowError):
        tokens = -1
    if text and not 1 <= tokens <= cfg.LARGEST:
        raise UsageError(f"{text!r} is not a number of tokens; write 2B, 500M or 4096")
    return tokens


def weights(mixture: tuple[str, ...]) -> dict[str, float] | None:
    """("a=60", "b=40") -> {"a": 60.0, "b": 40.0}; () -> None."""
    items = [item for item in mixture if item]
    pairs = [re.fullmatch(r"(.*)=(\d{1,15}\.?\d*|\.\d+)", item, re.DOTALL) for item in items]
    found = {pair[1]: float(pair[2]) for pair in pairs if pair}
    if len(found) < len(items):
        text = " ".join(mixture)
        raise UsageError(f"{text!r} is not NAME=WEIGHT ..., each once, as in wiki=60 code=40")
    return found or None


def public(text: str) -> str:
    """A text without what may be secret in its URLs: user, password and query."""
    text = re.sub(r"(\w://)[^\s/'\"]*@", r"\1", text)
    return re.sub(r"(\w://[^\s?'\"]*)\?[^\s'\"]*", r"\1", text)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(main: Callable[[list[str]], int | None]) -> None:
    """Run main(argv) and exit with its result. A user's mistake prints one sentence, once per node,
    a bug a traceback."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # None: it was closed
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the name of a file may hold any bytes
        setattr(sys, name, stream)
    try:
        code = main(sys.argv[1:]) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        code = 130
    except Exception as error:
        code = exit_code(error)
        if code == 141:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still to be printed
        elif code == 1 and not isinstance(error, RankError):
            print(public(traceback.format_exc()), end="", file=sys.stderr, flush=True)
        else:
            text, file = public(f"error: {error}"), os.environ.get("TORCHELASTIC_ERROR_FILE")
            if isinstance(error, OSError):  # of a disk
                text = f"error: {error.filename or 'writing'}: {error.strerror}; free some space"
            if file:  # for torchrun's summary, which would otherwise give the exit code alone
                Path(file).write_text(json.dumps({"message": text, "timestamp": int(time.time())}))
            if not file or os.environ.get("LOCAL_RANK") == "0":
                print(text, file=sys.stderr, flush=True)
    if "RANK" in os.environ:
        # Skip Python's teardown: a gloo thread that frees a tensor then either aborts the process
        # (the exit code becomes a signal) or deadlocks on the GIL.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def exit_code(error: BaseException) -> int:
    """The error's own exit_code if it has one (errors.py); that of a StorageError for a disk that
    is full or fails; 2 for a name that is too long; 141 if nobody reads what we print; 1: a bug."""
    if isinstance(error, BrokenPipeError) and _nobody_reads():
        return 141
    codes = dict.fromkeys(DISK_FAILS, StorageError.exit_code) | {errno.ENAMETOOLONG: 2}
    if isinstance(error, OSError) and error.errno in codes:
        return codes[error.errno]
    return getattr(error, "exit_code", 1)


def _nobody_reads() -> bool:
    """Whether standard output is a pipe that its reader has closed, as `| head` does."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
