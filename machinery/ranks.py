"""The machine a program runs on: device, dtype, threads, and the ranks that train together.

Reads the environment that torchrun sets; plain `python` is one rank. If a rank does not
start, connect or answer, the others end within a time limit. Next: train.py.
"""

import contextlib
import ctypes
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException as DCPError
from torch.distributed.distributed_c10d import _set_pg_timeout

from config import UsageError
from machinery import cli, disk
from machinery.errors import RankError, StorageError, reason_of

# Seconds for all ranks to start and connect: on one node, on several.
MEET_S = 30.0
NODES_MEET_S = 300.0
ANSWER_S = 600.0  # to join a collective; one may be compiling
DAY_S = 86_400.0  # to copy data, or a checkpoint, from or to a store


class Team:
    """Ranks that act together, in a gloo group of their own: what one thread does with it must not
    interleave with the collectives of another. alone: this process only. first_s, others_s: how
    long the first rank waits for the others, and they for it; by default ANSWER_S."""

    def __init__(self, alone: bool = False, first_s: float = 0, others_s: float = 0):
        self.rank = 0
        self.size = 1
        self.group = None
        if dist.is_initialized() and not alone:
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()
            limit_s = (others_s if self.rank else first_s) or ANSWER_S
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_s))
        self.for_dcp = {"process_group": self.group, "no_dist": self.size == 1}

    def on_all(self, work: Callable[[], Any], otherwise: type = StorageError) -> list:
        """Run work() on every rank; returns the results by rank. If one rank fails, all ranks raise
        its error, so that none waits: as class `otherwise`, unless its own has an exit code."""
        result = error = None
        try:
            result = work()
        except (Exception, DCPError) as e:  # DCP's is only a BaseException
            rank, (cause, _) = next(iter(getattr(e, "failures", {self.rank: (e, None)}).items()))
            is_ours = hasattr(e, "exit_code")
            who = f"rank {rank}: " if self.size > 1 else ""
            text = str(e) if is_ours else reason_of(cause)
            error = (type(e) if is_ours else otherwise)(who + text)
        found = [(result, error)] * self.size
        if self.size > 1:
            dist.all_gather_object(found, (result, error), group=self.group)
        for _, error in found:
            if error:
                raise error
        return [result for result, _ in found]

    def on_first(self, work: Callable[[], Any], otherwise: type = StorageError) -> Any:
        """Run work() on rank 0 only; every rank gets its result, or its error."""
        return self.on_all(lambda: work() if self.rank == 0 else None, otherwise)[0]

    def any(self, value: Any) -> Any:
        """The first true value that a rank has, or None; the same on all."""
        return next(filter(None, self.on_all(lambda: value)), None)


@dataclass(frozen=True)
class World:
    """This process among the ranks, and the device and dtype it computes with."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    dtype: torch.dtype
    memory_bytes: int  # of the GPU that has least; without GPUs, a rank's share of host memory
    device_name: str  # a GPU's, as its driver says it; else cpu or mps
    # For what the ranks decide together before the first step.
    team: Team = field(default_factory=Team, kw_only=True)

    is_first = property(lambda self: self.rank == 0)


def pick_device(asked: str = "auto", local_rank: int = 0) -> torch.device:
    """`auto`: cuda, then mps, then cpu. UsageError for a GPU that PyTorch cannot use."""
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has = dict(cuda=n_gpus > 0, mps=torch.backends.mps.is_available(), cpu=True)
    if asked == "auto":
        if not n_gpus and os.path.exists("/dev/nvidia0"):
            raise UsageError(
                f"PyTorch {torch.__version__} cannot use the GPU here; run.sh installs one that "
                "fits its driver; --device cpu runs without it"
            )
        asked = next(kind for kind in has if has[kind])
    kind, _, index = asked.partition(":")
    if not re.fullmatch("(cuda(:[0-9]+)?|mps|cpu)", asked) or not has[kind]:
        raise UsageError(f"--device {asked} is not available; choose auto, cuda, mps or cpu")
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", int(index or local_rank))
    if device.index >= n_gpus:
        raise UsageError(
            f"rank {local_rank} of this machine needs {device}, but it has {n_gpus} GPUs; try "
            f"torchrun --nproc_per_node={n_gpus}"
        )
    torch.cuda.set_device(device)
    return device


def pick_dtype(device: torch.device, asked: str = "auto") -> torch.dtype:
    """`auto`: bf16 if the hardware multiplies it natively, fp16 on a V100 or a T4, else fp32."""
    if asked != "auto":
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[asked]
    if device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(device)
        return torch.bfloat16 if major >= 8 else torch.float16 if major == 7 else torch.float32
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if device.type == "cpu" and has_bf16 else torch.float32


def start(device: str = "auto", dtype: str = "auto") -> World:
    """Become a rank: pick the device, connect to the other ranks, test the connection."""
    alone = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)
    values = (int(os.environ.get(name, default)) for name, default in alone.items())
    rank, world_size, local_rank, ranks_here = values
    chosen = pick_device(device, local_rank)
    name = chosen.type
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_here
    if name == "cpu":
        _set_up_cpu(ranks_here)
    if name == "cuda":
        gpu = torch.cuda.get_device_properties(chosen)
        name = gpu.name
        memory_bytes = gpu.total_memory
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False  # sums may overflow
    world = World(
        rank, world_size, local_rank, chosen, pick_dtype(chosen, dtype), memory_bytes, name
    )
    if world_size > 1:
        meet_and_test(world, MEET_S if world_size == ranks_here else NODES_MEET_S)
        least = torch.tensor(memory_bytes)  # all ranks must plan alike, for the smallest of them
        dist.all_reduce(least, dist.ReduceOp.MIN)
        world = replace(world, memory_bytes=int(least), team=Team())
    return world


def _set_up_cpu(ranks_here: int) -> None:
    """Set the number of threads, make sums deterministic, and keep freed memory for reuse."""
    # torchrun gives each of several ranks one thread; take a fair share of the cores instead
    if ranks_here > 1 or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cli.cores() // ranks_here))
    # Threads that add to the same row of a table do so in a fixed order, for identical bits.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    # Else the C library returns freed tensors' pages, and zeroing new ones takes 12% of a step.
    if not any(name.startswith("MALLOC_") for name in os.environ):
        with contextlib.suppress(OSError, AttributeError):  # another C library has no mallopt
            libc = ctypes.CDLL(None)
            libc.mallopt(-4, 0)  # M_MMAP_MAX; the numbers are from glibc's malloc.h
            libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD


def meet_and_test(world: World, timeout_s: float) -> None:
    """Connect all ranks and add up one number; RankError if that takes longer than timeout_s."""
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        one = torch.ones(1, device=world.device)
        dist.all_reduce(one)
        one.item()  # waits for the sum
    except RuntimeError as error:  # torch.distributed.DistError is one
        raise RankError(
            f"rank {world.rank} of {world.world_size} ({world.device_name}) could not meet the "
            f"others within {timeout_s:.0f} s ({str(error).splitlines()[0]}); look at their "
            "output; between nodes set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; within one, try "
            "NCCL_P2P_DISABLE=1"
        ) from None
    _set_pg_timeout(timedelta(seconds=ANSWER_S))


def device_name(world: World) -> str:
    """The GPU; or the processor, with the threads that torch takes."""
    if world.device.type != "cpu":
        return world.device_name
    n = torch.get_num_threads()
    return f"{cpu_name()}, {n} thread{'s' * (n > 1)}"


def cpu_name() -> str:
    """The processor's model name, where /proc/cpuinfo has it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", disk.read_text(info)) if info.exists() else []
    return names[0] if names else "CPU"


class Signals:
    """From now on, these signals are only noted, in `received`; the next step's all-reduce tells
    all ranks. A second Ctrl-C interrupts at once, a third is ignored."""

    STOP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP

    def __init__(self):
        self.received = 0
        for signum in self.STOP:
            if (signum, signal.getsignal(signum)) != (signal.SIGHUP, signal.SIG_IGN):  # nohup
                signal.signal(signum, self._note)

    def _note(self, signum, frame) -> None:
        if self.received == signum == signal.SIGINT:
            signal.signal(signum, signal.SIG_IGN)
            raise KeyboardInterrupt("at once: the same command resumes from the newest checkpoint")
        self.received = signum
        if os.environ.get("LOCAL_RANK", "0") == "0":
            os.write(2, b"ends soon, with a checkpoint; Ctrl-C again: at once, without one\n")
