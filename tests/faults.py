"""Real processes for test_faults.py: start train.py, watch it, kill it, and spoil it on purpose.

`start` forks a process that has already done the imports (a run of a tiny model then takes half a
second). It becomes `python train.py ARGS`, or one rank of several, after applying `spoil`:
functions of this file that break something in that process. `launch` is torchrun itself. Neither
paints pictures.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

from conftest import ROOT, SMALL, command, environment, paint_nothing

HERE = Path(__file__).parent


# ------------------------------------------------------------------------------- processes


class Run:
    """The processes of one run: its ranks (and a launcher), and where they print to."""

    of_this_test: ClassVar[list["Run"]] = []  # conftest.py stops them after it

    def __init__(self, processes: list, outputs: list[Path], run_dir: Path):
        self.processes, self.outputs, self.run_dir = processes, outputs, Path(run_dir)
        self.of_this_test.append(self)

    @property
    def text(self) -> str:
        return "".join(o.read_text(errors="replace") for o in self.outputs)

    @property
    def pids(self) -> list[int]:
        """Of the ranks, in order; under torchrun those that have started."""
        if isinstance(self.processes[0], subprocess.Popen):
            return [pid for p in self.processes for pid in ranks_of(p.pid)]
        return [p.pid for p in self.processes]

    def alive(self) -> bool:
        return any(_code(p) is None for p in self.processes)

    def step(self) -> int:
        """The last step in metrics.jsonl."""
        return max((r["step"] for r in records(self.run_dir) if "loss" in r), default=0)

    def until(self, ready, timeout_s: float = 60.0) -> "Run":
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
        pids = self.pids if ranks is None else [self.pids[r] for r in ranks]
        if ranks is None and isinstance(self.processes[0], subprocess.Popen):
            pids = [p.pid for p in self.processes] + pids
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        return self

    def stop(self) -> None:
        """Kill what is left, and wait for it."""
        self.kill()
        for p in self.processes:
            p.wait() if isinstance(p, subprocess.Popen) else p.join()

    def codes(self) -> list[int | None]:
        return [_code(p) for p in self.processes]

    def end(self, *codes: int, timeout_s: float = 60.0) -> str:
        """Wait for the end, which must come with these exit codes (of all, if one); the output."""
        deadline = time.monotonic() + timeout_s
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        late = self.alive()
        self.stop()
        assert not late, f"still there after {timeout_s} s\n{self.text}"
        expected = list(codes) * (len(self.processes) if len(codes) == 1 else 1)
        assert not codes or self.codes() == expected, f"{self.codes()}\n{self.text}"
        return self.text


def _code(process) -> int | None:
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def ranks_of(launcher: int) -> list[int]:
    """Process ids of a launcher's ranks, in order of local rank (from /proc)."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if f"\nPPid:\t{launcher}\n" in status.read_text():
                variables = (status.parent / "environ").read_bytes().split(b"\0")
                rank = [v[11:] for v in variables if v.startswith(b"LOCAL_RANK=")]
                if rank:
                    found[int(rank[0])] = int(status.parent.name)
    return [found[r] for r in sorted(found)]


def records(run_dir) -> list[dict]:
    """Lines of metrics.jsonl, also while it is being written."""
    path, found = Path(run_dir) / "metrics.jsonl", []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


_outputs = iter(range(10**9))


def start(data, run_dir, *args, world: int = 1, spoil=(), env=None, argv=None) -> Run:
    """`python train.py tiny ... ARGS` on `world` ranks, without a launcher. argv: another command
    line in place of that."""
    context = multiprocessing.get_context("forkserver")
    theirs = dict(PYTHONPATH=f"{ROOT}{os.pathsep}{HERE}", CUDA_VISIBLE_DEVICES="")
    with mock.patch.dict(os.environ, theirs):
        context.set_forkserver_preload(["faults_preload"])
        multiprocessing.forkserver.ensure_running()
    argv = argv or ["tiny", *SMALL, "--data_dir", data, "--run_dir", run_dir, *args]
    env = {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": "", **(env or {})}
    processes, outputs = [], []
    folder = Path(run_dir).parent
    folder.mkdir(parents=True, exist_ok=True)
    meeting = dict(MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
    meeting |= dict(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    for rank in range(world):
        mine = env | meeting | dict(RANK=str(rank), LOCAL_RANK=str(rank)) if world > 1 else env
        outputs.append(folder / f"output_{next(_outputs)}_rank_{rank}.txt")
        outputs[-1].touch()
        job = (str(outputs[-1]), mine, [str(a) for a in argv], list(spoil))
        processes.append(context.Process(target=child, args=job, daemon=True))
        processes[-1].start()
    return Run(processes, outputs, run_dir)


def launch(data, run_dir, *args, world: int = 2, nodes: int = 1, spoil=(), **env) -> Run:
    """The same under torchrun; `nodes` launchers that meet as nodes of a cluster would."""
    argv = ["tiny", *SMALL, "--data_dir", data, "--run_dir", run_dir, *args]
    argv = [str(a) for a in argv]
    whole = command(str(HERE / "faults.py"), [json.dumps(list(spoil)), *argv], nproc=world)
    if nodes > 1:
        meet = f"--nnodes={nodes} --rdzv_backend=c10d --rdzv_id=test --local_addr=localhost"
        at = whole.index("--standalone")
        whole[at : at + 1] = [*meet.split(), f"--rdzv_endpoint=localhost:{free_port()}"]
    tools = dict(stderr=subprocess.STDOUT, cwd=ROOT)
    tools |= dict(env=environment(PYTHONPATH=f"{ROOT}{os.pathsep}{HERE}", **env))
    processes, outputs = [], []
    for _ in range(nodes):
        outputs.append(Path(run_dir).parent / f"output_{next(_outputs)}.txt")
        with open(outputs[-1], "w") as file:
            processes.append(subprocess.Popen(whole, stdout=file, **tools))
    return Run(processes, outputs, run_dir)


def edited(folder: Path, file: str, old: str, new: str) -> tuple[str, str]:
    """The fault of a student's copy of the project, in `folder`, with a line of a file replaced."""
    packages = [path.parent for path in ROOT.glob("*/__init__.py")]
    for path in (path for place in (ROOT, *packages) for path in place.glob("*.py")):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    text = (folder / file).read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times: {old}"
    (folder / file).write_text(text.replace(old, new))
    return "use_project_in", str(folder)


def child(output: str, env: dict, argv: list[str], spoil: list) -> None:
    """Become `python train.py`: what the forked process runs."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False)
    for name, value in env.items():
        os.environ.pop(name, None) if value == "" else os.environ.__setitem__(name, value)
    sys.path[:0] = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    become_train(argv, spoil)


def become_train(argv: list[str], spoil: list) -> None:
    for name, *args in spoil:
        globals()[name](*args)
    import train
    from machinery import cli

    sys.argv = ["train.py", *argv]
    cli.run(train.main)


# ------------------------------------------------------------------- what a run can be spoiled by


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def _after_step(more) -> None:
    """Let more(run, progress) run once a step is taken and its numbers are written down."""
    import train

    honest = train.log_step

    def log_step(run, progress, numbers):
        honest(run, progress, numbers)
        more(run, progress)

    train.log_step = log_step


def slow(seconds: float) -> None:
    """Sleep after each step, so that there is time to be killed in."""
    _after_step(lambda run, progress: time.sleep(seconds))


def minutes_pass(minutes: float, only_rank: int = 0) -> None:
    """By the clock of one rank's training, each step takes so long; it does not."""
    import train

    passed = []
    clock = dict(vars(time), monotonic=lambda: time.monotonic() + 60 * minutes * len(passed))
    train.time = SimpleNamespace(**clock)
    _after_step(lambda run, progress: passed.append(1) if rank() == only_rank else None)


def wait_for_saves() -> None:
    """A step does not begin before the save that the one before has asked for is at its end."""
    from machinery.checkpoint import Checkpointer

    honest = Checkpointer.save

    def save(checkpoints, *args, **kwargs):
        honest(checkpoints, *args, **kwargs)
        checkpoints.join()

    Checkpointer.save = save


def hold(step: int, until: str) -> None:
    """After a step, wait until this file exists."""

    def wait(run, progress):
        while progress.step == step and not Path(until).exists():
            time.sleep(0.01)

    _after_step(wait)


def signal_at(step: int, signum: int, only_rank: int = -1) -> None:
    """Send this process a signal right after a step."""

    def send(run, progress):
        if progress.step == step and only_rank in (-1, rank()):
            os.kill(os.getpid(), signum)

    _after_step(send)


def ignore(signum: int) -> None:
    """As nohup does."""
    signal.signal(signum, signal.SIG_IGN)


def kill_at_stage(stage: str, step: int) -> None:
    """SIGKILL to the first rank at this stage of publishing the checkpoint of `step`."""
    from machinery import checkpoint

    begun = []
    begin = checkpoint._begin

    def noting(path, state):
        begun.append(path.name)
        return begin(path, state)

    def stage_is(name):
        if name == stage and begun and begun[-1] == f"step_{step:08d}":
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint._begin, checkpoint._stage = noting, stage_is


def kill_before_validation(step: int) -> None:
    """SIGKILL once the checkpoint of `step` is published, before its validation is written down."""
    from machinery.log import Log

    honest = Log.write

    def write(log, record):
        if record.get("step") == step and record.keys() & {"val_bpb", "full_val_bpb"}:
            while not (log.run_dir / "checkpoints" / f"step_{step:08d}").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        honest(log, record)

    Log.write = write


def save_at_once() -> None:
    """Instead of training: save what was loaded, under its own step, as if it were new."""
    import train

    def resave(run, progress):
        path = run.log.run_dir / "checkpoints" / f"step_{progress.step:08d}"
        if rank() == 0:
            path.rename(path.with_name("before"))
        train.save(run, progress, wait=True)

    train.train = resave


def saves_until_joined() -> None:
    """A save in the background ends no sooner than training waits for it."""
    from machinery import checkpoint

    joined, honest = threading.Event(), checkpoint.Checkpointer.join

    def join(checkpoints, *args, **kwargs):
        joined.set()
        try:
            return honest(checkpoints, *args, **kwargs)
        finally:
            joined.clear()

    checkpoint.Checkpointer.join = join
    checkpoint._stage = lambda name: name == "write" and joined.wait(60)


def failing_saves(first: int, last: int, only_rank: int = 0) -> None:
    """Writing the checkpoints of steps first..last ends in a full disk."""
    from machinery import checkpoint

    honest = checkpoint._hash_own

    def fsync_and_hash(team, tmp):
        step = int(tmp.name.split("-")[1])
        if first <= step <= last and team.rank == only_rank:
            raise OSError(28, "No space left on device")
        return honest(team, tmp)

    checkpoint._hash_own = fsync_and_hash


def full_disk_for_metrics(first: int, last: int) -> None:
    """metrics.jsonl takes no lines of the steps first to last."""
    from machinery import disk
    from machinery.log import Log

    honest, append = Log.write, disk.append

    def refuse(path, text):
        raise OSError(28, "No space left on device")

    def write(log, record):
        disk.append = refuse if first <= record.get("step", 0) <= last else append
        honest(log, record)

    Log.write = write


def dropout(p: float) -> None:
    """Dropout at the output of each MLP, as a reader may add it to the model."""
    import torch.nn.functional as F

    from model import MLP

    honest = MLP.forward
    MLP.forward = lambda mlp, x: F.dropout(honest(mlp, x), p, mlp.training)


def poison(steps: list[int], only_rank: int) -> None:
    """A loss of NaN, gradients included, at these steps on one rank."""
    from dataclasses import replace

    import torch

    import train

    honest = train.take_steps

    class _Wrapped(torch.nn.Module):
        def __init__(self, model, progress):
            super().__init__()
            self.model, self.progress = model, progress

        def forward(self, inputs, targets, **how):
            loss = self.model(inputs, targets, **how)
            return loss * float("nan") if self.progress.step + 1 in steps else loss

    def take_steps(run, progress):
        if rank() == only_rank:
            run = replace(run, step_model=_Wrapped(run.step_model, progress))
        return honest(run, progress)

    train.take_steps = take_steps


def use_project_in(folder: str) -> None:
    """Run this copy of the project (see `edited`), not what is imported already."""
    ours = {path.stem for path in Path(folder).iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]
    sys.path.insert(0, folder)


def note_weights() -> None:
    """Print a fingerprint of weights and optimizer state after each step, bad ones included."""
    import hashlib

    import train

    def fingerprint(run):
        digest = hashlib.sha256()
        tensors = [p.detach() for p in run.model.parameters()]
        for optimizer in run.optimizers:
            tensors += [t for slots in optimizer.state.values() for t in slots.values()]
        for tensor in tensors:
            digest.update(getattr(tensor, "_local_tensor", tensor).numpy().tobytes())
        return digest.hexdigest()

    honest = train.log_step

    def noting(run, progress, numbers):
        print(f"rank {rank()} weights {numbers['step']} {fingerprint(run)}", flush=True)
        return honest(run, progress, numbers)

    train.log_step = noting


def note_rows() -> None:
    """Print each row that is trained on, with its position in the order of all."""
    import data

    honest = data.RowLoader.next_batch

    def next_batch(loader):
        inputs, targets = honest(loader)
        count = int((targets[:, 0] != data.IGNORED).sum())  # the others only fill the batch
        for p, row in enumerate(loader.row_ids(loader.first_row, count), loader.first_row):
            print(f"position {p}: {row}", flush=True)
        return inputs, targets

    data.RowLoader.next_batch = next_batch


def limits(meet_s: float, answer_s: float = 100.0) -> None:
    """How long ranks wait for each other."""
    from machinery import ranks

    ranks.MEET_S, ranks.ANSWER_S = meet_s, answer_s


def late(only_rank: int, seconds: float, limit_s: float) -> None:
    """One rank comes too late to the meeting, which waits `limit_s`; the others print its start."""
    from machinery import ranks

    limits(limit_s)
    if rank() == only_rank:
        time.sleep(seconds)
    honest = ranks.meet_and_test

    def meet_and_test(*args):
        print(f"meeting since {time.monotonic()}", flush=True)
        honest(*args)

    ranks.meet_and_test = meet_and_test


def mute(only_rank: int) -> None:
    """One rank says that it is there, and then connects to nobody."""
    import torch.distributed as dist

    if rank() == only_rank:
        dist.init_process_group = lambda *args, **kwargs: time.sleep(600)


def store(renew_s: float, watch_s: float, *protocols: str) -> None:
    """A lease that is renewed and watched for so long; and more protocols of URLs."""
    from machinery import mirror, store

    mirror.RENEW_S, mirror.WATCH_S, store.PAUSES_S = renew_s, watch_s, (0.05, 0.05)
    store.PROTOCOLS.update(protocols)


def slow_mirror(seconds: float) -> None:
    """Each upload of the tensors to the mirror takes a while."""
    from machinery.store import Store

    honest = Store.send

    def send(store, file, *args):
        time.sleep(seconds if "dcp" in file.parts else 0)
        return honest(store, file, *args)

    Store.send = send


def slow_step(step: int, seconds: float, only_rank: int) -> None:
    """One rank takes longer over one step, as for compiling."""
    import train

    honest = train.take_steps

    def take_steps(run, progress):
        taken = honest(run, progress)
        while True:
            if progress.step == step and rank() == only_rank:
                time.sleep(seconds)
            if (numbers := next(taken, None)) is None:
                return
            yield numbers

    train.take_steps = take_steps


def little_memory(only_rank: int, nbytes: int) -> None:
    """The machine of one rank has less memory than those of the others."""
    from machinery import ranks

    honest = ranks.memory_of
    ranks.memory_of = lambda device: nbytes if rank() == only_rank else honest(device)


def disk(free: int) -> None:
    import shutil

    usage = shutil.disk_usage("/")._replace(free=free)
    shutil.disk_usage = lambda path: usage


def no_compiler(where: str, only_rank: int = -1) -> None:
    """torch.compile refuses at once, or when the compiled model is called."""
    import torch

    def fail(*args, **kwargs):
        raise RuntimeError("no C++ compiler found")

    def compile(model, **kwargs):
        return fail() if where == "at once" else fail

    if only_rank in (-1, rank()):
        torch.compile = compile


def fake_compiler(only_rank: int) -> None:
    """A compiler that works, and says how often it was asked."""
    import torch

    if rank() == only_rank:
        asked = []

        def compile(model, **kwargs):
            asked.append(model)
            print(f"compiled {len(asked)} time", flush=True)
            return model

        torch.compile = compile


def memory_for(rows: int, from_step: int = 0, only_rank: int = -1) -> None:
    """Training on more than `rows` rows at a time is out of memory, from a step on."""
    import torch

    from model import GPT

    honest, taken = GPT.forward, []
    _after_step(lambda run, progress: taken.append(progress.step))

    def forward(model, inputs, *args, **kwargs):
        here = only_rank in (-1, rank()) and len(taken) >= from_step
        if here and torch.is_grad_enabled() and len(inputs) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return honest(model, inputs, *args, **kwargs)

    GPT.forward = forward


def validation_in_the_trial() -> None:
    """The trial of a step ends with a validation, as it does on a GPU."""
    from machinery import build

    honest = build.try_step
    build.try_step = lambda *args, validate: honest(*args, validate=True)


def memory_for_backward(rows: int) -> None:
    """The backward through the first block is out of memory with more than `rows` rows."""
    import torch

    from model import Block

    honest = Block.forward

    def fail(grad):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def forward(block, x, *args, **kwargs):
        out = honest(block, x, *args, **kwargs)
        if block.attn.layer == 0 and out.requires_grad and len(x) > rows:
            out.register_hook(fail)
        return out

    Block.forward = forward


if __name__ == "__main__":  # under torchrun: faults.py SPOIL ARGS
    paint_nothing()
    become_train(sys.argv[2:], json.loads(sys.argv[1]))
