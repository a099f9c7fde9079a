"""A small preset and a machine, for the tests of plan.py and build.py."""

from dataclasses import replace

import torch
from conftest import SMALL

import config
from machinery import cli, ranks


def small_preset() -> config.Preset:
    """What SMALL trains, on 8 rows a step."""
    preset = cli.parse("train.py", "train", ["tiny", *SMALL])
    model = replace(preset.model, seq_len=64, vocab_size=512)
    return replace(preset, model=model)


def small_world(kind: str = "cpu", ranks_: int = 1, **more) -> ranks.World:
    given = dict(device=torch.device(kind), dtype=torch.float32, memory_bytes=80 * 10**9) | more
    return ranks.World(0, ranks_, 0, device_name=kind, **given)
