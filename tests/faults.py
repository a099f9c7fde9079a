"""Real processes for test_faults.py: start train.py, watch it, kill it, and spoil it on purpose.

`start` forks a process that has already done the imports (a run of a tiny model then takes half a
second). It becomes `python train.py ARGS`, or one rank of several, after applying `spoil`:
functions of this file that break something in that process. `launch` is torchrun itself. Neither
paints pictures.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import pkgutil
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar
from unittest import mock

from conftest import ROOT, SMALL, environment, paint_nothing

HERE = Path(__file__).parent
# What takes time to import, and every process of a run needs.
PRELOAD = (
    "faults train instruments.pages.report tyro torch._dynamo torch._inductor.config "
    "tokenizers.implementations matplotlib.figure matplotlib.backends.backend_agg"
).split()


# ------------------------------------------------------------------------------- processes
class Run:
    """The processes of one run, its ranks or launchers, and the file that they print to."""

    of_this_test: ClassVar[list["Run"]] = []  # conftest.py stops them after it

    def __init__(self, processes: list, output: Path, run_dir: Path):
        self.processes = processes
        self.output = output
        self.run_dir = Path(run_dir)
        self.of_this_test.append(self)

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def alive(self) -> bool:
        return None in self.codes()

    def step(self) -> int:
        """The last step in metrics.jsonl."""
        return max((r["step"] for r in records(self.run_dir) if "loss" in r), default=0)

    def until(self, ready, timeout_s: float = 200.0) -> "Run":
        """Wait for ready(); the run may not end before."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            assert self.alive() or ready(), f"ended too early: {self.codes()}\n{self.text}"
            assert time.monotonic() < deadline, f"waited {timeout_s} s\n{self.text}"
            time.sleep(0.002)
        return self

    def until_step(self, step: int) -> "Run":
        return self.until(lambda: self.step() >= step)

    def kill(self, signum: int = signal.SIGKILL, ranks=None) -> "Run":
        """Send a signal to the launchers and the ranks, or to these ranks alone."""
        chosen = self.processes if ranks is None else [self.processes[r] for r in ranks]
        for pid in [pid for p in chosen for pid in (p.pid, *children_of(p.pid))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        return self

    def stop(self) -> None:
        """Kill what is left, and wait for it."""
        self.kill()
        for p in self.processes:
            p.join()

    def codes(self) -> list[int | None]:
        return [p.exitcode for p in self.processes]

    def end(self, code: int | None = None, timeout_s: float = 200.0) -> str:
        """Wait for the end, which must come with this exit code on all ranks; the output."""
        self.until(lambda: not self.alive(), timeout_s)
        assert code is None or {*self.codes()} == {code}, f"{self.codes()}\n{self.text}"
        return self.text


class Launcher(subprocess.Popen):
    """With the names of a multiprocessing.Process."""

    exitcode = property(subprocess.Popen.poll)
    join = subprocess.Popen.wait


def children_of(parent: int) -> list[int]:
    """Process ids, from /proc."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if f"\nPPid:\t{parent}\n" in status.read_text():
                found.append(int(status.parent.name))
    return found


def records(run_dir) -> list[dict]:
    """Lines of metrics.jsonl, also while it is being written."""
    path = Path(run_dir) / "metrics.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def free_port() -> int:
    """Below those that the system deals out: no connection takes it before it is listened to."""
    with socket.socket() as s:
        while True:
            with contextlib.suppress(OSError):
                port = random.randrange(15_000, 32_000)
                s.bind(("localhost", port))
                return port


_outputs = iter(range(10**9))


def words_of(data, run_dir, args) -> list[str]:
    """The command line of a small run, after `train.py`."""
    return [*map(str, ["tiny", *SMALL, "--data_dir", data, "--run_dir", run_dir, *args])]


def start(
    data, run_dir, *args, world: int = 1, spoil=(), env=None, argv=None, main="train:main"
) -> Run:
    """`python train.py tiny ... ARGS` on `world` ranks, without a launcher. argv: another command
    line in place of that; main: another program."""
    context = multiprocessing.get_context("forkserver")
    theirs = environment(PYTHONPATH=f"{ROOT}{os.pathsep}{HERE}", CUDA_VISIBLE_DEVICES="")
    with mock.patch.dict(os.environ, theirs, clear=True):
        context.set_forkserver_preload(PRELOAD)
        multiprocessing.forkserver.ensure_running()
    argv = argv or words_of(data, run_dir, args)
    meeting = dict(MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
    meeting |= dict(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    output = new_output(run_dir)
    processes = []
    for rank in range(world):
        mine = meeting | dict(RANK=str(rank), LOCAL_RANK=str(rank)) if world > 1 else {}
        job = (output, mine | (env or {}), argv, list(spoil), main)
        processes.append(context.Process(target=child, args=job, daemon=True))
        processes[-1].start()
    return Run(processes, output, run_dir)


def new_output(run_dir) -> Path:
    """An empty file beside the run."""
    folder = Path(run_dir).parent
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"output_{next(_outputs)}.txt"
    path.touch()
    return path


def launch(data, run_dir, *args, world: int = 2, nodes: int = 1, spoil=(), **env) -> Run:
    """The same under torchrun; `nodes` launchers that meet as nodes of a cluster would."""
    meet = f"--nnodes={nodes} --rdzv_backend=c10d --rdzv_id=test --local_addr=localhost"
    meet += f" --rdzv_endpoint=localhost:{free_port()} --nproc_per_node={world}"
    whole = [sys.executable, "-m", "torch.distributed.run", *meet.split(), HERE / "faults.py"]
    whole += [json.dumps(list(spoil)), *words_of(data, run_dir, args)]
    env = environment(PYTHONPATH=f"{ROOT}{os.pathsep}{HERE}", **env)
    output = new_output(run_dir)
    with output.open("a") as file:
        how = dict(stdout=file, stderr=file, cwd=ROOT, env=env)
        processes = [Launcher(whole, **how) for _ in range(nodes)]
    return Run(processes, output, run_dir)


def edited(folder: Path, file: str, old: str, new: str) -> tuple[str, str]:
    """The fault of a student's copy of the project, in `folder`, with a line of a file replaced."""
    for path in (*ROOT.glob("*.py"), *ROOT.glob("*/*.py")):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    text = (folder / file).read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times: {old}"
    (folder / file).write_text(text.replace(old, new))
    return "use_project_in", str(folder)


def child(output: Path, env: dict, argv: list, spoil: list, main: str) -> None:
    """Become `python train.py`, or another program: what the forked process runs."""
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # Buffered, whatever pytest-xdist has chosen: ranks that print at once mix no lines.
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False)
    os.environ.update(env)
    if "PYTHONPATH" in env:
        sys.path.insert(0, env["PYTHONPATH"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    become(main, [*map(str, argv)], spoil)


def become(main: str, argv: list[str], spoil: list) -> None:
    paint_nothing()
    for name, *args in spoil:
        globals()[name](*args)
    from machinery import cli

    sys.argv = [f"{main.partition(':')[0]}.py", *argv]
    cli.run(pkgutil.resolve_name(main))


# ------------------------------------------------------------------- what a run can be spoiled by
def rank() -> int:
    return int(os.environ.get("RANK", 0))


def instead_of(owner: str, name: str):
    """Decorator: the function takes the place of `name` of a module ("train") or of a class
    ("model:GPT"), and gets the original as its first argument."""

    def replace(function):
        where = pkgutil.resolve_name(owner)
        honest = getattr(where, name)
        replacement = functools.wraps(honest)(lambda *a, **k: function(honest, *a, **k))
        setattr(where, name, replacement)
        return function

    return replace


def after_step(more) -> None:
    """Let more(run, progress) run once a step is taken and its numbers are written down."""

    @instead_of("train", "log_step")
    def log_step(honest, run, step):
        honest(run, step)
        more(run, run.progress)


def slow(seconds: float) -> None:
    """Sleep after each step, so that there is time to be killed in."""
    after_step(lambda run, progress: time.sleep(seconds))


def minutes_pass(minutes: float, only_rank: int = 0) -> None:
    """By the clock of one rank's training, each step takes so long; it does not."""

    @instead_of("train", "log_step")
    def log_step(honest, run, step):
        if rank() == only_rank:
            run.progress.saved_at -= 60 * minutes
            run.log.printed_at -= 60 * minutes
        honest(run, step)


def wait_for_saves() -> None:
    """A step does not begin before the save that the one before has asked for is at its end."""

    @instead_of("machinery.checkpoint:Checkpointer", "save")
    def save(honest, checkpoints, *args, **kwargs):
        honest(checkpoints, *args, **kwargs)
        checkpoints.join()


def hold(step: int, until: str = "no such file") -> None:
    """After a step, wait until a signal is received, or the file `until` exists."""

    @after_step
    def wait(run, progress):
        while progress.step == step and not (Path(until).exists() or run.signals.received):
            time.sleep(0.01)


def signal_at(step: int, signum: int, only_rank: int = -1) -> None:
    """Send this process a signal right after a step."""

    @after_step
    def send(run, progress):
        if progress.step == step and only_rank in (-1, rank()):
            os.kill(os.getpid(), signum)


def ignore(signum: int) -> None:
    """As nohup does."""
    signal.signal(signum, signal.SIG_IGN)


def unread() -> None:
    """What read the output has left."""
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    sys.stdout = open(1, "w", closefd=False)  # no longer a file that can be sought in


def kill_before_validation(step: int) -> None:
    """SIGKILL once the checkpoint of `step` is published, before its validation."""
    wait_for_saves()

    @instead_of("train", "evaluate")
    def evaluate(honest, run):
        if run.progress.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        honest(run)


def stopped_in(function: str, only_rank: int) -> None:
    """One rank is stopped, as on a suspended node, in its first call of a function of saving."""

    @instead_of("machinery.checkpoint", function)
    def call(honest, *args):
        if rank() == only_rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        return honest(*args)


def failing_saves(first: int, last: int, only_rank: int = 0) -> None:
    """Writing the checkpoints of steps first..last ends in a full disk."""

    @instead_of("machinery.checkpoint", "_hash_own")
    def hash_own(honest, team, tmp):
        step = int(tmp.name.split("-")[1][5:])
        if first <= step <= last and team.rank == only_rank:
            raise OSError(28, "No space left on device")
        return honest(team, tmp)


def full_disk_for_metrics(first: int, last: int) -> None:
    """metrics.jsonl takes no lines of the steps first to last."""

    @instead_of("machinery.disk", "append")
    def append(honest, path, text):
        if path.name == "metrics.jsonl" and first <= json.loads(text).get("step", 0) <= last:
            raise OSError(28, "No space left on device")
        honest(path, text)


def dropout(p: float) -> None:
    """Dropout at the output of each MLP, as a reader may add it to the model."""
    import torch.nn.functional as F

    spoiled = lambda honest, mlp, x: F.dropout(honest(mlp, x), p, mlp.training)
    instead_of("model:MLP", "forward")(spoiled)


def poison(steps: list[int], only_rank: int, what: str = "loss") -> None:
    """At these steps, on one rank: gradients of NaN, and by default a loss of NaN as well."""

    @instead_of("train", "add_gradients")
    def add_gradients(honest, run, scale):
        sums, yours = honest(run, scale)
        if rank() == only_rank and run.progress.step + 1 in steps:
            for p in run.model.parameters():
                p.grad *= float("nan")
            if what == "loss":
                sums["nats"] *= float("nan")
        return sums, yours


def growth(steps: int) -> None:
    """So many good steps double the loss scale of fp16."""
    import optim

    optim.GROWTH_STEPS = steps


def use_project_in(folder: str) -> None:
    """Run this copy of the project (see `edited`), not what is imported already."""
    ours = {path.stem for path in Path(folder).iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]
    sys.path.insert(0, folder)


def note_rows() -> None:
    """Print each row that is trained on, with its position in the order of all."""
    import data

    @instead_of("data:RowLoader", "next_batch")
    def next_batch(honest, loader):
        inputs, targets = honest(loader)
        count = int((targets[:, 0] != data.IGNORED).sum())  # the others only fill the batch
        for p in range(loader.position, loader.position + count):
            shard, row = loader.manifest.locate("train", *loader.order(p))
            print(f"position {p}: {shard.file} row {row}", flush=True)
        return inputs, targets


def limits(meet_s: float, answer_s: float = 100.0) -> None:
    """How long ranks wait for each other."""
    from machinery import ranks

    ranks.MEET_S = meet_s
    ranks.ANSWER_S = answer_s


def late(only_rank: int) -> None:
    """One rank does not come to the meeting."""
    if rank() == only_rank:
        time.sleep(600)


def lease(renew_s: float, watch_s: float) -> None:
    """How often a mirror's lease is renewed, and how long it is watched."""
    from stores import mirror

    mirror.RENEW_S = renew_s
    mirror.WATCH_S = watch_s


def wandb_waits(limit_s: float) -> None:
    from machinery import log

    log.WANDB_S = limit_s


def little_memory(only_rank: int, nbytes: int) -> None:
    """The machine of one rank has less memory than those of the others."""
    if rank() == only_rank:
        os.sysconf = lambda name: nbytes if name == "SC_PHYS_PAGES" else 1


def memory_for(rows: int, from_step: int = 0, only_rank: int = -1) -> None:
    """Training on more than `rows` rows at a time is out of memory, from a step on."""
    import torch

    taken = []
    after_step(lambda run, progress: taken.append(progress.step))

    @instead_of("model:GPT", "forward")
    def forward(honest, model, inputs, *args, **kwargs):
        here = only_rank in (-1, rank()) and len(taken) >= from_step
        if here and torch.is_grad_enabled() and len(inputs) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return honest(model, inputs, *args, **kwargs)


if __name__ == "__main__":  # under torchrun: faults.py SPOIL ARGS
    become("train:main", sys.argv[2:], json.loads(sys.argv[1]))
