"""The machine a program runs on: device, dtype, threads, and the ranks that train together.

Reads the environment that torchrun sets; plain `python` is one rank. Guarantees: a rank that is
missing or cannot talk is named within a time limit, before any work; a GPU that PyTorch cannot use
stops the program, which would otherwise crawl on the CPU. Next: train.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from machinery.errors import RankError


@dataclass(frozen=True)
class World:
    """Who this process is among the ranks, and what it computes on."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    dtype: torch.dtype
    device_name: str

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def memory_bytes(self) -> int:
        """Memory of the device (of the host, shared by its ranks, for a CPU)."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_here


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pick_device(asked: str = "auto", local_rank: int = 0) -> torch.device:
    """`auto`: cuda, then mps, then cpu; an unusable GPU is an error, not a reason for the CPU."""
    if asked == "auto":
        if torch.cuda.is_available():
            asked = "cuda"
        elif glob.glob("/proc/driver/nvidia/version") or shutil.which("nvidia-smi"):
            _explain_unusable_gpu()
        asked = "mps" if asked == "auto" and torch.backends.mps.is_available() else asked
        asked = "cpu" if asked == "auto" else asked
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise ValueError(f"device {asked!r} is none of auto, cuda, mps, cpu") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--device cuda was asked for, but PyTorch sees no GPU; try cpu")
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def _explain_unusable_gpu() -> None:
    """Raise if there is a GPU with a driver; return if `nvidia-smi` finds none either."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return
    if driver.returncode == 0 and driver.stdout.strip():
        raise ValueError(
            f"there is a GPU (driver {driver.stdout.split()[0]}), but PyTorch {torch.__version__} "
            f"(built for CUDA {torch.version.cuda}) cannot use it; install a PyTorch built for "
            "that driver or a newer driver, or ask for --device cpu"
        )


def pick_dtype(device: torch.device, asked: str = "auto") -> torch.dtype:
    """bf16 where the hardware multiplies it natively, else fp32 (emulated bf16 is slower)."""
    if asked != "auto":
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[asked]
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    elif device.type == "cpu":
        native = any(
            getattr(torch.cpu, f"_is_{unit}_supported", lambda: False)()
            for unit in ("avx512_bf16", "amx_tile")
        )
    else:
        native = False
    return torch.bfloat16 if native else torch.float32


def start(device: str = "auto", dtype: str = "auto", timeout_s: float = 30.0) -> World:
    """Become a rank: pick the device, meet the others, test the connection."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    chosen = pick_device(device, local_rank)
    if chosen.type == "cpu":
        # torchrun gives each of several ranks one thread; take a fair share of the cores instead
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if ranks_here > 1 or "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, cores() // ranks_here))
        keep_freed_memory()
        # a fixed order of sums, also when threads add to the same row of a table: the same bits
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_float32_matmul_precision("high")
    name = chosen.type
    if chosen.type == "cuda":
        name = torch.cuda.get_device_name(chosen)
    world = World(rank, world_size, local_rank, chosen, pick_dtype(chosen, dtype), name)
    if world_size > 1:
        meet_and_test(world, timeout_s)
    return world


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors. By default it returns their pages, and
    every step waits for the system to clear new ones: 12% of a step on a CPU. Does nothing if a
    MALLOC_ variable is set."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    m_mmap_max, m_trim_threshold = -4, -1  # from malloc.h of glibc
    with contextlib.suppress(OSError, AttributeError):  # another C library has no mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, -1)


def meet_and_test(world: World, timeout_s: float) -> None:
    """Wait for every rank by name, then prove that an all-reduce works, in bounded time."""
    deadline, silent = time.monotonic() + timeout_s, []
    try:
        store = _open_store(world, timedelta(seconds=timeout_s))
        store.set(f"here/{world.rank}", "")
    except (dist.DistError, RuntimeError):
        silent.append(0)  # the store lives on rank 0's node, so rank 0 is the one that is missing
    for rank in range(0 if silent else world.world_size):
        try:
            left_s = max(0.1, deadline - time.monotonic())
            store.wait([f"here/{rank}"], timedelta(seconds=left_s))
        except (dist.DistStoreError, RuntimeError):
            silent.append(rank)
    if silent:
        raise RankError(
            f"rank {', '.join(map(str, silent))} of {world.world_size} did not come within "
            f"{timeout_s:.0f} s; look at its output, and at the network between the nodes"
        )
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size)
    number, failures = torch.ones(1, device=world.device), []

    def add_up() -> None:  # in a thread, because the call that sets up the connection can hang
        try:
            if world.device.type == "cuda":
                torch.cuda.set_device(world.device)
            dist.all_reduce(number)
            assert number.item() == world.world_size, f"all-reduce gave {number.item()}"
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=add_up, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise RankError(
            f"rank {world.rank} ({world.device_name}) waited {timeout_s:.0f} s for an "
            "all-reduce of one number; try NCCL_P2P_DISABLE=1 or NCCL_DEBUG=INFO to see why"
        )
    if failures:
        raise failures[0]


def _open_store(world: World, timeout: timedelta) -> dist.Store:
    """The store through which ranks find each other: torchrun's, or else one that rank 0 holds."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(dist.rendezvous("env://", timeout=timeout))[0]
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(
        address, port, world.world_size, world.is_first, timeout, wait_for_workers=False
    )


def any_rank(problem: str | None) -> str | None:
    """The first rank's problem, on all ranks, so that they decide alike."""
    if not dist.is_initialized():
        return problem
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next((p for p in problems if p), None)


def listen_to_signals(run) -> None:
    """SIGTERM and SIGINT set `run.signal`; the next all-reduce carries it to all ranks."""

    def on_signal(signum, frame):
        if run.signal == signal.SIGINT and signum == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice
        run.signal = signum

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, on_signal)


def once_per_node(world: World, work: Callable[[], object]) -> None:
    """Run work() on the first rank of each node while the others wait, for hours if need be; an
    error on one is raised on all."""
    error = None
    if world.world_size > 1:
        patient = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    if world.local_rank == 0:
        try:
            work()
        except Exception as e:
            error = e
    if world.world_size > 1:
        errors = [None] * world.world_size
        dist.all_gather_object(errors, error, group=patient)
        error = next((e for e in errors if e), None)
    if error:
        raise error
