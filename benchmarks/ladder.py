"""The ladder: what each change is worth on a CPU, from a plain eager step to the default.

    python benchmarks/ladder.py [--steps 8] [--rounds 1] [--head_dim 128]

6 layers x 384, T 512, vocabulary 8,192, 4,096 tokens a step, random rows: the real training step
of train.py (see throughput.py). One change per row, kept unless the row says "taken back". Speed
is a fraction of the bf16 matmul ceiling of the same minute, in the full convention, so that rows
measured on a busy or a throttled machine can still be compared; "with Muon's" also counts the
optimizer's matmuls, which are work but not the model's. Of several rounds the best counts.
Appends to benchmarks/RESULTS.md (--results "" for no file).
"""

import argparse
import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from throughput import ROOT, percent, report, run_case

START = {
    "preset": "cpu-6x384",
    "model": {"extras": [], "n_head": 6, "n_kv_head": 6, "head_dim": 64},
    "train": {
        "compile": False,
        "dtype": "fp32",
        "optimizer": "adamw",
        "lr": 3e-4,
        "micro_batch": 1,
    },
    "ceiling_dtype": "bfloat16",
    # 0 is its default; but while any MALLOC_ variable is set, ranks.py does not tune the allocator
    "environment": {"MALLOC_PERTURB_": "0"},
}

# (what changes, the change, is it kept?)
RUNGS = [
    ("eager, fp32, AdamW, heads of 64, 1 row at a time", {}, True),
    ("8 rows at a time", {"train": {"micro_batch": 8}}, True),
    ("torch.compile", {"train": {"compile": True}}, True),
    ("memory kept between steps", {"environment": {"MALLOC_PERTURB_": None}}, True),
    ("bf16 by autocast", {"autocast": True}, False),
    ("bf16 by casting the weights", {"train": {"dtype": "bf16"}}, True),
    ("heads of 128", {"model": {"n_head": 3, "n_kv_head": 3, "head_dim": 128}}, True),
    ("Muon for the matrices", {"train": {"optimizer": "muon"}}, True),
    ("value embeddings", {"model": {"extras": ["value_embeds"]}}, True),
    ("key offset: the default", {"model": {"extras": ["key_offset", "value_embeds"]}}, True),
]


def merge(case: dict, change: dict) -> dict:
    """A copy of the case with the change's options laid over it."""
    case = copy.deepcopy(case)
    for key, value in change.items():
        case[key] = {**case.get(key, {}), **value} if isinstance(value, dict) else value
    return case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="measured, after 3 to warm up")
    parser.add_argument("--rounds", type=int, default=1, help="times that the ladder is climbed")
    parser.add_argument(
        "--head_dim",
        type=int,
        choices=[64, 128],
        default=128,
        help="64: leave the rung `heads of 128` out",
    )
    parser.add_argument("--results", default=str(ROOT / "benchmarks" / "RESULTS.md"))
    args = parser.parse_args()
    rungs = [rung for rung in RUNGS if args.head_dim == 128 or rung[0] != "heads of 128"]
    best: dict[str, dict] = {}
    for _ in range(args.rounds):
        kept = {**START, "steps": args.steps, "warmup": 3}
        for name, change, keep in rungs:
            case = merge(kept, change)
            kept = case if keep else kept
            environment = {k: v for k, v in case["environment"].items() if v}
            result = run_case(case, **environment)
            if "error" in result:
                print(f"{name}: {result['error']}", flush=True)
                continue
            print(
                f"{name}: {result['tokens_per_s']:,.0f} tok/s, "
                f"{percent(result['of_ceiling'])} of the ceiling",
                flush=True,
            )
            if name not in best or result["of_ceiling"] > best[name]["of_ceiling"]:
                best[name] = result
    header = ["change", "tok/s", "ms/step", "of the ceiling", "with Muon's", "ceiling, GFLOP/s"]
    rows = [
        [
            name if keep else f"{name} (taken back)",
            f"{r['tokens_per_s']:,.0f}",
            f"{r['dt_ms']:,.0f}",
            percent(r["of_ceiling"]),
            percent(r["of_ceiling_with_muon"]),
            f"{r['ceiling'] / 1e9:,.0f}",
        ]
        for name, _, keep in rungs
        if (r := best.get(name))
    ]
    report("The CPU ladder", header, rows, args.results)


if __name__ == "__main__":
    main()
