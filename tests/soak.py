"""One run, killed again and again: `python tests/soak.py DATA_DIR WORK_DIR [KILLS] [SEED]`.

1 rank and 2 ranks (DDP, FSDP) take turns at random, each start ends by SIGKILL of all, SIGKILL of
one rank, or SIGTERM, at a random moment: in a step, in a save, or while it still starts. At the end
the run must have the losses of an undisturbed one. Prints its figures. Also run by test_faults.py.
"""

# ruff: noqa: E402
import contextlib
import random
import signal
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from conftest import losses
from faults import records, start

from machinery import checkpoint

STEPS = 120
ARGS = ("--steps", STEPS, "--lr_scale", 0.1, "--save_every", 2, "--eval_every", 25)
WAYS = {"1 rank": (1, "ddp"), "DDP x 2": (2, "ddp"), "FSDP x 2": (2, "fsdp")}
ENDS = ("SIGKILL", "SIGKILL of one rank", "SIGTERM")


def soak(data, folder: Path, ways: tuple[str, ...], kills: int = 30, seed: int = 0) -> dict:
    """Kill a run `kills` times, let it finish; figures about it and about the undisturbed run."""
    draw, run_dir, began = random.Random(seed), folder / "run", time.monotonic()
    world, parallel = WAYS[ways[0]]
    start(data, folder / "plain" / "run", *ARGS, "--parallel", parallel, world=world).end(0)
    expected = losses(folder / "plain" / "run")
    counts = dict.fromkeys([*ways, *ENDS], 0)
    worst = replayed = furthest = 0
    for kill in range(kills):
        way, end = draw.choice(ways), draw.choice(ENDS)
        world, parallel = WAYS[way]
        counts[way] += 1
        counts[end] += 1
        run = start(
            data, run_dir, *ARGS, "--parallel", parallel, world=world, spoil=[("slow", 0.02)]
        )
        if draw.random() < 0.2:  # while it starts
            time.sleep(draw.uniform(0, 0.8))
        else:
            newest = _newest(run_dir)
            goal = min(newest + draw.randint(1, max(2, 2 * STEPS // kills)), STEPS - 1)
            run.until(lambda run=run, goal=goal: _lines(run_dir, goal) or not run.alive())
            time.sleep(draw.uniform(0, 0.05))
        ranks = [draw.randrange(world)] if end == "SIGKILL of one rank" else None
        run.kill(signal.SIGTERM if end == "SIGTERM" else signal.SIGKILL, ranks)
        with contextlib.suppress(AssertionError):  # the rest ends by itself, or is ended, as by
            run.until(lambda run=run: not run.alive(), timeout_s=10)  # a launcher
        text = run.kill().end()
        seen = {r["step"]: r["loss"] for r in records(run_dir) if "loss" in r}
        for step, loss in seen.items():
            worst = max(worst, abs(loss - expected[step]))
        replayed += max(0, furthest - _newest(run_dir))
        furthest = max([furthest, *seen])
        for path in checkpoint.checkpoints(run_dir / "checkpoints"):
            assert (why := checkpoint.why_invalid(path)) is None, f"kill {kill}: {path}: {why}"
        assert "is not used" not in text and "none of the" not in text, text
    last = start(data, run_dir, *ARGS, "--parallel", parallel, world=world)
    last.end(0)
    assert not [*run_dir.rglob(".tmp-*"), *run_dir.rglob(".trash-*")]
    found = losses(run_dir)
    assert found.keys() == expected.keys()
    worst = max([worst, *(abs(found[s] - expected[s]) for s in found)])
    final = abs(found[STEPS] - expected[STEPS])
    seconds = time.monotonic() - began
    return counts | dict(
        kills=kills, replayed_steps=replayed, worst=worst, final=final, seconds=round(seconds)
    )


def _newest(run_dir) -> int:
    found = checkpoint.checkpoints(Path(run_dir) / "checkpoints")
    return int(found[0].name[5:]) if found else 0


def _lines(run_dir, step: int) -> bool:
    return any(r["step"] >= step for r in records(run_dir) if "loss" in r)


if __name__ == "__main__":
    data, folder, kills, seed = [*sys.argv[1:], "30", "0"][:4]
    for ways in (("1 rank",), ("1 rank", "DDP x 2", "FSDP x 2")):
        place = Path(folder) / ways[-1].replace(" ", "_")
        print(soak(data, place, ways, int(kills), int(seed)), flush=True)
