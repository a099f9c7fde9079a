"""Run by test_optim.py on 2 ranks: Muon, divided and on sharded weights, against one rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from machinery.cli import run
from optim import Muon


def build():
    torch.manual_seed(0)
    # shapes that 2 ranks cannot share evenly: 3 matrices of one shape, 5 and 7 rows
    return nn.ModuleList(
        [nn.Linear(6, 5, bias=False) for _ in range(3)] + [nn.Linear(5, 7, bias=False)]
    )


def train(model, **options):
    optimizer = Muon(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, **options)
    g = torch.Generator().manual_seed(1)
    for step in range(4):
        for p in model.parameters():
            grad = torch.randn(p.shape, generator=g)  # the same on every rank
            if hasattr(p, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                grad = distribute_tensor(grad, p.device_mesh, p.placements)
            p.grad = grad
        optimizer.found_inf = torch.tensor(float(step == 2))  # this one must not happen
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


def main(argv):
    dist.init_process_group("gloo")
    alone = train(build())
    divided = train(build(), divide=True)
    sharded = build()
    for layer in sharded:
        fully_shard(layer)
    sharded = train(sharded)
    for a, b, c in zip(alone, divided, sharded):
        torch.testing.assert_close(b, a, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(c, a, atol=1e-6, rtol=1e-5)
    print(f"rank {dist.get_rank()} agrees")


if __name__ == "__main__":
    run(main)
