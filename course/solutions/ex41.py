"""Exercise 41: the reference, and answers that the oracle must refuse."""

import math


def estimates(steps, seq_len):
    """-> (|G|^2, tr(Sigma)) of each step that counts."""
    found = []
    for small_sq, big_sq, small, big in steps:
        if small == big or not math.isfinite(small_sq + big_sq):
            continue
        b = small * seq_len  # tokens
        B = big * seq_len
        found.append(((B * big_sq - b * small_sq) / (B - b), (small_sq - big_sq) / (1 / b - 1 / B)))
    return found


def noise_scale(steps, seq_len):
    G_sq = 0.0
    trace = 0.0
    for g, t in estimates(steps, seq_len):
        G_sq = G_sq + g
        trace = trace + t
    return trace / G_sq if G_sq > 0 else None


def take(noise, overhead_s, token_s, unit, waste):
    def time(units):  # less what no batch changes
        return noise * overhead_s / (units * unit) + token_s * units * unit

    best = (noise * overhead_s / token_s) ** 0.5  # where the two terms are equal
    least = int(best / unit)
    most = max(1, math.floor(waste * noise / unit))
    return unit * min((max(1, min(n, most)) for n in (least, least + 1)), key=time)


# ---------------------------------------------------------------------------- wrong answers


def mean_of_ratios(steps, seq_len):
    """Biased: a step whose |G|^2 happens to be near 0 outweighs all the others."""
    ratios = [t / g for g, t in estimates(steps, seq_len) if g]
    return sum(ratios) / len(ratios) if ratios else None


def in_rows(steps, seq_len):
    return noise_scale(steps, 1)


def at_the_noise_scale(noise, overhead_s, token_s, unit, waste):
    return unit * max(1, round(min(noise, waste * noise) / unit))


def rounds(noise, overhead_s, token_s, unit, waste):
    """The nearest multiple, but time does not rise evenly to both sides."""
    best = (noise * overhead_s / token_s) ** 0.5
    return unit * max(1, min(round(best / unit), int(waste * noise / unit)))


WRONG = {  # name -> what of the reference it replaces
    "averages the ratios of single steps": dict(noise_scale=mean_of_ratios),
    "counts rows where tokens are meant": dict(noise_scale=in_rows),
    "takes the noise scale for the batch": dict(take=at_the_noise_scale),
    "takes the nearest multiple": dict(take=rounds),
}

EQUIVALENT = {
    "if small == big or not math.isfinite(small_sq + big_sq):: "
    "`small_sq + big_sq` -> `small_sq - big_sq`": "infinity less infinity is not finite either"
}
