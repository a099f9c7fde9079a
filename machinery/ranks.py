"""The machine a program runs on: device, dtype, threads, and the ranks that train together.

Reads the environment that torchrun sets; plain `python` is one rank. Guarantees: a rank that does
not come or cannot communicate is named within a time limit, before any work; a GPU that PyTorch
cannot use stops the program instead of leaving it to a slow CPU. Next: train.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.pool import ThreadPool

import torch
import torch.distributed as dist

from machinery.errors import RankError


@dataclass(frozen=True)
class World:
    """This process among the ranks, and the device and dtype it computes with."""

    rank: int
    world_size: int
    local_rank: int
    ranks_here: int
    """Ranks on this node."""
    device: torch.device
    dtype: torch.dtype

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def device_name(self) -> str:
        kind = self.device.type
        return torch.cuda.get_device_name(self.device) if kind == "cuda" else kind

    @property
    def memory_bytes(self) -> int:
        """Memory of the GPU; without one, this rank's share of the host's."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.ranks_here


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pick_device(asked: str = "auto", local_rank: int = 0) -> torch.device:
    """`auto`: cuda, then mps, then cpu. ValueError for a GPU that PyTorch cannot use."""
    has_cuda = torch.cuda.is_available()
    if asked == "auto":
        if not has_cuda:
            _refuse_unusable_gpu()
        asked = "cuda" if has_cuda else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise ValueError(f"device {asked!r} is none of auto, cuda, mps, cpu") from None
    if device.type == "cuda":
        if not has_cuda:
            raise ValueError(f"--device {asked} was asked for, but PyTorch sees no GPU; try cpu")
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def _refuse_unusable_gpu() -> None:
    """ValueError if `nvidia-smi` finds a GPU although PyTorch does not."""
    query = "timeout 20 nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    status, driver = subprocess.getstatusoutput(query)  # status 127: no such program
    if status == 0 and driver:
        raise ValueError(
            f"there is a GPU (driver {driver.split()[0]}), but PyTorch {torch.__version__} "
            f"(built for CUDA {torch.version.cuda}) cannot use it; install a PyTorch built for "
            "that driver or a newer driver, or ask for --device cpu"
        )


def pick_dtype(device: torch.device, asked: str = "auto") -> torch.dtype:
    """`auto`: bf16 where the hardware multiplies it natively, else fp32 (emulation is slower)."""
    if asked != "auto":
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[asked]
    native = False
    if device.type == "cuda":
        native = torch.cuda.get_device_capability(device) >= (8, 0)
    elif device.type == "cpu":
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def start(device: str = "auto", dtype: str = "auto", timeout_s: float = 30.0) -> World:
    """Become a rank: pick the device, meet the others, test the connection."""
    alone = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)
    ranks = [int(os.environ.get(name, default)) for name, default in alone.items()]
    _, world_size, local_rank, ranks_here = ranks
    chosen = pick_device(device, local_rank)
    if chosen.type == "cpu":
        # torchrun gives each of several ranks one thread; take a fair share of the cores instead
        if ranks_here > 1 or "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, cores() // ranks_here))
        keep_freed_memory()
        # Threads that add to the same row of a table do so in a fixed order: the same bits.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_float32_matmul_precision("high")
    world = World(*ranks, chosen, pick_dtype(chosen, dtype))
    if world_size > 1:
        meet_and_test(world, timeout_s)
    return world


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors, unless a MALLOC_ variable is set. By
    default it returns their pages, and clearing new ones takes 12% of a step on a CPU."""
    m_mmap_max, m_trim_threshold = -4, -1  # from malloc.h of glibc
    if not any(name.startswith("MALLOC_") for name in os.environ):
        with contextlib.suppress(OSError, AttributeError):  # another C library has no mallopt
            libc = ctypes.CDLL(None)
            libc.mallopt(m_mmap_max, 0)
            libc.mallopt(m_trim_threshold, -1)


def meet_and_test(world: World, timeout_s: float) -> None:
    """Wait for all ranks, then test an all-reduce. RankError names the ranks that do not come, or
    the one whose connection hangs."""
    timeout, keys = timedelta(seconds=timeout_s), [f"here/{r}" for r in range(world.world_size)]
    try:
        store = _open_store(world, timeout)
        store.set(keys[world.rank], "")
        with contextlib.suppress(dist.DistStoreError):  # the time is over
            store.wait(keys, timeout)
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        missing = ["0"]  # its node holds the store
    if missing:
        raise RankError(
            f"rank {', '.join(missing)} of {world.world_size} did not come within {timeout_s:.0f} "
            "s; look at its output, and at the network between the nodes"
        )
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.world_size)

    def count_ranks() -> float:
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)  # a thread begins with device 0
        one = torch.ones(1, device=world.device)
        dist.all_reduce(one)
        return one.item()

    try:
        # in a daemon thread, because the call that sets up the connection can hang
        with ThreadPool(1) as pool:
            counted = pool.apply_async(count_ranks).get(timeout_s)
    except multiprocessing.TimeoutError:
        raise RankError(
            f"rank {world.rank} ({world.device_name}) waited {timeout_s:.0f} s for an "
            "all-reduce of one number; try NCCL_P2P_DISABLE=1 or NCCL_DEBUG=INFO to see why"
        ) from None
    assert counted == world.world_size, f"counted {counted} ranks"


def _open_store(world: World, timeout: timedelta) -> dist.Store:
    """The store through which ranks find each other: torchrun's, or else one that rank 0 holds."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(dist.rendezvous("env://", timeout=timeout))[0]
    address, port, n = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world.world_size
    return dist.TCPStore(address, port, n, world.is_first, timeout, wait_for_workers=False)


def any_rank(problem: object, group: dist.ProcessGroup | None = None) -> object:
    """The first rank's problem (a text, an exception; None: no problem), the same on all ranks."""
    problems = [problem]
    if dist.is_initialized():
        problems *= dist.get_world_size()
        dist.all_gather_object(problems, problem, group=group)
    return next(filter(None, problems), None)


def listen_to_signals(run) -> None:
    """SIGTERM and SIGINT set `run.signal`; the next all-reduce carries it to all ranks."""

    def on_signal(signum, frame):
        if run.signal == signum == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice
        run.signal = signum

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
