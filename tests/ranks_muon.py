"""Run by test_optim.py on 2 ranks: Muon, divided and sharded, against one rank."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing import assert_close

from optim import Muon


def train(how=""):
    """The parameters and the state after four steps, whole."""
    torch.manual_seed(0)  # the same gradients on every rank
    # shapes that 2 ranks cannot share evenly: 3 matrices of one shape, 5 and 7 rows, and 1 row
    sizes = [(6, 5), (6, 5), (6, 5), (5, 7), (3, 1)]
    model = nn.ModuleList([nn.Linear(*size, bias=False) for size in sizes])
    for layer in model if how == "shard" else ():
        fully_shard(layer)
    params = list(model.parameters())
    muon = Muon(params, lr=0.1, momentum=0.9, weight_decay=0.1, divide=how == "divide")
    for _ in range(4):
        for p in params:
            p.grad = torch.randn(p.shape)
            if how == "shard":
                p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements)
        muon.step()
    found = [*params, *(t for p in params for t in muon.state[p].values())]
    return [t.full_tensor() if isinstance(t, DTensor) else t.detach() for t in found]


def main(argv):
    dist.init_process_group("gloo")
    dist.all_gather = None  # into a list: that copies once more than a gather into a tensor
    warnings.simplefilter("error", FutureWarning)  # each rank would print that of torch
    for how in ("divide", "shard"):
        assert_close(train(how), train(), atol=1e-6, rtol=1e-5)
    print(f"rank {dist.get_rank()} agrees")
