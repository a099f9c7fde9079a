"""Exercise 27: name what is wrong with a training run.

    diagnose(run) -> "dead_head"

The ten faults are listed in course/clinic.py (`SICK`, a line each); a run without a fault is
"healthy". A run has one fault at most. What you get is a dict of what was logged:

    loss, lr, zeros   (S,): training loss; the rate as configured; share of the entries of the
                      gradient that are exactly 0, the embedding's left out
    grad, update      {matrix: (S,)}: the norm of the gradient that the optimizer got, and of the
                      step that it took
    heads             (S, H): how much each head adds (RMS)
    val_loss, order   (S / 10 + 1,), at steps 0, 10, ..: loss on validation rows; how far the last
                      position's logits move if the symbols before it come in reverse
    weights           {matrix: (2, rows, columns)}: before and after the run

The optimizer is Adam without weight decay. Make as many runs as you like to learn from, with any
seeds: `clinic.train([("dead_head", 0), ("healthy", 5)])`. The judge has others, which it draws from
the text of your file: where a fault strikes, and when, depends on the seed. Change nothing in what
you get.
"""


def diagnose(run: dict) -> str:
    raise NotImplementedError("write diagnose, then: python course/check.py 27")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import zlib
    from pathlib import Path

    import clinic
    import numpy as np
    import torch

    # other seeds for each answer: no table of runs is of use, and a verdict comes again
    first = 2304 + 1008 * (zlib.crc32(Path(answer.__file__).read_bytes()) % 1000)
    often = dict.fromkeys(clinic.SICK, 2) | {"healthy": 4}
    # each head, bucket and matrix once, and repeated epochs of 24 to 35 steps
    often |= {"dead_head": 3, "stale_bucket": 3, "frozen_weight": 8, "repeated_epoch": 12}
    cases = [(kind, first + 5 * i) for kind in clinic.KINDS for i in range(often[kind])]

    def strikes(seed: int) -> int:
        return clinic.plan("rate_spike", seed)["scale"].argmax()

    seeds = sorted(range(first, first + 50), key=strikes)
    cases += [("rate_spike", seed) for seed in (seeds[0], seeds[-1])]  # early and late
    torch.set_num_threads(1)  # more may sum differently
    runs = clinic.train(cases)
    for i in np.random.default_rng(8).permutation(len(cases)):  # a doubled_rate first
        kind, seed = cases[i]
        said = answer.diagnose(runs[i])
        assert said == kind, (
            f"the run clinic.train([({kind!r}, {seed})]) is called {said!r}: its loss goes from "
            f"{runs[i]['loss'][0]:.2f} to {runs[i]['loss'][-10:].mean():.2f}, its validation loss "
            f"to {runs[i]['val_loss'][-1]:.2f}"
        )
