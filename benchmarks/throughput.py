"""Speed of the real training step, on random rows: no data folder needed.

    python benchmarks/throughput.py d12 d20 --micro_batch 16 32 64        on a GPU
    python benchmarks/throughput.py cpu-6x384 --tokens_per_step 4096      on a laptop

For each preset and micro-batch a process of its own builds what train.py builds, and takes its
steps (train.take_steps). Prints one table and appends it to benchmarks/RESULTS.md (--results "" for
no file). A case that fails loses only its own row.
MFU is against the datasheet (n/a for a device that has none here), `of matmul` against a big
matmul timed before and after the steps; both in the full convention unless they say causal.
"""

import argparse
import datetime
import json
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import at_root  # noqa: F401
import config as cfg
import flops
import train
from config import GPTConfig
from machinery import build, cli, folders, ranks
from machinery.log import Log
from machinery.plan import make_plan
from runs import device_name, parser_of, table
from session import Progress, Run

# small enough for a CPU, big enough for its matmuls
CPU = dict(seq_len=512, vocab_size=8192, n_layer=6, n_head=3, n_kv_head=3, head_dim=128)
CPU |= dict(n_embd=384, mlp_hidden=1536, extras=cfg.PRESETS["tiny"].model.extras)
MORE_PRESETS = {
    "cpu-6x384": cfg.Preset(
        GPTConfig(**CPU), cfg.DataConfig(), cfg.TrainConfig(tokens_per_step=4096)
    )
}


class RandomRows:
    """Stands in for shards.Manifest: as many rows as anyone asks for, of random tokens."""

    marks = ()  # no conversations

    sources = ["random"]
    dtype = np.uint16
    fingerprint = tokenizer_sha256 = "0" * 64

    def __init__(self, model: GPTConfig):
        self.row_len = model.seq_len + 1
        self.vocab_size = model.vocab_size
        self.bos_id = 0
        pool = np.random.default_rng(0).integers(0, self.vocab_size, (256, self.row_len))
        self.pool = pool.astype(self.dtype)
        self.pool[:, 0] = self.bos_id

    def rows(self, split, source=None) -> int:
        return 1 << 40

    def tokens(self, split) -> int:
        return self.rows(split) * self.row_len

    def row(self, split, source, row) -> np.ndarray:
        return self.pool[row % len(self.pool)]

    def token_bytes(self) -> np.ndarray:
        return np.ones(self.vocab_size, dtype=np.int32)


def find_preset(name: str) -> cfg.Preset:
    found = MORE_PRESETS.get(name) or cfg.find_preset(name)
    return found or cli.lookup("preset", name, cfg.PRESETS)


def measure(case: dict, run_dir: str) -> dict:
    """Take case["warmup"] + case["steps"] optimizer steps; returns the figures of the last ones."""
    preset = find_preset(case["preset"])
    given = case.get("train", {})
    options = dict(run_dir=run_dir, data_dir="random rows") | given
    options = {k: v for k, v in options.items() if k in cfg.RunConfig.__dataclass_fields__}
    recipe = {"steps": 10_000} | {k: v for k, v in given.items() if k not in options}
    parts = dict(model=replace(preset.model, **case.get("model", {})))
    parts |= dict(train=replace(preset.train, **recipe), run=replace(preset.run, **options))
    preset = replace(preset, name=case["preset"], **parts)
    world = ranks.start(preset.run.device, preset.train.dtype)
    with ExitStack() as stack:
        run = build_run(preset, world, RandomRows(preset.model), stack)
        plan, meter = run.plan, run.meter
        ceiling, first_step_s = take_steps(run, case)
    peak = meter.peak
    if world.device.type == "cpu" and not preset.run.peak_tflops:
        peak = None  # one was measured: `of matmul` does that better
    speed = meter.summary()
    per_token = {"full": meter.flops_full, "causal": meter.flops_causal}
    found = {key: speed[key] for key in ("tokens_per_s", "dt_ms", "data_wait_ms")}
    found |= dict(micro_batch=plan.micro_batch, grad_accum=plan.grad_accum, ceiling=ceiling)
    found |= dict(memory=peak_memory(world.device), dtype=str(world.dtype).removeprefix("torch."))
    found["mfu"] = {k: flops.mfu(speed["tokens_per_s"], n, peak) for k, n in per_token.items()}
    found["of_ceiling"] = flops.mfu(speed["tokens_per_s"], per_token["full"], ceiling)
    return found | dict(first_step_s=first_step_s)


def build_run(preset: cfg.Preset, world: ranks.World, rows, stack: ExitStack) -> Run:
    """What session.open_run builds, for a run that saves nothing; rows: a Manifest, or RandomRows.
    Its loader is closed when `stack` is."""
    log = Log(Path(preset.run.run_dir), is_first=False)
    plan = make_plan(preset, world)
    model = build.build_model(preset.model, plan, world, preset.train.seed)
    optimizers = build.build_optimizers(model, preset, plan, world)
    step_model, val_model, plan = build.compile_step(model, optimizers, plan, world, log)
    order = folders.training_order(preset, plan, rows)
    loader = build.open_loader(rows, order, plan, world, step=0)
    stack.callback(loader.close)
    return Run(
        preset=preset,
        plan=plan,
        world=world,
        manifest=rows,
        log=log,
        progress=Progress(),
        signals=ranks.Signals(),
        model=model,
        step_model=step_model,
        val_model=val_model,
        optimizers=optimizers,
        checkpoints=build.open_checkpoints(preset, plan, log, None),
        loader=loader,
        meter=build.make_meter(model, world, preset.run),
        token_bytes=torch.from_numpy(rows.token_bytes()).to(world.device),
        report=None,
    )


def take_steps(run: Run, case: dict) -> tuple[float, float]:
    """Take the steps of train.py, and leave those after the warm-up in run.meter; returns (FLOP/s
    of a big matmul around them, seconds from the command to the end of the first step)."""
    device = run.world.device
    dtype = run.world.dtype
    for step in train.take_steps(run):
        train.log_step(run, step)
        if step.step == 1:
            first_step_s = time.time() - case["asked_at"]
        if step.step == case["warmup"]:
            before = measure_matmul(device, dtype)
            run.meter.steps.clear()
            run.meter.start()
        if step.step == case["warmup"] + case["steps"]:
            break
    return (before + measure_matmul(device, dtype)) / 2, first_step_s


def measure_matmul(device: torch.device, dtype: torch.dtype, seconds: float = 1.0) -> float:
    """FLOP/s that a big square matmul reaches on this device, now: the ceiling for any model.
    Random data: a GPU draws less power on zeros and runs 13% faster."""
    n = 2048 if device.type == "cpu" else 8192
    sync = torch.get_device_module(device).synchronize
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    times = []
    deadline = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < deadline:
        sync()
        start = time.perf_counter()
        a @ b.T
        sync()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / statistics.median(times[2:])  # the first two warm up


def peak_memory(device: torch.device) -> int:
    """Bytes at the highest: of the device's allocator, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def run_case(case: dict, timeout_s: float = 900, program: str | Path = __file__) -> dict:
    """The `measure` of this program, or of another one, in a process of its own; {"error": ...} if
    that fails."""
    # the imports are part of the time to the first step, so that clock starts here
    case = json.dumps({**case, "asked_at": time.time()})
    try:
        command = [sys.executable, str(Path(program).resolve()), "--case", case]
        options = dict(capture_output=True, text=True, check=False)
        done = subprocess.run(command, timeout=timeout_s, **options)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {timeout_s:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def percent(fraction: float | None) -> str:
    return "n/a" if fraction is None else f"{fraction:.1%}"


HEADER = "preset, micro-batch, dtype, ms/step, tok/s, MFU full, MFU causal, of matmul, memory"
HEADER = [*HEADER.split(", "), "data wait", "first step"]


def cells(name: str, r: dict) -> list[str]:
    return [
        name,
        f"{r['micro_batch']} x {r['grad_accum']}",
        r["dtype"],
        f"{r['dt_ms']:,.0f}",
        f"{r['tokens_per_s']:,.0f}",
        percent(r["mfu"]["full"]),
        percent(r["mfu"]["causal"]),
        f"{percent(r['of_ceiling'])} of {r['ceiling'] / 1e12:.3g}T",
        f"{r['memory'] / 1e9:.2f} GB",
        f"{r['data_wait_ms']:.1f} ms",
        f"{r['first_step_s']:.0f} s",
    ]


def report(title: str, header: list[str], rows: list[list[str]], results: str) -> None:
    """Print the table, and append it with device, date and version to `results`, if that is set."""
    text = table(header, rows)
    today = datetime.date.today().isoformat()
    print(f"\n{title}: {device_name()}, torch {torch.__version__}, {today}\n\n{text}")
    if results:
        words = ["python", *sys.argv]
        if "--results" in words:  # where the table goes is no part of how it was made
            del words[words.index("--results") : words.index("--results") + 2]
        command = shlex.join(words)
        with open(results, "a") as file:
            file.write(f"\n## {title}: {device_name()}, torch {torch.__version__}, {today}\n")
            file.write(f"\n`{command}`\n\n{text}\n")


def main() -> None:
    parser = parser_of(__doc__)
    known = ", ".join([*cfg.PRESETS, *MORE_PRESETS])
    parser.add_argument("presets", nargs="*", default=["tiny"], help=f"of {known}")
    parser.add_argument("--micro_batch", type=int, nargs="+", default=[0], help="0: auto")
    parser.add_argument("--tokens_per_step", type=int, default=0, help="0: the preset's")
    parser.add_argument("--steps", type=int, default=10, help="measured, after --warmup")
    parser.add_argument("--warmup", type=int, default=3, help="1 or more")
    parser.add_argument("--dtype", choices=["auto", "bf16", "fp16", "fp32"], default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--no_compile", action="store_true")
    parser.add_argument("--extras", nargs="*", help="instead of the preset's")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        with tempfile.TemporaryDirectory() as run_dir:
            print(json.dumps(measure(json.loads(args.case), run_dir)))
        return
    try:
        _ = [find_preset(name) for name in args.presets]
    except ValueError as error:
        parser.error(str(error))
    if args.warmup < 1:
        parser.error(f"--warmup {args.warmup}: the first step compiles; give 1 or more")
    rows = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # report what there is until then
    try:
        for case in cases(args):
            result = run_case(case)
            micro_batch = case["train"]["micro_batch"]
            if "error" in result:
                print(
                    f"{case['preset']}, micro-batch {micro_batch or 'auto'}: {result['error']}",
                    flush=True,
                )
                continue
            rows.append(cells(case["preset"], result))
            print(" | ".join(rows[-1]), flush=True)
    finally:
        if rows:
            report("Throughput", HEADER, rows, args.results)
    if not rows:
        sys.exit(1)


def cases(args) -> Iterator[dict]:
    """One for each preset and micro-batch."""
    for name in args.presets:
        tokens = args.tokens_per_step or find_preset(name).train.tokens_per_step
        for micro_batch in args.micro_batch:
            options = dict(micro_batch=micro_batch, tokens_per_step=tokens, dtype=args.dtype)
            options |= dict(device=args.device, compile=not args.no_compile)
            case = dict(preset=name, train=options, steps=args.steps, warmup=args.warmup)
            yield case if args.extras is None else case | dict(model=dict(extras=args.extras))


if __name__ == "__main__":
    main()
