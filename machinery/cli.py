"""Command line -> preset; how a program ends.

`parse(program, part, argv)`: the first word names the preset (none: tiny), every field of the
program's dataclasses is an option. `run(main)`: a user's mistake ends in one sentence and an exit
code, a bug in a traceback. Next: config.py, the options; errors.py, the exit codes.
"""

import difflib
import os
import re
import select
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import config as cfg
from config import UsageError
from machinery import disk
from machinery.errors import REMEDIES, RankError, StorageError
from machinery.output import printable, say


@dataclass(frozen=True)
class TrainArgs:
    """Train a GPT. The first word is the preset (default: tiny); options override its values."""

    train: cfg.TrainConfig
    run: cfg.RunConfig
    model: cfg.GPTConfig


def parse(program: str, part: Literal["data", "train"], argv: list[str]) -> cfg.Preset:
    """`parse("train.py", "train", ["d12", "--steps", "200"])` -> the preset with its folders."""
    name, options = first_word(argv)
    preset = preset_called(name)
    default = TrainArgs(preset.train, preset.run, preset.model)
    args = read_options(preset.data if part == "data" else default, options, f"{program} {name}")
    where = args if part == "data" else args.run
    own = where.name or name
    if not re.fullmatch(r"[^/]*[^/.]", own):
        raise UsageError(f"--name {own} is not the name of a folder; write --name mine")
    where = with_folders(where, dict(data_dir=f"data/{own}", run_dir=f"runs/{own}"))
    if part == "data":
        return replace(preset, data=where)
    return replace(preset, model=args.model, train=args.train, run=where)


def preset_called(name: str) -> cfg.Preset:
    """The preset of that name or depth; UsageError, with a similar name, if there is none."""
    others = f"there are {', '.join(cfg.PRESETS)}, and all depths up to d99, also as d99-stock; a "
    others += f"text goes after --source, a name of yours after --name: tiny --name {name}"
    return replace(cfg.find_preset(name) or lookup("preset", name, cfg.PRESETS, others), name=name)


def first_word(argv: list[str]) -> tuple[str, list[str]]:
    """The word before the options, tiny if there is none; and the options."""
    return (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("tiny", argv)


def read_options(default: Any, argv: list[str], program: str) -> Any:
    """`default` with argv's options. tyro reports mistakes, once per node, and exits with 2."""
    import tyro

    parts = [part for part in vars(default).values() if is_dataclass(part)] or [default]
    ours = {name: value for part in parts for name, value in vars(part).items()}
    option = re.compile(r"--(?:[\w-]*\.)*([\w-]*)").match  # its last part: --train.max_tokens
    flags = [found[1].replace("-", "_") for found in map(option, argv) if found]
    foreign = [name for name in flags if name in cfg.FOREIGN.keys() - ours]
    if foreign:
        known = "; ".join(f"for --{name} it is {cfg.FOREIGN[name]}" for name in foreign)
        raise UsageError(f"there is no --{', --'.join(foreign)}; here {known}")
    for flag in flags:
        if isinstance(ours.get(flag), tuple) and flags.count(flag) > 1:
            raise UsageError(f"--{flag} is given twice; write all its values after one --{flag}")
    if shutil.get_terminal_size().columns < 40:
        os.environ["COLUMNS"] = "40"  # in a few, tyro's help would never end
    home = rf"\1{os.path.expanduser('~')}"  # which a shell leaves as it is after an =
    words = [re.sub(r"^(--[\w-]+=)~(?=/|$)", home, word) for word in argv]
    options = tyro.cli(
        type(default),
        default=default,
        args=words,
        prog=program,
        config=(tyro.conf.OmitArgPrefixes,),
        use_underscores=True,
        console_outputs=os.environ.get("LOCAL_RANK", "0") == "0",
    )
    cfg.check_values(options)
    if isinstance(options, TrainArgs):
        options = replace(options, train=settled(options.train, flags))
    return with_folders(options, vars(default))


def settled(train: cfg.TrainConfig, flags: list[str]) -> cfg.TrainConfig:
    """How long to train, as typed, in place of what the preset says; UsageError if typed twice, and
    for a learning rate that the optimizer does not have."""
    of_muon = ["lr_scale", "matrix_lr", "embedding_lr", "head_lr"]
    for rate in ["lr"] if train.optimizer == "muon" else of_muon:
        if rate in flags:
            raise UsageError(
                f"--{rate} does nothing with --optimizer {train.optimizer}: adamw has --lr, muon "
                f"--{', --'.join(of_muon)}"
            )
    usual = dict(steps=0, tokens="", epochs=0.0)
    typed = {name: getattr(train, name) for name in usual if name in flags and getattr(train, name)}
    if len(typed) > 1:
        raise UsageError(f"--{' and --'.join(typed)} contradict each other; give one of them")
    return replace(train, **usual | typed) if typed else train


def with_folders(options: Any, defaults: dict[str, Any]) -> Any:
    """An empty folder option, as from a shell variable that is not set, means the default."""
    given = vars(options)
    usual = {k: defaults[k] for k in given if k.endswith("_dir") and not given[k]}
    return replace(options, **usual)


def lookup(kind: str, name: str, table: dict, where: str = "") -> Any:
    """table[name]; if there is no such entry, a UsageError, with a similar name if there is one."""
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
    near = f" (did you mean {near[0]}?)" if near else ""
    where = where or f"there are {', '.join(table)}"
    raise UsageError(f"there is no {kind} {name!r}{near}; {where}")


def count(text: str) -> int:
    """A number of tokens: "2B" -> 2_000_000_000, "10k" -> 10_000, "" -> 0. UsageError for 100.000:
    whether that is 100 or 100,000 depends on the country."""
    if not text:
        return 0
    mark = re.fullmatch(r"([\d_]+)[.,][\d_.,]+", text)
    if mark:
        raise UsageError(
            f"{text} may be {re.sub('[.,]', '', text)} tokens or {mark[1]}; write one of the two, "
            "or with a unit: 2.5B"
        )
    powers = str.maketrans({"K": "e3", "M": "e6", "B": "e9", "T": "e12"})
    try:
        tokens = round(float(text.upper().translate(powers)))
    except (ValueError, OverflowError):
        tokens = 0
    if not 1 <= tokens <= cfg.LARGEST:
        raise UsageError(f"{text!r} is not a number of tokens; write 2B, 500M or 4096")
    return tokens


def weights(mixture: tuple[str, ...]) -> dict[str, float] | None:
    """("a=60", "b=40") -> {"a": 60.0, "b": 40.0}; () -> None."""
    items = [item for item in mixture if item]
    pairs = [re.fullmatch(r"(.*)=(\d{1,15}\.?\d*|\.\d+)", item) for item in items]
    found = {pair[1]: float(pair[2]) for pair in pairs if pair}
    if len(found) < len(items):
        raise UsageError(
            f"{' '.join(mixture)!r} is not NAME=WEIGHT ..., each name once; write wiki=60 code=40"
        )
    return found or None


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ignore_half_a_rank() -> None:
    """Remove what a scheduler or a notebook has left of the variables of a rank, unless all are
    there by which ranks meet: those say that a launcher has started this process."""
    needed = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    found = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & os.environ.keys()
    if needed <= os.environ.keys() and all(os.environ[name].isdecimal() for name in found):
        return
    for name in sorted(found):
        value = os.environ.pop(name)
        say(
            f"{name}={value} is ignored and this is one rank, since torchrun sets all of RANK, "
            "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT",
            file=sys.stderr,
        )


def run(main: Callable[[list[str]], int | None]) -> None:
    """Run main(argv) and exit with its result."""
    if hasattr(sys.stdout, "reconfigure"):  # not if it was closed: then it is None
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may hold any bytes
    ignore_half_a_rank()
    try:
        code = main(sys.argv[1:]) or 0
        print(end="", flush=True)
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code(error)
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if code == 130:
            say(f"stopped {error}".rstrip(), file=sys.stderr, flush=True)
        elif code == 141:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still to be printed
        elif code == 1 and not isinstance(error, RankError):
            say(traceback.format_exc(), end="", file=sys.stderr, flush=True)
        else:
            text = f"error: {error}"
            if remedy_of(error):
                text += f"; {remedy_of(error)}"
            elif isinstance(error, OSError):
                text = f"error: {error.filename} cannot be used: {error.strerror}; name another"
            if file:  # for torchrun's summary, which would otherwise give the exit code alone
                content = {"message": printable(text), "timestamp": int(time.time())}
                disk.write_json(Path(file), content)
            if not file or os.environ.get("LOCAL_RANK") == "0":
                say(text, file=sys.stderr, flush=True)
    if "RANK" in os.environ:
        # Skip Python's teardown: a gloo thread that frees a tensor then either aborts the process
        # (the exit code becomes a signal) or deadlocks on the GIL.
        print(end="", flush=True)
        os._exit(code)
    sys.exit(code)


def remedy_of(error: BaseException) -> str | None:
    """What helps if the disk failed, or if one of our errors was raised because of that."""
    of_system = error.__context__ if hasattr(error, "exit_code") else error
    return REMEDIES.get(getattr(of_system, "errno", None))


def exit_code(error: BaseException) -> int:
    """The exit code of an error: its own (errors.py), a suitable one for OSErrors, 1 for a bug."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, BrokenPipeError):  # stdout's, closed as by `| head`, or another's
        poll = select.poll()
        poll.register(1, 0)  # report errors only
        return 141 if poll.poll(0) else 1
    if remedy_of(error):
        return StorageError.exit_code
    if isinstance(error, OSError) and error.filename and not isinstance(error, FileNotFoundError):
        return UsageError.exit_code  # the user named a path that cannot be used
    return getattr(error, "exit_code", 1)
