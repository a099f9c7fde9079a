"""Lesson 0: the whole training run in one file, without a single seat belt.

It trains the preset tiny with the data, model, optimizer and row order of train.py, on one device,
in one process. The first losses are the same, bit for bit (compare `python course/00_one_file.py`
with `python train.py --log_every 1`; a test does). Pull the plug and all is lost; feed it NaN and
the weights are gone; a flipped byte on the disk is caught only because `Manifest.row` insists.

Read it before train.py. A comment that begins with the name of a file says which file turns the
bare line beside it into a promise; once you have read this, you know what those files are for.

Shapes: B rows per step (tiny: 4), T positions (512), V vocabulary (4,096).
"""

import argparse
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import config as cfg
import flops
import optim
from data import Order, mix64
from machinery import fused
from machinery.ranks import start
from machinery.shards import Manifest
from model import GPT
from tokenizer import Tokenizer


# ------------------------------------------------------------------------------------ 1. the data
def batch(manifest: Manifest, order: Order, first_row: int, n_rows: int, device):
    """Rows first_row, first_row + 1, ... of the run -> inputs, targets, int64 (B, T) each.

    A row has T + 1 tokens: the first T are read, the last T are predicted, so each position learns
    to name the token after it."""
    rows = [manifest.row("train", *order(first_row + j)).astype("int64") for j in range(n_rows)]
    rows = torch.tensor([row.tolist() for row in rows], device=device)  # (B, T + 1)
    # data.py: a RowLoader reads ahead in a thread, so that the device never waits for this
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# ----------------------------------------------------------------------------------- 2. the model
def build_model(preset: cfg.Preset, manifest: Manifest, device, dtype) -> GPT:
    """The model with its initial values, on its device."""
    found = dict(
        vocab_size=manifest.vocab_size, seq_len=manifest.row_len - 1, bos_id=manifest.bos_id
    )
    # machinery/setup.py: built on the meta device (shapes without memory) first, so that no weight
    # exists twice; sharded over GPUs (FSDP2) when the state does not fit on one
    torch.manual_seed(preset.train.seed)
    with torch.device(device):
        model = GPT(replace(preset.model, **found), compute_dtype=dtype)
    torch.manual_seed(preset.train.seed)
    model.init_weights()
    fused.install(model, fused.usable(model.config))  # the same numbers in fewer passes
    return model


# ---------------------------------------------------------------------------------- 3. validation
@torch.no_grad()
def validate(model: GPT, manifest: Manifest, token_bytes, n_rows: int, device) -> float:
    """Bits per byte of held-out text: nats / ln 2 / bytes, over the targets that stand for text."""
    nats = n_bytes = 0.0
    for i in range(min(n_rows, manifest.rows("val", 0))):
        row = torch.tensor(manifest.row("val", 0, i).astype("int64"), device=device)[None]
        targets = row[:, 1:].contiguous()
        loss = model(row[:, :-1].contiguous(), targets, reduction="none")  # (1, T)
        size = token_bytes[targets]
        nats += float((loss * (size > 0)).sum())
        n_bytes += float(size.sum())
    return nats / math.log(2) / n_bytes


# ------------------------------------------------------------------------------------ 4. the loop
def train(preset: cfg.Preset, data_dir: Path, steps: int, compile: bool, rows_val: int) -> list:
    """Take `steps` steps of the run that the preset describes; returns the losses."""
    config = preset.train
    # machinery/cli.py turns a command line into this preset; machinery/errors.py has an exit code
    # for each way in which what follows can fail
    world = start(preset.run.device, config.dtype)  # machinery/ranks.py: device, dtype, threads
    device = world.device
    # machinery/shards.py: every row is checked when it is read
    manifest = Manifest.load(data_dir, preset.name)
    token_bytes = torch.from_numpy(manifest.token_bytes()).to(device)

    model = build_model(preset, manifest, device, world.dtype)
    # machinery/setup.py: falls back to eager where the compiler fails, halves the rows per pass
    # until they fit (and accumulates gradients), prints both
    step_model = torch.compile(model, dynamic=False, fullgraph=True) if compile else model
    optimizers = optim.build(
        model.param_groups(), config, model.config.n_embd, ns_dtype=world.dtype
    )

    T = model.config.seq_len
    B = config.tokens_per_step // T  # rows in a step, all in one pass
    n_sources = len(manifest.sources)
    sizes = [manifest.rows("train", i) for i in range(n_sources)]
    order = Order(sizes, sizes, config.seed)  # position -> (source, row): no state to save

    # machinery/plan.py: prints all of this before the first step: epochs, memory, hours, dollars
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {B} rows x {T} a step")
    losses = []
    for step in range(steps):
        began = time.perf_counter()
        # machinery/checkpoint.py: a save now and then, atomic and verified, behind the training
        factor = optim.set_schedule(optimizers, step, config.steps, config)
        inputs, targets = batch(manifest, order, step * B, B, device)
        torch.manual_seed(mix64(mix64(config.seed) ^ (step * B)))  # dropout, if you add some
        loss = step_model(inputs, targets)
        loss.backward()
        # train.py, guard: NaN on any rank, and a signal to any rank, reach all of them here
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())  # train.py reads it a step late, so that a GPU never waits
        # machinery/diary.py: this line as metrics.jsonl, status.json, loss.png
        seconds = time.perf_counter() - began
        bpb = losses[-1] * B * T / math.log(2) / float(token_bytes[targets].sum())
        speed = flops.mfu(B * T / seconds, model.flops_per_token(), 1e12)
        print(
            f"step {step + 1}/{config.steps} | loss {losses[-1]:.4f} | bpb {bpb:.3f} | "
            f"lr {factor:.3f} | {1e3 * seconds:.0f} ms | {speed:.3f} TFLOP/s full"
        )
    print(f"validation: {validate(model, manifest, token_bytes, rows_val, device):.4f} bpb")

    # ---------------------------------------------------------------------------- 5. its own words
    tokenizer = Tokenizer.load(data_dir / "tokenizer.json")
    for prompt in preset.prompts[:1]:
        ids = torch.tensor([[manifest.bos_id, *tokenizer.encode(prompt.rstrip())]], device=device)
        out = model.generate(ids, 40, generator=torch.Generator(device).manual_seed(0))
        print(repr(tokenizer.decode(out[0, 1:].tolist())))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data_dir", default=ROOT / "data" / "tiny", help="made by prepare_data.py"
    )
    parser.add_argument("--steps", type=int, default=20, help="how many of 1,000 to take")
    parser.add_argument("--no_compile", action="store_true")
    parser.add_argument("--val_rows", type=int, default=40)
    args = parser.parse_args()
    preset, data_dir = cfg.PRESETS["tiny"], Path(args.data_dir)
    train(preset, data_dir, args.steps, not args.no_compile, args.val_rows)


if __name__ == "__main__":
    main()
