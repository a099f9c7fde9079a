"""nanochat beside this program, on this machine: the speed of a step, and what each recipe learns.

    git clone https://github.com/karpathy/nanochat /tmp/nanochat
    python benchmarks/peer.py speed d12 --peer /tmp/nanochat
    python benchmarks/peer.py learn d6 --peer /tmp/nanochat --data_dir data/d12

Both have the depth, vocabulary, row and batch of the preset, and the same dtype; nanochat looks
back over the whole row, as ours does (--window-pattern L; its default is SSSL). Its model and
optimizer come from its own package; `Peer` does what its scripts/base_train.py does, with the rates
and the schedules of that script (read at commit 92d63d4). It is faster with FlashAttention-3, which
it gets from the package `kernels`: without that, the table says "torch's attention".

speed: steps on random tokens, a process for each side and round, in turn. learn: both recipes on
the same rows in the same order, to the end of the preset's steps, or of --steps; bits per byte of
all held-out rows. The seconds of the first seed include compiling. --sides ours, or nanochat: that
one alone. --rate_scale: what nanochat's learning rates are multiplied by, in place of its rule for
the batch, by which they are too small where a step has a few thousand tokens. nanochat is run
without its --fp8, with which no figure here was measured (`git show f8a04af` has the lines that it
takes). Each prints a table, and appends it to benchmarks/RESULTS.md (--results "" for no file).
"""

import argparse
import gc
import json
import math
import os
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

import torch
from torch import Tensor, nn

import at_root  # noqa: F401
import config as cfg
import data
import flops
import train
from bits_per_byte import score_text
from machinery import build, folders, ranks
from machinery.plan import make_plan
from runs import ROOT, parser_of
from session import Progress, Run
from throughput import (
    HEADER,
    build_run,
    cells,
    find_preset,
    measure_matmul,
    peak_memory,
    report,
    run_case,
)

BATCH = 2**19  # tokens of a step at which the rates of base_train.py were tuned, at depth 12
RATES = dict(unembedding_lr=0.008, embedding_lr=0.3, matrix_lr=0.02, scalar_lr=0.5)
DECAY = 0.28  # of the matrices, likewise
SIDES = ["ours", "nanochat"]


# ------------------------------------------------------------------------------------ nanochat


def find_peer(folder: str) -> str:
    """Make `import nanochat` find the package in that checkout; returns its commit."""
    if not Path(folder, "nanochat", "gpt.py").is_file():
        raise cfg.UsageError(
            f"--peer {folder}: there is no nanochat/gpt.py in it; git clone "
            "https://github.com/karpathy/nanochat, and give that folder"
        )
    sys.path.insert(0, str(Path(folder).resolve()))
    command = ["git", f"--git-dir={folder}/.git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return "unknown commit"
    return done.stdout.strip() or "unknown commit"


def gpt_config(depth: int, vocab: int, seq_len: int):
    """nanochat's configuration of that depth: width 64 x depth, in whole heads of 128."""
    from nanochat.gpt import GPTConfig

    n_head = (64 * depth + 127) // 128
    sizes = dict(n_layer=depth, n_head=n_head, n_kv_head=n_head, n_embd=128 * n_head)
    return GPTConfig(sequence_len=seq_len, vocab_size=vocab, window_pattern="L", **sizes)


class Peer:
    """nanochat's model of a depth, compiled, and its optimizer for that batch."""

    name = "nanochat"

    def __init__(
        self,
        model: cfg.GPTConfig,
        tokens_per_step: int,
        world: ranks.World,
        rate_scale: float | None = None,
    ):
        # it takes fp32 on a CPU, where ours may take bf16
        os.environ.setdefault("NANOCHAT_DTYPE", str(world.dtype).removeprefix("torch."))
        from nanochat.gpt import GPT

        self.config = gpt_config(model.n_layer, model.vocab_size, model.seq_len)
        if self.config.n_embd != model.n_embd:
            raise cfg.UsageError(
                f"at depth {model.n_layer}, nanochat is {self.config.n_embd} wide, not "
                f"{model.n_embd}; take a preset like d12"
            )
        if world.dtype == torch.float16:  # it would need a loss scale
            raise cfg.UsageError("no comparison in fp16; a GPU with bf16 is needed")
        self.device = world.device
        self.model = self.build()
        self.step_model = torch.compile(self.model, dynamic=False)
        with torch.device("meta"):
            at_12 = GPT(gpt_config(12, model.vocab_size, model.seq_len))
        of_batch = math.sqrt(tokens_per_step / BATCH)
        self.decay = DECAY * of_batch * count_scaling(at_12) / count_scaling(self.model)
        if rate_scale is None:
            rate_scale = of_batch
        rates = {name: rate * rate_scale for name, rate in RATES.items()}
        self.optimizer = self.model.setup_optimizer(weight_decay=self.decay, **rates)

    def build(self) -> nn.Module:
        """A model with new weights, drawn with torch's seed."""
        from nanochat.gpt import GPT

        with torch.device("meta"):
            model = GPT(self.config)
        model.to_empty(device=self.device)
        model.init_weights()
        return model

    def step(self, batches: Iterator, grad_accum: int, rate: float, momentum: float, decay: float):
        """Take a step on the next micro-batches, and read their loss, as base_train.py does. rate:
        factor on the learning rates; momentum and decay: Muon's."""
        total = 0.0
        for _ in range(grad_accum):
            inputs, targets = next(batches)
            loss = self.step_model(inputs, targets)
            total = total + loss.detach()
            (loss / grad_accum).backward()
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate
            if group["kind"] == "muon":
                group["momentum"] = momentum
                group["weight_decay"] = decay
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        if not math.isfinite(total):
            raise FloatingPointError("nanochat's loss is not finite")

    def train(self, run: Run, seed: int) -> None:
        """Train from new weights on the rows of `run`, with the schedules of base_train.py."""
        torch.manual_seed(42 + seed)  # base_train.py has 42
        self.model.load_state_dict(self.build().state_dict())
        self.optimizer.state.clear()
        preset = replace(run.preset, train=replace(run.preset.train, seed=seed))
        order = folders.training_order(preset, run.plan, run.manifest)
        loader = build.open_loader(run.manifest, order, run.plan, run.world, 0)
        batches = ((x, y.clamp(min=-1)) for x, y in iter(loader.next_batch, None))  # -1: ignored
        horizon = run.plan.steps
        decay_begins = horizon - round(0.65 * horizon)
        try:
            for step in range(horizon):
                gone = max(0.0, (step - decay_begins) / (horizon - decay_begins))
                rate = (step + 1) / 40 if step < 40 else 1 - 0.95 * gone
                momentum = 0.85 + 0.12 * step / 400 if step < 400 else 0.97 - 0.07 * gone
                decay = self.decay * 0.5 * (1 + math.cos(math.pi * step / horizon))
                self.step(batches, run.plan.grad_accum, rate, momentum, decay)
        finally:
            loader.close()

    def scored(self, run: Run) -> nn.Module:
        """The model as bits_per_byte.score_text calls it."""
        model = self.model

        class Scored(nn.Module):
            def forward(self, inputs, targets, reduction):
                return model(inputs, targets, loss_reduction=reduction).view(targets.shape)

        return Scored()


def count_scaling(model: nn.Module) -> int:
    """The weights that nanochat's scaling laws count: blocks and head."""
    counts = model.num_scaling_params()
    return counts["transformer_matrices"] + counts["lm_head"]


# --------------------------------------------------------------------------------------- speed


def measure(case: dict) -> dict:
    """throughput.measure, of nanochat's step."""
    find_peer(case["peer"])
    if not case["train"]["compile"]:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its optimizer is compiled wherever it is imported
    model = find_preset(case["preset"]).model
    world = ranks.start(case["train"]["device"], case["train"]["dtype"])
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(42)
    tokens = case["train"]["tokens_per_step"]
    rows = case["train"]["micro_batch"] or planned_rows(find_preset(case["preset"]), tokens, world)
    peer = Peer(model, tokens, world)
    on_gpu = world.device.type == "cuda"
    host = torch.randint(model.vocab_size, (2, rows, model.seq_len))
    host = host.pin_memory() if on_gpu else host
    batch = torch.empty_like(host, device=world.device)

    def batches() -> Iterator[Tensor]:
        while True:
            yield batch.copy_(host, non_blocking=True)

    grad_accum, rest = divmod(tokens, rows * model.seq_len)
    if rest:
        raise cfg.UsageError(
            f"a step of {tokens:,} tokens is not whole micro-batches of {rows} rows; try "
            "--micro_batch 1"
        )
    source = batches()
    times = []
    for step in range(case["warmup"] + case["steps"]):
        start = time.perf_counter()
        peer.step(source, grad_accum, 1.0, 0.9, peer.decay)  # it reads the loss: the device is done
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        if step == 0:
            first_step_s = time.time() - case["asked_at"]
            gc.collect()
            gc.freeze()
            gc.disable()
        if step == case["warmup"] - 1:
            before = measure_matmul(world.device, world.dtype)
    ceiling = (before + measure_matmul(world.device, world.dtype)) / 2
    step_s = statistics.median(times[case["warmup"] :])
    speed = grad_accum * rows * model.seq_len / step_s
    full = peer.model.estimate_flops()  # a causal model needs half of attention's
    causal = full - 6 * peer.config.n_layer * peer.config.n_embd * model.seq_len
    peak = flops.find_peak(world) if on_gpu else None
    mfu = {"full": flops.mfu(speed, full, peak), "causal": flops.mfu(speed, causal, peak)}
    return dict(
        micro_batch=rows,
        grad_accum=grad_accum,
        dtype=os.environ["NANOCHAT_DTYPE"],
        attention=attention(),
        dt_ms=1e3 * step_s,
        tokens_per_s=speed,
        mfu=mfu,
        ceiling=ceiling,
        of_ceiling=flops.mfu(speed, full, ceiling),
        memory=peak_memory(world.device),
        data_wait_ms=0.0,
        first_step_s=first_step_s,
    )


def attention() -> str:
    import nanochat.flash_attention as of_peer

    return "FlashAttention-3" if of_peer.USE_FA3 else "torch's attention"


def speed(args) -> int:
    """Measure both sides in turn; returns the exit code."""
    preset = find_preset(args.preset)
    tokens = args.tokens_per_step or preset.train.tokens_per_step
    options = dict(tokens_per_step=tokens, dtype="auto", device="auto", compile=not args.no_compile)
    options |= dict(micro_batch=args.micro_batch)
    case = dict(preset=args.preset, train=options, steps=args.steps, warmup=args.warmup)
    case["peer"] = args.peer
    programs = {"ours": "throughput.py", "nanochat": "peer.py"}
    about = [find_peer(args.peer), f"windows of {preset.model.seq_len:,}"]
    rows = []
    speeds = {side: [] for side in args.sides}
    try:
        for side in args.sides * args.rounds:
            result = run_case(case, program=ROOT / "benchmarks" / programs[side])
            while "out of memory" in result.get("error", "") and options["micro_batch"] > 1:
                options["micro_batch"] //= 2
                result = run_case(case, program=ROOT / "benchmarks" / programs[side])
            if "error" in result:
                print(f"{side}: {result['error']}", flush=True)
                continue
            options["micro_batch"] = result["micro_batch"]  # the same for the other side
            rows.append(cells(side, result))
            speeds[side].append(result["tokens_per_s"])
            print(" | ".join(rows[-1]), flush=True)
            if side == "nanochat":
                about[2:] = [result["attention"]]
    finally:
        if rows:
            title = f"{args.preset} beside nanochat ({', '.join(about)})"
            report(title, ["program", *HEADER[1:]], rows, args.results)
        if all(speeds.values()) and len(speeds) > 1:
            medians = {side: statistics.median(found) for side, found in speeds.items()}
            ratio = medians["ours"] / medians["nanochat"]
            text = f"Tokens per second, ours / nanochat's: {ratio:.3f}"
            if torch.cuda.is_available() and "torch's attention" in about:
                text += " (nanochat without FlashAttention-3, which it takes if it can)"
            note(text, args.results)
    return 0 if all(speeds.values()) else 1


def planned_rows(preset: cfg.Preset, tokens_per_step: int, world: ranks.World) -> int:
    """The micro-batch that our plan takes on this device."""
    train_config = replace(preset.train, tokens_per_step=tokens_per_step, steps=1)
    return make_plan(replace(preset, train=train_config), world).micro_batch


def note(text: str, results: str) -> None:
    print(f"\n{text}")
    if results:
        with open(results, "a") as file:
            file.write(f"\n{text}\n")


# ---------------------------------------------------------------------------------- what is learned


class Ours:
    """The recipe of the preset, in the program's own loop."""

    name = "ours"

    def train(self, run: Run, seed: int) -> None:
        """As Peer.train."""
        torch.manual_seed(seed)
        run.model.init_weights()
        for optimizer in run.optimizers:
            for state in optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()
        preset = replace(run.preset, train=replace(run.preset.train, seed=seed))
        order = folders.training_order(preset, run.plan, run.manifest)
        loader = build.open_loader(run.manifest, order, run.plan, run.world, 0)
        try:
            own = replace(run, preset=preset, loader=loader, progress=Progress())
            for step in train.take_steps(own):
                if step.bad:
                    raise FloatingPointError(f"step {step.step}: the loss is not finite")
        finally:
            loader.close()

    def scored(self, run: Run) -> nn.Module:
        """The model as bits_per_byte.score_text calls it."""
        return run.model


def score(side, run: Run, rows: int) -> float:
    """Bits per byte of the first held-out rows; eager, so that no further graph is compiled."""
    at_once = min(8, rows)
    batches = data.val_batches(run.manifest, at_once, rows, device=run.world.device)
    return score_text(side.scored(run), batches, run.token_bytes, at_once, run.manifest.sources)[1]


def open_run(args, run_dir: str, stack: ExitStack) -> Run:
    """The run of the preset, on the data that was given and with the batch that was."""
    preset = find_preset(args.preset)
    tokens = args.tokens_per_step or preset.train.tokens_per_step
    steps = args.steps or preset.train.steps
    train_config = replace(preset.train, tokens_per_step=tokens, steps=steps)
    options = replace(preset.run, data_dir=args.data_dir, run_dir=run_dir, save_minutes=0.0)
    options = replace(options, compile=not args.no_compile, micro_batch=args.micro_batch)
    world = ranks.start("auto", "auto")
    preset = replace(preset, name=args.preset, train=train_config, run=options)
    manifest, preset = folders.open_data(preset.run.data_dir, preset)
    return build_run(preset, world, manifest, stack)


def learn(args) -> int:
    """Train each side from each seed; returns the exit code."""
    commit = find_peer(args.peer)
    if args.no_compile:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    table = []
    bits = {"ours": [], "nanochat": []}
    with tempfile.TemporaryDirectory() as run_dir, ExitStack() as stack:
        run = open_run(args, run_dir, stack)
        report_if_stopped()  # train.py's way is to take another step first
        if run.plan.rows_per_step % run.plan.micro_batch:
            raise cfg.UsageError("the rows of a step are not whole micro-batches: --micro_batch 1")
        if run.world.device.type == "cuda":
            torch.cuda.empty_cache()
        rows = run.manifest.rows("val")
        sides = [Ours()] if "ours" in args.sides else []
        if "nanochat" in args.sides:
            sides.append(
                Peer(run.preset.model, run.plan.tokens_per_step, run.world, args.rate_scale)
            )
        try:
            for seed in args.seeds:
                for side in sides:
                    start = time.monotonic()
                    side.train(run, seed)
                    took_s = time.monotonic() - start
                    bits[side.name].append(score(side, run, rows))
                    bpb = f"{bits[side.name][-1]:.4f}"
                    table.append([str(seed), side.name, bpb, f"{took_s:.0f}"])
                    print(" | ".join(table[-1]), flush=True)
        finally:
            if table:
                of = f"{run.plan.steps} steps of {run.plan.tokens_per_step:,} tokens of "
                of += f"{', '.join(run.manifest.sources)}; {rows} held-out rows"
                report(
                    f"What {args.preset} learns, beside nanochat ({commit}, --window-pattern L): "
                    f"{of}",
                    ["seed", "recipe", "bits per byte", "s"],
                    table,
                    args.results,
                )
    ratios = [f"{ours / theirs:.4f}" for ours, theirs in zip(bits["ours"], bits["nanochat"])]
    if ratios:
        note(f"Bits per byte, ours / nanochat's, by seed: {', '.join(ratios)}", args.results)
    return 0


def report_if_stopped() -> None:
    """On a signal, end this process by an exception, so that it reports what there is so far."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("part", nargs="?", choices=["speed", "learn"], default="speed")
    parser.add_argument("preset", nargs="?", default="tiny")
    parser.add_argument("--peer", default="", help="a checkout of nanochat")
    parser.add_argument("--tokens_per_step", type=int, default=0, help="0: the preset's")
    parser.add_argument("--steps", type=int, default=0, help="speed: 8; learn: the preset's")
    parser.add_argument("--no_compile", action="store_true")
    parser.add_argument("--micro_batch", type=int, default=0, help="rows; 0: as planned for ours")
    parser.add_argument("--warmup", type=int, default=3, help="speed: steps before those measured")
    parser.add_argument("--rounds", type=int, default=1, help="speed")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--rate_scale", type=float, help="learn; not given: for the batch")
    parser.add_argument("--data_dir", default="", help="learn")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="learn")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(json.loads(args.case))))
        return 0
    if args.part == "speed":
        args.steps = args.steps or 8
    report_if_stopped()
    if args.warmup < 1:
        parser.error(f"--warmup {args.warmup}: the first step compiles; give 1 or more")
    try:
        return speed(args) if args.part == "speed" else learn(args)
    except Exception as error:
        if not hasattr(error, "exit_code"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
