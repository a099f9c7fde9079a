"""What a last stage on longer rows is worth: `python benchmarks/context.py [FOLDER]`.

Trains a small model on short rows, then goes on from its weights on rows of twice the length, with
the same `rope_theta` and with four times as much (docs/context.md), for three seeds. Prints the
loss by position on held-out rows, before and after. A CPU does it in a few minutes.
"""

import statistics
import sysconfig
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
import tyro

import at_root  # noqa: E402, F401
import data  # noqa: E402
import prepare_data  # noqa: E402
import train  # noqa: E402
from instruments.exams import loss  # noqa: E402
from machinery import checkpoint, shards  # noqa: E402
from model import GPT  # noqa: E402

T = 64
THETA = 1000
STEPS = 120
MORE = 40
ROWS = 512  # held-out rows to score
SHAPE = (
    "--n_layer 2 --n_embd 64 --n_head 2 --n_kv_head 2 --head_dim 32 --mlp_hidden 256 --device cpu "
    "--dtype fp32 --no_compile --tokens_per_step 512 --save_minutes 0 --log_every 100 "
    "--eval_every 0 --eval_tokens 1024 --peak_tflops 0.1"
).split()


def prepare(folder: Path) -> None:
    """A few packages of the standard library, in short rows and in long ones of the same tokens."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("asyncio", "email", "unittest", "http", "json", "importlib"):
        if not (folder / "texts" / name).exists():
            (folder / "texts").mkdir(parents=True, exist_ok=True)
            (folder / "texts" / name).symlink_to(library / name)
    source = ["tiny", "--source", f"files:{folder}/texts/*/*.py", "--val_fraction", "0.1"]
    short = ["--row_len", f"{T + 1}", "--vocab_size", "512", "--data_dir", f"{folder}/short"]
    long = ["--row_len", f"{2 * T + 1}", "--data_dir", f"{folder}/long"]
    prepare_data.main([*source, *short])
    prepare_data.main([*source, *long, "--tokenizer", f"{folder}/short/tokenizer.json"])


def losses(path: Path, manifest: shards.Manifest, theta: float) -> torch.Tensor:
    """(T of the data,): nats at each position with the weights in path, for rows of any length."""
    config = checkpoint.read_trainer(path).model
    model = GPT(replace(config, seq_len=manifest.row_len - 1, rope_theta=theta))
    model.init_weights()
    checkpoint.load_model(path, model)
    token_bytes = torch.from_numpy(manifest.token_bytes())
    nats, counted = loss.score(model.eval(), data.val_batches(manifest, 32, ROWS), token_bytes)[1]
    return nats / counted


def last(run_dir: Path) -> Path:
    return checkpoint.checkpoints(run_dir / "checkpoints")[0]


def main(folder: tyro.conf.Positional[Path] = Path("runs/context")) -> None:
    prepare(folder)
    short, long = (shards.Manifest.load(folder / name) for name in ("short", "long"))
    found: dict[str, list[torch.Tensor]] = defaultdict(list)
    for seed in range(3):
        base = folder / f"base{seed}"
        rates = ["--rope_theta", f"{THETA}", "--seed", f"{seed}", *SHAPE]
        folders = ["--data_dir", f"{folder}/short", "--run_dir", f"{base}"]
        train.main(["tiny", *rates, "--steps", f"{STEPS}", *folders])
        found["before, short rows"].append(losses(last(base), short, THETA))
        found["before, long rows"].append(losses(last(base), long, THETA))
        for theta in (THETA, 4 * THETA):
            run_dir = folder / f"long{seed}_{theta}"
            stage = ["--data_dir", f"{folder}/long", "--init_from", f"{last(base)}"]
            stage += ["--rope_theta", f"{theta}", "--run_dir", f"{run_dir}"]
            train.main(["tiny", *rates, *stage, "--steps", f"{MORE}", "--lr_scale", "0.5"])
            found[f"after, theta {theta}"].append(losses(last(run_dir), long, theta))
            again = losses(last(run_dir), short, theta)
            found[f"after, theta {theta}, short rows"].append(again)
        show(found)


def show(found: dict[str, list[torch.Tensor]]) -> None:
    """Nats per token by position, as mean +- standard deviation of the seeds so far."""
    for name, seeds in found.items():
        parts = [("all", [float(nats.mean()) for nats in seeds])]
        for part in torch.arange(len(seeds[0])).tensor_split(8):
            parts.append((f"{part[0]}-{part[-1]}", [float(n[part].mean()) for n in seeds]))
        cells = (
            f"{start} {statistics.mean(n):.3f}+-{statistics.stdev(n) if n[1:] else 0:.3f}"
            for start, n in parts
        )
        print(f"{name:40} {'  '.join(cells)}")


if __name__ == "__main__":
    tyro.cli(main)
