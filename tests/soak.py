"""One run, killed again and again (test_faults.py).

1 rank and 2 ranks (DDP, FSDP) take turns at random, each start ends by SIGKILL of all, SIGKILL of
one rank, or SIGTERM, at a random moment: in a step, in a save, or while it still starts. At the end
the run must have the losses of an undisturbed one.
"""

import contextlib
import random
import signal
import time
from collections import Counter
from pathlib import Path

from conftest import losses
from faults import records, start

from machinery import checkpoint

STEPS = 120
ARGS = ("--steps", STEPS, "--lr_scale", 0.1, "--save_every", 2, "--eval_every", 25)
WAYS = {"1 rank": (1, "ddp"), "DDP x 2": (2, "ddp"), "FSDP x 2": (2, "fsdp")}
ENDS = ("SIGKILL", "SIGKILL of one rank", "SIGTERM")


def soak(data, folder: Path, kills: int = 30, seed: int = 0) -> dict:
    """Kill a run `kills` times, let it finish: how often each way and end was drawn, and the
    largest difference from the losses of an undisturbed run."""
    draw, run_dir = random.Random(seed), folder / "run"
    start(data, folder / "plain" / "run", *ARGS).end(0)
    expected, counts, worst = losses(folder / "plain" / "run"), Counter(), 0.0
    for kill in range(kills + 1):
        way, end = draw.choice([*WAYS]), draw.choice(ENDS)
        world, parallel = WAYS[way]
        how = dict(world=world, spoil=[("slow", 0.02)])
        run = start(data, run_dir, *ARGS, "--parallel", parallel, **how)
        if kill == kills:
            run.end(0, timeout_s=120)
            break
        counts.update((way, end))
        if draw.random() < 0.2:  # while it starts
            time.sleep(draw.uniform(0, 0.8))
        else:
            newest = checkpoint.checkpoints(run_dir / "checkpoints")[:1]
            goal = int(newest[0].name[5:]) if newest else 0
            goal = min(goal + draw.randint(1, max(2, 2 * STEPS // kills)), STEPS - 1)
            run.until(lambda run=run, goal=goal: run.step() >= goal or not run.alive())
            time.sleep(draw.uniform(0, 0.05))
        ranks = [draw.randrange(world)] if end == "SIGKILL of one rank" else None
        run.kill(signal.SIGTERM if end == "SIGTERM" else signal.SIGKILL, ranks)
        with contextlib.suppress(AssertionError):  # the rest ends by itself, or is ended, as by
            run.until(lambda run=run: not run.alive(), timeout_s=10)  # a launcher
        text = run.kill().end()
        seen = [r for r in records(run_dir) if "loss" in r]
        worst = max([worst, *(abs(r["loss"] - expected[r["step"]]) for r in seen)])
        for path in checkpoint.checkpoints(run_dir / "checkpoints"):
            assert (why := checkpoint.why_invalid(path)) is None, f"kill {kill}: {path}: {why}"
        assert "is not used" not in text and "none of the" not in text, text
    assert not [*run_dir.rglob(".tmp-*"), *run_dir.rglob(".trash-*")]
    found = losses(run_dir)
    assert found.keys() == expected.keys()
    return dict(counts, worst=max([worst, *(abs(found[s] - expected[s]) for s in found)]))
