"""Command line -> preset, and how a program ends.

`parse(program, part, argv)`: the first word names the preset (none: tiny), every field of the
program's dataclasses is an option. `run(main)`: a user's mistake is one sentence and an exit code,
a bug a traceback. Next: config.py, the options; errors.py, the exit codes.
"""

import difflib
import json
import math
import os
import select
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    preset = replace(find("preset", name, cfg.PRESETS), name=name)
    data = replace(preset.data, data_dir=f"data/{preset.name}")
    run = replace(preset.run, data_dir=data.data_dir, run_dir=f"runs/{preset.name}")
    default = data if part == "data" else TrainArgs(preset.model, preset.train, run)
    args = read_options(default, options, f"{program} {preset.name}")
    # An empty folder, such as a variable of the shell that is not set, means the preset's own.
    if part == "data":
        return replace(preset, data=replace(args, data_dir=args.data_dir or data.data_dir))
    refuse_unread(args.train, preset.train)
    folders = {k: getattr(args.run, k) or getattr(run, k) for k in ("run_dir", "data_dir")}
    return replace(preset, model=args.model, train=args.train, run=replace(args.run, **folders))


def first_word(argv: list[str]) -> tuple[str, list[str]]:
    """The word before the options, tiny if there is none; and the options."""
    return (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("tiny", argv)


def read_options(default: Any, argv: list[str], program: str) -> Any:
    """The dataclass `default` with the options of argv. For an unknown option, tyro prints the
    nearest one and exits with 2."""
    import tyro

    style = dict(config=(tyro.conf.OmitArgPrefixes,), use_underscores=True)
    return tyro.cli(type(default), default=default, args=argv, prog=program, **style)


def refuse_unread(given: cfg.TrainConfig, preset: cfg.TrainConfig) -> None:
    """UsageError for an option that the chosen optimizer or schedule would ignore."""
    for name, (other, choices, instead) in cfg.READ_BY.items():
        value, choice = getattr(given, name), getattr(given, other)
        is_read = choice in choices or (name == "decay" and given.decay_mixture)
        if value != getattr(preset, name) and not is_read:
            raise UsageError(
                f"--{name} {value} has no effect with --{other} {choice}: it is read by "
                f"{' and '.join(choices)} alone; use {instead}, or leave it out"
            )
    if given.tokens != preset.tokens and given.steps:
        raise UsageError(
            f"--tokens {given.tokens} has no effect with --steps {given.steps}; add --steps 0"
        )


def find(kind: str, name: str, table: dict) -> Any:
    """table[name]; UsageError with the nearest name if there is no such entry."""
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.0)[0]
    raise UsageError(
        f"there is no {kind} {name!r}; did you mean {near}? There are {', '.join(table)}"
    )


def count(text: str) -> int:
    """A number of tokens: "2B" -> 2_000_000_000, "10k" -> 10_000, "4096" -> 4096, "" -> 0."""
    unit = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(text[-1:].upper(), 1)
    try:
        tokens = round(float(text if unit == 1 else text[:-1]) * unit) if text else 0
    except (ValueError, OverflowError):
        tokens = -1
    if text and tokens < 1:
        raise UsageError(f"{text!r} is not a number of tokens; write 2B, 500M or 4096")
    return tokens


def weights(mixture: tuple[str, ...]) -> dict[str, float] | None:
    """("a=60", "b=40") -> {"a": 60.0, "b": 40.0}; () -> None."""
    pairs = [item.rpartition("=") for item in mixture if item]
    try:
        found = {name: float(weight) for name, _, weight in pairs}
    except ValueError:
        found = {"": math.nan}
    if not all(map(math.isfinite, found.values())) or len(found) < len(pairs):
        given = " ".join(mixture)
        raise UsageError(f"{given!r} is not NAME=WEIGHT ..., each once, as in wiki=60 code=40")
    return found or None


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(main: Callable[[list[str]], int | None]) -> None:
    """Run main(argv) and exit with its result. A user's mistake prints one sentence, once per node,
    a bug a traceback."""
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
            traceback.print_exc()
        else:
            text, file = f"error: {error}", os.environ.get("TORCHELASTIC_ERROR_FILE")
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
    is full or fails; 141 if nobody reads what we print; 1 for anything else: a bug."""
    if isinstance(error, BrokenPipeError) and _nobody_reads():
        return 141
    if isinstance(error, OSError) and error.errno in DISK_FAILS:
        return StorageError.exit_code
    return getattr(error, "exit_code", 1)


def _nobody_reads() -> bool:
    """Whether standard output is a pipe that its reader has closed, as `| head` does."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
