"""The first ten minutes on a rented GPU: does everything work, and how fast is it?

    bash benchmarks/first_hour.sh                            ten minutes
    bash benchmarks/first_hour.sh --minutes 60               more presets, a longer comparison
    bash benchmarks/first_hour.sh --peer /tmp/nanochat       beside nanochat, from a checkout of it

Runs the parts of `plan_parts` in order of their value. Each has a limit, and is left out where too
little time remains; one that fails or hangs is reported, and the next one begins. first_hour/ gets
RESULTS.md, with all tables and the list of parts, for benchmarks/RESULTS.md, and in logs/ what each
part printed. A CPU gets smaller sizes, which test the parts and not the CPU; on a busy machine,
--slow 4 gives each part four times as long. nanochat is faster if the package `kernels` is there
(peer.py).
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from at_root import ROOT
from config import find_preset
from machinery import disk

NEEDED = "numpy pyarrow safetensors tiktoken tokenizers torch tqdm tyro xdist zstandard".split()
ROOM_FOR_ALL = 70e9  # bytes of a GPU; with less, nothing on it runs at the same time
RESERVE_S = 15  # of all the time: to end a part, and for what it then reports
SECONDS = "SECONDS"
SHOWN = 3  # last lines of a part's output, on the screen


@dataclass(frozen=True, eq=False)
class Part:
    """A command with a limit."""

    name: str
    limit_s: int
    command: list[str]  # SECONDS in it becomes the seconds that it has
    least_s: int = 15  # left out if there is less time
    needs: Path | None = None  # left out if this file is not there
    shows: str = ""  # its output from a line with these words on goes to RESULTS.md


class Hour:
    """Runs parts until the time is over, and keeps the list of how they ended."""

    def __init__(self, out: Path, seconds: float, slow: float, variables: dict[str, str]):
        self.out = out
        self.slow = slow  # factor on the limits
        self.ends_at = time.monotonic() + seconds
        self.environment = os.environ | variables
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # this is no job of torchrun
            self.environment.pop(name, None)
        self.ended: list[str] = []  # a line for each part
        self.failed = 0
        self.running: dict[Part, subprocess.Popen] = {}

    def left(self) -> int:
        return int(self.ends_at - time.monotonic())

    def run(self, *parts: Part) -> None:
        """Run these parts at the same time; returns when all have ended."""
        begun = time.monotonic()
        limits = {}
        for part in parts:
            limit = min(part.limit_s * self.slow, self.left() - RESERVE_S)
            if part.needs and not part.needs.exists():
                self.report(part, f"left out: there is no {part.needs.name}")
            elif limit < part.least_s:
                self.report(part, "left out: no time")
            else:
                limits[part] = limit
                try:
                    self.start(part, limit)
                except OSError as error:
                    self.failed += 1
                    self.report(part, f"failed: {error}")
        while self.running:
            for part, process in list(self.running.items()):
                took = time.monotonic() - begun
                code = process.poll()
                if code is None and took < limits[part]:
                    continue
                end(process)  # what it has left running, too
                del self.running[part]
                if code == 0:
                    self.report(part, f"ok ({took:.0f} s)")
                else:
                    self.failed += 1
                    ending = f"stopped after {took:.0f} s" if code is None else f"exit code {code}"
                    self.report(part, f"failed: {ending}: {self.last_lines(part, 1)[0][:120]}")
            time.sleep(0.05)

    def start(self, part: Part, limit: float) -> None:
        words = [str(int(limit)) if word == SECONDS else word for word in part.command]
        self.log_of(part).parent.mkdir(exist_ok=True)
        with open(self.log_of(part), "w") as log:
            self.running[part] = subprocess.Popen(
                words,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,  # so that `end` reaches what it starts
            )
        print(f"{part.name:<14} begins", flush=True)

    def log_of(self, part: Part) -> Path:
        return self.out / "logs" / f"{part.name}.txt"

    def lines_of(self, part: Part) -> list[str]:
        """What it has printed, if it has begun."""
        log = self.log_of(part)
        return log.read_text(errors="replace").splitlines() if log.exists() else []

    def last_lines(self, part: Part, n: int) -> list[str]:
        return [line for line in self.lines_of(part) if line.strip()][-n:] or ["no output"]

    def report(self, part: Part, said: str) -> None:
        lines = self.lines_of(part)
        begins = [n for n, line in enumerate(lines) if part.shows and part.shows in line]
        if begins:
            text = "\n".join(f"    {line}" for line in lines[begins[-1] :])
            text = text.replace(f"{self.out}/", "")  # a folder of this machine
            self.append(f"## {part.name.capitalize()}\n\n{text}")
        self.ended.append(f"{part.name:<14} {said}; {self.left()} s left")
        for line in self.last_lines(part, SHOWN) if lines else []:
            print(f"    {line[:160]}")
        print(self.ended[-1], flush=True)

    def close(self) -> None:
        """End what still runs, and write the list of parts at the end of the results."""
        for part, process in self.running.items():
            end(process)
            self.report(part, "interrupted")
        lines = "\n".join(f"    {line}" for line in self.ended)
        self.append(f"## Parts\n\n{lines}")

    def append(self, text: str) -> None:
        with open(self.out / "RESULTS.md", "a") as file:
            file.write(f"\n{text}\n")


def end(process: subprocess.Popen, patience_s: float = 10.0) -> None:
    """End a process and what it has started: SIGTERM, so that it reports, then SIGKILL."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signum)
            process.wait(patience_s)
        except (ProcessLookupError, PermissionError):  # all have ended (macOS: PermissionError)
            return
        except subprocess.TimeoutExpired:
            continue


def environment(out: Path) -> None:
    """Say what a figure may depend on, in RESULTS.md; what the parts depend on, in machine.json."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as train.py does
    import torch

    from machinery import cli, log

    gpu = torch.cuda.is_available()
    if not gpu and Path("/dev/nvidia0").exists():
        torch.zeros(1, device="cuda")  # its error says why
    facts = {
        "GPU": torch.cuda.get_device_name() if gpu else "none",
        "nvidia-smi": said(
            "nvidia-smi",
            "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu",
            "--format=csv,noheader",
        ),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "cuDNN": torch.backends.cudnn.version(),
        "Triton": said(sys.executable, "-c", "import triton; print(triton.__version__)"),
        "Python": sys.version.split()[0],
        "CPU": f"{cli.cores()} cores, {log.cpu_name()}",
        "disk": f"{shutil.disk_usage(out).free / 1e9:.0f} GB free",
        "commit": said("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
    }
    free = 0
    segments = True
    if gpu:
        free, total = torch.cuda.mem_get_info()
        facts["memory"] = f"{total / 1e9:.1f} GB, {free / 1e9:.1f} of them free"
        try:
            torch.ones(1 << 28, device="cuda").sum().item()
        except RuntimeError as error:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
            torch.ones(1 << 28, device="cuda").sum().item()  # if this fails, it was not those
            segments = False
            facts["expandable segments"] = f"do not work: {str(error).splitlines()[0]}"
    text = "## The machine\n\n" + "".join(f"- {name}: {fact}\n" for name, fact in facts.items())
    print(text)
    (out / "RESULTS.md").write_text(text)
    machine = dict(gpu=gpu, segments=segments, memory=free)
    (out / "machine.json").write_text(json.dumps(machine))


def said(*command: str) -> str:
    """The first line of what a command prints; none if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return done.stdout.strip().partition("\n")[0] or "none"


@dataclass(frozen=True)
class Sizes:
    """What is run, by kind of machine."""

    preset: str  # trained and timed
    small: str  # killed and resumed; the preset of the comparison of what is learned
    others: tuple[str, ...]  # presets timed if there is time left
    rows: str  # other micro-batches to time
    source: tuple[str, ...]  # options of prepare_data.py
    step: tuple[str, ...]  # options of a training step
    measured: tuple[str, ...]  # options of the steps that are timed
    learned: tuple[str, ...] = ()  # options of the comparison of what is learned
    save_every: str = "40"
    tests: tuple[str, ...] = ("tests/test_cuda.py",)


ON_GPU = Sizes(
    preset="d12",
    small="d6",
    others=("d20", "smol-135m"),
    rows="64 16",
    source=("code=stdlib+site", "--tokens", "80M", "--val_fraction", "0.015"),
    step=("--tokens_per_step", "131072"),
    measured=("--steps", "8"),
)
FEW_TOKENS = ("--tokens_per_step", "1024", "--no_compile")
ON_CPU = Sizes(
    preset="tiny",
    small="tiny",
    others=(),
    rows="1",
    source=("code=files:machinery", "--vocab_size", "1024", "--val_fraction", "0.1"),
    step=FEW_TOKENS,
    measured=(*FEW_TOKENS, "--steps", "2", "--warmup", "1"),
    learned=("--steps", "4"),
    save_every="8",
    tests=("tests/test_cuda.py", "-k", "pinned"),
)


def plan_parts(sizes: Sizes, args, work: Path, on_gpu: bool) -> list[list[Part]]:
    """The parts, in order of their value; those of one list run at the same time."""
    preset = sizes.preset
    rows = work / "rows"
    ready = rows / "manifest.json"
    run_dir = work / "profile"
    trace = run_dir / "profile" / "trace.json.gz"
    results = str(args.out / "RESULTS.md")

    def script(name: str, *words: str, to: str = results) -> list[str]:
        return [sys.executable, f"benchmarks/{name}.py", *words, "--results", to]

    source = [*sizes.source]
    if (ROOT / "prose").is_dir():  # made by prose.sh
        source.insert(1, f"prose=files:{ROOT}/prose/*.txt")
    prepare = [sys.executable, "prepare_data.py", preset, "--data_dir", str(rows)]
    if shutil.which("nice"):
        prepare = ["nice", "-n", "5", *prepare]
    tests = [sys.executable, "-m", "pytest", "-q", "-rs", "-n", "3", "-p", "no:cacheprovider"]
    of_rows = ("--data_dir", str(rows), *sizes.step)
    profile = [sys.executable, "train.py", preset, *of_rows, "--run_dir", str(run_dir), "--profile"]
    first = (*sizes.step, "--steps", "1", "--warmup", "1")
    beside = ("speed", preset, "--peer", args.peer)
    speed = Part("speed", 120, script("throughput", preset, *sizes.measured))
    if args.peer:
        speed = Part("speed", 240, script("peer", *beside, *sizes.measured))
    saves = ("--save_every", sizes.save_every, "--dir", str(work))
    resume = script("resume", sizes.small, *of_rows, *saves)
    learn = ("learn", sizes.small, "--peer", args.peer, *of_rows)
    learn += (*sizes.learned, "--seconds", SECONDS)
    other_rows = ("--micro_batch", *sizes.rows.split(), *sizes.measured)
    limit = 200 if args.minutes < 30 else 1200
    parts = [
        [  # none of these is timed; the first steps fill the compiler's caches
            Part("data", 150, [*prepare, "--source", *source]),
            Part("tests", 170, [*tests, *sizes.tests]),
            Part("warm", 150, script("throughput", preset, *first, to="")),
            Part("warm_peer", 150, script("peer", *beside, *first, "--sides", "nanochat", to="")),
        ],
        [speed],
        [Part("ceilings", 60, script("ceilings", preset), least_s=30)],
        [Part("resume", 150, resume, least_s=90, needs=ready)],
        [Part("profile", 100, profile, least_s=40, needs=ready, shows="where the time goes")],
        [Part("kernels", 40, script("trace_kernels", str(trace)), needs=trace)],
        [Part("learn", limit, script("peer", *learn), least_s=120, needs=ready)],
        [Part("speed_more", 160, script("throughput", preset, *other_rows), least_s=60)],
    ]
    for name in sizes.others:
        timed = script("throughput", name, *sizes.step, *sizes.measured)
        parts.append([Part(f"speed_{name}", 300, timed, least_s=120)])
    left_out = set()
    if not on_gpu:
        left_out |= {"warm", "warm_peer", "kernels"}
    if not args.peer:
        left_out |= {"warm_peer", "learn"}
    return [[part for part in each if part.name not in left_out] for each in parts]


def run_parts(args, hour: Hour, work: Path) -> None:
    """The machine first, then what is planned for its kind."""
    command = [sys.executable, __file__, "--environment", "--out", str(args.out)]
    hour.run(Part("environment", 90, command))
    if hour.failed:
        return
    machine = json.loads((args.out / "machine.json").read_text())
    sizes = ON_GPU if machine["gpu"] else ON_CPU
    if args.preset:
        sizes = replace(sizes, preset=args.preset)
    if not machine["gpu"]:
        print("torch finds no GPU: small sizes, which say nothing about speed", flush=True)
        hour.environment["TEST_DEVICE"] = "cpu"
    if not machine["segments"]:
        hour.environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
    for parts in plan_parts(sizes, args, work, machine["gpu"]):
        parts = [part for part in parts if part.name in (args.only or [part.name])]
        if machine["gpu"] and machine["memory"] < ROOM_FOR_ALL:
            for part in parts:
                hour.run(part)
        else:
            hour.run(*parts)
        if len(parts) > 1:  # Triton's choices on a busy GPU: to be made again
            for choice in (work / "inductor").rglob("*.best_config"):
                choice.unlink()


def check(args) -> None:
    """ValueError if the options do not fit together."""
    missing = [name for name in NEEDED if not importlib.util.find_spec(name)]
    if missing:
        remedy = "install requirements.txt there, or make .venv: bash run.sh test"
        raise ValueError(f"{sys.executable} has no {', '.join(missing)}; {remedy}")
    if args.peer and not Path(args.peer, "nanochat", "gpt.py").is_file():
        remedy = "git clone https://github.com/karpathy/nanochat, and give that folder"
        raise ValueError(f"--peer {args.peer}: no nanochat/gpt.py is in it; {remedy}")
    if args.preset and not find_preset(args.preset):
        raise ValueError(f"--preset {args.preset}: there is none; try d6, d12 or smol-135m")
    if args.minutes <= 0:
        raise ValueError(f"--minutes {args.minutes:g} is no time")
    parts = sum(plan_parts(ON_GPU, args, Path(), True), [])
    unknown = set(args.only) - {part.name for part in parts}
    if unknown:
        names = ", ".join(part.name for part in parts)
        raise ValueError(f"--only {min(unknown)}: no such part; there are {names}")
    if args.out.exists() and not (args.out / ".lock").exists() and any(args.out.iterdir()):
        raise ValueError(f"{args.out} holds other files; give --out a new folder")


def begin(out: Path, work: Path) -> BinaryIO:
    """Make the folders, and lock them: this file keeps them, until it is closed."""
    lock = disk.lock(out, "--out")
    for old in (work, out / "logs"):
        shutil.rmtree(old, ignore_errors=True)
    work.mkdir()
    results = out / "RESULTS.md"
    if results.exists():
        results.replace(out / f"RESULTS.{int(results.stat().st_mtime)}.md")
    return lock


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--peer", default="", help="a checkout of nanochat, to compare with")
    parser.add_argument("--preset", default="", help="instead of d12")
    parser.add_argument("--only", nargs="+", default=[], help="names of parts")
    parser.add_argument("--slow", type=float, default=1.0, help="factor on the limits of the parts")
    parser.add_argument("--out", type=Path, default=ROOT / "first_hour")
    parser.add_argument("--environment", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.peer = args.peer and str(Path(args.peer).resolve())
    if args.environment:
        environment(args.out)
        return 0
    work = args.out / "work"
    try:
        check(args)
        lock = begin(args.out, work)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    variables = dict(PYTHONUNBUFFERED="1", WANDB_MODE="disabled", MPLCONFIGDIR=str(work / "mpl"))
    variables |= dict(TORCHINDUCTOR_CACHE_DIR=str(work / "inductor"))
    variables |= dict(TRITON_CACHE_DIR=str(work / "triton"))
    hour = Hour(args.out, 60 * args.minutes, args.slow, variables)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signum, lambda signum, _: sys.exit(128 + signum))
    with lock:
        try:
            run_parts(args, hour, work)
        except KeyboardInterrupt:
            return 130
        finally:
            hour.close()
            trace = work / "profile" / "profile" / "trace.json.gz"
            if trace.exists():
                shutil.copy(trace, args.out)
            shutil.rmtree(work, ignore_errors=True)
    print(f"\nall of it: {args.out / 'RESULTS.md'}")
    return 1 if hour.failed else 0


if __name__ == "__main__":
    sys.exit(main())
