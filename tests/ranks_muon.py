"""Run by test_optim.py on 2 ranks: Muon (divided, sharded) and AdamW (sharded) against one rank."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing import assert_close

from optim import Muon, adamw, sum_over_ranks


def build(shard=False):
    torch.manual_seed(0)
    # shapes that 2 ranks cannot share evenly: 3 matrices of one shape, 5 and 7 rows, and 1 row
    sizes = [(6, 5), (6, 5), (6, 5), (5, 7), (3, 1)]
    model = nn.ModuleList([nn.Linear(*size, bias=False) for size in sizes])
    for layer in model if shard else ():
        fully_shard(layer)
    return model


def muon(model, **options):
    return Muon(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, **options)


def adam(model):
    params = list(model.parameters())
    return adamw([dict(params=params, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)])


def give_gradients(model, g):
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=g)  # the same on every rank
        if isinstance(p, DTensor):
            p.grad = distribute_tensor(p.grad, p.device_mesh, p.placements)


def train(model, optimizer, steps=4):
    """Returns the parameters and the state, whole."""
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        give_gradients(model, g)
        optimizer.step()
    state = [t for p in model.parameters() for t in optimizer.state[p].values()]
    whole = lambda t: t.full_tensor() if isinstance(t, DTensor) else t.detach()
    return [whole(t) for t in (*model.parameters(), *state)]


def main(argv):
    dist.init_process_group("gloo")
    dist.all_gather = None  # into a list: that copies once more than a gather into a tensor
    warnings.simplefilter("error", FutureWarning)  # each rank would print that of torch
    close = dict(atol=1e-6, rtol=1e-5)
    alone = build()
    divided = build()
    sharded = build(shard=True)
    whole = train(alone, muon(alone))
    assert_close(train(divided, muon(divided, divide=True)), whole, **close)
    assert_close(train(sharded, muon(sharded)), whole, **close)

    alone = build()
    sharded = build(shard=True)
    gradients = [torch.full((3,), dist.get_rank() + 1.0), torch.ones(2)]
    sum_over_ranks(gradients)
    assert [g.tolist() for g in gradients] == [[3.0] * 3, [2.0] * 2]
    assert_close(train(sharded, adam(sharded)), train(alone, adam(alone)), **close)

    print(f"rank {dist.get_rank()} agrees")
