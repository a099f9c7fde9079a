"""Exercise 27: name what is wrong with a training run.

    diagnose(run) -> "dead_head"

The ten faults are listed in course/clinic.py (`SICK`, one line for each); a run without a fault is
"healthy". A run has at most one fault. You get a dict of what was logged:

    loss, lr, zeros   (S,): training loss; the rate as configured; share of the entries of the
                      gradient that are exactly 0, leaving out the embedding
    grad, update      {matrix: (S,)}: the norm of the gradient that the optimizer got, and of the
                      step that it took
    heads             (S, H): how much each head adds (RMS)
    val_loss, order   (S / 10 + 1,), at steps 0, 10, ..: loss on validation rows; how far the last
                      position's logits move when the symbols before it come in reverse
    weights           {matrix: (2, rows, columns)}: before and after the run

The optimizer is Adam without weight decay. To learn, make as many runs as you like, with any seeds:
`clinic.train([("dead_head", 0), ("healthy", 5)])`. The judge has others, drawn from the text of
your file: where a fault strikes, and when, depends on the seed. Do not change what you are given.
Only the noise of the loss tells "healthy", "not_shuffled" and "repeated_epoch" apart, and one run
in a few hundred looks like another kind: among these three, you may miss one.
"""


def diagnose(run: dict) -> str:
    raise NotImplementedError("write diagnose, then: python course/check.py 27")


def oracle(answer) -> None:  # the judge: you may read it, it gives no solution away
    import zlib
    from pathlib import Path

    import clinic

    # other seeds for each answer, the same whenever it is judged
    first = 2304 + 1008 * (zlib.crc32(Path(answer.__file__).read_bytes()) % 1000)
    often = dict.fromkeys(clinic.SICK, 2) | {"healthy": 4, "rate_spike": 6}
    # each head, bucket and matrix once, and repeated epochs of 24 to 35 steps
    often |= {"dead_head": 3, "stale_bucket": 3, "frozen_weight": 8, "repeated_epoch": 12}
    cases = [(kind, first + 5 * i) for kind in clinic.KINDS for i in range(often[kind])]
    by_noise = ("healthy", "not_shuffled", "repeated_epoch")  # chance may confuse one of these
    missed = 0
    # the training takes none of the answer's seconds
    for (kind, seed), run in zip(cases, answer.unmeasured(clinic.train, cases)):
        said = answer.diagnose(run)
        missed += said != kind
        assert said == kind or (kind in by_noise and missed == 1), (
            f"diagnose says {said!r} of the run clinic.train([({kind!r}, {seed})]), and should say "
            f"{kind!r} ({missed} missed so far)"
        )
