"""What a run says about itself: bits per byte, metrics.jsonl, loss.png, status.json, wandb.

Writes into the run's folder; `metrics.jsonl` (one JSON object per step or validation) is the truth,
everything else can be drawn from it. Guarantees: wandb never asks, never waits and never stops a
run: it hangs behind a bounded queue in a thread of its own. Next: train.py, eval.py.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
import uuid
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from machinery import durable


@torch.no_grad()
def bits_per_byte(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], token_bytes: Tensor
) -> tuple[float, float]:
    """Loss in nats per token and in bits per byte of text, over all ranks' batches.

    Bits per byte does not depend on the tokenizer: total nats of the targets that stand for text,
    over ln 2, over the bytes of that text. Special tokens (0 bytes) are left out of it, and are in
    the mean loss. batches: inputs and targets (B, T); every rank must bring as many batches (the
    parts of a sharded model compute in step). token_bytes: (V,) bytes per token id.
    """
    total = torch.zeros(4, dtype=torch.float64)  # nats, targets, text nats, bytes: on the host
    training = model.training
    model.eval()
    for inputs, targets in batches:
        nats = model(inputs, targets, reduction="none")  # (B, T)
        size = token_bytes[targets]  # (B, T)
        sums = (nats, torch.ones_like(nats), nats * (size > 0), size)
        total += torch.stack([x.sum(dtype=torch.float32) for x in sums]).cpu()
    model.train(training)
    if dist.is_initialized():
        dist.all_reduce(total)
    nats, targets, text_nats, n_bytes = total.tolist()
    return nats / targets, text_nats / math.log(2) / n_bytes


class Log:
    """The run's diary. On ranks other than the first, every method does nothing."""

    def __init__(self, run_dir: Path, first: bool, wandb_config: dict | None = None):
        """wandb_config: also send everything to wandb, to one run, whose configuration this is."""
        self.run_dir, self.first = run_dir, first
        self.file = run_dir / "metrics.jsonl"
        self.wandb = _Wandb(run_dir, wandb_config) if first and wandb_config is not None else None

    def say(self, text: str) -> None:
        if self.first:
            print(text, flush=True)

    def write(self, record: dict) -> None:
        """Append one line to metrics.jsonl."""
        if not self.first:
            return
        with open(self.file, "a") as file:
            file.write(json.dumps(record) + "\n")
        if self.wandb:
            self.wandb.put(record)

    def rewind(self, step: int, validated_again: bool = False) -> None:
        """Drop the lines that a run resumed after `step` will write again."""
        if not self.first or not self.file.exists():
            return
        keep = [
            r for r in read_jsonl(self.file)
            if r["step"] < step or r["step"] == step and not (validated_again and "val_bpb" in r)
        ]  # fmt: skip
        durable.write_text(self.file, "".join(json.dumps(r) + "\n" for r in keep))

    def status(self, state: str, **facts) -> None:
        """Replace status.json: what a scheduler, or a person, wants to know of a run that ended."""
        if self.first:
            text = json.dumps({"state": state, **facts}, indent=1) + "\n"
            durable.write_text(self.run_dir / "status.json", text)

    def plot(self) -> Path | None:
        """Draw loss.png; None if matplotlib is not installed or nothing was logged."""
        return plot_loss(self.file, self.run_dir / "loss.png") if self.first else None

    def close(self) -> None:
        if self.wandb:
            self.wandb.close()


def step_line(r: dict, steps: int, left_s: float, noise_scale: str = "") -> str:
    """One step of `steps`, from its record in metrics.jsonl, for the screen:

    step 120/2,000 | loss 3.4120 | bpb 1.052 | lr 0.810 | |g| 0.930 | 512 ms | 1.02M tok/s | ...

    ms and tok/s are medians over the last steps, `data` a mean (see flops.Meter); bpb is the loss
    over the bytes of the step's own text (validation's also leaves the special tokens out)."""
    if r["mfu_full"] is None:
        used = f"mfu n/a, {r['tflops_full']:.2f}/{r['tflops_causal']:.2f} TFLOP/s full/causal"
    else:
        used = f"mfu {r['mfu_full']:.1%} full {r['mfu_causal']:.1%} causal"
    noise = f" | noise scale {noise_scale}" if noise_scale else ""
    return (
        f"step {r['step']:,}/{steps:,} | loss {r['loss']:.4f} | bpb {r['bpb']:.3f} | "
        f"lr {r['lr']:.3f} | |g| {r['norm']:.3f} | {r['dt_ms']:.0f} ms | "
        f"{short(r['tokens_per_s'])} tok/s | {used} | "
        f"data {r['data_wait_ms']:.1f} ms | {duration(left_s)} left{noise}"
    )


def short(x: float) -> str:
    """1_020_000 -> 1.02M"""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if x >= size:
            return f"{x / size:.3g}{unit}"
    return f"{x:.0f}"


def duration(seconds: float) -> str:
    """3725 -> 1h02m; 95 -> 1m35s"""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if m else f"{s}s"


def is_done(run_dir: Path) -> bool:
    """Whether status.json says that the run came to its end, last validation and picture."""
    path = run_dir / "status.json"
    return path.exists() and json.loads(path.read_text())["state"] == "done"


def read_jsonl(path: Path) -> list[dict]:
    """The records of metrics.jsonl; a last line that a kill cut short is left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def plot_loss(jsonl: Path, image: Path) -> Path | None:
    """Training loss (smoothed) over tokens on the left, validation bits per byte on the right."""
    try:
        from matplotlib.figure import Figure  # no pyplot: works without a display
    except ImportError:
        return None
    records = read_jsonl(jsonl) if jsonl.exists() else []
    train = [(r["tokens"], r["loss"]) for r in records if "loss" in r]
    val = [(r["tokens"], r["val_bpb"]) for r in records if "val_bpb" in r]
    if not train and not val:
        return None
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    if train:
        tokens, losses = zip(*train, strict=True)
        smooth, total, weight = [], 0.0, 0.0  # a decaying mean, over what there is so far
        for loss in losses:
            total, weight = 0.95 * total + loss, 0.95 * weight + 1
            smooth.append(total / weight)
        left.plot(tokens, losses, color="0.8", linewidth=0.6)
        left.plot(tokens, smooth, linewidth=1.5)
    left.set(xlabel="training tokens", ylabel="training loss, nats per token", ylim=(0, None))
    if val:
        right.plot(*zip(*val, strict=True), marker="o", markersize=3)
        right.annotate(f"{val[-1][1]:.3f}", val[-1], xytext=(-4, 8), textcoords="offset points",
                       ha="right")  # fmt: skip
    right.set(xlabel="training tokens", ylabel="validation, bits per byte")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(image, dpi=120)
    return image


class _Wandb:
    """wandb behind a queue: when it hangs or fails, records are dropped and training goes on."""

    def __init__(self, run_dir: Path, config: dict, size: int = 10_000):
        self.queue: queue.Queue = queue.Queue(maxsize=size)
        self.dropped = 0
        self.thread = threading.Thread(target=self._work, args=(run_dir, config), daemon=True)
        self.thread.start()

    def put(self, record: dict) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = 10.0) -> None:
        try:
            self.queue.put(None, timeout=timeout_s)
        except queue.Full:
            pass
        self.thread.join(timeout_s)
        if self.thread.is_alive() or self.dropped:
            print(f"wandb is behind or hangs ({self.dropped} records dropped); "
                  "metrics.jsonl has everything", flush=True)  # fmt: skip

    def _work(self, run_dir: Path, config: dict) -> None:
        try:
            # Without a key wandb would ask at the prompt; then it writes to a local folder instead.
            key = os.environ.get("WANDB_API_KEY") or "api.wandb.ai" in _netrc()
            os.environ.setdefault("WANDB_MODE", "online" if key else "offline")
            import wandb

            id_file = run_dir / "wandb_id"  # so that a run that is resumed stays one there
            if not id_file.exists():
                durable.write_text(id_file, uuid.uuid4().hex[:12])
            run = wandb.init(
                project="nano2049", name=run_dir.name, id=id_file.read_text(), resume="allow",
                dir=run_dir, config=config,
            )  # fmt: skip
            while (record := self.queue.get()) is not None:
                run.log(record, step=record["step"])
            run.finish()
        except (Exception, SystemExit) as error:  # whatever happens there, it is not worth a run
            print(f"wandb is off: {type(error).__name__}: {error}", flush=True)
            while self.queue.get() is not None:
                pass


def _netrc() -> str:
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    return path.read_text() if path.exists() else ""
