"""A watch on speed: which steps of a run were slow, and why.

Reads what each step says in metrics.jsonl (`watch`: how long the first rank waited for data,
whether a checkpoint was being written). A step that took over twice the median per token is slow.
It waited for data if the wait is at least half of what it took above the median. report.py shows
the lines.
"""

import statistics
from dataclasses import dataclass

SLOW = 2.0  # times the median


@dataclass(frozen=True)
class Step:
    """A step's seconds, beside those that the median step takes for as many tokens."""

    step: int
    seconds: float
    usual_s: float
    watch: dict

    @property
    def slow(self) -> bool:
        return self.seconds > SLOW * self.usual_s

    @property
    def waited(self) -> bool:
        return self.watch["wait_s"] > 0.5 * (self.seconds - self.usual_s)


def timed(processes: list[list[dict]]) -> list[Step]:
    """The steps except the first of each process, which compiles; compared per token."""
    kept = []
    for own in processes:
        for before, r in zip(own, own[1:]):
            if (tokens := r["tokens"] - before["tokens"]) > 0 < r["step_s"]:
                kept.append((r["step"], r["step_s"], tokens, r["watch"]))
    if not kept:
        return []
    per_token = statistics.median(seconds / tokens for _, seconds, tokens, _ in kept)
    return [Step(n, seconds, tokens * per_token, watch) for n, seconds, tokens, watch in kept]


def rows_of(processes: list[list[dict]]) -> list[tuple[str, str]]:
    """(name, text) for the report of a run: the sentence on slow steps, and the longest wait.
    processes: the steps of each process that trained."""
    watched = [[r for r in own if r.get("watch")] for own in processes]
    steps = timed(watched)
    if len(steps) < 2:
        return []
    ratios = sorted(s.seconds / s.usual_s for s in steps)
    p95 = ratios[min(len(ratios) - 1, int(0.95 * len(ratios)))]
    slow = [s for s in steps if s.slow]
    waiting, saving = sum(s.waited for s in slow), sum(bool(s.watch["saving"]) for s in slow)
    text = (
        f"{len(slow):,} of {len(steps):,} steps took over twice the median, {waiting:,} of them "
        f"waiting for data, {saving:,} while saving; the 95th percentile is {p95:.2f} x the median"
    )
    worst = max(steps, key=lambda s: s.watch["wait_s"])
    longest = f"{worst.watch['wait_s']:.2f} s, in step {worst.step:,}"
    return [("slow steps", text), ("longest wait for data", longest)]
