"""A small preset and a machine, for the tests of plan.py and build.py."""

import dataclasses

import torch

import config
from machinery import ranks


def small_preset(**train) -> config.Preset:
    """What SMALL trains, on 8 rows a step."""
    sizes = dict(n_layer=2, n_embd=32, n_head=2, n_kv_head=2, head_dim=16, mlp_hidden=64)
    tiny = config.PRESETS["tiny"]
    steps = dict(steps=12, tokens_per_step=512, decay=0.65) | train
    model = dataclasses.replace(tiny.model, seq_len=64, vocab_size=512, **sizes)
    return dataclasses.replace(tiny, model=model, train=dataclasses.replace(tiny.train, **steps))


def small_world(kind: str = "cpu", ranks_: int = 1, **more) -> ranks.World:
    given = dict(device=torch.device(kind), dtype=torch.float32, memory_bytes=80 * 10**9) | more
    return ranks.World(0, ranks_, 0, device_name=kind, **given)
