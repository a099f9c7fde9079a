"""The whole training run in one file, without a single seat belt.

Read it after lesson 7: it is the bridge from the GPT and the loop that you wrote to this project.
**Afterwards** you can name every part of a training run, and the file that guards it.

It trains the preset tiny with the data, model, optimizer and row order of train.py, on one device,
in one process. The first losses are the same to six digits (compare `python course/one_file.py`
with `python train.py --log_every 1`; a test does). From the project it imports only model.py,
optim.py and data.py, and from config.py the sizes and rates of tiny, which those three take as
arguments: a copy of them here would be wrong one day. Everything else is below. Pull the plug, and
all is lost; feed it a NaN, and the weights are gone; flip a byte on the disk, and it trains on it.

New words: a **token** is what a byte was until now, one of 4,096 common pieces of text (lesson 9
makes them); BOS is the token that begins each document; a **row** is 513 tokens, packed from
documents (lesson 11); a **shard** is a file of rows. A comment that begins with the name of a file
says which file turns the bare line beside it into a promise.

Shapes: B rows per step (tiny: 4), T positions (512), V vocabulary (4,096).
"""

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import optim
from config import PRESETS, Preset
from data import Order, mix64
from model import GPT


# ----------------------------------------------------------------------------------- 1. the device
def pick_device() -> tuple[torch.device, torch.dtype]:
    """The device, and the dtype to compute in: bf16 where the hardware multiplies it."""
    # machinery/ranks.py: says what is wrong with a GPU that does not work, and joins many GPUs
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        torch.use_deterministic_algorithms(True)  # threads add up in a fixed order: the same bits
    torch.set_float32_matmul_precision("high")
    return device, torch.bfloat16 if bf16 else torch.float32


# ------------------------------------------------------------------------------------- 2. the data
def open_data(data_dir: Path) -> tuple[dict, dict]:
    """-> manifest.json, which lists the shards; their rows: {"train": [of each source], "val": ..}.

    A shard is an array (rows, T + 1) in numpy's own format. Mapped into memory (`mmap_mode`), it
    is read from the disk only where you use it."""
    # machinery/shards.py: was this file edited, is a shard missing or cut off? It says what to do
    manifest = json.loads((data_dir / "manifest.json").read_text(encoding="utf-8"))
    names = [source["name"] for source in manifest["sources"]]
    shards = {}
    for split, sources in manifest["splits"].items():
        files = [[shard["file"] for shard in sources[name]["shards"]] for name in names]
        shards[split] = [[np.load(data_dir / f, mmap_mode="r") for f in own] for own in files]
    return manifest, shards


def batch(shards: list, places: list, device) -> tuple[torch.Tensor, torch.Tensor]:
    """The shards of each source, places (source, row) -> inputs, targets, int64 (B, T) each.

    A row has T + 1 tokens: the model reads the first T and predicts the last T, so each position
    learns to name the token after it."""
    rows = []
    for source, row in places:
        for shard in shards[source]:
            if row < len(shard):
                break
            row -= len(shard)  # it is in a later shard
        # machinery/shards.py: checks every row as it is read
        rows.append(torch.from_numpy(shard[row].astype("int64")))
    rows = torch.stack(rows).to(device)  # (B, T + 1)
    # data.py: a RowLoader reads ahead in a thread, so that the device never waits for this
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def read_tokens(data_dir: Path) -> list[bytes]:
    """The text of each token id; nothing for BOS and its like, which stand for no text.

    tokenizer.json writes one character for each byte: the byte's own if you can see it, else the
    next one of those from 256 on."""
    # tokenizer.py: is this file what we think it is? It also turns text into ids
    spec = json.loads((data_dir / "tokenizer.json").read_text(encoding="utf-8"))
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    byte_of = {chr(b): b for b in seen} | {chr(256 + i): b for i, b in enumerate(unseen)}
    special = {token["content"] for token in spec["added_tokens"]}
    ids = spec["model"]["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}
    tokens = [b""] * len(ids)
    for text, i in ids.items():
        tokens[i] = b"" if text in special else bytes(byte_of[c] for c in text)
    return tokens


# ------------------------------------------------------------------------------------ 3. the model
def build_model(preset: Preset, manifest: dict, device, dtype) -> GPT:
    """The model with its initial values, on its device."""
    # machinery/folders.py: refuses data that differ from what the command line asks for
    T = manifest["row_len"] - 1
    tokenizer = manifest["tokenizer"]
    sizes = dict(seq_len=T, vocab_size=tokenizer["vocab_size"], bos_id=tokenizer["bos_id"])
    config = replace(preset.model, **sizes)
    # machinery/build.py: builds on the meta device (shapes without memory) first, so that no weight
    # exists twice; shards the state over GPUs (FSDP2) when it does not fit on one
    with torch.device(device):
        model = GPT(config, compute_dtype=dtype)
    torch.manual_seed(preset.train.seed)
    model.init_weights()
    return model


# ----------------------------------------------------------------------------------- 4. validation
@torch.no_grad()
def validate(model: GPT, shards: list, token_bytes, n_rows: int, device) -> float:
    """Bits per byte of held-out text: nats / ln 2 / bytes, over the targets that stand for text."""
    nats = n_bytes = 0.0
    for i in range(min(n_rows, sum(map(len, shards[0])))):
        inputs, targets = batch(shards, [(0, i)], device)  # (1, T) each
        loss = model(inputs, targets, reduction="none")
        size = token_bytes[targets]
        nats += float((loss * (size > 0)).sum())
        n_bytes += float(size.sum())
    return nats / math.log(2) / n_bytes


# ------------------------------------------------------------------------------------- 5. the loop
def train(preset: Preset, data_dir: Path, steps: int, compile: bool, rows_val: int) -> list:
    """Take `steps` steps of the run that the preset describes, and return the losses."""
    # machinery/cli.py: turns a command line into this preset. machinery/errors.py: has an exit code
    # for each way in which the rest can fail
    config = preset.train
    device, dtype = pick_device()
    manifest, shards = open_data(data_dir)
    tokens = read_tokens(data_dir)
    token_bytes = torch.tensor([*map(len, tokens)], device=device)  # (V,)

    model = build_model(preset, manifest, device, dtype)
    # machinery/build.py: falls back to eager where the compiler fails, halves the rows per pass
    # until they fit (and accumulates gradients), and prints both
    step_model = torch.compile(model, dynamic=False, fullgraph=True) if compile else model
    optimizers = optim.build(model.param_groups(), config, model.config.n_embd, ns_dtype=dtype)

    T = model.config.seq_len
    B = config.tokens_per_step // T  # rows in a step, all in one pass
    sizes = [sum(map(len, source)) for source in shards["train"]]  # rows
    order = Order(sizes, sizes, config.seed)  # position -> (source, row): no state to save

    # machinery/plan.py: prints all of this before the first step: epochs, memory, hours, dollars
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {B} rows x {T} a step")
    if compile:
        print("the first step compiles the model: about a minute without a word", flush=True)
    losses = []
    for step in range(steps):
        began = time.perf_counter()
        first = step * B
        factor = optim.set_schedule(optimizers, step, config.steps, config)
        places = [order(p) for p in range(first, first + B)]
        inputs, targets = batch(shards["train"], places, device)
        torch.manual_seed(mix64(mix64(config.seed) ^ first))  # dropout, if you add some
        loss = step_model(inputs, targets)
        loss.backward()
        # train.py, take_steps: a NaN on any rank, or a signal to any rank, reaches all ranks here
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())  # train.py reads it before the step, and refuses a NaN
        # machinery/log.py: writes this line to metrics.jsonl, and how the run ended to status.json
        seconds = time.perf_counter() - began
        bpb = losses[-1] * B * T / math.log(2) / float(token_bytes[targets].sum())
        tflops = B * T / seconds * model.flops_per_token() / 1e12  # flops.py: MFU, from this
        print(
            f"step {step + 1}/{config.steps} | loss {losses[-1]:.4f} | bpb {bpb:.3f} | "
            f"lr {factor:.3f} | {1e3 * seconds:.0f} ms | {tflops:.3f} TFLOP/s full"
        )
        # machinery/checkpoint.py: saves now and then, atomic and verified, while training goes on
    print(f"validation: {validate(model, shards['val'], token_bytes, rows_val, device):.4f} bpb")

    # ------------------------------------------------------------------------- 6. its own words
    # eval.py: takes prompts of your own, which the tokenizer encodes; here, a held-out row begins
    prompt = batch(shards["val"], [(0, 0)], device)[0][:, :20]  # (1, 20)
    out = model.generate(prompt, 40, generator=torch.Generator(device).manual_seed(0))
    for part in (out[0, :20], out[0, 20:]):
        print(repr(b"".join(tokens[i] for i in part.tolist()).decode("utf-8", "replace")))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", default=ROOT / "data/tiny", help="made by prepare_data.py")
    parser.add_argument("--steps", type=int, default=20, help="how many of 1,000 to take")
    parser.add_argument("--no_compile", action="store_true")
    parser.add_argument("--val_rows", type=int, default=40)
    args = parser.parse_args()
    preset = PRESETS["tiny"]
    data_dir = Path(args.data_dir)
    if not (data_dir / "manifest.json").exists():
        sys.exit(f"there is no data in {data_dir}; run: python prepare_data.py")
    train(preset, data_dir, args.steps, not args.no_compile, args.val_rows)


if __name__ == "__main__":
    main()
