"""When do heads appear, and what are they worth? `python benchmarks/heads.py RUN [RUN ...]`

For each checkpoint of each run (train it with --keep): the head that looks most at the previous
token, and the best induction head (the one that looks most at what followed an earlier copy, in the
copy test); the share of attention, from instruments/pages/look.py; and how much the bits per byte
of held-out text rise when only that head is off. Then all induction heads, and the copy test.
--steps 20 100 takes only those checkpoints.
"""

import argparse
from pathlib import Path

import torch

import at_root  # noqa: F401
import data
import eval as evaluate
from instruments.pages.look import BIT, Probe, copy_test, describe_heads, nats_of
from machinery import checkpoint
from machinery.trained import EvalConfig


def measure(path: Path, data_dir: str, n_rows: int) -> list[str]:
    """A line of the table."""
    config = EvalConfig(checkpoint=str(path), data_dir=data_dir, device="cpu", dtype="fp32")
    loaded = evaluate.load_model(config)
    model = loaded.model
    manifest = loaded.data
    size = torch.from_numpy(manifest.token_bytes())
    rows = [inputs[0] for inputs, *_ in data.val_batches(manifest, 1, n_rows)]
    probes = [Probe(model) for _ in rows]
    whole = [nats_of(probe(ids), ids) for probe, ids in zip(probes, rows)]
    test = copy_test(model, size)
    n_bytes = sum(size[ids[1:]].sum().item() for ids in rows)
    heads = describe_heads(probes[0], rows[0], test)

    def worth(layer: int, head: int) -> float:
        """By how many bits per byte the loss rises without it."""
        change = 0.0
        for probe, ids, nats in zip(probes, rows, whole):
            off = Probe(model, probe.returned, begin=layer, off=(layer, head))
            change += ((nats_of(off(ids), ids) - nats) * (size[ids[1:]] > 0)).sum().item()
        return change / BIT / n_bytes

    cells = [f"{loaded.origin.step}"]
    for pattern in ("previous", "test"):
        best = max(heads, key=lambda head: head["places"][pattern][0])
        layer, head, share = best["layer"], best["head"], best["places"][pattern][0]
        cells += [f"{layer}.{head}", f"{share:.0%}", f"{worth(layer, head):+.3f}"]
    induction = [f"{h['layer']}.{h['head']}" for h in heads if h["kind"] == "induction"]
    bpb = sum((nats * (size[ids[1:]] > 0)).sum().item() for nats, ids in zip(whole, rows))
    random = [f"{test['first']:.1f}", f"{test['again']:.1f}"]
    return [*cells, " ".join(induction) or "none", *random, f"{bpb / BIT / n_bytes:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--data_dir", default="")
    parser.add_argument("--steps", type=int, nargs="*", default=[])
    parser.add_argument("--rows", type=int, default=4, help="held-out rows")
    args = parser.parse_args()
    head = "| step | previous-token head | share | worth | best induction head | copy test | worth "
    head += "| all induction heads | random tokens, bits | again | bits per byte |"
    for run in args.runs:
        lines = [f"\n{run}\n{head}\n" + "| --- " * 11 + "|"]
        for path in sorted(checkpoint.checkpoints(Path(run) / "checkpoints")):
            if not args.steps or int(path.name[5:]) in args.steps:
                lines.append(f"| {' | '.join(measure(path, args.data_dir, args.rows))} |")
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
