"""What a run prints beside its step line, which stands in train.py: the time that is left, the last
lines, numbers in few characters. Next: train.py."""

import math
import shlex


def time_left_s(run, step: int) -> float:
    """Seconds from `step` to the end of a run, with its validations and its last save."""
    every = run.preset.run.eval_every
    plan = run.plan
    evals = math.ceil(plan.steps / every) - step // every if every else 1
    return run.meter.eta_s(
        (plan.steps - step) * plan.tokens_per_step, eval=evals, report=evals, save=1
    )


def done_text(run, validation: str, report: str, seconds: dict) -> str:
    """The last lines of a run: its time, and where that went (Meter.seconds); where its files are,
    the next command."""
    plan = run.plan
    parts = ", ".join(f"{name} {duration(part)}" for name, part in seconds.items())
    since = f" since step {run.progress.resumed_at:,}" if run.progress.resumed_at else ""
    return (
        f"done: {plan.steps:,} steps, {plan.steps * plan.tokens_per_step:,} tokens, "
        f"{duration(sum(seconds.values()))} ({parts}){since}; {validation}\n"
        f"checkpoint  {run.log.run_dir / 'checkpoints' / f'step_{plan.steps:08d}'}\n"
        f"metrics     {run.log.file}\n{report}\n"
        f"next        python eval.py {'chat' if run.manifest.marks else 'sample'} "
        f"--run_dir {shlex.quote(str(run.log.run_dir))}"
    )


def sources_line(bpb: dict[str, float]) -> str:
    """{"web": 1.1, "code": 0.9} -> ' (web 1.1000, code 0.9000)'; '' if there is one source."""
    return f" ({', '.join(f'{k} {v:.4f}' for k, v in bpb.items())})" if len(bpb) > 1 else ""


def short(x: float) -> str:
    """1_020_000 -> 1.02M"""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if x >= 0.9995 * size:  # 999,600 is 1M, not 1000K
            return f"{x / size:.3g}{unit}"
    return f"{x:.0f}"


def duration(seconds: float) -> str:
    """3725 -> 1h02m; 95 -> 1m35s"""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if m else f"{s}s"
