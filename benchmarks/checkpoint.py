"""What a checkpoint costs: seconds that training stands still, bytes on disk, seconds to resume.

    python benchmarks/checkpoint.py [--layers 30] [--repeats 3] [--dir DIR]

Builds smol-135m (134,479,872 parameters) with AdamW on the CPU, 1.6 GB of state, and saves it:
training stands still while the state is copied, and not while it is written. Writes to a temporary
folder (in DIR), and removes it at the end.
"""

import argparse
import shutil
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

import at_root  # noqa: F401
from config import PRESETS, GPTConfig
from machinery.checkpoint import Checkpointer, checkpoints, why_invalid
from machinery.formats import Trainer
from model import GPT
from optim import adamw
from runs import timed


def build(layers: int) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    model = GPT(replace(PRESETS["smol-135m"].model, n_layer=layers))
    model.init_weights()
    optimizer = adamw([{"params": list(model.parameters()), "lr": 1e-3}])
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()  # moments that are not zeros
    optimizer.zero_grad(set_to_none=True)
    return model, [optimizer]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30, help="fewer is quicker")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="the disk to measure")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=args.dir))
    quiet = {"log": lambda text: None}
    try:
        model, optimizers = build(args.layers)
        parameters = sum(p.numel() for p in model.parameters())
        state_bytes = 3 * 4 * parameters  # weights and two moments, fp32
        saver = Checkpointer(root, **quiet)
        set_aside_s = timed(lambda: saver.resume(model, optimizers))

        stall_s = []
        total_s = []
        for step in range(args.repeats):
            trainer = Trainer(step=step, tokens=0, identity={}, model=GPTConfig())
            stall_s.append(timed(lambda: saver.save(trainer, model, optimizers)))  # noqa: B023
            total_s.append(stall_s[-1] + timed(saver.join))

        newest = checkpoints(root)[0]
        written = sum(p.stat().st_size for p in newest.rglob("*") if p.is_file())
        verify_s = timed(lambda: why_invalid(newest))
        fresh, others = build(args.layers)
        saver = Checkpointer(root, **quiet)
        resume_s = timed(lambda: saver.resume(fresh, others))
        same = all(
            torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True)
        )

        stall_m = statistics.median(stall_s)
        total_m = statistics.median(total_s)
        print(
            f"{parameters:,} parameters, {state_bytes / 1e9:.3f} GB of state, CPU, "
            f"{torch.get_num_threads()} threads, torch {torch.__version__}"
        )
        rows = [
            ("a save: until it is published", f"{total_m:.3f} s", total_s),
            ("  of which training stands still", f"{stall_m:.3f} s", stall_s),
            ("  shorter by (target 5x)", f"{total_m / stall_m:.1f}x", None),
            ("memory set aside at start, once", f"{set_aside_s:.3f} s", None),
            ("bytes written / bytes of state (target 1.02)", f"{written / state_bytes:.4f}", None),
            ("resume (verify, load, set memory aside)", f"{resume_s:.3f} s", None),
            ("  of which reading and hashing every file", f"{verify_s:.3f} s", None),
            ("loaded weights are the saved ones", "yes" if same else "NO", None),
        ]
        for name, value, all_of in rows:
            each = "  (" + ", ".join(f"{x:.2f}" for x in all_of) + ")" if all_of else ""
            print(f"| {name:<46} | {value:>9} |{each}")
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
