"""Peak memory of each rank: a whole model per rank (DDP) against a sharded one (FSDP2).

    python benchmarks/fsdp_memory.py                    2 ranks, about 100M parameters, CPU (gloo)

Every case is a torchrun of its own: the model, the optimizers and a few steps of train.py on random
tokens. Peak memory is VmHWM of /proc/self/status (on a GPU: torch's own peak). State is what a rank
keeps: weights, gradients, moments. The C library is told to return freed memory at once: otherwise
it holds each block's gathered weights, and FSDP peaks as high as DDP (2.2 GB against 2.1).
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import config as cfg
import optim
from config import GPTConfig
from machinery import build, cli, ranks

MODEL = GPTConfig(
    seq_len=128, vocab_size=8192, n_layer=12, n_embd=768, n_head=6, n_kv_head=6, mlp_hidden=3072
)
STEPS = 2
FRUGAL = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # bytes


def peak_mb(world: ranks.World) -> float:
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    status = Path("/proc/self/status").read_text()
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return int(kib) * 1024 / 1e6


def case(parallel: str, optimizer: str, rows: int) -> None:
    """One rank of one case; the first prints a line of JSON."""
    enough = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    world = ranks.start("cuda" if enough else "cpu", dtype="fp32")
    config = replace(cfg.TrainConfig(), optimizer=optimizer)
    before = peak_mb(world)
    sharded = parallel == "fsdp"
    plan = SimpleNamespace(sharded=sharded, compile=False, parallel=parallel)
    model = build.build_model(MODEL, plan, world, seed=0)
    optimizers = optim.build(
        model.param_groups(), config, MODEL.n_embd, divide=world.world_size > 1 and not sharded
    )
    step_model = build.wrap(model, plan)
    tokens = torch.randint(MODEL.vocab_size, (rows, MODEL.seq_len + 1), device=world.device)
    for _ in range(STEPS):
        step_model(tokens[:, :-1], tokens[:, 1:]).backward()
        for o in optimizers:
            o.step()
        held = [p for p in model.parameters()] + [p.grad for p in model.parameters()]
        held += [t for o in optimizers for slots in o.state.values() for t in slots.values()]
        model.zero_grad(set_to_none=True)
    state = sum(getattr(t, "_local_tensor", t).nbytes for t in held) / 1e6
    mine = (before, peak_mb(world), state)
    of_all = [mine] * world.world_size
    if world.world_size > 1:
        dist.all_gather_object(of_all, mine)
    if world.is_first:
        n_params = sum(p.numel() for p in model.parameters())
        print(json.dumps(dict(n_params=n_params, ranks=of_all)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1, help="micro-batch, of 128 tokens each")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        cli.run(lambda argv: case(*args.case, args.rows))
    print("| optimizer | parallel | rank | peak MB | before the model | of which state |")
    print("|---|---|---|---|---|---|")
    for optimizer in ("adamw", "muon"):
        for parallel in ("ddp", "fsdp"):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={args.ranks}", __file__, "--rows", str(args.rows)]
            out = subprocess.run(
                [*command, "--case", parallel, optimizer],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | FRUGAL,
            )
            result = json.loads(out.stdout.strip().splitlines()[-1])
            for rank, (before, peak, state) in enumerate(result["ranks"]):
                print(
                    f"| {optimizer} | {parallel} | {rank} | {peak:,.0f} | {before:,.0f} | "
                    f"{state:,.0f} |",
                    flush=True,
                )
    print(f"\n{result['n_params']:,} parameters, {args.rows} x 128 tokens per rank, fp32")


if __name__ == "__main__":
    main()
